"""Execute the calls of clients on the ledger and the payload.

Execution is deterministic: replaying the same inputs with the same times gives the same state and answers. Results of
user code and of the file system are recorded in the ledger's ``NondeterminismLog``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast, get_args

import msgspec
import xxhash

from .._version import __version__
from ..errors import AsyncFlowError, ProtocolError
from ..ledger import Ledger, pack_ids, unpack_ids
from ..ledger import commands as cmd
from ..ledger.commands import Ids
from ..ledger.payload_loss import LOST_REASON
from ..ledger.state.context import Trained
from ..ledger.state.sessions import ParkedRequest
from ..types import Event
from ..wire import Server
from . import protocol, snapshot
from .checks import Measures, check_payload
from .journal import DropRecord, JournalReader, Record, RequestRecord, TickRecord
from .listeners import Listeners
from .payload import SERVER, Payload
from .stores.homes import session_of

_log = logging.getLogger(__name__)
_UNEXECUTED = protocol.UNRECORDED | {cmd.OpenSession}
_CHECKED = protocol.WRITING | _UNEXECUTED | {cmd.Declare}
_REPLIES = frozenset(get_args(cmd.AnyReply))


class Clock:
    """Ledger seconds: this host's monotonic clock while the run is served; downtime does not count. ``offset``: the
    ledger's time minus that of the host."""

    def __init__(self) -> None:
        self.offset = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.offset

    def resume(self, now: float) -> None:
        """Continue from ledger time ``now``."""
        self.offset = now - time.monotonic()

    def to_host_time(self, event: Event) -> Event:
        """Return a ledger event with the host's monotonic time."""
        return msgspec.structs.replace(event, time_s=event.time_s - self.offset) if self.offset else event


class ClientProcess(NamedTuple):
    """``number``: its ledger session."""

    number: int
    hello: protocol.ClientHello


class ClientTable:
    """Open sessions by their wire name. ``silent``: by home, the key of its unit's last session if it
    ended by silence, and since when. Not thread-safe: only the server's thread uses it."""

    def __init__(self) -> None:
        self.by_session: dict[str, ClientProcess] = {}
        self.silent: dict[int, tuple[str, float]] = {}

    def open(self, session: str, client: ClientProcess) -> None:
        """Add a session."""
        self.by_session[session] = client

    def public_keys(self) -> set[str]:
        """Return the public keys of open sessions."""
        return {client.hello.public for client in self.by_session.values()}

    def numbers(self) -> dict[str, int]:
        """Return the ledger's numbers of all open sessions."""
        return {session: client.number for session, client in self.by_session.items()}


class ExecutedRequest(msgspec.Struct, frozen=True):
    """A command being executed, with the names of a ``ParkedRequest``. ``session``: the ledger's number."""

    ticket: int
    session: int
    command: Any
    first: cmd.Reply | None = None


