"""Rollout, Stage and Train: what the workers of a run do, and where. Plain descriptions; nothing starts here.

A worker's process makes the same object again from its constructor's arguments.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from ..algorithms import algorithm_spec, make_algorithm
from ..errors import ConfigError, PluginError, SchemaError
from ..interfaces import SAMPLING_MASK, TRAIN_COLUMNS, Algorithm, Placement
from ..ledger import TaskSpec
from ..plugins import import_name, registry
from ..queue import QueueClient
from ..queue.checks import check_names
from ..types import LOSS_MASK, VERSION_SPANS, Chat, Sampling, Weights
from ..types.config import Proof, SwapPolicy
from ..types.defaults import AGENT_S, CONCURRENCY, GROUP_SIZE, LEASE_S, PRODUCER_LEASE_S, STAGE_CALL_S, WORKER_LEASE_S
from ..types.spans import FINISH_REASON
from ..types.tasks import SamplerSpec
from ..types.validation import check_above, check_least
from .loops.agent import Agent
from .loops.stage_worker import run_stage
from .loops.user_code import CallLimit
from .processes.ranks import RankCommunicator, own_rank
from .rewards import Rewards, work_path
from .serialization import Serializable
from .work import EngineSpec, Generate, Logprobs, is_coroutine, needs_of, short_name, takes_all, without_fast_file

RESPONSE_COLUMNS = ("response_ids", "logprobs", VERSION_SPANS, FINISH_REASON)

WHOLE_GROUPS = SamplerSpec("whole_groups")
SHARES = SamplerSpec("token_balanced", {"column": "response_ids", "whole_groups": True})
"""Sampler that divides the rows of a step among the ranks of a trainer."""
TRAINED = ("",)
"""The partition of trained rows."""
PARTS = 8
"""Parts of a step that is trained in parts, about, unless ``part_rows`` says otherwise."""
DRIFT_LIMIT, ROUNDED_DRIFT_LIMIT = 0.05, 0.2
"""Defaults of ``Train.drift_limit``: for float32, and for less precise dtypes. Measured on tiny models: at most 1e-5
in float32, 0.02 in bfloat16, and 0.7 to 0.9 by faults."""
_BATCH = 256
_SMALL_BATCH = 32
"""Rows of a call of a coroutine function, and of a lease of an engine."""

_PLACEMENT: dict[str, Any] = typing.get_type_hints(Placement)
_MAPPINGS = [field.name for field in dataclasses.fields(Placement) if field.default is dataclasses.MISSING]
_PLACEMENT |= {name: _PLACEMENT[name] | None for name in _MAPPINGS}
_Spec = TypeVar("_Spec", bound=Serializable)


def placed(**defaults: Any) -> Callable[[type[_Spec]], type[_Spec]]:
    """Class decorator: add the fields of ``Placement`` to a constructor's keyword arguments. ``defaults``: those
    other than Placement's. The constructor receives them among its ``**`` ones."""

    def extend(made: type[_Spec]) -> type[_Spec]:
        constructor: Any = made.__init__
        signature = inspect.signature(constructor)
        own = list(signature.parameters.values())[1:]
        more = [each for each in own if each.kind is each.VAR_KEYWORD and each.name == "options"]
        named = [each for each in own if each.kind is not each.VAR_KEYWORD]
        for field in dataclasses.fields(Placement):
            plain = None if field.name in _MAPPINGS else field.default
            default = defaults.get(field.name, plain)
            named.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default))
        constructor.__annotations__ |= _PLACEMENT
        made.__signature__ = signature.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
        return made

    return extend


def _split_placement(given: dict[str, Any], **defaults: Any) -> tuple[Placement, dict[str, Any]]:
    """Return the placement, and the arguments that are not its own."""
    own = {name: value for name, value in given.items() if name in _PLACEMENT}
    place = {**defaults, **{name: value for name, value in own.items() if value is not None or name not in _MAPPINGS}}
    return Placement(**place), {name: value for name, value in given.items() if name not in _PLACEMENT}


