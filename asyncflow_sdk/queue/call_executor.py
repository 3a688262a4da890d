"""Carry out the calls of clients on the ledger and on the payload.

Everything here follows from the inputs and their times: the same inputs, carried out again from a journal, give the same state and the
same answers. What user code and the file system say meanwhile is recorded in the ledger's ``NondeterminismLog``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from .._version import __version__
from ..errors import AsyncFlowError, ProtocolError, by_name
from ..ledger import Ledger, pack_ids, unpack_ids
from ..ledger import commands as cmd
from ..ledger.commands import Ids
from ..ledger.state.grants import Grant
from ..types import ColumnSpec
from . import remote
from .blocks import Block, Located
from .checks import check_call, completed, owns
from .clients import Client, Clients
from .clock import Clock
from .listeners import Listeners
from .measures import Measures
from .payload_manager import PayloadManager
from .places import LOST
from .protocol import Answer, Call, Hello, Welcome, decode_answer, encode, failure

_log = logging.getLogger(__name__)


class PendingCall(NamedTuple):
    """A call whose reply is still to come from the ledger. ``ids``: rows that it completes, in the order of its block's entries.
    ``inline``: True if payload goes beside the answer. ``then``: a lease to ask for next. ``first``: reply to the command before."""

    session: str
    command: cmd.AnyCommand
    ids: Ids | None
    inline: bool
    then: cmd.LeaseRows | None = None
    first: cmd.Reply | None = None


class TrainedStep(NamedTuple):
    """Rows of a step that is being acknowledged, their groups, and the version that was current when each was completed."""

    number: int
    ids: Ids
    groups: Ids
    completed_at: Ids


class RunMemory(NamedTuple):
    """Directories of the run's shared memory. ``rows``: of the segments of rows, if elsewhere; else "". ``durability``: "" if a server
    that dies does not come back."""

    directory: str
    rows: str
    durability: str


class CallExecutor:
    """``send``: send an answer by ticket; True if ``QueueServer.make`` completes it. ``forget``: a session has ended. Not thread-safe:
    the server's thread owns it."""

    KEPT = ("_pending",)

    def __init__(
        self,
        ledger: Ledger,
        payloads: PayloadManager,
        clock: Clock,
        listeners: Listeners,
        memory: RunMemory,
        send: Callable[[int, bytes, bool], None],
        forget: Callable[[str], None],
    ) -> None:
        self.ledger, self.payloads, self.clock, self.memory = ledger, payloads, clock, memory
        self.clients = Clients()
        self._state, self._record = ledger.state, ledger.state.context.log
        self._listeners, self._send, self._forget = listeners, send, forget
        self._measures = Measures(ledger, payloads.places, payloads.reader)
        self._pending: dict[int, PendingCall] = {}
        self._digest = 0

    def take_digest(self) -> int:
        """Return a digest of the answers since the last call, by which a replay finds that one differs. 0 if nothing is recorded."""
        digest, self._digest = self._digest, 0
        return digest

    # ---- inputs

    def execute(self, session: str, ticket: int, call: Call, now: float) -> None:
        """Carry out a call. It is answered now, or by a later input."""
        try:
            if call.command is None:
                self._answer(ticket, session, Answer(cmd.Done()))
            elif isinstance(call.command, Hello):
                self._open_session(session, ticket, call.command, now)
            else:
                self._execute(session, ticket, call, now)
        except AsyncFlowError as error:
            self._answer(ticket, session, Answer(error=failure(error)))
        except Exception as error:  # a call that should have been refused: it fails alone
            _log.exception("the queue server failed at a call")
            error = ProtocolError(f"the server failed at this call: {error!r}")
            self._answer(ticket, session, Answer(error=failure(error)))
        if session not in self.clients:  # nobody would ever end it, so nothing is remembered of it
            self._forget(session)

    def drop(self, session: str, ticket: int, answer: bytes | None, now: float) -> None:
        """Nobody waits for a call, or reads its answer. ``answer``: None if there is none yet. Undo the effects it may have had."""
        if session not in self.clients:
            return
        if answer := self._record.record(lambda: answer or b""):
            self._take_back(session, decode_answer(answer), now)
        elif ticket:
            self._pending.pop(ticket, None)
            self.payloads.discard(ticket)
            self.ledger.forget(ticket, now)
        self._flush()

    def close_session(self, session: str, reason: str, now: float, *, blame: bool = True) -> None:
        """The process of a session has ended. ``blame``: that counts as an attempt of the rows it held."""
        number = self.clients.by_session.pop(session).number
        self.payloads.end_session(session)
        self.ledger.session_died(number, now, reason, blame=blame)
        self._flush()
        self._clean_up(session, number)

    def tick(self, now: float) -> None:
        """Let leases and parked requests end that are due."""
        self.ledger.tick(now)
        self._flush()

    def lose(self, ids: Ids, tickets: tuple[int, ...], now: float) -> None:
        """Fail rows whose payload is gone, and puts under way whose payload is gone."""
        self.ledger.lose(ids, now, LOST, tickets)
        self._flush()

    def tell_steps_again(self) -> None:
        """Call the listener for acknowledged steps whose rows are there: whoever was told of them may have died with an earlier server
        before it had read them."""
        rows = self._state.rows
        for step, ids in self._state.steps.acknowledged() if self._listeners.steps else ():
            at = rows.at(ids)
            self._tell_step(TrainedStep(step, ids, rows.first[at], rows.current[at]))

    # ---- calls

    def _open_session(self, session: str, ticket: int, hello: Hello, now: float) -> None:
        if hello.sdk != __version__:
            raise ProtocolError(f"this run is served by asyncflow-sdk {__version__}; {hello.name} has {hello.sdk}")
        if session in self.clients:
            raise ProtocolError(f"session {session} has already said hello")
        self.ledger.apply(0, cmd.OpenSession(name=hello.name), now, 0)
        (_, joined), *_rest = self.ledger.drain().answers
        assert isinstance(joined, cmd.SessionOpened)
        self.clients.by_session[session] = Client(joined.session, hello.pid, hello.pid_key, hello.host)
        self.payloads.open_session(session)
        memory = self.memory
        welcome = Welcome(joined.session, memory.directory, __version__, memory.durability, memory.rows)
        self._answer(ticket, session, Answer(welcome), made=True)

    def _execute(self, session: str, ticket: int, call: Call, now: float) -> None:
        command, block = call.command, call.block
        assert command is not None
        assert not isinstance(command, Hello)
        if isinstance(command, cmd.OpenSession):
            raise ProtocolError("join is said by hello")
        number = self.clients.number(session)
        owner, writer = (remote.OWNER, remote.NUMBER) if call.payload is not None else (session, number)
        try:
            ids, step = self._check(writer, command, block)
            if isinstance(command, cmd.AddRows | cmd.Complete):
                command = msgspec.structs.replace(command, nbytes=block.nbytes if block else 0)
            command = self._measures.fill(command, block)
            lease = self._lease_of_step(command) if step >= 0 else None
            unread, trained = self._unread(command), self._trained(lease, ids)
            if call.then is not None and not isinstance(command, cmd.Complete | cmd.GiveBack):
                raise ProtocolError("a lease rides with a completion or a return of rows, and with nothing else")
            if isinstance(command, cmd.AddCheckpoint):
                self._listeners.final(command.covers)
            self._pending[ticket] = PendingCall(session, command, ids, call.inline, call.then)
            if block is not None:
                self.payloads.hold(ticket, owner, block)
                block = None
            self.ledger.apply(number, command, now, ticket)
            if len(unread):
                self._find_lost(unread, now)
        except Exception:
            self._pending.pop(ticket, None)
            self.payloads.discard(ticket)
            if block is not None and owns(writer, block.segment):
                self.payloads.free(owner, block)
            raise
        if lease is not None and lease.shards is not None and len(lease.shards.done) < lease.shards.size:
            trained = None  # other ranks have not acknowledged yet
        self._flush(trained)
        if isinstance(command, cmd.CloseSession | cmd.Dismiss):
            self._close_left()

    def _close_left(self) -> None:
        """Close sessions that the ledger has closed."""
        known = self._state.sessions.by_id
        for session, client in list(self.clients.by_session.items()):
            if client.number not in known:
                del self.clients.by_session[session]
                self.payloads.end_session(session)
                self._clean_up(session, client.number)

    def _clean_up(self, session: str, number: int) -> None:
        self._forget(session)
        for ticket in [ticket for ticket, pending in self._pending.items() if pending.session == session]:
            del self._pending[ticket]
            self.payloads.forget(ticket)
        self.payloads.remove_segments(session, number)

    def _check(self, number: int, command: cmd.AnyCommand, block: Block | None) -> tuple[Ids | None, int]:
        """Return the rows that a call completes, and their step. Raises SchemaError, PayloadLost for wrong payload: only the files say
        that, so the result is recorded."""
        if not self._record.active:
            return check_call(self.ledger, self.payloads.rows, number, command, block)
        found: list[tuple[Ids | None, int]] = []

        def look() -> bytes:
            try:
                found.append(check_call(self.ledger, self.payloads.rows, number, command, block))
            except AsyncFlowError as error:
                return encode(failure(error))
            return b""

        if refused := self._record.record(look):
            raise by_name(*msgspec.msgpack.decode(refused, type=tuple[str, str]))
        return found[0] if found else completed(self.ledger, command, block)

    def _lease_of_step(self, command: cmd.AnyCommand) -> Grant | None:
        return self._state.leases.by_token.get(command.token) if isinstance(command, cmd.Complete) else None

    def _trained(self, lease: Grant | None, ids: Ids | None) -> TrainedStep | None:
        """Return the rows of a step that this call acknowledges; of all ranks, if several share the step."""
        if lease is None or ids is None:
            return None
        ids = ids if lease.shards is None else lease.ids
        rows, at = self._state.rows, self._state.rows.at(ids)
        return TrainedStep(lease.step, ids, rows.first[at], rows.current[at])

    def _unread(self, command: cmd.AnyCommand) -> Ids:
        """Return the rows that their holder gives back because it cannot read them."""
        if not isinstance(command, cmd.GiveBack) or not command.unread:
            return np.empty(0, np.int64)
        lease = self._state.leases.by_token.get(command.token)
        return np.empty(0, np.int64) if lease is None else lease.ids

    def _find_lost(self, unread: Ids, now: float) -> None:
        """Fail all rows whose payload is gone, if that of rows that could not be read is."""

        def look() -> bytes:
            lost, waiting = self.payloads.lost(self.payloads.there, among=unread)
            return msgspec.msgpack.encode((pack_ids(lost), waiting)) if len(lost) else b""

        if found := self._record.record(look):
            lost, waiting = msgspec.msgpack.decode(found, type=tuple[bytes, list[int]])
            self.ledger.lose(unpack_ids(lost), now, LOST, waiting)

    # ---- effects

    def _flush(self, trained: TrainedStep | None = None) -> None:
        """Send the answers of the ledger, call listeners, and free memory. ``trained``: a step that is acknowledged."""
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
                self._answer(ticket, pending.session, answer, made=pending.inline and bool(answer.located))
        done = any(isinstance(reply, cmd.Completed) for _, reply in effects.answers)
        if trained is not None and done and self._listeners.steps:
            self._tell_step(trained)
        for event in effects.events:
            self._listeners.event(self.clock.told(event))
        for ids in effects.retired:
            self.payloads.retire(ids)
        for ticket, call, lease in following:
            self._pending[ticket] = call
            self.ledger.apply(self.clients.number(call.session), lease, self.ledger.now, ticket)
        if following:
            self._flush()

    def _apply_reply(self, ticket: int, pending: PendingCall, reply: cmd.Reply | AsyncFlowError) -> Answer:
        """Place or free the payload of a call, and return its answer."""
        if isinstance(reply, AsyncFlowError):
            self.payloads.discard(ticket)
            return Answer(error=failure(reply), first=pending.first)  # type: ignore[arg-type]
        located: tuple[Located, ...] = ()
        schema: dict[str, ColumnSpec] = {}
        if isinstance(reply, cmd.PutDone):
            assert isinstance(pending.command, cmd.AddRows)
            self.payloads.put(ticket, pending.command, reply, unpack_ids(reply.groups))
        elif isinstance(reply, cmd.Completed) and pending.ids is not None:
            self.payloads.complete(ticket, pending.ids, unpack_ids(reply.revoked + reply.again))
        elif isinstance(reply, cmd.PublishReply | cmd.RollbackDone):
            self.payloads.keep_weights()
        elif isinstance(reply, cmd.Leased):
            needs = self._state.tasks[reply.task].spec.needs
            if isinstance(pending.command, cmd.LeaseRows) and pending.command.columns is not None:
                needs = pending.command.columns
            located, schema = self.payloads.locate(unpack_ids(reply.ids), needs)
        return Answer(reply, None, located, schema, first=pending.first)  # type: ignore[arg-type]

    def _take_back(self, session: str, unread: Answer, now: float) -> None:
        """Undo what an answer gave that its client will never read."""
        if unread.freed:
            self.payloads.free_later(session, unread.freed)
        if isinstance(unread.reply, cmd.Leased) and unread.reply.token in self._state.leases.by_token:
            lease, rank = self._state.leases.by_token[unread.reply.token], unread.reply.rank
            back = cmd.GiveBack(token=lease.token, reason="the request for it was cancelled", rank=rank)
            self.ledger.apply(lease.session_of(rank), back, now, 0)
        elif isinstance(unread.reply, cmd.Permitted):
            self.ledger.reply_undelivered(self.clients.number(session), unread.reply.version, now)

    def _answer(self, ticket: int, session: str, answer: Answer, *, made: bool = False) -> None:
        """Send an answer, with the session's blocks that were freed."""
        if freed := self.payloads.take_freed(session):
            answer = msgspec.structs.replace(answer, freed=freed)
        body = encode(answer)
        if self._record.active:
            self._digest = xxhash.xxh3_64_intdigest(body, self._digest)
        self._send(ticket, body, made)

    def _tell_step(self, step: TrainedStep) -> None:
        try:
            read: Any = self.payloads.read_step(step.ids, step.groups, step.completed_at)
        except Exception:  # the effects that follow must be carried out all the same
            _log.exception("the rows of step %d cannot be kept for reading", step.number)
        else:
            self._listeners.step(step.number, read)
