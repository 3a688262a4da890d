"""A plan as text, as plain data, and as a Mermaid drawing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from ...interfaces import Placement
from ...ledger import TaskSpec
from ...types import Sampling
from ..loops.trackers import tracker_label
from ..model_folder import snapshot_of
from ..rewards import function_names
from ..specs import TRAINED, Rollout, Stage, Train, takes_trained
from ..work import EngineSpec, Generate, Logprobs
from .choices import rule_of
from .dataflow import PROMPTS
from .plan import AHEAD_STEPS, Plan


def describe(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data; see ``Workflow.describe``."""
    options, train = plan.options, plan.train
    names = ("batch_size", "steps", "epochs", "seed", "on_failure", "max_failed", "stall_timeout_s", "save_steps")
    trained = {"task": train.task, **_engine(train), "algorithm": _algorithm(train), "needs": train.needs}
    trained |= {"part_rows": train.part_rows} if train.stream else {}
    return {
        "hub": dict(_models_of_the_hub(plan)),
        "prompts": {
            "rows": None if plan.stream else plan.data.rows,
            "columns": {name: str(column.spec) for name, column in plan.data.columns.items()},
        },
        "rollout": [_rollout(each) for each in plan.rollouts],
        "stages": [_stage(each) for each in plan.stages],
        "train": {**trained, "place": _placed(train.place, 0)},
        "edges": [{"from": e.giver, "to": e.taker, "columns": e.columns} for e in plan.edges],
        **{name: getattr(options, name) for name in names},
        "capacity_rows": plan.capacity_rows,
        "store": msgspec.to_builtins(plan.store),
        "evaluation": _evaluation(plan),
        "track": [tracker_label(each) for each in plan.trackers],
        "staleness": rule_of(plan.staleness),
        "weights": msgspec.to_builtins(plan.chosen_weights),
        "choices": _choices(plan),
    }


def _rollout(each: Rollout) -> dict[str, Any]:
    spec = each.declare()
    made = {"task": each.task, **_engine(each), "group_size": each.group_size, "replicas": each.replicas}
    return made | _columns(spec) | {"place": _placed(each.place)}


def _stage(each: Stage) -> dict[str, Any]:
    work: dict[str, Any] = {"function": each.path or function_names(each.work), "process": not each.here}
    if isinstance(each.work, EngineSpec):
        work = {type(each.work).__name__: _engine(each.work)}
    return {"task": each.task, "work": work, **_columns(each), "place": _placed(each.place)}


def _engine(spec: EngineSpec) -> dict[str, Any]:
    described: dict[str, Any] = {"engine": spec.engine, "model": spec.model, "options": spec.options}
    if isinstance(spec, (Rollout, Generate)):
        described["sampling"] = msgspec.to_builtins(spec.sampling)
    elif isinstance(spec, (Train, Logprobs)) and spec.world_size > 1:
        described["world_size"] = spec.world_size
    return described


def _columns(spec: TaskSpec | Stage) -> dict[str, Any]:
    return {"needs": spec.needs, "gives": spec.gives, "partitions": spec.partitions}


def _evaluation(plan: Plan) -> dict[str, Any] | None:
    each = plan.options.evaluate
    if each is None or plan.held_out is None:
        return None
    names = ("every", "samples", "rollback_margin", "early_stopping_patience")
    own = {name: getattr(each, name) for name in names}
    return {"prompts": plan.held_out.rows, "aside": each.rollout is not None, **own}


def _placed(place: Placement, max_restarts: int = Placement.max_restarts) -> dict[str, Any]:
    """Return the fields of a placement that differ from the defaults."""
    given: dict[str, Any] = msgspec.to_builtins(place)
    usual: dict[str, Any] = msgspec.to_builtins(Placement(max_restarts=max_restarts))
    given["env"] = sorted(given["env"])  # names only: values may be secret
    return {name: value for name, value in given.items() if value != usual[name] and value != []}


def _algorithm(train: Train) -> dict[str, Any]:
    """Return the algorithm's options by its name."""
    made = train.algorithm
    if made is not None and dataclasses.is_dataclass(made):
        return {type(made).__name__: msgspec.to_builtins(dataclasses.asdict(made))}
    return {train.algorithm_spec.label: train.algorithm_spec.options}


