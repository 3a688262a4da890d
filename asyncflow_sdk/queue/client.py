"""The client of a queue server, blocking and (``.aio``) for event loops.

queue.declare("reward", needs=["response"], gives=["reward"])
queue.put({"prompt": prompts}, group_size=8, key="epoch-0")
with queue.get("reward", count=64, timeout_s=30) as batch:
    batch.complete({"reward": score(batch["response"])})
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import AsyncFlowError, ConfigError, LeaseLost, SchemaError, StoreUnavailable, VersionNeeded
from ..interfaces import LeasedBatch, PutRows, StepPart, TransferQueue
from ..ledger import commands as cmd
from ..ledger import pack_ids, unpack_ids
from ..types import Batch
from ..types.columns import empty
from ..types.defaults import CALL_S, LEASE_S, MAX_ATTEMPTS, TIMEOUT_S
from ..types.reports import Audit, FailedGroup, StatusReport
from ..types.tasks import PolicySpec, SamplerSpec, TaskSpec
from .batches import AsyncLeasedBatch, BatchVerbs, BlockingBatch
from .checks import check_arguments, check_columns, check_name, check_names
from .connection import BlockingPort, Connection, LoopPort, Port, received_columns
from .coroutines import run_blocking, sync
from .lease_renewal import LeaseRenewer, UnreadLease
from .leased_steps import AsyncStepStream, BlockingStepStream
from .protocol import CallResult
from .stores import blocks
from .streams import AsyncStream, BlockingStream

LATE_S = 0.2
"""Pause before rows of a host that cannot be reached are leased again."""
_READ_TRIES = 8
"""Most requests for one batch: rows can end between their lease and the read."""
B = TypeVar("B", bound=BatchVerbs)
R = TypeVar("R", bound=Batch)
S = TypeVar("S", SamplerSpec, PolicySpec)


class QueueVerbs(Generic[B]):
    """The methods of a queue, written once as coroutines."""

    _batch: type[B]

    def __init__(self, port: Port) -> None:
        self._port = port

    @property
    def connection(self) -> Connection:
        """Return the session with the server. Events and weights of this client use the same one."""
        return self._port.connection

    async def _configure(
        self, *, staleness_policy: str | tuple[str, Mapping[str, Any]] | PolicySpec | None = None, **limits: Any
    ) -> None:
        """See ``TransferQueue.configure``."""
        await self._port.send(cmd.Configure(staleness=policy_spec(staleness_policy), **limits))

    async def _declare(
        self,
        name: str,
        *,
        needs: Sequence[str],
        gives: Sequence[str] = (),
        lease_s: float = LEASE_S,
        max_attempts: int = MAX_ATTEMPTS,
        admits: bool = False,
        batch_rows: int | None = None,
        partitions: Sequence[str] = ("",),
        sampler: str | tuple[str, Mapping[str, Any]] | SamplerSpec | None = None,
    ) -> None:
        task = TaskSpec(
            name=name, needs=check_columns("needs", needs), gives=check_columns("gives", gives), lease_s=lease_s,
            max_attempts=max_attempts, admits=admits, batch_rows=batch_rows,
            partitions=check_names("partitions", partitions, empty=True), sampler=_spec("sampler", SamplerSpec, sampler),
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
        version: int | None = None,
        keep_version: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> PutRows:
        packed = blocks.pack_columns(columns)
        count = max(map(len, packed.values()), default=0)
        command = cmd.AddRows(
            groups=count, group_size=group_size, columns={}, key=key, timeout_s=timeout_s, partition=partition,
            priority=priority, version=-1 if version is None else version,
            keep=-1 if keep_version is None else keep_version,
        )  # fmt: skip
        reply = await self._port.send_columns(command, packed if count else {})
        return PutRows(reply.first, reply.count, reply.again)

    async def _get(
        self,
        task: str,
        count: int = 1,
        *,
        ack: LeasedBatch | BatchVerbs | None = None,
        **options: Any,
    ) -> B:
        """See ``TransferQueue.get``."""
        if ack is not None and not isinstance(ack, BatchVerbs):
            raise TypeError(f"ack must be a batch that this queue leased, not {type(ack).__name__}")
        return await self._lease(_lease_request(task, count, **options), ack)

    async def _lease(self, request: cmd.LeaseRows, last: BatchVerbs | None = None, *, acknowledge: bool = True) -> B:
        """Send a lease request with the last message about batch ``last``; return the new batch."""
        answer = None if last is None else await last._send_last(request, acknowledge=acknowledge)
        batch, lease = await self._lease_rows(request, answer, self._batch)
        batch._bind(self._port, lease)
        return batch

    async def _lease_part(self, request: cmd.LeaseRows, until: float) -> tuple[StepPart, cmd.LeasedPart]:
        """Send the request for a part of a step; return it. ``until``: when the whole wait for it ends."""
        part, lease = await self._lease_rows(request, None, StepPart, until)
        assert isinstance(lease, cmd.LeasedPart)
        part._place(lease, unpack_ids(lease.completed_at))
        return part, lease

    async def _lease_rows(
        self, request: cmd.LeaseRows, answer: CallResult | None, kind: type[R], until: float | None = None
    ) -> tuple[R, cmd.Leased]:
        """Send a lease request, unless it has its ``answer``; return the rows, and the lease.

        A lease with rows that cannot be read goes back; if they had ended, the request is repeated. A
        rank of a group gets a batch without rows then, since the others work on this very lease. If
        their host cannot be reached now, the request is repeated until its own deadline; ranks of a group
        and parts of a step are read again ``until`` then, since nobody else can have them.
        """
        left, began, timeout_s = _READ_TRIES, time.monotonic(), request.timeout_s
        until = began + timeout_s if until is None else until
        while True:
            left -= 1
            if answer is None:
                await self._return_leases(request.timeout_s)
                answer = await self._port.call(request)
            else:
                answer.raise_error()
            lease = answer.reply
            if isinstance(lease, cmd.LoadFirst):
                raise VersionNeeded(
                    f"task {request.task!r} leases no more rows before version {lease.version} is loaded"
                )
            assert isinstance(lease, cmd.Leased)
            alone = lease.world_size == 1 or lease.step >= 0
            shared = request.token or lease.world_size > 1
            try:
                if self._port.connection.store.may_wait:
                    return await self._read_renewed(answer, lease, kind, until if shared else 0.0), lease
                return self._read(answer, lease, kind), lease
            except BaseException as error:
                late = isinstance(error, StoreUnavailable) and alone and not request.token
                self._port.connection.unreturned.append(
                    cmd.GiveBack(
                        token=lease.token, reason="reading the rows failed", rank=lease.rank,
                        unread=isinstance(error, LeaseLost),
                    )
                )  # fmt: skip
                with contextlib.suppress(AsyncFlowError):
                    await self._return_leases(max(CALL_S, began + timeout_s - time.monotonic() if late else 0.0))
                if (
                    late and (left_s := began + timeout_s - time.monotonic()) > 0
                ):  # late, not lost: the rows cost no attempt
                    await self._port.pause(min(LATE_S, left_s))
                    request, answer, left = msgspec.structs.replace(request, timeout_s=left_s), None, left + 1
                    continue
                if request.token or not (left and isinstance(error, LeaseLost)):
                    raise
                if alone:
                    answer = None  # rows ended before they were read
                    continue
                return self._without_rows(answer, kind), msgspec.structs.replace(lease, ids=b"", groups=b"")

    async def _return_leases(self, timeout_s: float) -> None:
        """Give back the leases whose rows could not be read. Raises ServerLost if the server cannot be
        reached; they are then given back before the next lease: their rows may be all that there is."""
        connection = self._port.connection
        while connection.unreturned:
            try:
                back = connection.unreturned.popleft()
            except IndexError:  # another thread has taken it
                return
            try:
                connection.unpack(await self._port.request(connection.encode_call(back), timeout_s))
            except BaseException:
                connection.unreturned.append(back)
                raise

    async def _read_renewed(self, answer: CallResult, lease: cmd.Leased, kind: type[R], until: float) -> R:
        """Read rows that may be on other hosts, and renew their lease meanwhile. ``until``: try again until
        then if a host cannot be reached. Raises StoreUnavailable, LeaseLost, SchemaError."""
        connection, unread = self._port.connection, UnreadLease(lease)
        if connection.renewer is None:
            LeaseRenewer(connection, unread=True)
        connection.renewer.add(unread)
        while True:
            try:
                return await self._port.in_thread(self._read, answer, lease, kind)
            except StoreUnavailable:
                if unread.lost or (left_s := until - time.monotonic()) <= 0:
                    raise
                await self._port.pause(min(LATE_S, left_s))

    def _read(self, answer: CallResult, lease: cmd.Leased, kind: type[R]) -> R:
        """Return the leased rows as a batch of views and copies."""
        ids, store = unpack_ids(lease.ids), self._port.connection.store
        if not len(ids):  # a rank group's lease may have fewer rows than shards
            return self._without_rows(answer, kind)
        beside = answer.payload is not None
        columns = received_columns(answer) if beside else store.read(answer.slices, answer.schema)
        where = {name: slices for slices in answer.slices for name in slices.columns}

        def writable(name: str) -> Any:
            """Return a column's values in a copy-on-write mapping, or None."""
            return store.writable(where[name], name, answer.schema)

        return kind(ids, unpack_ids(lease.groups), columns, writable if where else None)

    def _without_rows(self, answer: CallResult, kind: type[R]) -> R:
        return kind(unpack_ids(b""), unpack_ids(b""), {name: empty(spec) for name, spec in answer.schema.items()})

    async def _loaded(self, version: int) -> None:
        await self._port.send(cmd.ReportLoaded(version=version))

    async def _wanted(self, *, timeout_s: float = TIMEOUT_S) -> int:
        reply = await self._port.send(cmd.AwaitRowsWanted(timeout_s=timeout_s))
        return int(reply.count)

    async def _lost(self, *, timeout_s: float = TIMEOUT_S) -> npt.NDArray[np.int64]:
        reply = await self._port.send(cmd.AwaitLost(timeout_s=timeout_s))
        return unpack_ids(reply.ids)

    async def _end(self, *, cancel: bool = False, partition: str | None = None) -> None:
        await self._port.send(cmd.End(cancel=cancel, partition=partition))

    async def _cancel(
        self,
        rows: npt.ArrayLike | None = None,
        *,
        key: str = "",
        partition: str | None = None,
        reason: str = "cancelled by request",
    ) -> int:
        ids = b"" if rows is None else pack_ids(_ids(rows))
        if rows is not None and not ids:
            return 0
        reply = await self._port.send(cmd.Cancel(ids=ids, key=key, partition=partition, reason=reason))
        return int(reply.count)

    async def _failed(self, count: int = 100) -> tuple[FailedGroup, ...]:
        reply = await self._port.send(cmd.GetFailed(count=count))
        assert isinstance(reply, cmd.Failed)
        return reply.groups

    async def _audit(self) -> Audit:
        reply = await self._port.send(cmd.GetAudit())
        assert isinstance(reply, Audit)
        return reply

    async def _status(self) -> StatusReport:
        reply = await self._port.send(cmd.GetStatus())
        assert isinstance(reply, StatusReport)
        return reply

    async def _flush(self) -> None:
        await self._port.call(None)


