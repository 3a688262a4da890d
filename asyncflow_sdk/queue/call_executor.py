"""Execute the calls of clients on the ledger and the payload.

Execution is deterministic: replaying the same inputs with the same times gives the same state and
answers. Results of user code and of the file system are recorded in the ledger's
``NondeterminismLog``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from .._version import __version__
from ..errors import AsyncFlowError, ProtocolError, error_from_name
from ..ledger import Ledger, pack_ids, unpack_ids
from ..ledger import commands as cmd
from ..ledger.commands import Ids
from ..ledger.payload_loss import LOST_REASON
from ..ledger.state.context import HomeLoss
from ..ledger.state.sessions import Grant
from ..types import ColumnSpec, Event
from ..types.blocks import Block, BlockSlices
from . import remote_payload
from .checks import check_call, completed, owns
from .clients import ClientProcess, ClientTable
from .listeners import Listeners
from .measures import Measures
from .payload_manager import CallPayload, PayloadManager
from .protocol import UNRECORDED, Call, CallResult, ClientHello, Unrecorded, Welcome, decode_result, encode, failure

_log = logging.getLogger(__name__)


class Clock:
    """Ledger seconds: this host's monotonic clock while the run is served; downtime does not count."""

    def __init__(self) -> None:
        self._offset = 0.0
        self._fixed: float | None = None  # the time of the record being replayed

    def __call__(self) -> float:
        return time.monotonic() + self._offset if self._fixed is None else self._fixed

    def stop(self, now: float) -> None:
        """Show this time until ``resume``."""
        self._fixed = now

    def resume(self, now: float) -> None:
        """Continue from ledger time ``now``."""
        self._fixed = None
        self._offset = now - time.monotonic()

    def to_host_time(self, event: Event) -> Event:
        """Return a ledger event with the host's monotonic time."""
        if not self._offset:
            return event
        shifted: Event = msgspec.structs.replace(event, time_s=event.time_s - self._offset)
        return shifted


class PendingCall(NamedTuple):
    """A call without a reply from the ledger yet.

    ``ids``: rows that it completes, in the order of its block's entries. ``inline``: send payload
    beside the answer. ``then``: a lease to request next. ``first``: the reply before it.
    """

    session: str
    command: cmd.AnyCommand
    ids: Ids | None
    inline: bool
    then: cmd.LeaseRows | None = None
    first: cmd.Reply | None = None


class TrainedStep(NamedTuple):
    """A step being acknowledged: rows, groups, and the version current when each row was completed."""

    number: int
    ids: Ids
    groups: Ids
    completed_at: Ids


