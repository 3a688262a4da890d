"""Everything that can be known of a workflow before a process starts: one report of all that cannot work."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..errors import AsyncFlowError, ConfigError, PluginError, SchemaError
from ..interfaces import Launcher, Placement
from ..plugins import registry
from ..types.dtypes import floating_name
from ..weights import AUTO
from ..weights.publisher import check_publisher
from .dataflow import PROMPTS, Dataflow, Edge, Node, same_name
from .engines import odd_options
from .planning import planned
from .policy import rows_needed
from .ranks import check_ranks
from .specs import TRAINED, Rollout, Stage, Train, takes_trained
from .supervise import launcher_named
from .tokenizer import Tokenizer, token_ids, with_stop_ids
from .tracking import check_tracker
from .work import Generate, Logprobs

MOST = 2**53
AHEAD_STEPS = 3
"""Rows that may be alive at once, in steps beyond max_staleness: one trains, one fills, one is being fed."""

if TYPE_CHECKING:
    from .workflow import Workflow


Key = tuple[str | int, ...]
"""Where in a workflow something stands: ("batch_size",), ("rollout", 0, "model")."""


Told = Callable[[Key, AsyncFlowError], None]
_told: ContextVar[Told] = ContextVar("told", default=lambda key, error: None)


@contextlib.contextmanager
def telling(listener: Told) -> Iterator[None]:
    """In here ``listener`` hears of everything that is wrong with a workflow, and where, before it is raised."""
    before = _told.set(listener)
    try:
        yield
    finally:
        _told.reset(before)


_role: ContextVar[str | None] = ContextVar("role", default=None)


@contextlib.contextmanager
def for_role(task: str) -> Iterator[None]:
    """In here a workflow is looked at for the role ``task`` alone: what others have is on other hosts, and where it runs itself
    is asked when it starts."""
    before = _role.set(task)
    try:
        yield
    finally:
        _role.reset(before)


def _is_here(task: str) -> bool:
    """Whether the engine, the model and the tokenizer of a role are looked for on this host."""
    return _role.get() in (None, task)


class Problems:
    """What was found, in order, each with the key it is of."""

    def __init__(self) -> None:
        self.found: list[tuple[Key, AsyncFlowError]] = []
        self._launchers: dict[str, Launcher] = {}

    def add(self, text: str, *key: str | int) -> None:
        self._keep(ConfigError(text), key)

    @contextlib.contextmanager
    def kept(self, *key: str | int) -> Iterator[None]:
        """An error of configuration in here is one of them."""
        try:
            yield
        except (ConfigError, PluginError) as error:
            self._keep(error, key)

    def launcher(self, name: str) -> Launcher:
        """The one by this name, for all places of the workflow. Raises PluginError."""
        if name not in self._launchers:
            self._launchers[name] = launcher_named(name)
        return self._launchers[name]

    def close(self) -> None:
        """Free what launchers needed to look: the run has others."""
        for launcher in self._launchers.values():
            launcher.close()

    def _keep(self, error: AsyncFlowError, key: Key) -> None:
        if str(error) not in {str(known) for _, known in self.found}:
            self.found.append((key, error))

    def raise_all(self) -> None:
        """Raise the only one as it is, several as one ConfigError that lists them."""
        for key, error in self.found:
            _told.get()(key, error)
        if len(self.found) == 1:
            raise self.found[0][1]
        if self.found:
            listed = "".join(f"\n  {number}. {error}" for number, (_, error) in enumerate(self.found, 1))
            raise ConfigError(f"{len(self.found)} things in this workflow cannot work:{listed}")


def problems_of(flow: Workflow) -> Problems:
    """Everything that is wrong."""
    with contextlib.closing(Problems()) as problems:
        _find(flow, problems)
    return problems


def _find(flow: Workflow, problems: Problems) -> None:
    _check_numbers(flow, problems)
    for number, rollout in enumerate(flow.rollouts):
        _check_place(f"rollout {rollout.task!r}", rollout.place, problems, "rollout", number)
        if _is_here(rollout.task):
            _check_engine("rollout", rollout, rollout.place, problems, "rollout", number)
    for stage, key in zip(flow.stages, _stage_keys(flow), strict=True):
        if not stage.here:
            _check_place(f"stage {stage.task!r}", stage.place, problems, *key)
        if isinstance(stage.work, (Logprobs, Generate)) and _is_here(stage.task):
            _check_engine("stage", stage.work, stage.place, problems, *key, "work")
        with problems.kept(*key, "work", "sampling"):
            if isinstance(stage.work, Generate):
                _check_stops(stage.work)
        _check_here(stage, problems, *key)
    _check_place("train", flow.train.place, problems, "train", world_size=flow.train.world_size)
    if _is_here(flow.train.task):
        _check_engine("train", flow.train, flow.train.place, problems, "train")
    if all(_is_here(rollout.task) or not _lacks_model(rollout) for rollout in flow.rollouts):
        _check_columns(flow, problems)
    with problems.kept("staleness", "policy"):
        _check_capacity(flow, rows_needed(flow.staleness, flow.batch_size), problems)
    for number, rollout in enumerate(flow.rollouts):
        with problems.kept("prompts"):
            _check_ids(flow, rollout)
        with problems.kept("rollout", number):
            _check_lengths(flow, rollout)
        with problems.kept("rollout", number, "sampling"):
            _check_temperature(rollout, flow.train)
        with problems.kept("rollout", number, "sampling"):
            _check_stops(rollout)
    flow.plan = planned(flow, problems)
    with problems.kept("weights"):
        _check_weights(flow)
    _check_dtypes(flow, problems)
    for number, tracker in enumerate(flow.trackers):
        with problems.kept("trackers", number):
            check_tracker(tracker)


def _stage_keys(flow: Workflow) -> list[Key]:
    rewards = [("reward",)] if flow.reward is not None else []
    return [*rewards, *(("stages", number) for number in range(len(flow.stages) - len(rewards)))]


def _check_numbers(flow: Workflow, problems: Problems) -> None:
    size = flow.rollout.group_size
    for name in ("steps", "batch_size", "epochs", "capacity_rows"):
        if (getattr(flow, name) or 0) > MOST:
            problems.add(f"{name} is {getattr(flow, name)}, and at most {MOST}", name)
    if flow.seed < 0:
        problems.add(f"seed must be 0 or more, not {flow.seed}", "seed")
    if flow.steps < 1:
        problems.add(f"steps must be 1 or more, not {flow.steps}", "steps")
    if flow.epochs is not None and flow.epochs < 1:
        problems.add(f"epochs must be 1 or more, or None for as many as the steps take, not {flow.epochs}", "epochs")
    if not flow.stall_timeout_s > 0:
        problems.add(f"stall_timeout_s must be above 0, not {flow.stall_timeout_s}", "stall_timeout_s")
    sizes = {rollout.group_size for rollout in flow.rollouts if takes_trained(rollout.partitions)}
    if len(sizes) > 1:
        listed = " and ".join(map(str, sorted(sizes)))
        text = f"rollouts have group_size {listed}: a prompt has one number of responses; give all the same"
        problems.add(text, "rollout", 1, "group_size")
    if flow.batch_size < 1 or flow.batch_size % size:
        near = max(size, round(flow.batch_size / size) * size)
        text = f"no number of groups of {size} fills a batch of {flow.batch_size} rows; use batch_size={near}"
        problems.add(text, "batch_size")
    elif flow.epochs and flow.data.rows * size * flow.epochs < flow.batch_size:
        rows = flow.data.rows * size * flow.epochs
        problems.add(
            f"a step has {flow.batch_size} rows, and {flow.data.rows} prompts in groups of {size} give {rows} in"
            f" epochs={flow.epochs}: no step can fill; use batch_size={rows} or less, more prompts, or more epochs",
            "batch_size",
        )
    if flow.batch_size < flow.train.world_size:
        problems.add(
            f"a step of {flow.batch_size} rows cannot be dealt out to world_size={flow.train.world_size} ranks",
            "batch_size",
        )
    if flow.train.place.max_restarts and flow.checkpoint is None:
        problems.add(
            f"train has max_restarts={flow.train.place.max_restarts}, and a trainer that is started again without a"
            " checkpoint has lost what it learned; say checkpoint=af.Checkpoint(every=50), or leave max_restarts out",
            "train", "max_restarts",
        )  # fmt: skip
    if flow.train.algorithm is not None:
        with problems.kept("rollout", 0, "group_size"):
            flow.train.algorithm.check(group_size=size)


def _check_place(where: str, place: Placement, problems: Problems, *key: str | int, world_size: int = 1) -> None:
    if _role.get() is not None:
        return
    try:
        check_ranks(problems.launcher(place.launcher), place, world_size)
    except (ConfigError, PluginError) as error:
        about = [name for name in ("python", "cpus", "gpus", "env", "launcher") if f"{name}=" in str(error)]
        problems.add(f"{where}: {error}", *key, *(about[:1] or ["launcher"]))


def _check_engine(
    kind: str, spec: Rollout | Train | Logprobs | Generate, place: Placement, problems: Problems, *key: str | int
) -> None:
    if _lacks_model(spec):
        text = f"{kind} model {spec.model!r} is no model folder: it has no config.json"
        problems.add(text + _of_the_hub(str(spec.model)), *key, "model")
    if place.python is not None:  # another interpreter has plugins of its own
        return
    with problems.kept(*key, "engine"):
        factory = registry().get(spec.kind, spec.engine).load()
        for option, text in odd_options(spec.engine, factory, spec.options, inspect.signature(type(spec)).parameters):
            problems.add(text, *key, option)


def _lacks_model(spec: Rollout | Train | Logprobs | Generate) -> bool:
    return bool(spec.model) and not Path(spec.model, "config.json").is_file()


def _of_the_hub(model: str) -> str:
    """What to do about a name such as Qwen/Qwen3-0.6B: nothing is downloaded behind anybody's back."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model) or Path(model).exists():
        return ""
    return f"; one of the hub is downloaded first: hf download {model} --local-dir FOLDER"