class AsyncTransferQueue(QueueVerbs[AsyncLeasedBatch]):
    """The methods of ``TransferQueue`` as coroutines. One object serves one event loop."""

    _batch = AsyncLeasedBatch
    configure = QueueVerbs._configure
    declare = QueueVerbs._declare
    put = QueueVerbs._put
    get = QueueVerbs._get
    loaded = QueueVerbs._loaded
    wanted = QueueVerbs._wanted
    lost = QueueVerbs._lost
    end = QueueVerbs._end
    cancel = QueueVerbs._cancel
    failed = QueueVerbs._failed
    audit = QueueVerbs._audit
    status = QueueVerbs._status
    flush = QueueVerbs._flush

    def stream(self, task: str, count: int = 1, **options: Any) -> AsyncStream:
        """Iterate over the batches of a task; see ``TransferQueue.stream``. It leases none ahead."""
        request = _lease_request(task, count, **options)
        return AsyncStream(lambda last: self._lease(request, last, acknowledge=False))

    def steps(self, task: str, *, part_rows: int = 1, **options: Any) -> AsyncStepStream:
        """Iterate over the steps of a task, each in parts; see ``TransferQueue.steps``."""
        request = _lease_request(task, 1, parts=True, at_least=part_rows, **options)
        return AsyncStepStream(self._port, self._lease_part, request)