@placed()
class Rollout(EngineSpec):
    """Generates responses with ``replicas`` workers of the rollout engine ``engine``; None: one, or one on each of
    ``hosts``. 0: none from here, workers join by hand.

    ``model``: a Hugging Face model folder, or a model of the hub by its name, at ``model_revision`` (default: main);
    a workflow, or ``start`` of a run, downloads it into the cache, and ``model`` is its folder then. ``prompt``: the
    column of prompts; "prompt_ids" holds token ids, any other holds texts or chats. ``tokenizer``: a folder or
    tokenizer.json; default: the model's. ``chat``: arguments of its chat template; a text is then a chat of one
    message. ``keep_special``: True if the text of responses keeps special tokens, but the end. ``lease_s``: seconds
    until others get the prompts of a frozen or disconnected worker; a worker with progress renews its leases.
    ``swap``, ``verify``: as in ``Weights``; default: the workflow's. ``options``: of the engine, and the fields of
    ``Placement``.

    Rollouts of different engines may share the task "rollout": a free one takes the next prompts. A rollout of
    another ``task`` generates one more response to each prompt, into columns with its own ``prefix`` (default:
    "second_" for task "second"); the staleness rule ignores them.

    ``partitions``: names of the partitions whose rows it takes; "" is training's, "*" any. A rollout of other
    partitions, as for an evaluation, has no default prefix and no staleness rule.

    ``agent``: a coroutine function or a plain one, importable by the worker; each row is one conversation with the
    model, see ``Turns``. ``needs``: columns passed to it; default: its parameters after the first. ``gives``: columns
    it returns beside the response. ``agent_timeout_s``: limit of a conversation."""

    kind: Literal["rollout"] = "rollout"

    def __init__(
        self,
        engine: str | type,
        *,
        model: str | Path = "",
        model_revision: str | None = None,
        group_size: int = GROUP_SIZE,
        sampling: Sampling | None = None,
        replicas: int | None = None,
        prompt: str = "prompt",
        task: str = "rollout",
        prefix: str | None = None,
        partitions: Sequence[str] = TRAINED,
        agent: Callable[..., Any] | None = None,
        needs: Sequence[str] | None = None,
        gives: Sequence[str] = (),
        agent_timeout_s: float = AGENT_S,
        tokenizer: str | Path | None = None,
        chat: Chat | None = None,
        keep_special: bool = False,
        lease_s: float = WORKER_LEASE_S,
        swap: SwapPolicy | None = None,
        verify: Sequence[Proof] | None = None,
        **options: Any,
    ) -> None:
        self.swap, self.verify = swap, verify
        check_least(1, group_size=group_size)
        check_least(0, replicas=replicas)
        _check_task("rollout", task, lease_s)
        self.task, self.group_size = task, group_size
        self.partitions = _partitions("rollout", task, partitions)
        unprefixed = task == "rollout" or not takes_trained(self.partitions)
        self.prefix = ("" if unprefixed else f"{task}_") if prefix is None else prefix
        self.sampling, self.chat, self.keep_special = sampling or Sampling(), chat, keep_special
        self.lease_s = lease_s
        self.place, options = _split_placement(options)
        self.replicas = max(1, len(self.place.hosts)) if replicas is None else replicas
        self._take_engine(engine, options, model, model_revision, tokenizer)
        self.prompt = prompt
        self.agent: Agent | None = None
        if agent is not None:
            columns = tuple(needs) if needs is not None else None
            self.agent = Agent(function=agent, needs=columns, gives=tuple(gives), timeout_s=agent_timeout_s)
            self.agent.check_importable()
        elif needs is not None or gives:
            raise ConfigError(
                "needs= and gives= are an agent's: a rollout without one needs prompts and gives responses"
            )

    @property
    def admits(self) -> bool:
        """True if its columns are trained, so that the staleness rule admits its prompts."""
        return is_trained(self.prefix, self.partitions)

    def declare(self) -> TaskSpec:
        """Return its task. With a tokenizer, text prompts are encoded and responses decoded. Raises ConfigError for
        text prompts without a tokenizer."""
        if self.prompt != "prompt_ids" and not self.tokenizer:
            if not self.model:
                raise ConfigError(
                    f"Rollout({self.engine!r}) needs model=, or tokenizer=, since prompts are text (column"
                    f" {self.prompt!r}); or give token ids in a column prompt_ids"
                )
            raise ConfigError(
                f"prompts are text (column {self.prompt!r}), but {self.model!r} has no tokenizer.json; name a"
                f" tokenizer, or give token ids in a column prompt_ids{without_fast_file(self.model)}"
            )
        return self.task_spec

    @property
    def task_spec(self) -> TaskSpec:
        """Its task, also of prompts without an encoding."""
        text, admits = bool(self.tokenizer), self.admits
        spec = rollout_task(self.task, self.prompt, self.prefix, text, self.agent, self.chat, self.columns)
        own = {"lease_s": self.lease_s, "partitions": self.partitions, "admits": admits}
        return msgspec.structs.replace(spec, **own, sampler=None if admits else WHOLE_GROUPS)

    @property
    def columns(self) -> tuple[str, ...]:
        """Further columns of its engine: the declared ones of its adapter, and the sampling mask."""
        declared = registry().declared("rollout", self.engine, "gives") or ()
        return tuple(dict.fromkeys((*declared, *(SAMPLING_MASK if self.sampling.sampling_mask else ()))))


