"""TransferQueue: the client's verbs, blocking and (``.aio``) for event loops.

queue.declare("reward", needs=["response"], gives=["reward"])
queue.put({"prompt": prompts}, group_size=8, key="epoch-0")
with queue.get("reward", count=64, timeout_s=30) as batch:
    batch.complete({"reward": score(batch["response"])})
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import AsyncFlowError, ConfigError, LeaseLost, SchemaError, VersionNeeded
from ..ledger import commands as cmd
from ..ledger import pack_ids, unpack_ids
from ..ledger.commands import Audit, FailedGroup, PolicySpec, SamplerSpec, StatusReport, TaskSpec
from ..types.columns import empty
from . import blocks
from ._once import sync
from .arguments import check_arguments, check_columns, check_name, check_names
from .connection import BlockingPort, Connection, LoopPort, Port
from .leased import AsyncLeasedBatch, Lease, LeasedBatch
from .protocol import Answer
from .stream import AsyncStream, BlockingStream

_READ_TRIES = 8
"""Rows that ended on their way here do not come again: so often others are asked for in their place."""
B = TypeVar("B", bound=Lease)
S = TypeVar("S")


@dataclass(frozen=True)
class Rows:
    """What a put made: rows ``first`` to ``first + count - 1``; ``again``: nothing was added, they were there by their key."""

    first: int
    count: int
    again: bool


class Verbs(Generic[B, S]):
    """Every verb of the queue, once. ``TransferQueue`` and ``AsyncTransferQueue`` are its two faces."""

    _batch: type[B]
    _streams: Callable[[Callable[[B | None], Awaitable[B]]], S]

    def __init__(self, port: Port) -> None:
        self._port = port

    async def _configure(
        self,
        *,
        capacity_rows: int | None = None,
        capacity_bytes: int | None = None,
        row_bytes: int | None = None,
        max_staleness: int | None = None,
        steps: int | None = None,
        keep_versions: int | None = None,
        max_swapping: int | None = None,
        quorum: int | None = None,
        staleness_policy: str | tuple[str, Mapping[str, Any]] | PolicySpec | None = None,
        checkpoints: bool | None = None,
    ) -> None:
        """Set the queue's limits, before its tasks are declared. ``capacity_rows``: most rows alive at once.
        ``capacity_bytes``: most payload; ``row_bytes``: what a row may come to take with all that is written to
        it, reserved when it is put (0, the default: what the largest row so far took). ``steps``: how many steps
        there will be; then the stream ends by itself. ``staleness_policy``: by name, or name and options, what
        ``max_staleness`` means: "wait" (the default), "drop", "count", or another that is installed where the queue is
        served. ``keep_versions``, ``max_swapping``, ``quorum``: of the weights;
        ``checkpoints``: see ``Configure``. Raises ConfigError, PluginError."""
        command = cmd.Configure(
            capacity_rows=capacity_rows, max_staleness=max_staleness, steps=steps, capacity_bytes=capacity_bytes,
            row_bytes=row_bytes, keep_versions=keep_versions, max_swapping=max_swapping, quorum=quorum,
            staleness=policy_spec(staleness_policy), checkpoints=checkpoints,
        )  # fmt: skip
        await self._port.send(command)

    async def _declare(
        self,
        name: str,
        *,
        needs: Sequence[str],
        gives: Sequence[str] = (),
        lease_s: float = 600.0,
        max_attempts: int = 3,
        admits: bool = False,
        batch_rows: int | None = None,
        partitions: Sequence[str] = ("",),
        sampler: str | tuple[str, Mapping[str, Any]] | SamplerSpec | None = None,
    ) -> None:
        """Declare a task: see TaskSpec. Saying the same again does nothing.

        ``sampler``: the name of one, or name and options: ("shuffled", {"seed": 1}), ("length_bucketed", {"column":
        "response_ids"}), "whole_groups", ...; ``asyncflow plugins`` lists those installed where the queue is served.
        Raises SchemaError for a name that no column can have; ConfigError for a task that no row could ever get through
        (it gives what it needs, it waits for a task that waits for it, another task gives the same column, or it takes
        no partition); PluginError.
        """
        task = TaskSpec(
            name=name, needs=check_columns("needs", needs), gives=check_columns("gives", gives), lease_s=lease_s,
            max_attempts=max_attempts, admits=admits, batch_rows=batch_rows,
            partitions=check_names("partitions", partitions, empty=True), sampler=_sampler(sampler),
        )  # fmt: skip
        check_name("a task", name)
        check_arguments(task)
        await self._port.send(cmd.Declare(task=task))

    async def _put(
        self,
        columns: Mapping[str, Any],
        *,
        group_size: int = 1,
        key: str = "",
        partition: str = "",
        priority: int = 0,
        timeout_s: float = 60.0,
    ) -> Rows:
        """Add ``group_size`` rows for each entry of ``columns``: the rows of a group share it.

        The same ``key`` adds nothing the second time, but for groups that failed since because their payload was lost:
        these are added again, whole. It is refused with other values, another number of entries, ``group_size`` or
        partition. ``partition``: only the tasks that take it see the rows.
        ``priority``: every task takes rows of a higher one first. A full queue makes it wait. Raises SchemaError,
        ConfigError, Ended, MemoryFull, and DeadlineExceeded that says who keeps the queue full.
        """
        packed = blocks.pack_columns(columns)
        count = len(next(iter(packed.values()))) if packed else 0
        command = cmd.Put(
            groups=count, group_size=group_size, columns={}, key=key, timeout_s=timeout_s, partition=partition,
            priority=priority,
        )  # fmt: skip
        reply = await self._port.send_columns(command, packed if count else {})
        return Rows(reply.first, reply.count, reply.again)

    async def _get(
        self,
        task: str,
        count: int = 1,
        *,
        columns: Sequence[str] | None = None,
        at_least: int = 0,
        partition: str | None = None,
        timeout_s: float = 60.0,
        team: str = "",
        rank: int = 0,
        world_size: int = 1,
        shards: int = 0,
        most: int = 0,
        ack: Lease | None = None,
    ) -> B:
        """Lease up to ``count`` ready rows of a task, at least one; of a task with batch_rows, one whole step;
        of a task that admits, whole groups. The rows are of one ``partition``; without a name the partitions of
        the task take turns. ``at_least``: wait until so many are ready; only what is left at the end of the stream
        may be fewer. ``columns``: those to be read, of the task's needs; the others are neither mapped nor copied.

        ``ack``: a batch to acknowledge in the same request, as its ``finish`` said or, without one, all its rows
        that are left. It has its effect whatever becomes of the lease: before one is waited for. If it fails, its
        error (LeaseLost, SchemaError, WriteOnceError) is raised and nothing was leased.

        ``team``: the ``world_size`` ranks of a team lease together: the k-th get of each ``rank`` belongs to the k-th
        lease of the team, given when all have asked. Its ``count`` rows (or its step) are dealt out in ``shards`` (0:
        one a rank; fewer: ``world_size // shards`` ranks one after another get the very same rows), whose row counts
        differ by 1 at most, and which a balanced sampler makes about equally heavy; where it keeps groups whole, by
        their weight alone, and a shard may be empty. A step is acknowledged when every rank has; when one dies before, gives back or is too late, all lose it, and the next get of every rank is that
        step again, under a new token. What another session holds under the rank is void.

        ``most``: of a task that admits, the rows that this replica may hold in all. It hears of versions by itself, so that it is
        not told to load one first: it waits, and what it gets when it has is as many as it has room for by then.

        Raises Ended when there will never be another row, VersionNeeded when the replica must load newer
        weights first, DeadlineExceeded that says what is missing and who should bring it.
        """
        ask = cmd.Lease(
            task=task, count=count, timeout_s=timeout_s, partition=partition, at_least=at_least,
            columns=None if columns is None else check_names("columns", columns), team=team, rank=rank,
            world_size=world_size, shards=shards, most=most,
        )  # fmt: skip
        return await self._take(ask, ack)

    async def _take(self, ask: cmd.Lease, last: Lease | None, *, acknowledge: bool = True) -> B:
        """The batch that ``ask`` gives. The last word on batch ``last`` rides with it."""
        answer = None if last is None else await last._post_last(ask, acknowledge=acknowledge)
        for left in reversed(range(_READ_TRIES)):
            if answer is None:
                answer = await self._port.answer(ask)
            answer.raise_error()
            lease = answer.reply
            if isinstance(lease, cmd.LoadFirst):
                raise VersionNeeded(f"task {ask.task!r} gives nothing more before version {lease.version} is loaded")
            assert isinstance(lease, cmd.Leased)
            try:
                batch = self._read(answer, lease)
            except BaseException as error:  # rows that cannot be read must not stay ours
                with contextlib.suppress(AsyncFlowError):
                    await self._port.send(
                        cmd.GiveBack(
                            token=lease.token, reason="reading the rows failed", rank=lease.rank,
                            unread=isinstance(error, LeaseLost),
                        )
                    )  # fmt: skip
                if not (left and isinstance(error, LeaseLost)):
                    raise
                answer = None  # some ended on the way here, and their memory is others': there may be more
                continue
            batch._bind(self._port, lease)
            return batch
        raise AssertionError("the last try returns or raises")

    def _read(self, answer: Answer, lease: cmd.Leased) -> B:
        """Views and copies of the rows leased."""
        ids, reader = unpack_ids(lease.ids), self._port.connection.reader
        columns = self._port.connection.columns(answer)
        if not len(ids):  # of a team's last rows there may be fewer than shards
            columns = {name: empty(spec) for name, spec in answer.schema.items()}
        where = {name: located for located in answer.located for name in located.columns}

        def writable(name: str) -> Any:
            return reader.writable(where[name], name, answer.schema)

        return self._batch(ids, unpack_ids(lease.groups), columns, writable if where else None)

    def stream(
        self,
        task: str,
        count: int = 1,
        *,
        columns: Sequence[str] | None = None,
        at_least: int = 0,
        partition: str | None = None,
        timeout_s: float = 60.0,
    ) -> S:
        """Batches of a task, one after another, until the stream ends; ``get`` says what each is.

        What ``batch.finish`` said is sent with the request for the next batch, so that a batch costs one request.
        A batch that was neither finished nor completed is given back then, and the attempt counts. ``timeout_s``: the longest wait
        for one batch. Leaving the loop sends what is unsent; use it as a context manager, too, to have
        an exception in the loop count against the rows.
        """
        ask = cmd.Lease(
            task=task, count=count, timeout_s=timeout_s, partition=partition, at_least=at_least,
            columns=None if columns is None else check_names("columns", columns),
        )  # fmt: skip
        return self._streams(lambda last: self._take(ask, last, acknowledge=False))

    async def _loaded(self, version: int) -> None:
        """Say that this session's replica generates with ``version`` from now on."""
        await self._port.send(cmd.Loaded(version=version))

    async def _wanted(self, *, timeout_s: float = 60.0) -> int:
        """How many rows the remaining steps lack (without a last step: the next few); waits until there are any.
        Rows that were filtered, failed or were cancelled are wanted again. Raises Ended, DeadlineExceeded."""
        reply = await self._port.send(cmd.Wanted(timeout_s=timeout_s))
        return int(reply.count)

    async def _lost(self, *, timeout_s: float = 60.0) -> npt.NDArray[np.int64]:
        """Wait until rows that were leased here have ended (too late, cancelled, failed with their group): whoever works on them
        may stop. Remembered from the first call on. Returns their ids, each once. Raises DeadlineExceeded."""
        reply = await self._port.send(cmd.AwaitLost(timeout_s=timeout_s))
        return unpack_ids(reply.ids)

    async def _end(self, *, cancel: bool = False, partition: str | None = None) -> None:
        """No further put, into one partition or any. ``cancel``: its rows that no full step holds are cancelled."""
        await self._port.send(cmd.End(cancel=cancel, partition=partition))

    async def _cancel(
        self,
        rows: npt.ArrayLike | None = None,
        *,
        key: str = "",
        partition: str | None = None,
        reason: str = "cancelled by request",
    ) -> int:
        """End live rows with their groups: those with these ids, of the put with a ``key``, or of a ``partition``.

        Whoever holds them loses them; rows in a full step are their trainer's and stay. Returns how many rows ended.
        Raises SchemaError for an id or key that was never put.
        """
        ids = b"" if rows is None else pack_ids(_ids(rows))
        if rows is not None and not ids:
            return 0
        reply = await self._port.send(cmd.Cancel(ids=ids, key=key, partition=partition, reason=reason))
        return int(reply.count)

    async def _failed(self, count: int = 100) -> tuple[FailedGroup, ...]:
        """The newest ``count`` groups that failed for good (dead letters), oldest first: which rows, of which put,
        and why at each attempt. Rows whose payload was lost are among them. The queue keeps the last 1,000."""
        reply = await self._port.send(cmd.GetFailed(count=count))
        assert isinstance(reply, cmd.Failed)
        return reply.groups

    async def _audit(self) -> Audit:
        """The balance: rows put = live + consumed + filtered + expired + failed + cancelled."""
        reply = await self._port.send(cmd.GetAudit())
        assert isinstance(reply, Audit)
        return reply

    async def _status(self) -> StatusReport:
        """Rows by task and state, and what each waiting request waits for."""
        reply = await self._port.send(cmd.GetStatus())
        assert isinstance(reply, StatusReport)
        return reply

    async def _flush(self) -> None:
        """Deliver reported events now."""
        await self._port.answer(None)


class AsyncTransferQueue(Verbs[AsyncLeasedBatch, AsyncStream]):
    """The queue for event loops. One object serves one loop."""

    _batch = AsyncLeasedBatch
    _streams = AsyncStream
    configure = Verbs._configure
    declare = Verbs._declare
    put = Verbs._put
    get = Verbs._get
    loaded = Verbs._loaded
    wanted = Verbs._wanted
    lost = Verbs._lost
    end = Verbs._end
    cancel = Verbs._cancel
    failed = Verbs._failed
    audit = Verbs._audit
    status = Verbs._status
    flush = Verbs._flush


class TransferQueue(Verbs[LeasedBatch, BlockingStream]):
    """The queue for threads. Thread-safe: calls of different threads do not wait for each other."""

    _batch = LeasedBatch
    _streams = BlockingStream
    configure = sync(Verbs._configure)
    declare = sync(Verbs._declare)
    put = sync(Verbs._put)
    get = sync(Verbs[LeasedBatch, BlockingStream]._get)
    loaded = sync(Verbs._loaded)
    wanted = sync(Verbs._wanted)
    lost = sync(Verbs._lost)
    end = sync(Verbs._end)
    cancel = sync(Verbs._cancel)
    failed = sync(Verbs._failed)
    audit = sync(Verbs._audit)
    status = sync(Verbs._status)
    flush = sync(Verbs._flush)

    @property
    def aio(self) -> AsyncTransferQueue:
        """The same verbs as coroutines, on the same session."""
        return AsyncTransferQueue(LoopPort(self._port.connection))


def _sampler(sampler: Any) -> SamplerSpec | None:
    if sampler is None or isinstance(sampler, SamplerSpec):
        return sampler
    return SamplerSpec(*_named("sampler", sampler))


def policy_spec(policy: Any) -> PolicySpec | None:
    """A staleness policy by its name, or its name and options. Raises ConfigError."""
    if policy is None or isinstance(policy, PolicySpec):
        return policy
    return PolicySpec(*_named("staleness policy", policy))


def _named(what: str, said: Any) -> tuple[str, dict[str, Any]]:
    name, options = (said, {}) if isinstance(said, str) else said if _is_pair(said) else (None, None)
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise ConfigError(f"a {what} is a name, or a pair of name and options, not {said!r:.100}")
    for option in options:
        check_name(f"an option of {what} {name!r:.100}", option)
    return name, dict(options)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _ids(rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
    ids = np.asarray(rows)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        raise SchemaError(f"row ids are integers in one dimension, not {ids.dtype} of shape {ids.shape}")
    return ids.astype(np.int64)


def open_queue(connection: Connection) -> TransferQueue:
    """The queue of a connection."""
    return TransferQueue(BlockingPort(connection))
