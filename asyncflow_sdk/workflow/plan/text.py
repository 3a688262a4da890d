"""A plan as text, as plain data, and as a Mermaid drawing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from ...interfaces import Placement
from ...types import Sampling
from ..events.trackers import tracker_label
from ..hub import snapshot_of
from ..rewards import function_names
from ..specs import TRAINED, Rollout, Stage, Train, takes_trained
from ..work import Generate, Logprobs
from .dataflow import PROMPTS
from .plan import AHEAD_STEPS, Plan
from .policy import rule_of


def describe(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data; see ``Workflow.describe``."""
    rows = None if plan.stream else plan.data.rows
    return {
        "hub": dict(_models_of_the_hub(plan)),
        "prompts": {"rows": rows, "columns": {n: str(c.spec) for n, c in plan.data.columns.items()}},
        "rollout": [
            {
                "task": each.task, "engine": each.engine, "model": each.model, "options": each.options,
                "group_size": each.group_size, "replicas": each.replicas, "sampling": msgspec.to_builtins(each.sampling),
                "needs": each.declare().needs, "gives": each.declare().gives, "partitions": each.partitions, "place": _placed(each.place),
            }
            for each in plan.rollouts
        ],
        "stages": [
            {
                "task": each.task, "work": _worked(each), "needs": each.needs, "gives": each.gives,
                "partitions": each.partitions, "place": _placed(each.place),
            }
            for each in plan.stages
        ],
        "train": {
            "engine": plan.train.engine, "model": plan.train.model, "options": plan.train.options,
            "algorithm": _algorithm(plan.train), **_ranks(plan.train),
            **({"part_rows": plan.train.part_rows} if plan.train.stream else {}),
            "needs": plan.train.needs, "place": _placed(plan.train.place, 0),
        },
        "edges": [{"from": e.giver, "to": e.taker, "columns": e.columns} for e in plan.edges],
        "batch_size": plan.batch_size, "steps": plan.steps, "epochs": plan.epochs, "seed": plan.seed,
        "capacity_rows": plan.capacity_rows, "on_failure": plan.on_failure, "max_failed": plan.max_failed, "stall_timeout_s": plan.stall_timeout_s,
        "store": msgspec.to_builtins(plan.store), "save_steps": plan.save_steps, "evaluation": evaluation_of(plan),
        "track": [tracker_label(each) for each in plan.trackers],
        "staleness": rule_of(plan.staleness), "weights": msgspec.to_builtins(plan.chosen_weights),
        "choices": choices(plan),
    }  # fmt: skip


def evaluation_of(plan: Plan) -> dict[str, Any] | None:
    """Return the evaluation as plain data."""
    each = plan.evaluation
    if each is None or plan.held_out is None:
        return None
    return {
        "prompts": plan.held_out.rows, "every": each.every, "samples": each.samples, "aside": each.rollout is not None,
        "rollback_margin": each.rollback_margin, "early_stopping_patience": each.early_stopping_patience,
    }  # fmt: skip


def _placed(place: Placement, max_restarts: int = Placement.max_restarts) -> dict[str, Any]:
    """Return the fields of a placement that differ from the defaults."""
    given: dict[str, Any] = msgspec.to_builtins(place)
    usual: dict[str, Any] = msgspec.to_builtins(Placement(max_restarts=max_restarts))
    given["env"] = sorted(given["env"])  # names only: values may be secret
    return {name: value for name, value in given.items() if value != usual[name] and value != []}