class CallExecutor:
    """The state of a queue server determined by its inputs, and its answers. ``welcome``: the reply to a hello,
    without the session. Not thread-safe: only the server's thread uses it."""

    def __init__(
        self, ledger: Ledger, payload: Payload, listeners: Listeners, welcome: protocol.Welcome, wire: Server
    ) -> None:
        self.ledger, self.payload, self.clock, self.clients = ledger, payload, Clock(), ClientTable()
        self._state, self._log = ledger.state, ledger.state.context.log
        self._listeners, self._welcome, self._wire = listeners, welcome, wire
        self._measures = Measures(ledger, payload.index, payload.reader)
        self._rows, self._digest = str(payload.rows), 0
        self._now = 0.0  # of the record being replayed

    def take_digest(self) -> int:
        """Return a digest of the answers since the last call; 0 if nothing is recorded."""
        digest, self._digest = self._digest, 0
        return digest

    # ---- snapshots and replays, before the server starts

    def encode(self) -> bytes:
        """Return the whole state as bytes."""
        parts = self._parts()
        return snapshot.encode({name: snapshot.attributes(part) for name, part in parts.items()}, parts)

    def restore(self, state: bytes) -> None:
        """Set the state to that of ``encode``."""
        parts = self._parts()
        for name, attributes in snapshot.decode(state, parts).items():
            vars(parts[name]).update(attributes)
        self._wire.finish_replay()

    def _parts(self) -> dict[str, Any]:
        ledger = {f"ledger.{name}": part for name, part in self.ledger.parts().items()}
        payload = {"index": self.payload.index, "files": self.payload.files}
        return {"clients": self.clients, **payload, **ledger, "requests": self._wire.requests}

    def replay(self, recorded: JournalReader, now: float, after: Callable[[Record], None]) -> tuple[int, float]:
        """Replay the records of a journal, and call ``after`` with each. Raises ConfigError at damage.

        Return the number of records with other answers than before, and the ledger's time.
        """
        differing, self._now = 0, now
        self._listeners.mute(True)
        try:
            for entry in recorded.entries():
                self._now = entry.record.now
                self._log.replay(entry.results)
                self._replay_record(entry.record)
                used = self._log.replay(None)
                differing += not used or self.take_digest() != entry.digest
                after(entry.record)
        finally:
            self._listeners.mute(False)
            self._wire.finish_replay()
        return differing, self._now

    def _replay_record(self, record: Record) -> None:
        if isinstance(record, RequestRecord):
            self._wire.requests.replay(self, record.session, record.seq, record.done, record.ticket, record.body)
        elif isinstance(record, DropRecord):
            self._wire.requests.replay_drop(self, record.session, record.seq)
        elif isinstance(record, TickRecord):
            self.tick(record.now)
        elif record.session in self.clients.by_session:
            self.close_session(record.session, record.reason, record.now, blame=record.blame)

    def request(self, session: str, ticket: int, body: bytes, payload: Any) -> None:
        """Execute a recorded call; called by the wire."""
        self.execute(session, ticket, protocol.decode_call(body), self._now)
        if session not in self.clients.by_session:  # it would never be closed
            self._wire.forget(session)

    def dropped(self, session: str, seq: int, ticket: int, answer: bytes | None) -> None:
        """Undo a recorded cancelled call; called by the wire."""
        self.drop(session, ticket, answer, self._now)

    # ---- inputs

    def execute(self, session: str, ticket: int, call: protocol.Call, now: float) -> None:
        """Execute a call. It is answered now, or by a later input."""
        command: Any = call.command
        kind, then, clients = type(command), call.then, self.clients.by_session
        number = clients[session].number if session in clients else 0
        try:
            if kind is protocol.ClientHello:
                self._open_session(session, ticket, command, now)
            elif command is None:
                self._answer(ticket, number, protocol.CallResult(cmd.Done()))
            else:
                if kind in _CHECKED or then is not None:
                    command = self._check(number, call)
                unread = None
                if kind is cmd.GiveBack and command.unread and command.token in self._state.leases.by_token:
                    unread = self._state.leases.by_token[command.token].ids
                self.ledger.apply(number, command, now, ticket)
                if unread is not None:
                    self._find_lost(unread, now)
                first = self._flush(ExecutedRequest(ticket, number, command), leases=then is not None)
                if first is not None and then is not None:
                    self.ledger.apply(number, then, self.ledger.now, ticket, first)
                    self._flush(ExecutedRequest(ticket, number, then, first))
                if kind is cmd.CloseSession or kind is cmd.Dismiss:
                    self._close_left()
        except Exception as error:
            if not isinstance(error, AsyncFlowError):  # a call that the checks should have rejected
                _log.exception("a call failed in the queue server")
                error = ProtocolError(f"the call failed in the server: {error!r}")
            self._answer(ticket, number, protocol.CallResult(error=protocol.failure(error)))

    def drop(self, session: str, ticket: int, answer: bytes | None, now: float) -> None:
        """Undo a cancelled call. ``answer``: its unread answer; None if there is none yet."""
        if session not in self.clients.by_session:
            return
        if answer := self._log.record(lambda: answer or b""):
            number, unread = self.clients.by_session[session].number, protocol.decode_result(answer)
            if unread.freed:
                self.payload.files.free_later(number, unread.freed)
            if isinstance(unread.reply, cmd.Leased) and unread.reply.token in self._state.leases.by_token:
                lease, rank = self._state.leases.by_token[unread.reply.token], unread.reply.rank
                back = cmd.GiveBack(token=lease.token, reason="the request for it was cancelled", rank=rank)
                self.ledger.apply(lease.session_of(rank), back, now, 0)
            elif isinstance(unread.reply, cmd.Permitted):
                self.ledger.reply_undelivered(number, unread.reply.version, now)
        elif ticket:
            self.ledger.forget(ticket, now)
        self._flush()

    def close_session(self, session: str, reason: str, now: float, *, blame: bool = True) -> None:
        """Close the session of a dead process. ``blame``: its rows count an attempt."""
        client = self.clients.by_session.pop(session)
        homes = self._state.homes.by_number
        served = [number for number, home in homes.items() if home.unit == client.number]
        self.ledger.session_died(client.number, now, reason, blame=blame)
        if not blame:
            self.clients.silent.update({home: (client.hello.public, homes[home].absent_since) for home in served})
        self._flush()
        self._wire.forget(session)
        self.payload.end_session(client.number)

    def admits(self, public: str) -> bool:
        """Return True if a public key belongs to an open session, or to the unit of an absent home: its
        session has ended by silence, and it may come again."""
        absent = self._state.homes.absent
        return public in self.clients.public_keys() or any(
            key == public and home in absent and absent[home].absent_since == since
            for home, (key, since) in self.clients.silent.items()
        )

    def tick(self, now: float) -> None:
        """Expire leases and waiting requests."""
        self.ledger.tick(now)
        self._flush()

    def fail_lost(self, ids: Ids, tickets: Sequence[int], now: float) -> None:
        """Fail rows, and waiting puts (by ticket), with lost payload."""
        self.ledger.lose(ids, now, LOST_REASON, tickets)
        self._flush()

    def report_steps_again(self) -> None:
        """Report acknowledged steps with live rows: a listener may not have read them."""
        rows = self._state.rows
        for step, ids in self._state.steps.acknowledged() if self._listeners.has("step") else ():
            at = rows.at(ids)
            self._report_step(Trained(step, ids, rows.first[at], rows.current[at]))

    # ---- calls

    def _open_session(self, session: str, ticket: int, hello: protocol.ClientHello, now: float) -> None:
        if hello.sdk != __version__:
            raise ProtocolError(f"this run is served by asyncflow-sdk {__version__}; {hello.name} has {hello.sdk}")
        if session in self.clients.by_session:
            raise ProtocolError(f"session {session} is open already")
        self.ledger.apply(0, cmd.OpenSession(name=hello.name), now, 0)
        (_, joined), *_rest = self.ledger.drain().answers
        assert isinstance(joined, cmd.SessionOpened)
        self.clients.open(session, ClientProcess(joined.session, hello))
        welcome = msgspec.structs.replace(self._welcome, session=joined.session)
        self._answer(ticket, joined.session, protocol.CallResult(welcome), made=True)

    def _check(self, number: int, call: protocol.Call) -> Any:
        """Return the command of a call, with its measures. Raises AsyncFlowError; then its block is free again."""
        command: Any = call.command
        kind = type(command)
        writer = number if call.payload is None else SERVER  # the block was sent beside the call
        try:
            if kind in protocol.WRITING:
                check = partial(check_payload, self.ledger, self._rows, writer, command)
                self._log.record_or_raise(check) if self._log.active else check()
            elif kind in _UNEXECUTED:
                raise ProtocolError("a session is opened by hello; requests that change nothing are not executed")
            if call.then is not None and kind is not cmd.Complete and kind is not cmd.GiveBack:
                raise ProtocolError("`then` needs a completion or a return of rows")
            return self._measures.fill(command)
        except Exception:
            if (block := call.block) is not None and session_of(block.segment) == writer:
                self.payload.free(block.segment, block.packed_serial)
            raise

    def _close_left(self) -> None:
        known = self._state.sessions.by_id
        for session, client in list(self.clients.by_session.items()):
            if client.number not in known:
                self.clients.by_session.pop(session)
                self._wire.forget(session)
                self.payload.end_session(client.number)

    def _find_lost(self, unread: Ids, now: float) -> None:
        """If payload of unreadable rows is lost, fail all rows with lost payload."""

        def look() -> bytes:
            """Return the encoded ids of lost rows and tickets of lost puts."""
            lost, waiting = self.payload.find_lost(self.payload.blocks_exist, among=unread)
            return msgspec.msgpack.encode((pack_ids(lost), waiting)) if len(lost) else b""

        if found := self._log.record(look):
            lost, waiting = msgspec.msgpack.decode(found, type=tuple[bytes, list[int]])
            self.ledger.lose(unpack_ids(lost), now, LOST_REASON, waiting)

    # ---- effects

    def _flush(self, request: ExecutedRequest | None = None, *, leases: bool = False) -> cmd.Reply | None:
        """Send answers, call listeners, and free memory. ``request``: the one being executed. ``leases``: a
        lease follows it; then its reply is returned instead of sent, unless it is an error."""
        effects, first = self._state.context.drain(), None
        used: dict[tuple[str, int], Any] = {}
        for placed in effects.placed:
            self.payload.index.add(placed.ids, placed.block, placed.entries)
            used[placed.block.segment, placed.block.serial] = placed
        over: dict[int, Any] = effects.over
        if request is not None and request.ticket not in self._state.parked.by_ticket:
            over[request.ticket] = request
        for ticket in over:
            command = over[ticket].command
            block = command.block if type(command) in protocol.WRITING else None
            if block is not None and (block.segment, block.serial) not in used:
                self.payload.free(block.segment, block.packed_serial)
        for ticket, reply in effects.answers:
            if ticket not in over:
                continue
            asked, kind = over[ticket], type(reply)
            if kind not in _REPLIES:
                error = protocol.failure(cast("AsyncFlowError", reply))
                self._answer(ticket, asked.session, protocol.CallResult(error=error, first=asked.first))
            elif leases and asked is request:
                first = reply
            elif kind is cmd.Leased or kind is cmd.LeasedPart:
                self._answer_lease(asked, reply)
            else:
                self._answer(ticket, asked.session, protocol.CallResult(reply, first=asked.first))  # type: ignore[arg-type]
                if kind is cmd.PublishReply or kind is cmd.RollbackDone:
                    self.payload.files.remove_weights(self._state.versions.sessions())
        if effects.trained and self._listeners.has("step"):
            for trained in effects.trained:
                self._report_step(trained)
        for event in effects.events:
            self._listeners.event(self.clock.to_host_time(event))
        for ids in effects.retired:
            self.payload.retire(ids)
        if effects.homes_lost:
            losses, tickets = self.payload.drop_lost(effects.homes_lost)
            self.ledger.lose_homes(losses, self.ledger.now, tickets)
            self._flush()
        return first  # type: ignore[return-value]

    def _answer_lease(self, request: ExecutedRequest | ParkedRequest, reply: Any) -> None:
        columns = request.command.columns
        needs = self._state.tasks[reply.task].spec.needs if columns is None else columns
        slices, schema = self.payload.locate(unpack_ids(reply.ids), needs)
        result = protocol.CallResult(reply, None, slices, schema, first=request.first)  # type: ignore[arg-type]
        self._answer(request.ticket, request.session, result, made=request.command.inline and slices != ())

    def _answer(self, ticket: int, session: int, result: protocol.CallResult, *, made: bool = False) -> None:
        """Send a result. ``made``: ``QueueServer.make`` completes it."""
        if session in self.payload.files.freed:
            result = msgspec.structs.replace(result, freed=self.payload.files.freed.pop(session))
        body = protocol.encode(result)
        if self._log.active:
            self._digest = xxhash.xxh3_64_intdigest(body, self._digest)
        self._wire.answer(ticket, body, made)

    def _report_step(self, step: Trained) -> None:
        try:
            rows = self.payload.read_step(step.ids, step.groups, step.completed_at)
        except Exception:  # later effects must still be executed
            _log.exception("the rows of step %d cannot be read for the listener", step.step)
        else:
            self._listeners.call("step", step.step, rows)