def _check_here(stage: Stage, problems: Problems, *key: str | int) -> None:
    """A function that only the driver has cannot be placed elsewhere."""
    place = stage.place
    if stage.here and (place.python or place.env or place.cpus or place.gpus or place.launcher != "process"):
        problems.add(
            f"stage {stage.task!r} has a function that no other process can import, so it runs in the driver's, and has no"
            " place of its own: put the function into a module, or leave python=, env=, cpus=, gpus= and launcher= out",
            *key,
        )


def dataflow(flow: Workflow) -> Dataflow:
    """The tasks that work on the rows that are trained, and their columns. Raises ConfigError where rollouts that share a task
    do not agree."""
    nodes = [node for node in _nodes(flow) if node.takes(TRAINED[0])]
    return Dataflow(list(flow.data), nodes)


def dataflows_beside(flow: Workflow) -> dict[str, Dataflow]:
    """By partition, the tasks that work on rows that somebody else puts there, with the columns that none of them gives."""
    nodes, found = _nodes(flow), {}
    for partition in dict.fromkeys(each for node in nodes for each in node.partitions if each not in ("*", *TRAINED)):
        taking = [node for node in nodes if node.takes(partition)]
        given = {column for node in taking for column in node.gives}
        put = dict.fromkeys(column for node in taking for column in node.needs if column not in given)
        found[partition] = Dataflow(list(put), taking)
    return found