def _models_of_the_hub(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield name and commit of each model of the Hugging Face Hub."""
    work = [stage.work for stage in plan.stages]
    for each in (*plan.rollouts, plan.train, *(of for of in work if isinstance(of, (Logprobs, Generate)))):
        if found := snapshot_of(each.model):
            yield found


def _worked(stage: Stage) -> dict[str, Any]:
    work = stage.work
    if isinstance(work, (Logprobs, Generate)):
        more = {"sampling": msgspec.to_builtins(work.sampling)} if isinstance(work, Generate) else _ranks(work)
        return {type(work).__name__: {"engine": work.engine, "model": work.model, "options": work.options, **more}}
    return {"function": stage.path or function_names(work), "process": not stage.here}


def plan_text(plan: Plan) -> str:
    """Return tasks, columns and choices, one a line."""
    of = "a stream of" if plan.stream else plan.data.rows
    rows = f"{of} prompts: {', '.join(f'{n} ({c.spec})' for n, c in plan.data.columns.items())}"
    tasks = [(PROMPTS, rows)]
    tasks += [(each.task, _rollout(each)) for each in plan.rollouts]
    tasks += [(each.task, _stage(each)) for each in plan.stages]
    tasks.append((plan.train.task, _train(plan.train)))
    arrows = [(e.giver, ", ".join(e.columns), e.taker) for e in plan.edges]
    wide = max(len(name) for name, *_ in (*tasks, *arrows))
    most = max(len(columns) for _, columns, _ in arrows)
    last = "" if plan.epochs is None else f", or {plan.epochs} epochs"
    return "\n".join(
        [
            f"{plan.steps} steps{last} of {plan.batch_size} rows, in groups of {plan.rollout.group_size}",
            "",
            "tasks",
            *(f"  {name:{wide}}  {text}" for name, text in tasks),
            "",
            "columns",
            *(f"  {giver:>{wide}} ──{f' {columns} ':─^{most + 2}}──▶ {taker}" for giver, columns, taker in arrows),
            "",
            "chosen",
            *(f"  {name}: {text}" for name, text in choices(plan).items()),
        ]
    )


def _rollout(each: Rollout) -> str:
    several = f" × {each.replicas}" if each.replicas > 1 else ""
    return f"engine {each.engine}{several}{_of(each.model)}, {_sampled(each.sampling)}{_options(each.options)}{_where(each.place)}"


def _stage(stage: Stage) -> str:
    work = stage.work
    if isinstance(work, Logprobs):
        engine = f"{work.engine}{_several(work)}{_of(work.model)}"
        return f"log-probs by engine {engine}{_options(work.options)}{_where(stage.place)}"
    if isinstance(work, Generate):
        return (
            f"responses by engine {work.engine}{_of(work.model)}, {_sampled(work.sampling)}{_options(work.options)}"
            f"{_where(stage.place)}"
        )
    where = " in a thread of the driver" if stage.here else ""
    return f"function {stage.path or function_names(work)}{where}{_where(stage.place)}"


def _train(train: Train) -> str:
    (algorithm,) = _algorithm(train)
    return f"engine {train.engine}{_several(train)}{_of(train.model)}, {algorithm}{_options(train.options)}{_where(train.place, 0)}"


def _ranks(of: Train | Logprobs) -> dict[str, Any]:
    return {"world_size": of.world_size} if of.world_size > 1 else {}


def _several(of: Train | Logprobs) -> str:
    return f" × {of.world_size} ranks" if of.world_size > 1 else ""


def _algorithm(train: Train) -> dict[str, Any]:
    """Return the algorithm's name and options."""
    made = train.algorithm
    if made is not None and dataclasses.is_dataclass(made):
        return {type(made).__name__: msgspec.to_builtins(dataclasses.asdict(made))}
    return {train.algorithm_spec.label: train.algorithm_spec.options}


def _of(model: str) -> str:
    return f", model {model}" if model else ""


def _sampled(sampling: Sampling) -> str:
    return f"temperature {sampling.temperature:g}, at most {sampling.max_tokens} tokens"


def _options(options: dict[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())


def _where(place: Placement, max_restarts: int = Placement.max_restarts) -> str:
    return "".join(f", {name}={value!r}" for name, value in _placed(place, max_restarts).items())


def choices(plan: Plan) -> dict[str, str]:
    """Return each choice, of the user or by default, with its reason or meaning."""
    late, rule = plan.staleness.max_staleness, rule_of(plan.staleness)
    found = {
        "staleness": f"{rule['policy']}, {'at most' if rule['bounded'] else 'about'} {late} version{'' if late == 1 else 's'}"
        + (" (synchronous)" if not late else "")
        + f": {rule['promise']}",
        "capacity_rows": f"at most {plan.capacity_rows} rows in the queue" + _capacity(plan),
        **{choice.what: str(choice) for choice in plan.choices},
        "weights": f"{plan.weights.keep} versions are kept, to be fetched and rolled back to",
        "on_failure": "the run stops when a worker has failed for good"
        if plan.on_failure == "stop"
        else "the run goes on without a worker that has failed for good",
        "max_failed": f"the run ends once more than {plan.max_failed:.0%} of the groups that ended last have failed",
    }
    if plan.warnings:
        found["warnings"] = "; ".join(plan.warnings)
    for rollout in plan.rollouts:
        cuts, masked = rollout.sampling.restrictions, rollout.sampling.sampling_mask
        truncated, text = cuts.keys() - {"repetition_penalty"}, f"{', '.join(cuts)} cut them, and log-probs are of "
        text += "the tokens kept by each draw, in training, too" if masked and truncated else "the whole vocabulary"
        if truncated and not masked:
            text += (
                ": the gradient differs from the right one, by 8 to 27 % measured for responses of 2 to 6 tokens;"
                " sampling_mask=True makes it right for top_p, top_k and min_p"
            )
        if "repetition_penalty" in cuts:
            text += "; repetition_penalty is in no log-prob: the gradient is not that of the draws"
        if rollout.admits and (cuts or masked):
            found[f"draws of {rollout.task}"] = (
                text if cuts else "sampling_mask=True has no effect: nothing cuts them"
            )
    if plan.train.stream:
        found["steps"] = (
            f"trained in parts of at least {plan.train.part_rows} rows, while the rest is being generated; the gradient is"
            " the whole step's"
        )
    if plan.trackers:
        found["track"] = (
            f"{', '.join(map(tracker_label, plan.trackers))}: each in a thread of the driver; one that fails is"
            " left out"
        )
    if (evaluation := plan.evaluation) is not None:
        rows = plan.held_out.rows if plan.held_out is not None else 0
        where = (
            "the training replicas"
            if evaluation.rollout is None
            else f"{evaluation.rollout.replicas} replicas set aside"
        )
        found["evaluation"] = f"{rows} prompts every {evaluation.every} versions and at the end, on {where}"
    for name, commit in _models_of_the_hub(plan):
        found[f"model {name}"] = f"commit {commit} of the hub, from the cache"
    for rollout in plan.rollouts:
        if rollout.prompt != "prompt_ids":
            found[f"{rollout.task} {rollout.engine}".strip()] = (
                f"column {rollout.prompt!r} holds {_prompts(plan, rollout)}"
            )
        if not takes_trained(rollout.partitions):
            found[f"task {rollout.task}"] = (
                f"answers the rows of {_named(rollout.partitions)}; the staleness rule does not hold it"
            )
        elif rollout.prefix:
            found[f"task {rollout.task}"] = "answers every prompt once more; the staleness rule does not hold it"
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
    if plan.epochs is not None and plan.stream is None:
        steps = plan.data.rows * plan.rollout.group_size * plan.epochs // plan.batch_size
        found["epochs"] = (
            f"the prompts last for {min(steps, plan.steps)} of {plan.steps} steps, fewer if rows are filtered"
        )
    return found


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
    if plan.capacity_rows == plan.batch_size * (late + AHEAD_STEPS):
        ahead = f", {late} ahead" if late else ""
        return f" ({late + AHEAD_STEPS} steps): one in training, one filling, one being fed{ahead}"
    if plan.capacity_rows < plan.batch_size * (late + 1):
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