class _LoopQueue(QueueVerbs[BlockingBatch]):
    """Leases batches on an event loop for use in a thread."""

    _batch = BlockingBatch


class QueueClient(QueueVerbs[BlockingBatch], TransferQueue):
    """``TransferQueue`` over a connection to its server."""

    _batch = BlockingBatch
    configure = sync(QueueVerbs._configure, TransferQueue.configure)
    declare = sync(QueueVerbs._declare, TransferQueue.declare)
    put = sync(QueueVerbs._put, TransferQueue.put)
    get = sync(QueueVerbs[BlockingBatch]._get, TransferQueue.get)
    loaded = sync(QueueVerbs._loaded, TransferQueue.loaded)
    wanted = sync(QueueVerbs._wanted, TransferQueue.wanted)
    lost = sync(QueueVerbs._lost, TransferQueue.lost)
    end = sync(QueueVerbs._end, TransferQueue.end)
    cancel = sync(QueueVerbs._cancel, TransferQueue.cancel)
    failed = sync(QueueVerbs._failed, TransferQueue.failed)
    audit = sync(QueueVerbs._audit, TransferQueue.audit)
    status = sync(QueueVerbs._status, TransferQueue.status)
    flush = sync(QueueVerbs._flush, TransferQueue.flush)

    def stream(
        self,
        task: str,
        count: int = 1,
        *,
        ahead: bool = False,
        **options: Any,
    ) -> BlockingStream:
        """See ``TransferQueue.stream``."""
        request = _lease_request(task, count, **options)

        def lease_on_a_loop() -> Coroutine[Any, Any, BlockingBatch]:
            return _LoopQueue(LoopPort(self.connection))._lease(request)

        return BlockingStream(
            self.connection,
            lambda last: self._lease(request, last, acknowledge=False),
            lease_on_a_loop if ahead else None,
        )

    def steps(
        self,
        task: str,
        *,
        part_rows: int = 1,
        check: Callable[[], None] | None = None,
        **options: Any,
    ) -> BlockingStepStream:
        """See ``TransferQueue.steps``. ``check``: called before each wait for a part, and every few
        seconds of it; its exception ends the wait."""
        request = _lease_request(task, 1, parts=True, at_least=part_rows, **options)
        return BlockingStepStream(self._port, self._lease_part, request, check)

    def send(self, command: cmd.AnyCommand) -> Any:
        """Send a ledger command for another client of this server. Raises the ledger's error."""
        return run_blocking(self._port.send(command))

    @property
    def aio(self) -> AsyncTransferQueue:
        """Return the same methods as coroutines, on the same session."""
        return AsyncTransferQueue(LoopPort(self.connection))