def declare_task(queue: QueueClient, task: TaskSpec) -> None:
    """Declare a task. Raises ConfigError."""
    queue.declare(**{field: getattr(task, field) for field in task.__struct_fields__})


def rollout_task(
    task: str,
    prompt: str,
    prefix: str,
    text: bool,
    agent: Agent | None = None,
    chat: Chat | None = None,
    columns: tuple[str, ...] = (),
) -> TaskSpec:
    """Return the task of a rollout of trained rows with the columns it needs and gives. ``text``: responses are
    decoded. ``columns``: further ones of the engine."""
    tools = (chat.tools,) if chat is not None and isinstance(chat.tools, str) else ()
    needs = tuple(dict.fromkeys((prompt, *tools, *((agent.needs or ()) if agent is not None else ()))))
    gives = (
        *(() if prompt == "prompt_ids" else ("prompt_ids",)),
        *RESPONSE_COLUMNS,
        *(("response",) if text else ()),
        *((LOSS_MASK, *agent.gives) if agent is not None else ()),
    )
    if doubled := {*columns}.intersection(gives):
        odd = f"columns {sorted(doubled)}"
        raise ConfigError(f"the engine gives {odd}, and so does the run or the agent: rename them")
    named = tuple(prefix + name for name in (*gives, *columns))
    sampler = WHOLE_GROUPS if prefix else None
    return TaskSpec(name=task, needs=needs, gives=named, admits=not prefix, lease_s=PRODUCER_LEASE_S, sampler=sampler)


def trained_rollout(rollouts: Sequence[Rollout]) -> Rollout:
    """Return the first rollout with trained columns; of none the first."""
    return next((each for each in rollouts if each.admits), rollouts[0])


def is_trained(prefix: str, partitions: Sequence[str]) -> bool:
    """True if the columns of a rollout with this prefix and partitions are trained."""
    return not prefix and takes_trained(partitions)


def takes_trained(partitions: Sequence[str]) -> bool:
    """True if the partitions include training's."""
    return TRAINED[0] in partitions or "*" in partitions


def _partitions(what: str, task: str, names: Sequence[str]) -> tuple[str, ...]:
    try:
        found = check_names("partitions", names, empty=True)
    except SchemaError as error:
        raise ConfigError(f"{what} {task!r}: {error}") from None
    if not found:
        raise ConfigError(f"{what} {task!r}: partitions name the rows that it takes; it has none")
    return found


def _check_task(what: str, task: str, lease_s: float) -> None:
    """Check a task's name, since worker names and log files contain it, and its lease time."""
    if not task.isprintable() or "/" in task or not 0 < len(task) <= 100:
        raise ConfigError(f"{what} {task!r}: the name of a task is 1 to 100 letters, without '/'")
    if not lease_s > 0:
        raise ConfigError(f"{what} {task!r}: lease_s must be above 0, not {lease_s}")