def edges(flow: Workflow) -> list[Edge]:
    """All columns from task to task: first of the rows that are trained, then of those of other partitions."""
    found = dataflow(flow).edges
    for partition, of in dataflows_beside(flow).items():
        put = [edge._replace(giver=f"partition {partition}") if edge.giver == PROMPTS else edge for edge in of.edges]
        found += [edge for edge in put if edge not in found]
    return found


def _nodes(flow: Workflow) -> list[Node]:
    """All tasks. Rollouts that share one are one."""
    nodes: dict[str, Node] = {}
    listed: list[Node] = []
    for rollout in flow.rollouts:
        spec = rollout.declare()
        node = Node(spec.name, spec.needs, spec.gives, spec.partitions)
        known = nodes.setdefault(spec.name, node)
        if known is node:
            listed.append(node)
        elif known != node:
            raise ConfigError(
                f"rollouts of engines that share task {spec.name!r} must need and give the same columns of the same partitions: one needs"
                f" {', '.join(known.needs)} and gives {', '.join(known.gives)}, the other needs {', '.join(node.needs)} and"
                f" gives {', '.join(node.gives)}; name a tokenizer for both, or give one another task="
            )
    listed += [Node(stage.task, stage.needs, stage.gives, stage.partitions) for stage in flow.stages]
    return [*listed, Node(flow.train.task, flow.train.needs)]


