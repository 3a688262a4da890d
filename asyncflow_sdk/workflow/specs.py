"""What a workflow is made of: Rollout, Stage and Train say what to run, and where. Data; nothing starts here."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..algorithms import algorithm_spec, make_algorithm
from ..errors import ConfigError, PluginError, SchemaError
from ..interfaces import TRAIN_COLUMNS, Algorithm, OnFailure, Placement
from ..ledger import TaskSpec
from ..plugins import import_name, import_path
from ..queue import QueueClient
from ..queue.checks import check_names
from ..types import LOSS_MASK, VERSION_SPANS, Sampling, Weights
from ..types.config import Proof, SwapPolicy, check_policy, check_proofs
from ..types.defaults import LEASE_S, PRODUCER_LEASE_S, WORKER_LEASE_S
from ..types.tasks import SamplerSpec
from ..types.validation import check_least
from .agent import Agent
from .describing import Described
from .work import (
    FunctionWork,
    Generate,
    Logprobs,
    Work,
    engine_name,
    is_coroutine,
    parameters_of,
    plain_options,
    tokenizer_file,
)

RESPONSE_COLUMNS = ("response_ids", "logprobs", VERSION_SPANS)

WHOLE_GROUPS = SamplerSpec("whole_groups")
SHARES = SamplerSpec("token_balanced", {"column": "response_ids", "whole_groups": True})
"""How the rows of a step are dealt out to the ranks of a trainer."""
TRAINED = ("",)
"""The partition whose rows are trained."""
_BATCH = 256
_SMALL_BATCH = 32
"""Rows of a call where several run at a time, and of a lease of an engine."""


class Rollout(Described):
    """Generates responses: ``replicas`` workers with the rollout engine ``engine``, found through the hook.

    ``model``: a Hugging Face model folder. ``prompt``: the column of prompts; "prompt_ids" holds token ids,
    any other holds text. ``tokenizer``: a folder or tokenizer.json; by default the model's. ``lease_s``: for
    so long a worker may be frozen, or cut off, before others get its prompts; one that gets on keeps them for as long as it takes. ``swap``, ``verify``: when new weights are loaded, and what a load must prove; see
    ``Weights``, whose they are in a workflow unless given here. ``options`` are the engine's own.

    Rollouts of different engines may share the task "rollout": who is free takes the next prompts. Another ``task``
    answers every prompt once more, and gives the columns under its own name ("second_response_ids" of task "second";
    ``prefix`` says another beginning); the staleness rule is for the columns without one.

    ``partitions``: the rows it answers, by the partition they were put in; "" is training's, "*" any. A rollout of other
    partitions than training's, such as an evaluation's, gives its columns without a prefix, and the staleness rule does not hold it.

    ``agent``: a coroutine function that its worker can import; each row is a conversation of it with the model, see ``Turns``.
    ``needs``: columns it is called with, by default its parameters after the first; ``gives``: those it returns beside the
    response; ``agent_timeout_s``: how long a conversation may take.
    """

    kind: Literal["rollout"] = "rollout"

    def __init__(
        self,
        engine: str | type,
        *,
        model: str | Path = "",
        group_size: int = 8,
        sampling: Sampling | None = None,
        replicas: int = 1,
        prompt: str = "prompt",
        task: str = "rollout",
        prefix: str | None = None,
        partitions: Sequence[str] = TRAINED,
        agent: Callable[..., Any] | None = None,
        needs: Sequence[str] | None = None,
        gives: Sequence[str] = (),
        agent_timeout_s: float = 600.0,
        tokenizer: str | Path | None = None,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        max_restarts: int = 3,
        launcher: str = "process",
        cpus: Sequence[int] = (),
        gpus: Sequence[int] = (),
        on_failure: OnFailure | None = None,
        lease_s: float = WORKER_LEASE_S,
        swap: SwapPolicy | None = None,
        verify: Sequence[Proof] | None = None,
        **options: Any,
    ) -> None:
        check_policy(swap or "drain")
        check_proofs(verify or ())
        self.swap, self.verify = swap, verify
        check_least(1, group_size=group_size, replicas=replicas)
        _check_task("rollout", task, lease_s)
        self.engine, self.model = engine_name(engine), str(model)
        self.task, self.group_size, self.replicas = task, group_size, replicas
        self.partitions = _partitions("rollout", task, partitions)
        beside = task == "rollout" or not takes_trained(self.partitions)
        self.prefix = ("" if beside else f"{task}_") if prefix is None else prefix
        self.sampling = sampling or Sampling()
        self.lease_s = lease_s
        self.prompt, self.options = prompt, plain_options(self.engine, options)
        self.place = Placement(
            python=python, env=dict(env or {}), max_restarts=max_restarts, launcher=launcher, cpus=tuple(cpus),
            gpus=tuple(gpus), on_failure=on_failure,
        )  # fmt: skip
        self.tokenizer = tokenizer_file(tokenizer, model)
        self.agent: Agent | None = None
        if agent is not None:
            of = tuple(needs) if needs is not None else None
            self.agent = Agent(function=agent, needs=of, gives=tuple(gives), timeout_s=agent_timeout_s)
            self.agent.job()
        elif needs is not None or gives:
            raise ConfigError(
                "needs= and gives= are an agent's: a rollout without one needs prompts and gives responses"
            )

    @property
    def admits(self) -> bool:
        """True if its columns are trained, so that the staleness rule decides when it gets prompts."""
        return is_trained(self.prefix, self.partitions)

    def declare(self) -> TaskSpec:
        """The task: text prompts are encoded, and responses decoded, where there is a tokenizer."""
        if self.prompt != "prompt_ids" and not self.tokenizer:
            raise ConfigError(
                f"prompts are text (column {self.prompt!r}), but {self.model or 'the model'!r} has no"
                " tokenizer.json; name a tokenizer, or give token ids in a column prompt_ids"
            )
        return rollout_task(
            self.task, self.prompt, self.prefix, bool(self.tokenizer), self.agent, self.lease_s, self.partitions
        )


def rollout_task(
    task: str, prompt: str, prefix: str, text: bool, agent: Agent | None = None, lease_s: float = PRODUCER_LEASE_S,
    partitions: tuple[str, ...] = TRAINED,
) -> TaskSpec:  # fmt: skip
    """The task of a rollout: the columns it needs and gives. ``text``: responses are decoded."""
    needs = (prompt, *(agent.needs or ())) if agent is not None else (prompt,)
    gives = (
        *(() if prompt == "prompt_ids" else ("prompt_ids",)),
        *RESPONSE_COLUMNS,
        *(("response",) if text else ()),
        *((LOSS_MASK, *agent.gives) if agent is not None else ()),
    )
    admits = is_trained(prefix, partitions)
    return TaskSpec(
        name=task, needs=tuple(dict.fromkeys(needs)), gives=tuple(prefix + name for name in gives), admits=admits, lease_s=lease_s,
        partitions=partitions, sampler=None if admits else WHOLE_GROUPS,
    )  # fmt: skip


def is_trained(prefix: str, partitions: Sequence[str]) -> bool:
    """True if the columns of such a rollout are those that are trained."""
    return not prefix and takes_trained(partitions)


def takes_trained(partitions: Sequence[str]) -> bool:
    """True if rows of the partition that is trained are among these."""
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
    """A task's name is in the names of its workers, and of the files that they log to."""
    if not task.isprintable() or "/" in task or not 0 < len(task) <= 100:
        raise ConfigError(f"{what} {task!r}: the name of a task is 1 to 100 letters, without '/'")
    if not lease_s > 0:
        raise ConfigError(f"{what} {task!r}: lease_s must be above 0, not {lease_s}")