@placed()
class Stage(Serializable):
    """A step between rollout and training: takes rows with the columns it needs and writes the columns it gives.

    ``work``: a function, called with columns by name and a batch of rows, returning one value a row (or a dict of
    columns, for several ``gives``); with ``**columns`` it gets all columns of the data set, too; a coroutine
    function, with up to ``concurrency`` calls at a time; or an engine: ``Logprobs``, ``Generate``. A function with a
    parameter ``groups`` (int64, equal for rows of one prompt) gets whole groups. The dict may hold "filtered": bool,
    True for rows to drop together with their groups.

    A function with an import path runs in its own process; any other (a lambda, one of ``__main__`` or a notebook) in
    a thread of the driver. For a function known only to the interpreter ``python``, give its path ("module:function")
    and ``needs``. ``batch``: most rows of a call, or of an engine's lease, which its ranks share. ``timeout_s``:
    limit of one call of a function; its process is restarted (in the driver, the run ends). ``partitions``: as of
    ``Rollout``. ``placement``: the fields of ``Placement``."""

    elsewhere: Mapping[str, str] = {
        "world_size": "it is of an engine's work, as Logprobs(..., world_size=2); a function runs in one process, and"
        " run.scale starts more of them"
    }
    """Arguments of other objects, with the place of each."""

    def __init__(
        self,
        work: Callable[..., Any] | Logprobs | Generate | Rewards | str,
        *,
        task: str | None = None,
        needs: Sequence[str] | None = None,
        gives: Sequence[str] | None = None,
        partitions: Sequence[str] = TRAINED,
        batch: int | None = None,
        concurrency: int = CONCURRENCY,
        timeout_s: float = STAGE_CALL_S,
        lease_s: float = WORKER_LEASE_S,
        **placement: Any,
    ) -> None:
        self.place, _ = _split_placement(placement)
        if isinstance(work, str) and ":" in work and not self.place.elsewhere:
            work = import_name(work)
        engines = isinstance(work, (Logprobs, Generate, Rewards))
        if not (callable(work) or engines or (isinstance(work, str) and ":" in work)):
            raise ConfigError(f'a stage needs a function, "module:function", a Logprobs or a Generate, not {work!r}')
        self.work: Callable[..., Any] | Logprobs | Generate | Rewards | str = work
        name = task or (gives[0] if gives and isinstance(work, (Logprobs, Generate)) else None)
        self.task = name or (work.rpartition(":")[2] if isinstance(work, str) else short_name(work))
        parameters = needs_of(work)
        self.whole_groups = "groups" in parameters and "groups" not in (needs or ())
        self.needs = tuple(needs) if needs is not None else tuple(c for c in parameters if c != "groups")
        everything = work.takes_all if isinstance(work, Rewards) else takes_all(work)
        self.takes_all = everything and needs is None
        self.gives = tuple(gives) if gives is not None else (self.task,)
        self.partitions = _partitions("stage", self.task, partitions)
        self.world_size = work.world_size if isinstance(work, Logprobs) else 1
        self.replicas = max(1, len(self.place.hosts)) if self.world_size == 1 else 1
        """Workers at the start: one on each of ``hosts``, or one whose ranks are there."""
        small = _SMALL_BATCH * self.world_size
        awaited = work.awaited if isinstance(work, Rewards) else not callable(work) or is_coroutine(work)
        self.batch = batch or (small if awaited else _BATCH)
        self.concurrency, self.timeout_s, self.lease_s = concurrency, timeout_s, lease_s
        self._check()

    def _check(self) -> None:
        _check_task("stage", self.task, self.lease_s)
        check_least(1, batch=self.batch, concurrency=self.concurrency)
        check_above(0, timeout_s=self.timeout_s)
        if inspect.isgeneratorfunction(self.work) or inspect.isasyncgenfunction(self.work):
            raise ConfigError(f"stage {self.task!r}: a function returns its values, one a row; this one yields them")
        if isinstance(self.work, Generate) and (len(self.needs), len(self.gives)) != (1, 1):
            raise ConfigError(
                f"stage {self.task!r}: Generate needs one column of prompts and gives one of responses; say needs="
                " and gives="
            )
        if isinstance(self.work, Logprobs) and (len(self.needs), len(self.gives)) not in ((2, 1), (4, 1)):
            raise ConfigError(
                f"stage {self.task!r}: Logprobs needs two columns, the token ids of prompt and of response (and the two"
                " of their sampling mask), and gives one"
            )
        if self.batch < self.world_size:
            raise ConfigError(
                f"stage {self.task!r}: a lease of batch={self.batch} rows cannot be dealt out to"
                f" world_size={self.world_size} ranks"
            )
        if not self.needs:
            raise ConfigError(
                f"stage {self.task!r} needs no column; name its parameters after columns, or say needs="
            )

    @property
    def path(self) -> str | None:
        """The import path of its function; None for an engine, and if no other process can import it."""
        return None if isinstance(self.work, (Logprobs, Generate)) else work_path(self.work)

    @property
    def here(self) -> bool:
        """True if it runs in the driver's process, since no other process can import its function."""
        return not isinstance(self.work, (Logprobs, Generate)) and self.path is None

    def of_data(self, columns: Mapping[str, set[str]]) -> Stage:
        """Return the stage for the data of each partition: a function with ``**columns`` needs all columns of its
        partitions."""
        if not self.takes_all:
            return self
        taken = [columns.get(each, set()) for each in (columns if "*" in self.partitions else self.partitions)]
        more = set.intersection(*taken) - ({"groups"} if self.whole_groups else set())
        return self.changed(needs=tuple(dict.fromkeys((*self.needs, *sorted(more)))))

    @property
    def masks(self) -> bool:
        """True if it computes log-probs over kept tokens."""
        return isinstance(self.work, Logprobs) and len(self.needs) == 4

    def masked(self, rollouts: Sequence[Rollout]) -> Stage:
        """Return the stage with log-probs over the kept tokens of the draws of ``rollouts``."""
        for each in rollouts if isinstance(self.work, Logprobs) else ():
            shared = {*self.partitions} & {*each.partitions} or "*" in (*self.partitions, *each.partitions)
            if each.sampling.sampling_mask and shared and self.needs[1:] == (f"{each.prefix}response_ids",):
                kept = (each.prefix + name for name in SAMPLING_MASK)
                return self.changed(needs=(*self.needs, *kept))
        return self

    def find_model(self) -> None:
        """Find the model of its engine, if it has one, as ``Rollout`` does."""
        if isinstance(self.work, EngineSpec):
            self.work.find_model()

    def run(self, queue: QueueClient, limit: CallLimit | None = None) -> None:
        """Declare the task and work in this thread until the stream ends. ``queue``: of a connection without other
        users. With a ``world_size`` above 1, work as the rank in the environment. ``limit``: the limit of its calls;
        None: there is none. Raises ConfigError for an invalid task, and the errors of ``run_declared``."""
        ranks = None
        if self.world_size > 1:
            own = own_rank()
            if own is None or own.world_size != self.world_size:
                raise ConfigError(
                    f"stage {self.task!r} has world_size={self.world_size}: run.start starts its processes. This one"
                    " is no rank of so many; torchrun would set RANK and WORLD_SIZE"
                )
            ranks = RankCommunicator(queue, self.task, *own)
        self.find_model()
        declare_task(queue, self.declare())
        self.run_declared(queue, ranks, limit)

    def run_declared(
        self, queue: QueueClient, ranks: RankCommunicator | None = None, limit: CallLimit | None = None
    ) -> None:
        """Work in this thread until the stream ends; the task is declared. ``ranks``: work as one of them. ``limit``:
        an argument of ``run``. Raises EngineError for a failed engine."""
        run_stage(
            queue, self.work, task=self.task, needs=self.needs, gives=self.gives, batch=self.batch,
            concurrency=self.concurrency, groups=self.whole_groups, ranks=ranks, limit=limit,
        )  # fmt: skip

    def declare(self) -> TaskSpec:
        """Return its task. Ranks get about as many response tokens as the others."""
        ranked = isinstance(self.work, Logprobs)
        shares = SamplerSpec("token_balanced", {"column": self.needs[1]}) if ranked else None
        return TaskSpec(
            name=self.task,
            needs=self.needs,
            gives=self.gives,
            lease_s=self.lease_s,
            partitions=self.partitions,
            sampler=WHOLE_GROUPS if self.whole_groups else shares,
        )


