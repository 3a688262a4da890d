"""QueueServer: the ledger, the places of payload and the wire, put together. Everything runs in the wire's thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from .._version import __version__
from ..errors import AsyncFlowError, ProtocolError, SchemaError
from ..ledger import Ledger, unpack_ids
from ..ledger import commands as cmd
from ..ledger.commands import Ids
from ..memory import Mapper, SharedDirectory
from ..types import Batch, ColumnSpec, Event, carrier
from ..types import events as ev
from ..wire import Server
from .blocks import Block, Located, Reader
from .places import Places
from .protocol import Answer, Call, Hello, Welcome, decode_answer, decode_call, encode, failure

STATUS_EVERY_S = 0.5


@dataclass(frozen=True)
class _Pending:
    """A request under way, with what only the command that began it knows."""

    session: str
    command: cmd.AnyCommand
    block: Block | None
    ids: Ids | None  # of a completion, in the order of the block's entries
    step: int


class QueueServer:
    """Serves a queue and versions, at a socket of its own on this host and at ``addresses``.

    ``on_event`` and ``on_step`` (step, version trained, its rows with every column they have) are called in
    the server's thread and must return at once.
    """

    def __init__(
        self,
        addresses: list[str],
        on_event: Callable[[Event], None] | None = None,
        on_step: Callable[[int, Batch], None] | None = None,
    ) -> None:
        self.directory = SharedDirectory()
        addresses = [f"ipc://{self.directory.path}/queue", *addresses]
        self.ledger = Ledger()
        self._places = Places()
        self._mapper = Mapper(self.directory.path)
        self._reader = Reader(self._mapper)
        self._on_event = on_event
        self._on_step = on_step
        self._sessions: dict[str, int] = {}
        self._pending: dict[int, _Pending] = {}
        self._freed: dict[str, dict[tuple[str, int], int]] = {}
        self._next_status = 0.0
        try:
            self._wire = Server(addresses, self)
        except BaseException:
            self.directory.close()
            raise
        self.addresses = self._wire.addresses
        if self.directory.warning:
            self._emit(ev.Note(time_s=time.monotonic(), text=self.directory.warning, level="warning"))
        self._wire.start()

    def close(self) -> None:
        """Stop serving and remove the run's segments. Views that processes hold stay valid."""
        self._wire.stop()
        self._mapper.close()
        self.directory.close()

    # ---- called by the wire

    def request(self, session: str, ticket: int, body: bytes) -> None:
        try:
            call = decode_call(body)
            for event in call.events:
                self._emit(event)
            if call.command is None:
                self._answer(ticket, session, cmd.Done())
            elif isinstance(call.command, Hello):
                self._hello(session, ticket, call.command)
            else:
                self._command(session, ticket, call)
        except msgspec.MsgspecError as error:
            self._answer(ticket, session, ProtocolError(f"the server cannot read this call: {error}"))
        except AsyncFlowError as error:
            self._pending.pop(ticket, None)
            self._answer(ticket, session, error)

    def dropped(self, ticket: int, answer: bytes | None) -> None:
        if answer is None:
            self._pending.pop(ticket, None)
            self.ledger.forget(ticket)
            return
        reply = decode_answer(answer).reply
        if isinstance(reply, cmd.Leased):
            lease = self.ledger.leases.get(reply.token)
            if lease is not None:
                back = cmd.GiveBack(token=reply.token, reason="the request for it was cancelled")
                self.ledger.apply(lease.session, back, time.monotonic(), 0)
                self._flush()

    def gone(self, session: str, reason: str) -> None:
        number = self._sessions.pop(session, None)
        if number is None:
            return
        self.ledger.session_died(number, time.monotonic(), reason)
        self._flush()
        self._close_session(session, number)

    def idle(self) -> float | None:
        now = time.monotonic()
        self.ledger.tick(now)
        self._flush()
        if self._on_event is not None and now >= self._next_status:
            self._next_status = now + STATUS_EVERY_S
            self._status(now)
        deadlines = [self.ledger.next_deadline(), self._next_status if self._on_event is not None else None]
        return min((d - now for d in deadlines if d is not None), default=None)

    # ---- requests

    def _hello(self, session: str, ticket: int, hello: Hello) -> None:
        if hello.sdk != __version__:
            raise ProtocolError(f"this run is served by asyncflow-sdk {__version__}; {hello.name} has {hello.sdk}")
        if session in self._sessions:
            raise ProtocolError(f"session {session} has already said hello")
        self.ledger.apply(0, cmd.Join(name=hello.name), time.monotonic(), 0)
        (_, joined), *_rest = self.ledger.drain().answers
        assert isinstance(joined, cmd.Joined)
        self._sessions[session] = joined.session
        self._answer(ticket, session, Welcome(joined.session, str(self.directory.path), __version__))
        self._wire.watch(session, hello.pid, hello.pid_key)

    def _command(self, session: str, ticket: int, call: Call) -> None:
        command = call.command
        assert command is not None
        assert not isinstance(command, Hello)
        if session not in self._sessions:
            raise ProtocolError("say hello first: this session is unknown here, or its process was seen to end")
        number = self._sessions[session]
        if isinstance(command, cmd.Join):
            raise ProtocolError("join is said by hello")
        ids, step = None, -1
        if isinstance(command, (cmd.Put, cmd.Complete)):
            _check_block(call.block, command.columns)
        if isinstance(command, cmd.Complete):
            lease = self.ledger.leases.get(command.token)
            if lease is not None:
                ids, step = lease.ids, lease.step
                if command.index is not None:
                    at = np.frombuffer(command.index[: len(command.index) // 4 * 4], "<i4")
                    ids = ids[at[(at >= 0) & (at < len(ids))]]  # the ledger refuses the command if any is not
                if call.block is not None and call.block.rows != len(ids):
                    raise SchemaError(f"{len(ids)} rows are completed with {call.block.rows} values")
        self._pending[ticket] = _Pending(session, command, call.block, ids, step)
        record = self._record(command, ids, step)
        self.ledger.apply(number, command, time.monotonic(), ticket)
        self._flush(record)
        if isinstance(command, cmd.Leave):
            del self._sessions[session]
            self._close_session(session, number)

    def _record(self, command: cmd.AnyCommand, ids: Ids | None, step: int) -> tuple[int, Batch] | None:
        """The rows of a step about to be acknowledged, before their memory may go."""
        if self._on_step is None or step < 0 or ids is None or not isinstance(command, cmd.Complete):
            return None
        located, schema = self._locate(ids, tuple(self.ledger.schema))
        columns = {}
        for part in located:
            columns.update(self._reader.read(part, schema, len(ids)))
        at = self.ledger.rows.at(ids)
        return step, Batch(ids, self.ledger.rows.first[at], columns)

    def _locate(self, ids: Ids, columns: tuple[str, ...]) -> tuple[tuple[Located, ...], dict[str, ColumnSpec]]:
        have = self.ledger.rows.columns[self.ledger.rows.at(ids)]
        common = int(np.bitwise_and.reduce(have)) if len(have) else 0
        names = tuple(name for name in columns if common >> self.ledger._places[name] & 1)
        return self._places.locate(ids, names), {name: self.ledger.schema[name] for name in names}

    # ---- what came of them

    def _flush(self, record: tuple[int, Batch] | None = None) -> None:
        effects = self.ledger.drain()
        for ticket, reply in effects.answers:
            pending = self._pending.pop(ticket, None)
            if pending is not None:
                self._carry_out(ticket, pending, reply, record)
        for event in effects.events:
            self._emit(event)
        for ids in effects.retired:
            for owner, block in self._places.retire(ids):
                self._free(owner, block)

    def _carry_out(
        self, ticket: int, pending: _Pending, reply: cmd.Reply | AsyncFlowError, record: tuple[int, Batch] | None
    ) -> None:
        located: tuple[Located, ...] = ()
        schema: dict[str, ColumnSpec] = {}
        block = pending.block
        if isinstance(reply, cmd.PutDone) and not reply.again:
            assert block is not None
            assert isinstance(pending.command, cmd.Put)
            ids = np.arange(reply.first, reply.first + reply.count)
            entries = np.repeat(np.arange(block.rows), pending.command.group_size)
            self._places.add(ids, block, pending.session, entries)
        elif isinstance(reply, cmd.Completed):
            self._place_completion(pending, unpack_ids(reply.revoked))
            if record is not None and self._on_step is not None:
                self._on_step(*record)
        elif isinstance(reply, cmd.Leased):
            needs = self.ledger.tasks[reply.task].spec.needs
            located, schema = self._locate(unpack_ids(reply.ids), needs)
        self._answer(ticket, pending.session, reply, located, schema)

    def _place_completion(self, pending: _Pending, revoked: Ids) -> None:
        if pending.block is None or pending.ids is None:
            return
        entries = np.arange(pending.block.rows)
        kept = ~np.isin(pending.ids, revoked)
        self._places.add(pending.ids[kept], pending.block, pending.session, entries[kept])
        if not kept.any():
            self._free(pending.session, pending.block)

    def _free(self, owner: str, block: Block) -> None:
        if owner in self._sessions:
            freed = self._freed.setdefault(owner, {})
            key = (block.segment, block.generation)
            freed[key] = freed.get(key, 0) + 1
        elif block.segment not in self._places.segments_of(owner):
            (self.directory.path / block.segment).unlink(missing_ok=True)

    def _close_session(self, session: str, number: int) -> None:
        """Its segments go, but for those that rows still need."""
        self._wire.forget(session)
        self._freed.pop(session, None)
        needed = self._places.segments_of(session)
        for path in self.directory.path.glob(f"s{number}-*"):
            if path.name not in needed:
                path.unlink(missing_ok=True)

    def _answer(
        self,
        ticket: int,
        session: str,
        reply: cmd.Reply | Welcome | AsyncFlowError,
        located: tuple[Located, ...] = (),
        schema: dict[str, ColumnSpec] | None = None,
    ) -> None:
        freed = tuple((*key, blocks) for key, blocks in self._freed.pop(session, {}).items())
        if isinstance(reply, AsyncFlowError):
            answer = Answer(error=failure(reply), freed=freed)
        else:
            answer = Answer(reply, None, located, schema or {}, freed)  # type: ignore[arg-type]
        self._wire.answer(ticket, encode(answer))

    def _status(self, now: float) -> None:
        status = self.ledger.status()
        held = 0
        with contextlib.suppress(OSError):
            held = sum(path.stat().st_size for path in self.directory.path.iterdir())
        self._emit(ev.Status(time_s=now, rows=status.rows, ended=status.ended, waiting=status.waiting, bytes=held))

    def _emit(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)


def _check_block(block: Block | None, columns: cmd.Columns) -> None:
    """What a client says of its block fits what it says of its columns; the bytes are checked when read."""
    if (block is None) != (not columns):
        raise SchemaError("columns and payload belong together")
    if block is None:
        return
    if {placed.name for placed in block.columns} != set(columns) or "/" in block.segment or block.rows < 0:
        raise SchemaError("the payload is not that of the columns named")
    for placed in block.columns:
        spec = columns[placed.name]
        size = carrier(spec.dtype).itemsize * int(np.prod(spec.shape, dtype=np.int64))
        if min(placed.values, placed.nbytes) < 0 or (placed.offsets < 0) != (spec.kind == "fixed"):
            raise SchemaError(f"column {placed.name!r} lies nowhere")
        if spec.kind == "fixed" and placed.nbytes != size * block.rows:
            raise SchemaError(f"column {placed.name!r} has {placed.nbytes} bytes, not {size * block.rows}")
