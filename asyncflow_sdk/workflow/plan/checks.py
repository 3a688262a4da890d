"""Checks of a plan before any process starts: all problems in one report."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from ...errors import ConfigError, PluginError
from ...interfaces import SAMPLING_MASK, Capabilities, Placement
from ...ledger.state.rows import MAX_COLUMNS
from ...plugins import registry
from ...types import Sampling
from ...types.config import LOCAL
from ...types.validation import check_above, check_least
from ...weights import AUTO, TransportPublisher, make_transport
from ...wire import transport_of
from ..evaluation import EVALUATION
from ..loops.engines import check_mask, frozen_options, odd_options, whole_step_text
from ..loops.tokenizer import Tokenizer, with_stop_ids
from ..loops.trackers import check_tracker
from ..model_folder import OWN_CODE, WEIGHTS, ModelFolder, model_folder, own_model
from ..processes.ranks import check_ranks
from ..specs import Rollout, Stage, Train, takes_trained
from ..work import EngineSpec, Generate, Logprobs
from .choices import rows_needed
from .dataflow import same_name
from .plan import AHEAD_STEPS, PROMPT, Plan
from .problems import Key, Problems, checks_placements, is_checked_here
from .prompt_checks import MOST, check_ids, check_lengths

_SHOWN = 10
"""Most differences of two model folders in an error."""


def find_models(**parts: Iterable[Any]) -> None:
    """Make the models of ``parts``, by their key in the workflow, folders of this host. A model of the hub is
    downloaded once, so that all parts have the same commit. Raises all problems: ConfigError, PluginError."""
    problems = Problems()
    users: dict[tuple[str, str | None], list[tuple[Key, EngineSpec]]] = {}
    for key, listed in parts.items():
        for number, part in enumerate(listed):
            spec = part.work if isinstance(part, Stage) else part
            if isinstance(spec, EngineSpec) and is_checked_here(part.task):
                users.setdefault((spec.model, spec.model_revision), []).append(((key, number, "model"), spec))
    for asked, found in users.items():
        with problems.collect(*found[0][0]):
            folder = model_folder(*asked)
            for _, user in found:
                user.take_model(folder)
    problems.raise_all()


def check_plan(plan: Plan) -> None:
    """Make the plan's choices and raise its problems, all at once: a single one unchanged, several as one
    ConfigError."""
    with contextlib.closing(plan.problems.launchers):
        _find(plan, plan.problems)
    plan.problems.raise_all()


def _find(plan: Plan, problems: Problems) -> None:
    check = problems.check
    _check_numbers(plan, problems)
    _check_address(plan, problems)
    for number, rollout in enumerate(plan.rollouts):
        _check_place(f"rollout {rollout.task!r}", rollout.place, problems, "rollout", number)
        if is_checked_here(rollout.task):
            _check_engine("rollout", rollout, rollout.place, problems, "rollout", number)
    for stage, key in zip(plan.stages, plan.stage_keys, strict=True):
        _check_stage(stage, problems, *key)
    train = plan.train
    check(("train", "engine"), check_mask, f"engine {train.engine!r}", _masks("train", train.engine), train.needs)
    _check_place("train", train.place, problems, "train", world_size=train.world_size)
    if is_checked_here(train.task):
        _check_engine("train", train, train.place, problems, "train")
        check(("train", "stream"), _check_stream, train)
    if all(is_checked_here(rollout.task) or not _lacks_model(rollout) for rollout in plan.rollouts):
        _check_columns(plan, problems)
    check(("staleness", "policy"), _check_capacity, plan, problems)
    if plan.stream is not None and plan.options.checkpoint is not None:
        check(("prompts",), plan.stream.check_resumable)
    for number, rollout in enumerate(plan.rollouts):
        for name, data in plan.prompts_of(rollout):
            check(("prompts" if name == PROMPT else "evaluate",), check_ids, name, data, rollout)
            check(("rollout", number), check_lengths, plan, rollout, name, data)
        check(("rollout", number, "sampling"), _check_temperature, rollout, train)
        check(("rollout", number, "sampling"), _check_sampling, rollout, rollout.sampling)
        evaluation = plan.options.evaluate
        if evaluation is not None and {EVALUATION, "*"}.intersection(rollout.partitions):
            check(("evaluate", "sampling"), _check_sampling, rollout, evaluation.sampling_of(plan.rollout))
    _check_supply(plan, problems)  # after prompts were left out
    check(("store",), _check_store, plan)
    plan.choose()
    check(("weights",), _check_weights, plan)
    _check_dtypes(plan, problems)
    _check_folders(plan, problems)
    check(("evaluate", "rollback_margin"), _check_guard, plan)
    for number, tracker in enumerate(plan.trackers):
        check(("track", number), check_tracker, tracker)


def _check_stage(stage: Stage, problems: Problems, *key: str | int) -> None:
    work, place = stage.work, stage.place
    if not stage.here:
        _check_place(f"stage {stage.task!r}", place, problems, *key, world_size=stage.world_size)
    if isinstance(work, (Logprobs, Generate)) and is_checked_here(stage.task):
        _check_engine("stage", work, place, problems, *key, "work")
    if isinstance(work, Generate):
        problems.check((*key, "work", "sampling"), _check_sampling, work, work.sampling)
    own = place.python or place.env or place.cpus or place.gpus or place.hosts or place.launcher != "process"
    if stage.here and own:
        problems.add(
            f"stage {stage.task!r} has a function that no other process can import, so it runs in the driver's,"
            " and has no place of its own: put the function into a module, or leave python=, env=, cpus=, gpus=,"
            " hosts= and launcher= out",
            *key,
        )
    if isinstance(work, Logprobs) and stage.masks:
        about = f"engine {work.engine!r}", _masks("train", work.engine), SAMPLING_MASK
        problems.check((*key, "work", "engine"), check_mask, *about)


def _check_address(plan: Plan, problems: Problems) -> None:
    options = plan.options
    if options.address is not None:
        with problems.collect("address"):
            if transport_of(options.address) != "tcp":
                raise ConfigError(f"address={options.address!r} is for other hosts: tcp://HOST:PORT is expected")
        return
    if options.advertise is not None:
        problems.add("advertise= is of an address, which other hosts can reach: say address=, too", "advertise")
    roles: tuple[Rollout | Stage | Train, ...] = (*plan.rollouts, *plan.stages, plan.train)
    for each in roles:
        if each.place.hosts:
            problems.add(f"{each.task!r} has hosts=, which need address=, as tcp://0.0.0.0:7000, to join", "address")
    for each in plan.rollouts:
        if not each.replicas:
            text = f"{each.task!r}: replicas must be 1 or more; 0 waits for others to join at address="
            problems.add(text, "rollout")


def _check_store(plan: Plan) -> None:
    if plan.store.kind == LOCAL:
        return
    registry().get("store", plan.store.kind)
    if plan.options.checkpoint is None:
        raise ConfigError(
            f"store={plan.store.kind!r} needs checkpoint=af.Checkpoint(...): the record of the run reads the rows of a"
            " step after it was trained, and without a checkpoint they may be gone from their host then"
        )


def _check_numbers(plan: Plan, problems: Problems) -> None:
    options, train, size = plan.options, plan.train, plan.rollout.group_size
    rows, restarts = options.batch_size, train.place.max_restarts
    for name in ("steps", "batch_size", "epochs", "capacity_rows"):
        if (getattr(options, name) or 0) > MOST:
            problems.add(f"{name} is {getattr(options, name)}, and at most {MOST}", name)
    for name, least in {"seed": 0, "steps": 1}.items():
        problems.check((name,), check_least, least, **{name: getattr(options, name)})
    if options.epochs is not None and options.epochs < 1:
        text = f"epochs must be 1 or more, or None for as many as the steps take, not {options.epochs}"
        problems.add(text, "epochs")
    problems.check(("stall_timeout_s",), check_above, 0, stall_timeout_s=options.stall_timeout_s)
    if not 0 <= options.max_failed <= 1:
        problems.add(f"max_failed is a share from 0 to 1, not {options.max_failed}", "max_failed")
    sizes = sorted({rollout.group_size for rollout in plan.rollouts if takes_trained(rollout.partitions)})
    if len(sizes) > 1:
        text = f"rollouts have group_size {' and '.join(map(str, sizes))}: a prompt has one number of responses"
        problems.add(f"{text}; give all the same", "rollout", 1, "group_size")
    if rows < 1 or rows % size:
        near = max(size, round(rows / size) * size)
        problems.add(f"batch_size={rows} is not a multiple of group_size={size}; use {near}", "batch_size")
    if rows < train.world_size:
        text = f"a step of {rows} rows cannot be dealt out to world_size={train.world_size} ranks"
        problems.add(text, "batch_size")
    if (train.part_rows or 0) > rows:
        text = f"part_rows={train.part_rows} is more than a step has: batch_size={rows}"
        problems.add(text, "train", "part_rows")
    if restarts and options.checkpoint is None:
        text = f"train has max_restarts={restarts}, and a trainer that is started again without a checkpoint has lost"
        cure = "say checkpoint=af.Checkpoint(every=50), or leave max_restarts out"
        problems.add(f"{text} what it learned; {cure}", "train", "max_restarts")
    if train.algorithm is not None:
        with problems.collect("rollout", 0, "group_size"):
            train.algorithm.check(group_size=size)


def _check_supply(plan: Plan, problems: Problems) -> None:
    rows, size, epochs = plan.options.batch_size, plan.rollout.group_size, plan.options.epochs
    fed = plan.data.rows * size * (epochs or 0)
    if epochs and plan.stream is None and fed < rows:
        problems.add(
            f"a step has {rows} rows, and {plan.data.rows} prompts in groups of {size} give {fed} in epochs={epochs}: no"
            f" step can fill; use batch_size={fed} or less, more prompts, or more epochs",
            "batch_size",
        )


def _check_place(where: str, place: Placement, problems: Problems, *key: str | int, world_size: int = 1) -> None:
    if not checks_placements():
        return
    try:
        check_ranks(problems.launchers.of(place), place, world_size)
    except (ConfigError, PluginError) as error:
        about = [
            name
            for name in ("python", "cpus", "gpus", "env", "hosts", "launcher_options", "launcher")
            if f"{name}=" in str(error)
        ]
        problems.add(f"{where}: {error}", *key, *(about[:1] or ["launcher"]))


def _check_engine(
    kind: str, spec: Rollout | Train | Logprobs | Generate, place: Placement, problems: Problems, *key: str | int
) -> None:
    if not place.hosts and _lacks_model(spec):
        text = f"{kind} model {spec.model!r} is no model folder: it has no config.json"
        if Path(spec.model, "adapter_config.json").is_file():
            text += ", but a LoRA adapter, which is not supported yet: merge it into its model first"
        problems.add(text, *key, "model")
    if isinstance(spec, (Train, Logprobs)):
        _check_ranks(spec, problems, *key, "world_size")
    if place.elsewhere:  # another interpreter has other plugins
        return
    with problems.collect(*key, "engine"):
        factory = registry().get(spec.kind, spec.engine).load()
        options = {"model": spec.model} | spec.options
        if isinstance(spec, Logprobs):
            options = frozen_options(spec.engine, options)
        elif isinstance(spec, Train):
            options["algorithm"] = spec.algorithm
        for option, text in odd_options(spec.engine, factory, options, inspect.signature(type(spec)).parameters):
            problems.add(text, *key, option)
        if _needs_trust(spec.model, factory) and not spec.options.get("trust_remote_code"):
            problems.add(
                f"{kind} model {spec.model!r} is of a type that transformers lacks, and {OWN_CODE}", *key, "model"
            )


def _check_stream(train: Train) -> None:
    """Refuse steps in parts for an engine or an algorithm that needs whole steps, as far as this is known here; the
    worker asks its engine again."""
    if not train.stream:
        return
    reason = train.algorithm.whole_step if train.algorithm is not None else ""
    updates = train.options.get("updates", 1)
    if isinstance(updates, int) and updates > 1:
        reason = reason or f"updates={updates}: each optimizer step takes random rows of the whole batch"
    if not reason and not _may_stream(train):
        reason = f"engine {train.engine!r} has no accumulate (TrainEngine.streams)"
    if reason:
        raise ConfigError(whole_step_text(train.engine, reason))


def _may_stream(train: Train) -> bool:
    """True unless its adapter, or its class, declares that an engine trains whole steps only."""
    declared = registry().declared("train", train.engine, "steps")
    if declared is not None:
        return "parts" in declared
    return (
        train.place.elsewhere or getattr(registry().get("train", train.engine).load(), "streams", None) is not False
    )


def _check_ranks(spec: Train | Logprobs, problems: Problems, *key: str | int) -> None:
    """Refuse several ranks of an engine of one process, if its adapter declares it."""
    ranks = {
        each.spec.name: each.spec.declared("ranks") for each in registry().adapters if each.spec.kind == spec.kind
    }
    declared = ranks.get(spec.engine)
    if spec.world_size > 1 and declared is not None and "many" not in declared:
        able = ", ".join(name for name, many in ranks.items() if many is not None and "many" in many) or "none here"
        problems.add(
            f"engine {spec.engine!r} works in one process: world_size={spec.world_size} of them would each hold all"
            f" weights. Engines of several ranks: {able}",
            *key,
        )


def _lacks_model(spec: Rollout | Train | Logprobs | Generate) -> bool:
    return bool(spec.model) and not Path(spec.model, "config.json").is_file()


def _check_columns(plan: Plan, problems: Problems) -> None:
    keys = {stage.task: key for stage, key in zip(plan.stages, plan.stage_keys, strict=True)}
    with problems.collect("rollout"):
        tasks = [node.task for node in plan.nodes]
        found = [same_name(task) for task in dict.fromkeys(tasks) if tasks.count(task) > 1]
        for of in (plan.dataflow, *plan.other_dataflows.values()):
            found += of.problems()
        for problem in found:
            problems.add(problem.text, *keys.get(problem.task, (problem.task,)))
        columns = {*plan.data, *(name for node in plan.nodes for name in (*node.needs, *node.gives))}
        if len(columns) > MAX_COLUMNS:
            problems.add(
                f"tasks need and give {len(columns)} columns, and a queue holds at most {MAX_COLUMNS}: put some into one"
                " record of the data",
                "prompts",
            )
    if odd := [name for name in plan.columns.rename if name not in plan.columns.names]:
        problems.add(
            f"rename= names {', '.join(map(repr, odd))}, and the data has: {', '.join(plan.columns.names)}", "rename"
        )
    admitting = [rollout for rollout in plan.rollouts if rollout.admits]
    if len({rollout.task for rollout in admitting}) != 1:
        names = ", ".join(repr(rollout.task) for rollout in admitting) or "none"
        problems.add(
            f"one rollout task gives the columns that are trained, without a prefix; here that is: {names}", "rollout"
        )
    if len({rollout.lease_s for rollout in admitting}) > 1:
        problems.add("rollouts that share a task must have the same lease_s", "rollout")


def _check_capacity(plan: Plan, problems: Problems) -> None:
    rows, late = plan.options.batch_size, plan.staleness.max_staleness
    least = max(rows, plan.rollout.group_size, rows_needed(plan.staleness, rows))
    if plan.capacity_rows < least:
        problems.add(
            f"a queue of capacity_rows={plan.capacity_rows} is too small: steps of {rows} rows at max_staleness={late}"
            f" cannot fill with fewer than {least}; leave it out ({rows * (late + AHEAD_STEPS)} rows then), or give more",
            "capacity_rows",
        )


def _check_publisher(plan: Plan) -> None:
    """Raise the errors of the trainer's publisher in a process like this one, as far as they are known."""
    own, options = inspect.signature(TransportPublisher).parameters, plan.weights.options
    elsewhere = sorted(options.keys() & {"queue", "transport", "dtype"})
    if elsewhere:
        raise ConfigError(
            f"{', '.join(map(repr, elsewhere))} is no option of a transport; give it beside the options"
        )
    make_transport(plan.transport, **{name: value for name, value in options.items() if name not in own}).check()


