"""The client of a queue server, blocking and (``.aio``) for event loops.

queue.declare("reward", needs=["response"], gives=["reward"])
queue.put({"prompt": prompts}, group_size=8, key="epoch-0")
with queue.get("reward", count=64, timeout_s=30) as batch:
    batch.complete({"reward": score(batch["response"])})
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from .. import errors
from ..interfaces import LeasedBatch, PutRows, StepPart, TransferQueue
from ..ledger import commands as cmd
from ..ledger import pack_ids, unpack_ids
from ..types import Batch
from ..types.columns import empty
from ..types.defaults import CALL_S, TIMEOUT_S
from ..types.reports import Audit, FailedGroup, StatusReport
from ..types.tasks import PolicySpec, SamplerSpec, TaskSpec
from .batches import AsyncLeasedBatch, AsyncStep, BatchVerbs, BlockingBatch, BlockingStep, StepVerbs, UnreadLease
from .checks import check_arguments, check_columns, check_name, check_names
from .connection import BlockingPort, Connection, LoopPort, Port
from .coroutines import run_blocking, sync
from .lease_renewal import renewer_of
from .protocol import CallResult, ResultWithPayload
from .stores.blocks import pack_columns
from .stores.reader import from_image
from .streams import AsyncStream, BatchStream, StepStream

CHECK_S = 5.0
"""Interval of checks during a wait for rows, where no failure ends the wait."""
LARGE_BYTES = 128 << 20
"""A put from this size on is compared with ``capacity_bytes`` before it is written."""
LATE_S = 0.2
"""Pause before rows of a host that cannot be reached are leased again."""
_READ_TRIES = 8
"""Most requests for one batch: rows can end between their lease and the read."""
_STEPS = frozenset({"columns", "timeout_s", "group", "rank", "world_size"})
_STREAM = _STEPS | {"at_least", "partition", "shards"}
_OPTIONS = {"get": _STREAM | {"most"}, "stream": _STREAM, "steps": _STEPS}
"""Of each verb that leases."""
B = TypeVar("B", bound=BatchVerbs)
S = TypeVar("S", bound=StepVerbs)
R = TypeVar("R", bound=Batch)
Check = tuple[Callable[[], None], float] | None
K = TypeVar("K", SamplerSpec, PolicySpec)


class QueueVerbs(Generic[B, S]):
    """The leases of a queue, as coroutines. Its verbs are methods of ``AsyncTransferQueue``."""

    _batch: type[B]
    _step: type[S]

    def __init__(self, port: Port) -> None:
        self._port = port

    @property
    def connection(self) -> Connection:
        """Return the session with the server. Events and weights of this client use the same one."""
        return self._port.connection

    def _request(self, verb: str, task: str, count: int, options: dict[str, Any], **fields: Any) -> cmd.LeaseRows:
        """Return a checked request: its wait may be added to a clock. ``options``: as given to the verb."""
        if not options.keys() <= _OPTIONS[verb]:
            raise TypeError(f"{verb}() has no parameter {min(options.keys() - _OPTIONS[verb])!r}")
        if options.get("columns") is not None:
            fields["columns"] = check_names("columns", options.pop("columns"))
        fields = {"timeout_s": TIMEOUT_S, "inline": self._port.connection.store.inline} | options | fields
        request = cmd.LeaseRows(task=task, count=count, **fields)
        check_arguments(request)
        return request

    async def _get(
        self, task: str, count: int = 1, *, ack: LeasedBatch | BatchVerbs | None = None, **options: Any
    ) -> B:
        if ack is not None and not isinstance(ack, BatchVerbs):
            raise TypeError(f"ack must be a batch that this queue leased, not {type(ack).__name__}")
        return await self._lease(self._request("get", task, count, options), ack)

    async def _lease(
        self, request: cmd.LeaseRows, last: BatchVerbs | None = None, check: Check = None, *, acknowledge: bool = True
    ) -> B:
        """Send a lease request with the last message about batch ``last``; return the new batch."""
        if check is None:
            answer = None if last is None else await last._send_last(request, acknowledge=acknowledge)
            batch, lease = await self._lease_rows(request, answer, self._batch)
        else:
            batch, lease = await self._wait_checked(request, self._batch, check, last)
        batch._bind(self._port, lease)
        return batch

    async def _lease_step(self, request: cmd.LeaseRows, last: StepVerbs | None, check: Check = None) -> S:
        """Return the next step, once its first part is ready. ``last`` goes back if it was not acknowledged."""
        if last is not None:
            await last._close(None, blame=True)
        wait = functools.partial(self._lease_part, check)
        return self._step(self._port, wait, request, *await wait(request))

    async def _lease_part(self, check: Check, request: cmd.LeaseRows) -> tuple[StepPart, cmd.LeasedPart]:
        """Return the next part of a step. ``check``: see ``QueueClient.steps``."""
        if check is None:
            part, lease = await self._lease_rows(request, None, StepPart, time.monotonic() + request.timeout_s)
        else:
            part, lease = await self._wait_checked(request, StepPart, check)
        assert isinstance(lease, cmd.LeasedPart)
        part._place(lease, unpack_ids(lease.completed_at))
        return part, lease

    async def _wait_checked(
        self, request: cmd.LeaseRows, kind: type[R], check: Check, last: BatchVerbs | None = None
    ) -> tuple[R, cmd.Leased]:
        """Send a lease request with the last message about batch ``last``. ``check``: see ``QueueClient.stream``."""
        assert check is not None
        (run_check, interval_s), began, left_s = check, time.monotonic(), request.timeout_s
        while True:
            if interval_s < math.inf:
                run_check()
                request = msgspec.structs.replace(request, timeout_s=min(left_s, interval_s))
            answer = None if last is None else await last._send_last(request)
            last = None
            try:
                return await self._lease_rows(request, answer, kind, time.monotonic() + left_s)
            except errors.Ended:
                run_check()
                raise
            except errors.DeadlineExceeded as error:
                left_s -= request.timeout_s
                if left_s <= 0:
                    why = str(error).partition(": ")[2]
                    raise errors.DeadlineExceeded(f"after {time.monotonic() - began:.1f} s: {why}") from None

    async def _lease_rows(
        self, request: cmd.LeaseRows, answer: CallResult | None, kind: type[R], until: float | None = None
    ) -> tuple[R, cmd.Leased]:
        """Send a lease request, unless it has its ``answer``; return the rows, and the lease. One with rows that cannot
        be read goes back; if they had ended, the request is repeated. A rank of a group gets a batch without rows then,
        since the others work on this very lease. If their host cannot be reached now, the request is repeated until its
        own deadline; ranks of a group and parts of a step are read again ``until`` then: nobody else can have them."""
        left, deadline, port = _READ_TRIES, time.monotonic() + request.timeout_s, self._port
        while True:
            left -= 1
            if answer is None:
                if port.connection.unreturned:
                    await self._return_leases(request.timeout_s)
                answer = await port.call(request)
            else:
                answer.raise_error()
            lease = answer.reply
            if not isinstance(lease, cmd.Leased):
                assert isinstance(lease, cmd.LoadFirst)
                text = f"task {request.task!r} leases no more rows before version {lease.version} is loaded"
                raise errors.VersionNeeded(text)
            alone = lease.world_size == 1 or lease.step >= 0
            try:
                if not port.connection.store.may_wait:
                    return self._read(answer, lease, kind), lease
                again = request.token or lease.world_size > 1
                return await self._read_renewed(answer, lease, kind, (until or deadline) if again else 0.0), lease
            except BaseException as error:
                lost, late = isinstance(error, errors.LeaseLost), isinstance(error, errors.StoreUnavailable) and alone
                port.connection.unreturned.append(
                    cmd.GiveBack(token=lease.token, reason="reading the rows failed", rank=lease.rank, unread=lost)
                )
                left_s = deadline - time.monotonic() if late and not request.token else 0.0
                with contextlib.suppress(errors.AsyncFlowError):
                    await self._return_leases(max(CALL_S, left_s))
                if left_s > 0 and (left_s := deadline - time.monotonic()) > 0:
                    # late, not lost: the rows cost no attempt
                    await port.in_thread(time.sleep, min(LATE_S, left_s))
                    request, left = msgspec.structs.replace(request, timeout_s=left_s), left + 1
                elif request.token or not (left and lost):
                    raise
                elif not alone:
                    return _without_rows(answer, kind), msgspec.structs.replace(lease, ids=b"", groups=b"")
                answer = None  # the rows ended before they were read, or their host is away

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
        unread = UnreadLease(lease)
        renewer_of(self._port.connection).add(unread)
        while True:
            try:
                return await self._port.in_thread(self._read, answer, lease, kind)
            except errors.StoreUnavailable:
                if not unread.left or (left_s := until - time.monotonic()) <= 0:
                    raise
                await self._port.in_thread(time.sleep, min(LATE_S, left_s))

    def _read(self, answer: CallResult, lease: cmd.Leased, kind: type[R]) -> R:
        store, slices, schema = self._port.connection.store, answer.slices, answer.schema
        if not lease.ids:  # a rank group's lease may have fewer rows than shards
            return _without_rows(answer, kind)
        if answer.payload is None:
            columns = store.read(slices, schema)
        elif isinstance(answer, ResultWithPayload):
            columns = from_image(answer.memory, answer.payload, schema)
        else:
            raise errors.LeaseLost("the rows ended before their columns were sent")

        def _writable(name: str) -> Any:  # a column's values in a copy-on-write mapping, or None
            return store.writable(next(part for part in slices if name in part.columns), name, schema)

        return kind(unpack_ids(lease.ids), unpack_ids(lease.groups), columns, _writable if slices else None)


class AsyncTransferQueue(QueueVerbs[AsyncLeasedBatch, AsyncStep]):
    """The methods of ``TransferQueue`` as coroutines. One object serves one event loop."""

    _batch, _step = AsyncLeasedBatch, AsyncStep
    get = QueueVerbs._get

    async def configure(self, *, staleness_policy: Any = None, **limits: Any) -> None:
        """See ``TransferQueue.configure``."""
        spec = spec_of("staleness policy", PolicySpec, staleness_policy)
        await self._port.send(cmd.Configure(staleness=spec, **limits))

    async def declare(
        self,
        name: str,
        *,
        needs: Sequence[str],
        gives: Sequence[str] = (),
        partitions: Sequence[str] = ("",),
        sampler: str | tuple[str, Mapping[str, Any]] | SamplerSpec | None = None,
        **options: Any,
    ) -> None:
        """See ``TransferQueue.declare``."""
        task = TaskSpec(
            name=name, needs=check_columns("needs", needs), gives=check_columns("gives", gives),
            partitions=check_names("partitions", partitions, empty=True),
            sampler=spec_of("sampler", SamplerSpec, sampler), **options,
        )  # fmt: skip
        check_name("a task", name)
        check_arguments(task)
        await self._port.send(cmd.Declare(task=task))

    async def put(
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
        """See ``TransferQueue.put``."""
        packed = pack_columns(columns)
        count = nbytes = 0
        for column in packed.values():
            count, nbytes = len(column), nbytes + column.values.nbytes
        if nbytes >= LARGE_BYTES:
            room = (await self._port.send(cmd.GetStatus())).capacity_bytes
            if nbytes > room:  # checked before it is written
                text = f"a put of {nbytes} bytes exceeds capacity_bytes={room}; put fewer rows at a time"
                raise errors.SchemaError(text)
        command = cmd.AddRows(
            groups=count, group_size=group_size, columns={}, key=key, timeout_s=timeout_s, partition=partition,
            priority=priority, version=-1 if version is None else version,
            keep=-1 if keep_version is None else keep_version,
        )  # fmt: skip
        reply = await self._port.send_columns(command, packed if count else {})
        return PutRows(reply.first, reply.count, reply.again)

    async def loaded(self, version: int) -> None:
        """See ``TransferQueue.loaded``."""
        await self._port.send(cmd.ReportLoaded(version=version))

    async def wanted(self, *, timeout_s: float = TIMEOUT_S) -> int:
        """See ``TransferQueue.wanted``."""
        return int((await self._port.send(cmd.AwaitRowsWanted(timeout_s=timeout_s))).count)

    async def lost(self, *, timeout_s: float = TIMEOUT_S) -> npt.NDArray[np.int64]:
        """See ``TransferQueue.lost``."""
        return unpack_ids((await self._port.send(cmd.AwaitLost(timeout_s=timeout_s))).ids)

    async def end(self, *, cancel: bool = False, partition: str | None = None) -> None:
        """See ``TransferQueue.end``."""
        await self._port.send(cmd.End(cancel=cancel, partition=partition))

    async def cancel(
        self,
        rows: npt.ArrayLike | None = None,
        *,
        key: str = "",
        partition: str | None = None,
        reason: str = "cancelled by request",
    ) -> int:
        """See ``TransferQueue.cancel``."""
        ids = b"" if rows is None else pack_ids(_ids(rows))
        if rows is not None and not ids:
            return 0
        reply = await self._port.send(cmd.Cancel(ids=ids, key=key, partition=partition, reason=reason))
        return int(reply.count)

    async def failed(self, count: int = 100) -> tuple[FailedGroup, ...]:
        """See ``TransferQueue.failed``."""
        return cast(cmd.Failed, await self._port.send(cmd.GetFailed(count=count))).groups

    async def audit(self) -> Audit:
        """See ``TransferQueue.audit``."""
        return cast(Audit, await self._port.send(cmd.GetAudit()))

    async def status(self) -> StatusReport:
        """See ``TransferQueue.status``."""
        return cast(StatusReport, await self._port.send(cmd.GetStatus()))

    async def flush(self) -> None:
        """See ``TransferQueue.flush``."""
        await self._port.call(None)

    def stream(self, task: str, count: int = 1, **options: Any) -> AsyncStream[AsyncLeasedBatch]:
        """Iterate over the batches of a task; see ``TransferQueue.stream``. It leases none ahead."""
        request = self._request("stream", task, count, options)
        return AsyncStream(self.connection, lambda last: self._lease(request, last, acknowledge=False))

    def steps(self, task: str, *, part_rows: int = 1, **options: Any) -> AsyncStream[AsyncStep]:
        """Iterate over the steps of a task, each in parts; see ``TransferQueue.steps``."""
        request = self._request("steps", task, 1, options, parts=True, at_least=part_rows)
        return AsyncStream(self.connection, lambda last: self._lease_step(request, last))


def _without_rows(answer: CallResult, kind: type[R]) -> R:
    return kind(unpack_ids(b""), unpack_ids(b""), {name: empty(spec) for name, spec in answer.schema.items()})


class QueueClient(QueueVerbs[BlockingBatch, BlockingStep], TransferQueue):
    """``TransferQueue`` over a connection to its server."""

    _batch, _step = BlockingBatch, BlockingStep
    configure = sync(AsyncTransferQueue.configure, TransferQueue.configure)
    declare = sync(AsyncTransferQueue.declare, TransferQueue.declare)
    put = sync(AsyncTransferQueue.put, TransferQueue.put)
    get = sync(QueueVerbs[BlockingBatch, BlockingStep]._get, TransferQueue.get)
    loaded = sync(AsyncTransferQueue.loaded, TransferQueue.loaded)
    wanted = sync(AsyncTransferQueue.wanted, TransferQueue.wanted)
    lost = sync(AsyncTransferQueue.lost, TransferQueue.lost)
    end = sync(AsyncTransferQueue.end, TransferQueue.end)
    cancel = sync(AsyncTransferQueue.cancel, TransferQueue.cancel)
    failed = sync(AsyncTransferQueue.failed, TransferQueue.failed)
    audit = sync(AsyncTransferQueue.audit, TransferQueue.audit)
    status = sync(AsyncTransferQueue.status, TransferQueue.status)
    flush = sync(AsyncTransferQueue.flush, TransferQueue.flush)

    def stream(
        self, task: str, count: int = 1, *, ahead: bool = False, check: Check = None, **options: Any
    ) -> BatchStream:
        """See ``TransferQueue.stream``. ``check``: a function and an interval. It is called at the end of the stream,
        before each wait for a batch, and in it after so many seconds (inf: only at the end); its error is raised."""
        request, connection = self._request("stream", task, count, options), self.connection
        early = QueueClient(LoopPort(connection))
        return BatchStream(
            connection,
            lambda last: self._lease(request, last, check, acknowledge=False),
            (lambda: early._lease(request)) if ahead else None,
        )

    def steps(self, task: str, *, part_rows: int = 1, check: Check = None, **options: Any) -> StepStream:
        """See ``TransferQueue.steps``. ``check``: an argument of ``stream``, here for each wait for a part."""
        request = self._request("steps", task, 1, options, parts=True, at_least=part_rows)
        return StepStream(self.connection, lambda last: self._lease_step(request, last, check))

    def send(self, command: cmd.AnyCommand) -> Any:
        """Send a ledger command for another client of this server. Raises the ledger's error."""
        return run_blocking(self._port.send(command))

    @property
    def aio(self) -> AsyncTransferQueue:
        """Return the same methods as coroutines, on the same session."""
        return AsyncTransferQueue(LoopPort(self.connection))


def spec_of(what: str, kind: type[K], given: Any) -> K | None:
    """Return the spec of a policy or sampler given by name, or by name and options. Raises ConfigError."""
    if given is None or isinstance(given, kind):
        return given
    is_pair = isinstance(given, tuple) and len(given) == 2
    name, options = (given, {}) if isinstance(given, str) else given if is_pair else (None, None)
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise errors.ConfigError(f"a {what} is a name, or a pair of name and options, not {given!r:.100}")
    for option in options:
        check_name(f"an option of {what} {name!r:.100}", option)
    return kind(name, dict(options))


def _ids(rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
    ids = np.asarray(rows)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        raise errors.SchemaError(f"row ids are integers in one dimension, not {ids.dtype} of shape {ids.shape}")
    return ids.astype(np.int64)


def open_queue(connection: Connection) -> QueueClient:
    """Return the blocking queue client of a connection."""
    return QueueClient(BlockingPort(connection))