def _check_columns(flow: Workflow, problems: Problems) -> None:
    keys = {stage.task: key for stage, key in zip(flow.stages, _stage_keys(flow), strict=True)}
    with problems.kept("rollout"):
        tasks = [node.task for node in _nodes(flow)]
        found = [same_name(task) for task in dict.fromkeys(tasks) if tasks.count(task) > 1]
        for of in (dataflow(flow), *dataflows_beside(flow).values()):
            found += of.problems()
        for problem in found:
            problems.add(problem.text, *keys.get(problem.task, (problem.task,)))
    admitting = [rollout for rollout in flow.rollouts if rollout.admits]
    if len({rollout.task for rollout in admitting}) != 1:
        names = ", ".join(repr(rollout.task) for rollout in admitting) or "none"
        problems.add(
            f"one rollout task gives the columns that are trained, without a prefix; here that is: {names}", "rollout"
        )
    if len({rollout.lease_s for rollout in admitting}) > 1:
        problems.add("rollouts that share a task must have the same lease_s", "rollout")


def _check_capacity(flow: Workflow, needed: int, problems: Problems) -> None:
    """``needed``: rows that the staleness policy wants alive at once for every step to fill."""
    least = max(flow.batch_size, flow.rollout.group_size, needed)
    if flow.capacity_rows < least:
        problems.add(
            f"a queue of capacity_rows={flow.capacity_rows} is too small: steps of {flow.batch_size} rows at"
            f" max_staleness={flow.staleness.max_staleness} cannot fill with fewer than {least}; leave it out"
            f" ({flow.batch_size * (flow.staleness.max_staleness + AHEAD_STEPS)} rows then), or give more",
            "capacity_rows",
        )


def _check_weights(flow: Workflow) -> None:
    replicas = sum(rollout.replicas for rollout in flow.rollouts)
    if flow.weights.quorum > replicas:
        raise ConfigError(
            f"quorum={flow.weights.quorum} replicas must have a version staged before any loads it, and there are"
            f" {replicas}"
        )
    place = flow.train.place
    here = place.python is None and not place.env and _is_here("train")  # as it will be in the trainer's process
    if here and flow.plan.transport != AUTO:  # else it was told already why there is none
        check_publisher(flow.plan.transport, flow.weights.options)
    temperature = flow.train.options.get("temperature", 1.0)
    if flow.weights.probe is not None and temperature != 1.0:
        raise ConfigError(
            f"a probe is compared at temperature 1, and training computes log-probs at {temperature:g}: leave the"
            " probe out"
        )