@placed(max_restarts=0)
class Train(EngineSpec):
    """Trains with the train engine ``engine``.

    ``weights``: how versions are published; a workflow has its own. ``needs``: columns of its batches beside
    TRAIN_COLUMNS and the algorithm's. ``options``: of the engine, and the fields of ``Placement`` (``max_restarts``:
    0).

    ``world_size``: number of processes (ranks) that train together. Each gets whole groups of every step with about
    as many tokens as the others, and connects to the others as under torchrun. ``gpus``: one a rank, by LOCAL_RANK;
    ``cpus`` are divided among the ranks. If one rank dies, all are ended and restarted together.

    ``algorithm``: an installed name ("grpo"), "module:Class", a class, one of these with options (("grpo",
    {"clip_high": 0.3})), or an Algorithm dataclass; default: GRPO. One known only to the interpreter ``python`` is
    made there, and ``needs`` must name its columns.

    ``stream``: train each step in parts while the rest of it is still being generated, with the gradient of the whole
    step. Needs an engine and an algorithm that can; ``print`` of a workflow and ConfigError say why one cannot.
    ``part_rows``: least rows of a part, over all ranks; default: in a workflow an eighth of a step, at least one
    group a rank; elsewhere one group.

    ``drift_limit``: the metric ``logprob_drift`` of a step drawn by the trainer's own weights above which the run
    warns, once; default: 0.05, and 0.2 for weights less precise than float32."""

    kind: Literal["train"] = "train"
    task = "train"

    def __init__(
        self,
        engine: str | type,
        *,
        model: str | Path = "",
        model_revision: str | None = None,
        algorithm: Any = None,
        world_size: int = 1,
        needs: Sequence[str] = (),
        weights: Weights | None = None,
        stream: bool = False,
        part_rows: int | None = None,
        drift_limit: float | None = None,
        **options: Any,
    ) -> None:
        check_least(1, world_size=world_size)
        check_above(0, drift_limit=drift_limit)
        if part_rows is not None:
            check_least(1, part_rows=part_rows)
            if not stream:
                raise ConfigError(f"part_rows={part_rows} is of a step trained in parts: say stream=True, too")
        self.stream, self.part_rows = stream, part_rows
        self.place, options = _split_placement(options, max_restarts=0)
        if world_size == 1 < len(self.place.hosts):
            raise ConfigError(f"hosts={list(self.place.hosts)} of a trainer with world_size=1: it runs on one host")
        self._take_engine(engine, options, model, model_revision)
        self.world_size, self.weights, self._drift_limit = world_size, weights, drift_limit
        self.algorithm_spec = algorithm_spec(algorithm)
        self.algorithm: Algorithm | None = None
        """The algorithm; None if only its worker can make it."""
        try:
            self.algorithm = make_algorithm(self.algorithm_spec)
        except PluginError:
            if not self.place.elsewhere:
                raise
        own = self.algorithm.needs if self.algorithm is not None else ()
        self.needs = tuple(dict.fromkeys((*TRAIN_COLUMNS, *own, *needs)))
        how = self.algorithm_spec
        self.init_args |= {"algorithm": (how.name, how.options), "needs": self.needs}

    @property
    def drift_limit(self) -> float:
        """The given limit, or the default for the dtype."""
        precise = self.dtype_of(str(self.options.get("dtype") or "auto")) in ("", "float32", "float64")
        return self._drift_limit or (DRIFT_LIMIT if precise else ROUNDED_DRIFT_LIMIT)

    def needing(self, *columns: str) -> Train:
        """Return a copy whose batches also have these columns."""
        return self.changed(needs=(*self.needs, *columns))

    def sized(self, batch_size: int, group_size: int, steps: int) -> Train:
        """Return a copy with the default ``part_rows`` for steps and groups of these sizes, and for a learning-rate
        schedule ``max_steps``, the optimizer steps of the run."""
        sizes: dict[str, int] = {}
        if "max_steps" not in self.options and {"lr_scheduler_type", "warmup_ratio"} & self.options.keys():
            sizes = {"max_steps": steps * self.options.get("updates", 1)}
        if self.stream and self.part_rows is None:
            sizes["part_rows"] = max(group_size * self.world_size, batch_size // PARTS)
        return self.changed(**sizes) if sizes else self

    def declare(self, batch_rows: int) -> TaskSpec:
        """Return its task: steps of ``batch_rows`` rows. It is the same for any number of ranks, which may change
        when a run is resumed."""
        return TaskSpec(name=self.task, needs=self.needs, batch_rows=batch_rows, lease_s=LEASE_S, sampler=SHARES)