def _check_weights(plan: Plan) -> None:
    replicas = sum(rollout.replicas for rollout in plan.rollouts)
    if plan.weights.quorum > replicas:
        raise ConfigError(
            f"quorum={plan.weights.quorum} replicas must have a version staged before any loads it, and there are"
            f" {replicas}"
        )
    place = plan.train.place
    same_environment = not place.elsewhere and not place.env and is_checked_here("train")
    if same_environment and plan.transport != AUTO:  # else the choice has reported why
        _check_publisher(plan)
    temperature = plan.train.options.get("temperature", 1.0)
    if plan.weights.probe and temperature != 1.0:
        raise ConfigError(
            f"a probe is compared at temperature 1, and training computes log-probs at {temperature:g}: leave the"
            " probe out"
        )


def _check_guard(plan: Plan) -> None:
    """Refuse rollbacks of a run that may be resumed, if the best version ends with its trainer."""
    if (
        plan.options.evaluate is None
        or plan.options.evaluate.rollback_margin is None
        or plan.options.checkpoint is None
    ):
        return
    if registry().declared("transport", plan.transport, "outlives") == ():
        raise ConfigError(
            f"rollback_margin= needs the best version, and transport {plan.transport!r} loses it if the trainer dies:"
            " say weights=af.Weights(transport='file', options={'path': ...}), a path that all hosts see, or 'shm' on"
            " one host; or leave checkpoint= out, so that the run is not resumed"
        )


