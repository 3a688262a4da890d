"""Checks of a plan before any process starts: all problems in one report."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, PluginError, SchemaError
from ...interfaces import SAMPLING_MASK, Capabilities, Placement
from ...ledger.state.rows import MAX_COLUMNS
from ...plugins import registry
from ...types import Batch, Ragged, Sampling
from ...types.config import LOCAL
from ...weights import AUTO, TransportPublisher, make_transport
from ...wire import transport_of
from ..data import cut_prompts
from ..evaluation import EVALUATION
from ..events.trackers import check_tracker
from ..model_folder import OWN_CODE
from ..rollout.chat import PromptEncoder
from ..rollout.tokenizer import Tokenizer, token_ids, with_stop_ids
from ..specs import Rollout, Stage, Train, takes_trained
from ..work import Generate, Logprobs
from ..workers.engines import check_mask, frozen_options, odd_options, whole_step_text
from ..workers.ranks import check_ranks
from .dataflow import same_name
from .folders import check_folders, needs_trust
from .plan import AHEAD_STEPS, PROMPT, Plan
from .policy import rows_needed
from .problems import Problems, checks_placements, is_checked_here

MOST = 2**53
"""Largest number of rows or steps."""
ENCODED_AT_ONCE = 1000
"""Prompts in a batch of the tokenizer, which needs 100 times the memory of their ids; and of a sample."""
_NO_IDS = np.empty(0, np.int32)
_RESIZE = (
    "Name the model's own tokenizer (tokenizer=), or give the model an embedding for all its tokens:"
    " model.resize_token_embeddings(len(tokenizer)) of transformers"
)


def check_plan(plan: Plan) -> None:
    """Make the plan's choices and raise its problems, all at once: a single one unchanged, several as
    one ConfigError."""
    with contextlib.closing(plan.problems) as problems:
        _find(plan, problems)
    problems.raise_all()


def _find(plan: Plan, problems: Problems) -> None:
    _check_numbers(plan, problems)
    _check_address(plan, problems)
    for number, rollout in enumerate(plan.rollouts):
        _check_place(f"rollout {rollout.task!r}", rollout.place, problems, "rollout", number)
        if is_checked_here(rollout.task):
            _check_engine("rollout", rollout, rollout.place, problems, "rollout", number)
    for stage, key in zip(plan.stages, plan.stage_keys, strict=True):
        if not stage.here:
            _check_place(f"stage {stage.task!r}", stage.place, problems, *key, world_size=stage.world_size)
        if isinstance(stage.work, (Logprobs, Generate)) and is_checked_here(stage.task):
            _check_engine("stage", stage.work, stage.place, problems, *key, "work")
        with problems.collect(*key, "work", "sampling"):
            if isinstance(stage.work, Generate):
                _check_sampling(stage.work, stage.work.sampling)
        _check_here(stage, problems, *key)
        with problems.collect(*key, "work", "engine"):
            if isinstance(stage.work, Logprobs) and stage.masks:
                check_mask(f"engine {stage.work.engine!r}", _masks("train", stage.work.engine), SAMPLING_MASK)
    with problems.collect("train", "engine"):
        check_mask(f"engine {plan.train.engine!r}", _masks("train", plan.train.engine), plan.train.needs)
    _check_place("train", plan.train.place, problems, "train", world_size=plan.train.world_size)
    if is_checked_here(plan.train.task):
        _check_engine("train", plan.train, plan.train.place, problems, "train")
        with problems.collect("train", "stream"):
            _check_stream(plan.train)
    if all(is_checked_here(rollout.task) or not _lacks_model(rollout) for rollout in plan.rollouts):
        _check_columns(plan, problems)
    with problems.collect("staleness", "policy"):
        _check_capacity(plan, rows_needed(plan.staleness, plan.batch_size), problems)
    with problems.collect("prompts"):
        if plan.stream is not None and plan.checkpoint is not None:
            plan.stream.check_resumable()
    for number, rollout in enumerate(plan.rollouts):
        for name, data in plan.prompts_of(rollout):
            with problems.collect("prompts" if name == PROMPT else "evaluate"):
                _check_ids(name, data, rollout)
            with problems.collect("rollout", number):
                _check_lengths(plan, rollout, name, data)
        with problems.collect("rollout", number, "sampling"):
            _check_temperature(rollout, plan.train)
        with problems.collect("rollout", number, "sampling"):
            _check_sampling(rollout, rollout.sampling)
        with problems.collect("evaluate", "sampling"):
            if plan.evaluation is not None and {EVALUATION, "*"}.intersection(rollout.partitions):
                _check_sampling(rollout, plan.evaluation.sampling_of(plan.rollout))
    _check_supply(plan, problems)
    with problems.collect("store"):
        _check_store(plan)
    plan.choose()
    with problems.collect("weights"):
        _check_weights(plan)
    _check_dtypes(plan, problems)
    check_folders(plan, problems)
    with problems.collect("evaluate", "rollback_margin"):
        _check_guard(plan)
    for number, tracker in enumerate(plan.trackers):
        with problems.collect("track", number):
            check_tracker(tracker)


def _check_address(plan: Plan, problems: Problems) -> None:
    with problems.collect("address"):
        if plan.address is not None and transport_of(plan.address) != "tcp":
            raise ConfigError(f"address={plan.address!r} is for other hosts: tcp://HOST:PORT is expected")
    if plan.address is not None:
        return
    if plan.advertise is not None:
        problems.add("advertise= is of an address, which other hosts can reach: say address=, too", "advertise")
    roles: tuple[Rollout | Stage | Train, ...] = (*plan.rollouts, *plan.stages, plan.train)
    for each in roles:
        if each.place.hosts:
            problems.add(f"{each.task!r} has hosts=, which need address=, as tcp://0.0.0.0:7000, to join", "address")
    for each in plan.rollouts:
        if not each.replicas:
            problems.add(
                f"{each.task!r}: replicas must be 1 or more; 0 waits for others to join at address=", "rollout"
            )


def _check_store(plan: Plan) -> None:
    if plan.store.kind == LOCAL:
        return
    registry().get("store", plan.store.kind)
    if plan.checkpoint is None:
        raise ConfigError(
            f"store={plan.store.kind!r} needs checkpoint=af.Checkpoint(...): the record of the run reads the rows of a"
            " step after it was trained, and without a checkpoint they may be gone from their host then"
        )


def _check_numbers(plan: Plan, problems: Problems) -> None:
    size = plan.rollout.group_size
    for name in ("steps", "batch_size", "epochs", "capacity_rows"):
        if (getattr(plan, name) or 0) > MOST:
            problems.add(f"{name} is {getattr(plan, name)}, and at most {MOST}", name)
    if plan.seed is not None and plan.seed < 0:
        problems.add(f"seed must be 0 or more, not {plan.seed}", "seed")
    if plan.steps < 1:
        problems.add(f"steps must be 1 or more, not {plan.steps}", "steps")
    if plan.epochs is not None and plan.epochs < 1:
        problems.add(f"epochs must be 1 or more, or None for as many as the steps take, not {plan.epochs}", "epochs")
    if not plan.stall_timeout_s > 0:
        problems.add(f"stall_timeout_s must be above 0, not {plan.stall_timeout_s}", "stall_timeout_s")
    if not 0 <= plan.max_failed <= 1:
        problems.add(f"max_failed is a share from 0 to 1, not {plan.max_failed}", "max_failed")
    sizes = {rollout.group_size for rollout in plan.rollouts if takes_trained(rollout.partitions)}
    if len(sizes) > 1:
        listed = " and ".join(map(str, sorted(sizes)))
        text = f"rollouts have group_size {listed}: a prompt has one number of responses; give all the same"
        problems.add(text, "rollout", 1, "group_size")
    if plan.batch_size < 1 or plan.batch_size % size:
        near = max(size, round(plan.batch_size / size) * size)
        text = f"batch_size={plan.batch_size} is not a multiple of group_size={size}; use {near}"
        problems.add(text, "batch_size")
    if plan.batch_size < plan.train.world_size:
        problems.add(
            f"a step of {plan.batch_size} rows cannot be dealt out to world_size={plan.train.world_size} ranks",
            "batch_size",
        )
    if (plan.train.part_rows or 0) > plan.batch_size:
        text = f"part_rows={plan.train.part_rows} is more than a step has: batch_size={plan.batch_size}"
        problems.add(text, "train", "part_rows")
    if plan.train.place.max_restarts and plan.checkpoint is None:
        problems.add(
            f"train has max_restarts={plan.train.place.max_restarts}, and a trainer that is started again without a"
            " checkpoint has lost what it learned; say checkpoint=af.Checkpoint(every=50), or leave max_restarts out",
            "train", "max_restarts",
        )  # fmt: skip
    if plan.train.algorithm is not None:
        with problems.collect("rollout", 0, "group_size"):
            plan.train.algorithm.check(group_size=size)


def _check_supply(plan: Plan, problems: Problems) -> None:
    size = plan.rollout.group_size
    if plan.epochs and plan.stream is None and plan.data.rows * size * plan.epochs < plan.batch_size:
        rows = plan.data.rows * size * plan.epochs
        problems.add(
            f"a step has {plan.batch_size} rows, and {plan.data.rows} prompts in groups of {size} give {rows} in"
            f" epochs={plan.epochs}: no step can fill; use batch_size={rows} or less, more prompts, or more epochs",
            "batch_size",
        )


def _check_place(where: str, place: Placement, problems: Problems, *key: str | int, world_size: int = 1) -> None:
    if not checks_placements():
        return
    try:
        check_ranks(problems.launcher(place), place, world_size)
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
        if needs_trust(spec.model, factory) and not spec.options.get("trust_remote_code"):
            problems.add(
                f"{kind} model {spec.model!r} is of a type that transformers lacks, and {OWN_CODE}", *key, "model"
            )


def _check_stream(train: Train) -> None:
    """Refuse steps in parts for an engine or an algorithm that needs whole steps, as far as this is
    known here; the worker asks its engine again."""
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


def _check_here(stage: Stage, problems: Problems, *key: str | int) -> None:
    """Refuse a placement for a function that only the driver can run."""
    place = stage.place
    own = place.python or place.env or place.cpus or place.gpus or place.hosts or place.launcher != "process"
    if stage.here and own:
        problems.add(
            f"stage {stage.task!r} has a function that no other process can import, so it runs in the driver's,"
            " and has no place of its own: put the function into a module, or leave python=, env=, cpus=, gpus=,"
            " hosts= and launcher= out",
            *key,
        )


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


def _check_capacity(plan: Plan, needed: int, problems: Problems) -> None:
    """``needed``: live rows that the staleness policy needs to fill every step."""
    least = max(plan.batch_size, plan.rollout.group_size, needed)
    if plan.capacity_rows < least:
        problems.add(
            f"a queue of capacity_rows={plan.capacity_rows} is too small: steps of {plan.batch_size} rows at"
            f" max_staleness={plan.staleness.max_staleness} cannot fill with fewer than {least}; leave it out"
            f" ({plan.batch_size * (plan.staleness.max_staleness + AHEAD_STEPS)} rows then), or give more",
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
    here = (
        not place.elsewhere and not place.env and is_checked_here("train")
    )  # the trainer's process has the same environment
    if here and plan.transport != AUTO:  # else the choice has reported why
        _check_publisher(plan)
    temperature = plan.train.options.get("temperature", 1.0)
    if plan.weights.probe and temperature != 1.0:
        raise ConfigError(
            f"a probe is compared at temperature 1, and training computes log-probs at {temperature:g}: leave the"
            " probe out"
        )


def _check_guard(plan: Plan) -> None:
    """Refuse rollbacks of a run that may be resumed, if the best version ends with its trainer."""
    if plan.evaluation is None or plan.evaluation.rollback_margin is None or plan.checkpoint is None:
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


def _check_ids(name: str, data: Batch, rollout: Rollout) -> None:
    """Check prompts given as token ids."""
    if rollout.prompt != "prompt_ids" or rollout.prompt not in data:
        return
    try:
        token_ids(data, rollout.prompt)
    except SchemaError as error:
        raise ConfigError(f"{name}s: {error}") from None


def _check_lengths(plan: Plan, rollout: Rollout, name: str, data: Batch) -> None:
    """Find prompts that cannot be encoded, have tokens without an embedding, or leave no room for a
    response, if tokenizer, vocabulary and context are known here."""
    if rollout.prompt not in data:
        return
    if rollout.chat is not None and isinstance(rollout.chat.tools, str) and rollout.chat.tools not in data:
        return  # the check of the columns reports it
    is_ids = data.spec(rollout.prompt).kind not in ("text", "json")
    encoder: PromptEncoder | None = None
    most = plan.prompt_limit(rollout, name)

    def _length(row: Batch) -> int:
        return int(row.ragged(rollout.prompt).lengths[0]) if encoder is None else encoder.length(row, rollout.prompt)

    if is_ids:
        lengths = _lengths(data.ragged(rollout.prompt), np.arange(data.rows), rollout, name)
    elif rollout.tokenizer:
        try:
            encoder = PromptEncoder(Tokenizer(rollout.tokenizer), rollout.chat)
            lengths = _lengths_of_texts(plan, rollout, encoder, MOST if most is None else most, name, data)
        except PluginError:  # this environment has no tokenizers: the worker checks
            return
    else:
        return
    if not lengths.all():
        empty = int((lengths == 0).argmax())
        raise ConfigError(f"{name}s: record {empty}: column {rollout.prompt!r} is empty: it has no token")
    if most is None:
        return
    context = int(rollout.config["max_position_embeddings"])
    if most < 1:
        raise ConfigError(
            f"max_tokens={context - most} leaves no room for a prompt: the model's context is {context};"
            f" say sampling=af.Sampling(max_tokens={max(context // 2, 1)})"
        )
    if plan.stream is not None and name == PROMPT:  # its later records, and with "error" the first ones
        if plan.long_prompts != "truncate_left":
            plan.stream.limit(_length, most)
        elif is_ids:  # texts are not encoded here only to find the empty ones
            plan.stream.limit(_length, MOST)
            plan.stream.cut(most)
        if plan.long_prompts != "error":
            return
    odd = np.flatnonzero(lengths > most)
    if not len(odd):
        return
    first = int(odd[0])
    text = (
        f"{name} {first} has {lengths[first]} tokens, and {len(odd)} of {len(lengths)} prompts do not fit: with"
        f" max_tokens={context - most} a prompt may have 1 to {most} tokens, since the"
        f" model's context is {context}"
    )
    if plan.long_prompts == "error" or (plan.long_prompts == "drop" and len(odd) == len(lengths)):
        others = "'truncate_left' cuts their beginnings off"
        if plan.long_prompts == "error":
            others = f"'drop' leaves such prompts out, {others}"
        raise ConfigError(f"{text}; long_prompts={others}")
    if plan.long_prompts == "drop":
        plan.change_prompts(name, data.take(lengths <= most))
    elif is_ids:
        plan.change_prompts(name, cut_prompts(data, rollout.prompt, most))
    plan.warn(f"{text}; {'they are left out' if plan.long_prompts == 'drop' else 'their beginnings are cut off'}")


def _lengths(encoded: Ragged, rows: npt.NDArray[np.int64], rollout: Rollout, name: str) -> npt.NDArray[np.int64]:
    """Return the number of tokens of each prompt. Raises ConfigError for tokens without an embedding."""
    vocabulary = rollout.config.get("vocab_size")
    beyond = encoded.values >= vocabulary if isinstance(vocabulary, int) else np.zeros(0, np.bool_)
    if encoded.values.ndim == 1 and beyond.any():
        first = int(beyond.argmax())
        row = rows[int(np.searchsorted(encoded.offsets, first, side="right")) - 1]
        raise ConfigError(
            f"{name} {row} has token {encoded.values[first]}, and the embedding of {rollout.model} has {vocabulary}"
            f" tokens. {_RESIZE}"
        )
    return encoded.lengths


def _lengths_of_texts(
    plan: Plan, rollout: Rollout, encoder: PromptEncoder, most: int, name: str, data: Batch
) -> npt.NDArray[np.int64]:
    """Encode a sample of the prompts, and all possibly too long ones. Return the number of tokens of each, 1 of
    others. A worker puts aside a prompt it cannot encode. Raises ConfigError if these are more than
    ``max_failed``."""
    tokenizer, vocabulary, refused = encoder.tokenizer, rollout.config.get("vocab_size"), dict[int, str]()
    column = data.columns[rollout.prompt]
    assert column.offsets is not None
    sizes = np.diff(column.offsets)
    lengths = np.ones(len(sizes), np.int64)

    def _encode(rows: npt.NDArray[np.int64]) -> Ragged:
        encoded = encoder.encode_rows(data.take(rows), rollout.prompt)
        refused.update({int(row): str(e) for row, e in zip(rows, encoded, strict=True) if isinstance(e, SchemaError)})
        ids = Ragged.of([_NO_IDS if isinstance(each, SchemaError) else each for each in encoded], np.int32)
        lengths[rows] = [
            1 if row in refused else length
            for row, length in zip(rows, _lengths(ids, rows, rollout, name), strict=True)
        ]
        return ids

    count = min(len(sizes), ENCODED_AT_ONCE)
    sample = np.arange(count) * len(sizes) // count
    ids = _encode(sample)
    larger = isinstance(vocabulary, int) and tokenizer.size > vocabulary
    more = max(int((ids.lengths - sizes[sample]).max()), 0)  # tokens of a template; no tokenizer makes two of a byte
    doubtful = (sizes == 0) | (sizes + more > (0 if larger else most))
    doubtful[sample] = False
    rest = np.flatnonzero(doubtful)
    for start in range(0, len(rest), ENCODED_AT_ONCE):
        _encode(rest[start : start + ENCODED_AT_ONCE])
    if refused:
        row = min(refused)
        text = f"{name} {row}: {refused[row]}"
        if len(refused) > plan.max_failed * (count + len(rest)):
            raise ConfigError(f"{name}s: {text}")
        plan.warn(
            f"{len(refused)} of {count + len(rest)} {name}s are put aside, since they cannot be encoded: {text}"
        )
    if larger:
        plan.warn(
            f"{tokenizer.file} has {tokenizer.size} tokens, and the embedding of {rollout.model} {vocabulary}: a text"
            f" with one of the others fails. {_RESIZE}"
        )
    _warn_of_tokens(plan, rollout, tokenizer, ids, data.take(sample))
    return lengths


def _warn_of_tokens(plan: Plan, rollout: Rollout, tokenizer: Tokenizer, ids: Ragged, sample: Batch) -> None:
    """Warn of special tokens in texts."""
    if tokenizer.is_doubled(ids):
        plan.warn(
            f"prompts of {rollout.task} begin with the token for the beginning of a text, and {tokenizer.file} adds"
            " it once more: remove it from the prompts' text, or give token ids in a column prompt_ids"
        )
        return
    taken = sample.take(ids.lengths > 0)  # the others are refused
    texts = taken.texts(rollout.prompt) if taken.spec(rollout.prompt).kind == "text" else []
    if rollout.chat is None and any(map(tokenizer.control.find, texts)):
        plan.warn(
            f"prompts of {rollout.task} are texts, and control tokens in them are read as such; in the texts of chats"
            " they are not"
        )