class Stage(Described):
    """A step between rollout and training, on the rows that have the columns it needs; it writes those it gives.

    ``work``: a function, which is called with columns by name, a batch of rows at a time, and returns one value a row (or a
    dict of columns, for several ``gives``); a coroutine function, of which so many calls as ``concurrency`` run at a
    time; or an engine: ``Logprobs``, ``Generate``. A parameter named ``groups`` (int64, equal for rows of one prompt) makes
    it work on whole groups. A dict may hold "filtered" beside the columns: bool, True for rows to drop, with their groups.

    A function that another process can import runs in a process of its own; any other (a lambda, one from
    ``__main__`` or a notebook) runs in a thread of the driver. Of one that only the interpreter ``python`` has, the path
    ("module:function") is given, and ``needs``. ``batch``: most rows of a call; for engines, of a lease.
    ``partitions``: as of ``Rollout``; a function may score the rows of training and those of an evaluation.
    """

    def __init__(
        self,
        work: Callable[..., Any] | Logprobs | Generate | str,
        *,
        task: str | None = None,
        needs: Sequence[str] | None = None,
        gives: Sequence[str] | None = None,
        partitions: Sequence[str] = TRAINED,
        batch: int | None = None,
        concurrency: int = 8,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        max_restarts: int = 3,
        launcher: str = "process",
        cpus: Sequence[int] = (),
        gpus: Sequence[int] = (),
        on_failure: OnFailure | None = None,
        lease_s: float = WORKER_LEASE_S,
    ) -> None:
        if isinstance(work, str) and ":" in work and python is None:
            work = import_name(work)
        if not (callable(work) or isinstance(work, (Logprobs, Generate)) or (isinstance(work, str) and ":" in work)):
            raise ConfigError(f'a stage needs a function, "module:function", a Logprobs or a Generate, not {work!r}')
        self.work: Callable[..., Any] | Logprobs | Generate | str = work
        name = task or (gives[0] if gives and isinstance(work, (Logprobs, Generate)) else None)
        named = (
            work.rpartition(":")[2]
            if isinstance(work, str)
            else getattr(work, "__name__", type(work).__name__.lower())
        )
        self.task = name or named.strip("<>")
        asked = parameters_of(work) if callable(work) else getattr(work, "needs", ())
        self.whole_groups = "groups" in asked and "groups" not in (needs or ())
        self.needs = tuple(needs) if needs is not None else tuple(c for c in asked if c != "groups")
        self.gives = tuple(gives) if gives is not None else (self.task,)
        self.partitions = _partitions("stage", self.task, partitions)
        self.batch = batch or (_BATCH if callable(work) and not is_coroutine(work) else _SMALL_BATCH)
        self.concurrency, self.lease_s = concurrency, lease_s
        self.place = Placement(
            python=python, env=dict(env or {}), max_restarts=max_restarts, launcher=launcher, cpus=tuple(cpus),
            gpus=tuple(gpus), on_failure=on_failure,
        )  # fmt: skip
        self._check()

    def _check(self) -> None:
        _check_task("stage", self.task, self.lease_s)
        check_least(1, batch=self.batch, concurrency=self.concurrency)
        if inspect.isgeneratorfunction(self.work) or inspect.isasyncgenfunction(self.work):
            raise ConfigError(f"stage {self.task!r}: a function returns its values, one a row; this one yields them")
        if isinstance(self.work, Generate) and (len(self.needs), len(self.gives)) != (1, 1):
            raise ConfigError(
                f"stage {self.task!r}: Generate needs one column of prompts and gives one of responses; say needs= and gives="
            )
        if isinstance(self.work, Logprobs) and (len(self.needs), len(self.gives)) != (2, 1):
            raise ConfigError(
                f"stage {self.task!r}: Logprobs needs two columns, the token ids of prompt and of response, and gives one"
            )
        if not self.needs:
            raise ConfigError(
                f"stage {self.task!r} needs no column; name its parameters after columns, or say needs="
            )

    @property
    def path(self) -> str | None:
        """By which another process can import the function; None where none can, and for engines."""
        if isinstance(self.work, str):
            return self.work
        return import_path(self.work) if callable(self.work) else None

    @property
    def here(self) -> bool:
        """Whether it runs in the driver's process, since no other can import its function."""
        return callable(self.work) and self.path is None

    def job(self) -> Work | None:
        """What its worker is told; None where no other process can have it."""
        if isinstance(self.work, (Logprobs, Generate)):
            return self.work.job()
        return None if self.path is None else FunctionWork(self.path)

    def run(self, queue: QueueClient) -> None:
        """Do the work here, in this thread, until the stream ends; the task is declared first. ``queue`` is of a
        connection of its own. Raises ConfigError for a task that cannot be declared, and what the work raises."""
        from .stage_worker import run_stage

        spec = self.declare()
        queue.declare(**{name: getattr(spec, name) for name in spec.__struct_fields__})
        work = self.work if callable(self.work) else self.job()
        assert work is not None
        run_stage(
            queue, work, task=self.task, needs=self.needs, gives=self.gives, batch=self.batch,
            concurrency=self.concurrency, groups=self.whole_groups,
        )  # fmt: skip

    def declare(self) -> TaskSpec:
        return TaskSpec(
            name=self.task, needs=self.needs, gives=self.gives, lease_s=self.lease_s, partitions=self.partitions,
            sampler=WHOLE_GROUPS if self.whole_groups else None,
        )  # fmt: skip