def _check_dtypes(flow: Workflow, problems: Problems) -> None:
    """Versions have a dtype that each rollout takes, as far as adapters and model folders say."""
    asked = flow.weights.dtype
    trained = registry().find("train", flow.train.engine)
    if asked is None and trained is not None and trained.spec.declared("dtype") == ("option",):
        asked = flow.train.options.get("dtype") or "auto"
    published = "" if asked is None else _dtype_of(asked, flow.train.model)
    for number, rollout in enumerate(flow.rollouts):
        adapter = registry().find("rollout", rollout.engine)
        taken = (adapter.spec.declared("dtype") if adapter is not None else None) or ()
        options = {"option": rollout.options.get("dtype") or "auto", "folder": "auto"}
        names = list(dict.fromkeys(_dtype_of(options[each], rollout.model) for each in taken))
        if published and names and all(names) and published not in names:
            problems.add(
                f"train publishes weights in {published}, and rollout {rollout.task!r} with engine {rollout.engine!r} takes"
                f" {' or '.join(names)}: say weights=af.Weights(dtype={names[0]!r}), or dtype={published!r} for the rollout",
                *(("rollout", number, "dtype") if "dtype" in rollout.options else ("rollout", number)),
            )


def _dtype_of(option: str, model: str) -> str:
    """The dtype that an engine's option names, or its model folder; "" if it is not known here."""
    if option != "auto":
        return floating_name(option)
    config = _config(model)
    return floating_name(config.get("dtype") or config.get("torch_dtype"))


def _check_temperature(rollout: Rollout, train: Train) -> None:
    """Ratios of log-probs mean something only under the same distribution."""
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


def _check_stops(spec: Rollout | Generate) -> None:
    """Texts that end a response are one token each, where the tokenizer is known here."""
    with contextlib.suppress(PluginError):  # no tokenizers in this environment: the worker has them, and checks
        with_stop_ids(spec.sampling, Tokenizer(spec.tokenizer) if spec.tokenizer and spec.sampling.stop else None)


def _check_ids(flow: Workflow, rollout: Rollout) -> None:
    """Prompts given as token ids are that."""
    if not takes_trained(rollout.partitions) or rollout.prompt != "prompt_ids" or rollout.prompt not in flow.data:
        return
    try:
        lengths = token_ids(flow.data, rollout.prompt).lengths
    except SchemaError as error:
        raise ConfigError(f"prompts: {error}") from None
    if not lengths.all():
        raise ConfigError(f"prompts: row {int((lengths == 0).argmax())} of column 'prompt_ids' is empty")


def _check_lengths(flow: Workflow, rollout: Rollout) -> None:
    """Prompts that leave no room for a response, where tokenizer and context are known here."""
    context = _context(rollout.model)
    if context is None or rollout.prompt not in flow.data or not takes_trained(rollout.partitions):
        return
    if rollout.prompt == "prompt_ids":
        lengths = flow.data.ragged("prompt_ids").lengths
    elif rollout.tokenizer:
        try:
            encoded = Tokenizer(rollout.tokenizer).encode(flow.data.texts(rollout.prompt))
        except PluginError:  # no tokenizers in this environment: the worker has them, and checks
            return
        except SchemaError as error:
            raise ConfigError(f"prompts: {error}") from None
        lengths = np.array([len(ids) for ids in encoded])
    else:
        return
    most = context - rollout.sampling.max_tokens
    odd = np.flatnonzero((lengths > most) | (lengths == 0))
    if len(odd):
        first = int(odd[0])
        raise ConfigError(
            f"prompt {first} has {lengths[first]} tokens, and {len(odd)} of {len(lengths)} prompts do not fit: with"
            f" max_tokens={rollout.sampling.max_tokens} a prompt may have 1 to {most} tokens, since the"
            f" model's context is {context}"
        )


def _context(model: str) -> int | None:
    """The most tokens a model folder's configuration allows; None when it does not say."""
    context = _config(model).get("max_position_embeddings")
    return context if isinstance(context, int) else None


def _config(model: str) -> dict[str, Any]:
    """The configuration of a model folder; empty where there is none that can be read."""
    try:
        config = msgspec.json.decode(Path(model, "config.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        return {}
    return config if isinstance(config, dict) else {}


def name_of(function: Callable[..., Any] | str) -> str:
    """What people call a function."""
    return str(getattr(function, "__qualname__", type(function).__name__))