def _lease_request(
    task: str, count: int, *, columns: Sequence[str] | None = None, timeout_s: float = TIMEOUT_S, **options: Any
) -> cmd.LeaseRows:
    """Return a checked request: its wait may be added to a clock."""
    needs = None if columns is None else check_names("columns", columns)
    request = cmd.LeaseRows(task=task, count=count, columns=needs, timeout_s=timeout_s, **options)
    check_arguments(request)
    return request


def policy_spec(policy: Any) -> PolicySpec | None:
    """Return the spec of a policy given by name, or by name and options. Raises ConfigError."""
    return _spec("staleness policy", PolicySpec, policy)


def _spec(what: str, kind: type[S], given: Any) -> S | None:
    if given is None or isinstance(given, kind):
        return given
    is_pair = isinstance(given, tuple) and len(given) == 2
    name, options = (given, {}) if isinstance(given, str) else given if is_pair else (None, None)
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise ConfigError(f"a {what} is a name, or a pair of name and options, not {given!r:.100}")
    for option in options:
        check_name(f"an option of {what} {name!r:.100}", option)
    return kind(name, dict(options))


def _ids(rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
    ids = np.asarray(rows)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        raise SchemaError(f"row ids are integers in one dimension, not {ids.dtype} of shape {ids.shape}")
    return ids.astype(np.int64)


def open_queue(connection: Connection) -> QueueClient:
    """Return the blocking queue client of a connection."""
    return QueueClient(BlockingPort(connection))