class Train(Described):
    """Trains with the train engine ``engine``, found through the hook. ``weights``: how each version is published; in a workflow
    that is the workflow's. ``needs``: columns that its batches have beside TRAIN_COLUMNS and those of its algorithm.
    ``options`` are the engine's own.

    ``world_size``: so many processes train it together, its ranks: each gets its share of the rows of every step, in whole groups
    and about as many tokens as the others, and finds the others as under torchrun. ``gpus`` are one a rank, by LOCAL_RANK;
    ``cpus`` are shared out among them. When one dies all are ended, and started again together.

    ``algorithm``: the name of an installed one ("grpo"), "module:Class", a class, one of these with options
    (("grpo", {"clip_high": 0.3})), or an Algorithm that is a dataclass; GRPO by default. One that only the interpreter ``python``
    has is made there, and what it needs is to be said in ``needs``."""

    kind: Literal["train"] = "train"
    task = "train"

    def __init__(
        self,
        engine: str | type,
        *,
        model: str | Path = "",
        algorithm: Any = None,
        world_size: int = 1,
        needs: Sequence[str] = (),
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        max_restarts: int = 0,
        launcher: str = "process",
        cpus: Sequence[int] = (),
        gpus: Sequence[int] = (),
        on_failure: OnFailure | None = None,
        weights: Weights | None = None,
        **options: Any,
    ) -> None:
        check_least(1, world_size=world_size)
        self.engine, self.model, self.world_size = engine_name(engine), str(model), world_size
        self.options = plain_options(self.engine, options)
        self.weights = weights
        self.algorithm_spec = algorithm_spec(algorithm)
        self.algorithm: Algorithm | None = None
        """As it is here; None where only its worker has it."""
        try:
            self.algorithm = make_algorithm(self.algorithm_spec)
        except PluginError:
            if python is None:
                raise
        own = self.algorithm.needs if self.algorithm is not None else ()
        self.needs = tuple(dict.fromkeys((*TRAIN_COLUMNS, *own, *needs)))
        self.place = Placement(
            python=python, env=dict(env or {}), max_restarts=max_restarts, launcher=launcher, cpus=tuple(cpus),
            gpus=tuple(gpus), on_failure=on_failure,
        )  # fmt: skip

    def needing(self, column: str) -> Train:
        """The same, with ``column`` in its batches."""
        other = copy.copy(self)
        other.needs = tuple(dict.fromkeys((*self.needs, column)))
        return other

    def declare(self, batch_rows: int) -> TaskSpec:
        shares = SHARES if self.world_size > 1 else None
        return TaskSpec(name=self.task, needs=self.needs, batch_rows=batch_rows, lease_s=LEASE_S, sampler=shares)