def _models_of_the_hub(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield name and commit of each model of the Hugging Face Hub."""
    for each in (*plan.rollouts, plan.train, *(stage.work for stage in plan.stages)):
        if isinstance(each, EngineSpec) and (found := snapshot_of(each.model)):
            yield found


def plan_text(plan: Plan) -> str:
    """Return tasks, columns and choices of ``describe``, one a line."""
    known = describe(plan)
    columns = ", ".join(f"{name} ({spec})" for name, spec in known["prompts"]["columns"].items())
    tasks = [(PROMPTS, f"{'a stream of' if plan.stream else plan.data.rows} prompts: {columns}")]
    parts = (*known["rollout"], *known["stages"], known["train"])
    tasks += [(each["task"], _task_text(each)) for each in parts]
    arrows = [(each["from"], ", ".join(each["columns"]), each["to"]) for each in known["edges"]]
    wide = max(len(name) for name, *_ in (*tasks, *arrows))
    most = max(len(columns) for _, columns, _ in arrows)
    last = "" if known["epochs"] is None else f", or {known['epochs']} epochs"
    return "\n".join(
        [
            f"{known['steps']} steps{last} of {known['batch_size']} rows, in groups of {plan.rollout.group_size}",
            "",
            "tasks",
            *(f"  {name:{wide}}  {text}" for name, text in tasks),
            "",
            "columns",
            *(f"  {giver:>{wide}} ──{f' {columns} ':─^{most + 2}}──▶ {taker}" for giver, columns, taker in arrows),
            "",
            "chosen",
            *(f"  {name}: {text}" for name, text in known["choices"].items()),
        ]
    )


def _task_text(part: dict[str, Any]) -> str:
    """Return the work of a described task, and its place."""
    work = part.get("work", part)
    where = _listed(part["place"])
    if "function" in work:
        return f"function {work['function']}{'' if work['process'] else ' in a thread of the driver'}{where}"
    if "Logprobs" in work:
        return f"log-probs by {_engine_text(work['Logprobs'])}{where}"
    if "Generate" in work:
        return f"responses by {_engine_text(work['Generate'])}{where}"
    return f"{_engine_text(part)}{where}"


def _engine_text(of: dict[str, Any]) -> str:
    ranks, replicas = of.get("world_size", 1), of.get("replicas", 1)
    several = f" × {ranks} ranks" if ranks > 1 else f" × {replicas}" if replicas > 1 else ""
    text = f"engine {of['engine']}{several}" + (f", model {of['model']}" if of["model"] else "")
    if "sampling" in of:
        text += f", temperature {of['sampling']['temperature']:g}, at most {of['sampling']['max_tokens']} tokens"
    if "algorithm" in of:
        text += f", {next(iter(of['algorithm']))}"
    return text + _listed(of["options"])


def _listed(options: dict[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())


def _choices(plan: Plan) -> dict[str, str]:
    """Return each choice, of the user or by default, with its reason or meaning."""
    late, rule, options = plan.staleness.max_staleness, rule_of(plan.staleness), plan.options
    bound = f"{'at most' if rule['bounded'] else 'about'} {late} version{'' if late == 1 else 's'}"
    failing = {"stop": "stops when a worker has failed", "continue": "goes on without a worker that has failed"}
    found = {
        "staleness": f"{rule['policy']}, {bound}{'' if late else ' (synchronous)'}: {rule['promise']}",
        "capacity_rows": f"at most {plan.capacity_rows} rows in the queue" + _capacity(plan),
        **{choice.what: str(choice) for choice in plan.choices},
        "weights": f"{plan.weights.keep} versions are kept, to be fetched and rolled back to",
        "on_failure": f"the run {failing[options.on_failure]} for good",
        "max_failed": f"the run ends once more than {options.max_failed:.0%} of the groups that ended last have failed",
    }
    if plan.warnings:
        found["warnings"] = "; ".join(plan.warnings)
    for rollout in plan.rollouts:
        if rollout.admits and (text := _draws(rollout.sampling)):
            found[f"draws of {rollout.task}"] = text
    if plan.train.stream:
        found["steps"] = (
            f"trained in parts of at least {plan.train.part_rows} rows, while the rest is being generated; the gradient is"
            " the whole step's"
        )
    if plan.trackers:
        labels = ", ".join(map(tracker_label, plan.trackers))
        found["track"] = f"{labels}: each in a thread of the driver; one that fails is left out"
    if (evaluation := options.evaluate) is not None:
        rows, aside = plan.held_out.rows if plan.held_out is not None else 0, evaluation.rollout
        where = "the training replicas" if aside is None else f"{aside.replicas} replicas set aside"
        found["evaluation"] = f"{rows} prompts every {evaluation.every} versions and at the end, on {where}"
    for name, commit in _models_of_the_hub(plan):
        found[f"model {name}"] = f"commit {commit} of the hub, from the cache"
    for rollout in plan.rollouts:
        if rollout.prompt != "prompt_ids":
            what = f"{rollout.task} {rollout.engine}".strip()
            found[what] = f"column {rollout.prompt!r} holds {_prompts(plan, rollout)}"
        free = "; the staleness rule does not hold it"
        if not takes_trained(rollout.partitions):
            found[f"task {rollout.task}"] = f"answers the rows of {_named(rollout.partitions)}{free}"
        elif rollout.prefix:
            found[f"task {rollout.task}"] = f"answers every prompt once more{free}"
    for stage in plan.stages:
        if stage.here or stage.place.launcher == "thread":
            why = ": no other process can import its function" if stage.here else ""
            found[f"stage {stage.task}"] = (
                f"a thread of the driver{why}; signal.alarm needs a process of its own, and none can end a call: one of"
                f" more than {stage.timeout_s:g} s ends the run"
            )
        elif stage.whole_groups:
            found[f"stage {stage.task}"] = "works on whole groups: its function asks for groups"
        if stage.partitions != TRAINED:
            found[f"partitions of {stage.task}"] = f"it takes the rows of {_named(stage.partitions)}"
    for column, task in plan.dataflow.unused.items():
        if task not in {rollout.task for rollout in plan.rollouts}:
            found[f"column {column}"] = f"given by {task} and needed by nobody: training does not wait for it"
    if options.epochs is not None and plan.stream is None:
        steps = plan.data.rows * plan.rollout.group_size * options.epochs // options.batch_size
        last = f"the prompts last for {min(steps, options.steps)} of {options.steps} steps"
        found["epochs"] = f"{last}, fewer if rows are filtered"
    return found


def _draws(sampling: Sampling) -> str:
    """Return the meaning of draws from a part of the vocabulary; "" for draws from all of it."""
    cuts, masked = sampling.restrictions, sampling.sampling_mask
    if not cuts:
        return "sampling_mask=True has no effect: nothing cuts them" if masked else ""
    truncated, text = cuts.keys() - {"repetition_penalty"}, f"{', '.join(cuts)} cut them, and log-probs are of "
    text += "the tokens kept by each draw, in training, too" if masked and truncated else "the whole vocabulary"
    if truncated and not masked:
        text += (
            ": the gradient differs from the right one, by 8 to 27 % measured for responses of 2 to 6 tokens;"
            " sampling_mask=True makes it right for top_p, top_k and min_p"
        )
    penalty = "; repetition_penalty is in no log-prob: the gradient is not that of the draws"
    return text + (penalty if "repetition_penalty" in cuts else "")


def _prompts(plan: Plan, rollout: Rollout) -> str:
    chats = rollout.chat is not None or (
        rollout.prompt in plan.data and plan.data.spec(rollout.prompt).kind == "json"
    )
    return "chats, formatted by the model's chat template" if chats else f"text, encoded by {rollout.tokenizer}"


def _named(partitions: tuple[str, ...]) -> str:
    if "*" in partitions:
        return "every partition"
    return " and ".join("training" if each in TRAINED else f"partition {each!r}" for each in partitions)


def _capacity(plan: Plan) -> str:
    late = plan.staleness.max_staleness
    if plan.capacity_rows == plan.options.batch_size * (late + AHEAD_STEPS):
        ahead = f", {late} ahead" if late else ""
        return f" ({late + AHEAD_STEPS} steps): one in training, one filling, one being fed{ahead}"
    if plan.capacity_rows < plan.options.batch_size * (late + 1):
        return f": fewer than the {late} + 1 steps that max_staleness={late} would let be under way"
    return ""


def mermaid(plan: Plan) -> str:
    """Return the tasks and their columns as a Mermaid flowchart."""
    drawn_edges = plan.edges
    tasks = list(dict.fromkeys(task for edge in drawn_edges for task in (edge.giver, edge.taker)))
    ids = {task: re.sub(r"\W", "_", task) + f"_{number}" for number, task in enumerate(tasks)}
    lines = [f'  {ids[task]}["{task}"]' for task in tasks]
    lines += [f'  {ids[e.giver]} -->|"{", ".join(e.columns)}"| {ids[e.taker]}' for e in drawn_edges]
    return "\n".join(["flowchart LR", *lines])