def _check_dtypes(plan: Plan, problems: Problems) -> None:
    """Compare the dtype of training with the engine's, and the dtype of versions with each rollout's, as far as
    adapters and model folders declare them."""
    option, trained = plan.train.options.get("dtype"), ""
    declared = registry().declared("train", plan.train.engine, "dtype") or ()
    if "option" in declared:
        trained = plan.train.dtype_of(option or "auto")
    able = [each for each in declared if each != "option"]
    if able and trained and trained not in able:
        whose = "" if option else ", the dtype of its model folder"
        reason = ": small gradients are below its range" if trained == "float16" else ""
        cure = " or ".join(f"dtype={each!r}" for each in able)
        problems.add(
            f"engine {plan.train.engine!r} does not train in {trained}{whose}{reason}; say {cure}", "train", "dtype"
        )
    asked = plan.weights.dtype
    published = trained if asked is None else plan.train.dtype_of(asked)
    for number, rollout in enumerate(plan.rollouts):
        taken = registry().declared("rollout", rollout.engine, "dtype") or ()
        options = {"option": rollout.options.get("dtype") or "auto", "folder": "auto"}
        names = list(dict.fromkeys(rollout.dtype_of(options[each]) for each in taken))
        if published and names and all(names) and published not in names:
            problems.add(
                f"train publishes weights in {published}, and rollout {rollout.task!r} with engine"
                f" {rollout.engine!r} takes {' or '.join(names)}: say weights=af.Weights(dtype={names[0]!r}), or"
                f" dtype={published!r} for the rollout",
                *(("rollout", number, "dtype") if "dtype" in rollout.options else ("rollout", number)),
            )