class CallExecutor:
    """``welcome``: the reply to a hello, without the session. ``send``: sends an answer by ticket;
    its last argument is True if ``QueueServer.make`` completes it. ``forget``: called when a
    session has ended. Not thread-safe: only the server's thread uses it."""

    KEPT = ("_pending",)

    def __init__(
        self,
        ledger: Ledger,
        payloads: PayloadManager,
        clock: Clock,
        listeners: Listeners,
        welcome: Welcome,
        send: Callable[[int, bytes, bool], None],
        forget: Callable[[str], None],
    ) -> None:
        self.ledger, self.payloads, self.clock, self._welcome = ledger, payloads, clock, welcome
        self.clients = ClientTable()
        self._state, self._record = ledger.state, ledger.state.context.log
        self._listeners, self._send, self._forget = listeners, send, forget
        self._measures = Measures(ledger, payloads.index, payloads.reader)
        self._pending: dict[int, PendingCall] = {}
        self._digest = 0

    def take_digest(self) -> int:
        """Return a digest of the answers since the last call; 0 if nothing is recorded."""
        digest, self._digest = self._digest, 0
        return digest

    # ---- inputs

    def execute(self, session: str, ticket: int, call: Call, now: float) -> None:
        """Execute a call. It is answered now, or by a later input."""
        try:
            if call.command is None:
                self._answer(ticket, session, CallResult(cmd.Done()))
            elif isinstance(call.command, ClientHello):
                self._open_session(session, ticket, call.command, now)
            elif isinstance(call.command, UNRECORDED):
                raise ProtocolError("a request that changes nothing is not executed")
            else:
                self._execute(session, ticket, call, now)
        except AsyncFlowError as error:
            self._answer(ticket, session, CallResult(error=failure(error)))
        except Exception as error:  # a call that the checks should have rejected
            _log.exception("a call failed in the queue server")
            error = ProtocolError(f"the call failed in the server: {error!r}")
            self._answer(ticket, session, CallResult(error=failure(error)))
        if session not in self.clients:  # it would never be closed
            self._forget(session)

    def drop(self, session: str, ticket: int, answer: bytes | None, now: float) -> None:
        """Undo a cancelled call. ``answer``: its unread answer; None if there is none yet."""
        if session not in self.clients:
            return
        if answer := self._record.record(lambda: answer or b""):
            self._undo(session, decode_result(answer), now)
        elif ticket:
            self._pending.pop(ticket, None)
            self.payloads.discard(ticket)
            self.ledger.forget(ticket, now)
        self._flush()

    def close_session(self, session: str, reason: str, now: float, *, blame: bool = True) -> None:
        """Close the session of a dead process. ``blame``: its rows count an attempt."""
        client = self.clients.close(session)
        homes = [home for home in self._state.homes.by_number.values() if home.unit == client.number]
        self.payloads.end_session(session)
        self.ledger.session_died(client.number, now, reason, blame=blame)
        if not blame:
            self.clients.silence(client, {home.number: home.absent_since for home in homes})
        self._flush()
        self._clean_up(session, client.number)

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

    def fail_lost(self, ids: Ids, tickets: tuple[int, ...], now: float) -> None:
        """Fail rows, and waiting puts (by ticket), whose payload is lost."""
        self.ledger.lose(ids, now, LOST_REASON, tickets)
        self._flush()

    def report_steps_again(self) -> None:
        """Report acknowledged steps with live rows: a listener may not have read them."""
        rows = self._state.rows
        for step, ids in self._state.steps.acknowledged() if self._listeners.steps else ():
            at = rows.at(ids)
            self._report_step(TrainedStep(step, ids, rows.first[at], rows.current[at]))

    # ---- calls

    def _open_session(self, session: str, ticket: int, hello: ClientHello, now: float) -> None:
        if hello.sdk != __version__:
            raise ProtocolError(f"this run is served by asyncflow-sdk {__version__}; {hello.name} has {hello.sdk}")
        if session in self.clients:
            raise ProtocolError(f"session {session} is open already")
        self.ledger.apply(0, cmd.OpenSession(name=hello.name), now, 0)
        (_, joined), *_rest = self.ledger.drain().answers
        assert isinstance(joined, cmd.SessionOpened)
        self.clients.open(session, ClientProcess(joined.session, hello.pid, hello.pid_key, hello.host, hello.public))
        self.payloads.open_session(session)
        welcome = msgspec.structs.replace(self._welcome, session=joined.session)
        self._answer(ticket, session, CallResult(welcome), completed_by_make=True)

    def _execute(self, session: str, ticket: int, call: Call, now: float) -> None:
        command, block = call.command, call.block
        assert command is not None
        assert not isinstance(command, ClientHello | Unrecorded)
        if isinstance(command, cmd.OpenSession):
            raise ProtocolError("sessions are opened by hello, not by join")
        number = self.clients.number(session)
        owner, writer = session, number
        if call.payload is not None:  # the block was sent beside the call
            owner, writer = remote_payload.OWNER, remote_payload.NUMBER
        held = False
        try:
            ids, step = self._check(writer, command, block)
            if isinstance(command, (cmd.AddRows, cmd.Complete)):
                command = msgspec.structs.replace(command, nbytes=block.nbytes if block else 0)
            command = self._measures.fill(command, block)
            lease: Grant | None = None
            if step >= 0 and isinstance(command, cmd.Complete):
                lease = self._state.leases.by_token.get(command.token)
            unread, trained = self._unread(command), self._trained(lease, ids)
            if call.then is not None and not isinstance(command, (cmd.Complete, cmd.GiveBack)):
                raise ProtocolError("`then` needs a completion or a return of rows")
            self._pending[ticket] = PendingCall(session, command, ids, call.inline, call.then)
            if block is not None:
                self.payloads.hold(ticket, CallPayload(owner, block))
                held = True
            self.ledger.apply(number, command, now, ticket)
            if len(unread):
                self._find_lost(unread, now)
        except Exception:
            self._pending.pop(ticket, None)
            self.payloads.discard(ticket)
            if not held and block is not None and owns(writer, block.segment):
                self.payloads.free(CallPayload(owner, block))
            raise
        if lease is not None and lease.shards is not None and len(lease.shards.done) < lease.shards.size:
            trained = None  # other ranks have to acknowledge it, too
        self._flush(trained)
        if isinstance(command, (cmd.CloseSession, cmd.Dismiss)):
            self._close_left()

    def _close_left(self) -> None:
        """Remove sessions that the ledger has closed."""
        known = self._state.sessions.by_id
        for session, client in list(self.clients.by_session.items()):
            if client.number not in known:
                self.clients.close(session)
                self.payloads.end_session(session)
                self._clean_up(session, client.number)

    def _clean_up(self, session: str, number: int) -> None:
        self._forget(session)
        for ticket in [ticket for ticket, pending in self._pending.items() if pending.session == session]:
            del self._pending[ticket]
            self.payloads.forget(ticket)
        self.payloads.remove_segments(session, number)

    def _check(self, number: int, command: cmd.AnyCommand, block: Block | None) -> tuple[Ids | None, int]:
        """Return the rows that a call completes, and their step. Raises SchemaError, PayloadLost
        for invalid payload.

        The result depends on files, so it is recorded.
        """
        if not self._record.active:
            return check_call(self.ledger, self.payloads.rows, number, command, block)
        found: list[tuple[Ids | None, int]] = []

        def look() -> bytes:
            """Check the call and return its encoded error, if any."""
            try:
                found.append(check_call(self.ledger, self.payloads.rows, number, command, block))
            except AsyncFlowError as error:
                return encode(failure(error))
            return b""

        if refused := self._record.record(look):
            raise error_from_name(*msgspec.msgpack.decode(refused, type=tuple[str, str]))
        return found[0] if found else completed(self.ledger, command, block)

    def _trained(self, lease: Grant | None, ids: Ids | None) -> TrainedStep | None:
        if lease is None or ids is None:
            return None
        ids = ids if lease.shards is None else lease.ids
        rows, at = self._state.rows, self._state.rows.at(ids)
        return TrainedStep(lease.step, ids, rows.first[at], rows.current[at])

    def _unread(self, command: cmd.AnyCommand) -> Ids:
        """Return the rows that their holder gives back as unreadable."""
        if not isinstance(command, cmd.GiveBack) or not command.unread:
            return np.empty(0, np.int64)
        lease = self._state.leases.by_token.get(command.token)
        return np.empty(0, np.int64) if lease is None else lease.ids

    def _find_lost(self, unread: Ids, now: float) -> None:
        """If payload of unreadable rows is lost, fail all rows with lost payload."""

        def look() -> bytes:
            """Return the encoded ids of lost rows and tickets of lost puts."""
            lost, waiting = self.payloads.find_lost(self.payloads.blocks_exist, among=unread)
            return msgspec.msgpack.encode((pack_ids(lost), waiting)) if len(lost) else b""

        if found := self._record.record(look):
            lost, waiting = msgspec.msgpack.decode(found, type=tuple[bytes, list[int]])
            self.ledger.lose(unpack_ids(lost), now, LOST_REASON, waiting)

    # ---- effects

    def _flush(self, trained: TrainedStep | None = None) -> None:
        """Send answers, call listeners, and free memory. ``trained``: the acknowledged step."""
        effects = self.ledger.drain()
        following: list[tuple[int, PendingCall, cmd.LeaseRows]] = []
        for ticket, reply in effects.answers:
            pending = self._pending.pop(ticket, None)
            if pending is None:
                continue
            answer = self._apply_reply(ticket, pending, reply)
            if pending.then is not None and answer.error is None:
                assert not isinstance(reply, AsyncFlowError)
                call = PendingCall(pending.session, pending.then, None, pending.inline, first=reply)
                following.append((ticket, call, pending.then))
            else:
                self._answer(
                    ticket, pending.session, answer, completed_by_make=pending.inline and bool(answer.slices)
                )
        done = any(isinstance(reply, cmd.Completed) for _, reply in effects.answers)
        if trained is not None and done and self._listeners.steps:
            self._report_step(trained)
        for event in effects.events:
            self._listeners.event(self.clock.to_host_time(event))
        for ids in effects.retired:
            self.payloads.retire(ids)
        if effects.homes_lost:
            self._lose_homes(effects.homes_lost)
        for ticket, call, lease in following:
            self._pending[ticket] = call
            self.ledger.apply(self.clients.number(call.session), lease, self.ledger.now, ticket)
        if following or effects.homes_lost:
            self._flush()

    def _lose_homes(self, lost: list[HomeLoss]) -> None:
        """Report the columns in lost homes and blocks to the ledger: rows fail."""
        losses, tickets = [], []
        for each in lost:
            columns, waiting = self.payloads.drop_lost(each)
            losses.append((each, columns))
            tickets += waiting
        self.ledger.lose_homes(losses, self.ledger.now, tickets)

    def _apply_reply(self, ticket: int, pending: PendingCall, reply: cmd.Reply | AsyncFlowError) -> CallResult:
        """Place or free the payload of a call, and return its result."""
        if isinstance(reply, AsyncFlowError):
            self.payloads.discard(ticket)
            return CallResult(error=failure(reply), first=pending.first)  # type: ignore[arg-type]
        slices: tuple[BlockSlices, ...] = ()
        schema: dict[str, ColumnSpec] = {}
        if isinstance(reply, cmd.PutDone):
            assert isinstance(pending.command, cmd.AddRows)
            self.payloads.put(ticket, pending.command, reply, unpack_ids(reply.groups))
        elif isinstance(reply, cmd.Completed) and pending.ids is not None:
            self.payloads.complete(ticket, pending.ids, unpack_ids(reply.revoked + reply.again))
        elif isinstance(reply, (cmd.PublishReply, cmd.RollbackDone)):
            self.payloads.remove_old_weights()
        elif isinstance(reply, cmd.Leased):
            needs = self._state.tasks[reply.task].spec.needs
            if isinstance(pending.command, cmd.LeaseRows) and pending.command.columns is not None:
                needs = pending.command.columns
            slices, schema = self.payloads.locate(unpack_ids(reply.ids), needs)
        return CallResult(reply, None, slices, schema, first=pending.first)  # type: ignore[arg-type]

    def _undo(self, session: str, unread: CallResult, now: float) -> None:
        """Undo the effects of a result that its client will never read."""
        if unread.freed:
            self.payloads.free_later(session, unread.freed)
        if isinstance(unread.reply, cmd.Leased) and unread.reply.token in self._state.leases.by_token:
            lease, rank = self._state.leases.by_token[unread.reply.token], unread.reply.rank
            back = cmd.GiveBack(token=lease.token, reason="the request for it was cancelled", rank=rank)
            self.ledger.apply(lease.session_of(rank), back, now, 0)
        elif isinstance(unread.reply, cmd.Permitted):
            self.ledger.reply_undelivered(self.clients.number(session), unread.reply.version, now)

    def _answer(self, ticket: int, session: str, answer: CallResult, *, completed_by_make: bool = False) -> None:
        if freed := self.payloads.take_freed(session):
            answer = msgspec.structs.replace(answer, freed=freed)
        body = encode(answer)
        if self._record.active:
            self._digest = xxhash.xxh3_64_intdigest(body, self._digest)
        self._send(ticket, body, completed_by_make)

    def _report_step(self, step: TrainedStep) -> None:
        try:
            rows = self.payloads.read_step(step.ids, step.groups, step.completed_at)
        except Exception:  # later effects must still be executed
            _log.exception("the rows of step %d cannot be read for the listener", step.number)
        else:
            self._listeners.step(step.number, rows)