def _check_temperature(rollout: Rollout, train: Train) -> None:
    """Ratios of log-probs need the same temperature in sampling and training."""
    drawn, trained = rollout.sampling.temperature, train.options.get("temperature", 1.0)
    if not rollout.admits:  # its log-probs are not trained
        return
    if drawn == 0:
        raise ConfigError("sampling at temperature 0 draws the same response for a whole group; use one above 0")
    if drawn != trained:
        raise ConfigError(
            f"responses are sampled at temperature {drawn:g}, but their log-probs are recomputed at {trained:g};"
            f" say Train(..., temperature={drawn:g})"
        )


def _masks(kind: Literal["rollout", "train"], engine: str) -> bool:
    """True unless its adapter declares what an engine has, and that without sampling masks."""
    declared = registry().declared(kind, engine, "has")
    return declared is None or "sampling_mask" in declared


def _check_sampling(spec: Rollout | Generate, sampling: Sampling) -> None:
    """Check that stop texts have a tokenizer, and what the engine's adapter declares of draws. A worker asks the engine."""
    adapter = registry().find("rollout", spec.engine)
    if adapter is not None:
        able = adapter.spec.declared("restrictions")
        can = Capabilities(
            restrictions=tuple(sampling.restrictions) if able is None else able,
            extra=adapter.spec.declared("extra") or (),
            sampling_mask=_masks("rollout", spec.engine),
        )
        can.check(f"engine {spec.engine!r}", sampling)
    with contextlib.suppress(PluginError):  # this environment has no tokenizers: the worker checks
        with_stop_ids(sampling, Tokenizer(spec.tokenizer) if spec.tokenizer and sampling.stop else None)


def _check_folders(plan: Plan, problems: Problems) -> None:
    """Find a quantised folder of the trainer, rollouts with other tensors in their folder than the trainer's, by name
    and shape, and folders with a tied configuration and another ``lm_head``.

    Reads headers only, and the bytes of a tied ``lm_head``, which a folder may also lack. Numbers are not compared: a
    rollout loads a version before its first prompt, except tensors that training leaves out. Folders of other hosts
    and folders without safetensors are not compared."""
    read: dict[str, ModelFolder] = {}

    def folder_of(spec: Rollout | Train, *key: str | int) -> ModelFolder | None:
        here = is_checked_here(spec.task) and not spec.place.hosts and spec.model
        path = os.path.realpath(spec.model)
        if not here or not any(Path(path, name).is_file() for name in WEIGHTS):  # for its engine to judge
            return None
        with problems.collect(*key, "model"):
            read[path] = read.get(path) or ModelFolder(spec.model)
        return read.get(path)

    trained = folder_of(plan.train, "train")
    if trained is not None:
        with problems.collect("train", "model"):
            trained.check_unquantised()
    for number, rollout in enumerate(plan.rollouts):
        served = folder_of(rollout, "rollout", number)
        with problems.collect("rollout", number, "model"):
            if served is not None and trained is not None and served is not trained:
                _compare(rollout.task, served, trained)


def _compare(task: str, served: ModelFolder, trained: ModelFolder) -> None:
    """Raise ConfigError with all differences."""
    if found := served.differences(trained, served.folder, trained.folder):
        listed = "\n  ".join(found[:_SHOWN])
        more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ConfigError(
            f"rollout {task!r} has the model {served.folder}, whose weights are not those of {trained.folder}, which"
            f" train publishes; give both the same model=:\n  {listed}{more}"
        )


def _needs_trust(model: str, factory: Callable[..., Any]) -> bool:
    """True if an engine with the option trust_remote_code needs it: the folder has Python of its own for a model type
    that transformers, found here without importing it, lacks."""
    kind, own = own_model(model)
    if not own or "trust_remote_code" not in inspect.signature(factory).parameters:
        return False
    found = importlib.util.find_spec("transformers")
    places = (found.submodule_search_locations if found is not None else None) or ()
    models = [file for each in places if (file := Path(each, "models", "auto", "modeling_auto.py")).is_file()]
    return bool(models) and not any(f'"{kind}"' in each.read_text() for each in models)
