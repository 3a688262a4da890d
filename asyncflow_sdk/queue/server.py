"""QueueServer: the ledger, the places of payload and the wire, put together. Everything runs in the wire's thread."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from .._version import __version__
from ..errors import AsyncFlowError, MemoryFull, ProtocolError, WireError, by_name
from ..interfaces import Sampler, StalenessPolicy
from ..ledger import commands as cmd
from ..ledger.commands import Ids
from ..ledger.factory import make_policy, make_sampler
from ..types import Batch, Event
from ..types import events as ev
from ..wire import MAX_BYTES, KeyPair, PayloadSink, Server, has_ended, offer_key, process_key
from . import remote
from .blocks import Block
from .carrying import Carrying, Pending
from .checks import check_call, completed, owns
from .deferred import DeferredRequest, DeferredRequests
from .journal import Asked, Dropped, Gone, Record, Ticked
from .keeping import Keeping
from .measuring import Measuring
from .protocol import Answer, Call, Hello, Welcome, decode_answer, decode_call, encode, failure
from .recovery import Recovered
from .remote import UNREADABLE, IncomingBlock, Refused

STATUS_EVERY_S = 1.0
MOST_SESSIONS = 4096
"""A session costs memory, and a descriptor for each connection of it."""
LOOKS = (cmd.GetAudit, cmd.GetFailed, cmd.GetStatus, cmd.GetCut, cmd.GetPut, cmd.GetRestoration)
"""Commands that change nothing."""
_log = logging.getLogger(__name__)


class QueueServer(Carrying):
    """Serves a queue and versions, at a socket of its own on this host and at ``addresses``, and to
    its own process at ``here``.

    ``on_event``, and ``on_step`` with the number of an acknowledged step and a function that reads its rows
    (every column they have; in any thread, once), are called in the server's thread and must return at
    once. Of a server that comes back, steps that no checkpoint covers are told again. ``on_final``: called there before a checkpoint
    makes the steps below a number final: they are not told again, so it returns when they need not be. What these raise is logged and
    changes nothing. ``keys``: for the addresses that are tcp, which need them, unless ``insecure``; this user's clients on this
    host find them.
    ``max_call_bytes``: of the largest call taken, with its payload where that comes over the socket; and of the payload of
    all calls together that have not arrived whole.

    ``journal``: a directory where every input is kept before its answer leaves, so that a server that is made with it
    later goes on where this one died (``recovered`` tells what it found). ``durability``: "process" (any process may
    die at any time) or "host" (the payload is on disk, too, before a put is acknowledged); None: what it was. Raises
    ConfigError when the directory is served by another process or was written by another version. ``history``: what a journal
    replaces is kept, too, for replays. ``start`` False: nobody is served, as in a replay.
    """

    KEPT = ("_sessions", "_processes", "_pending", "_freed")

    def __init__(
        self,
        addresses: list[str],
        on_event: Callable[[Event], None] | None = None,
        on_step: Callable[[int, Callable[[], Batch]], None] | None = None,
        *,
        on_final: Callable[[int], None] | None = None,
        journal: Path | None = None,
        durability: str | None = None,
        keys: KeyPair | None = None,
        insecure: bool = False,
        max_call_bytes: int = MAX_BYTES,
        samplers: Mapping[str, Callable[..., Sampler]] | None = None,
        policies: Mapping[str, Callable[..., StalenessPolicy]] | None = None,
        history: bool = False,
        start: bool = True,
    ) -> None:
        super().__init__(Keeping(journal, durability, history), on_event, on_step, on_final)
        self.ledger.samplers.make_sampler = functools.partial(make_sampler, own=samplers)
        self.ledger.staleness.make_policy = functools.partial(make_policy, own=policies)
        # the name of an inproc socket is free a while after its server is gone
        self.here = f"inproc://{self.directory.path.name}-{secrets.token_hex(4)}"
        addresses = [self.here, f"ipc://{self.directory.path}/queue", *addresses]
        self._measuring = Measuring(self.ledger, self._places, self._reader)
        self._next_status = 0.0
        self._deferred = DeferredRequests()
        self.recovered: Recovered | None = None
        try:
            self._wire = self._keeping.listen(
                addresses, functools.partial(self._listen, keys, insecure, max_call_bytes)
            )
        except BaseException:
            self._keeping.close(over=False)
            raise
        self.addresses = self._wire.addresses
        self._wire.on_note(self._note_or_log)
        if self.directory.warning:
            self._note_or_log(self.directory.warning, "warning")
        try:
            self.recovered = self._keeping.recover(self)
            self.ledger.staleness.make_policy(
                self.ledger.staleness.rule.spec
            )  # one that is not there any more is an error now
        except BaseException:
            self._wire.stop()
            self._mapper.close()
            self._keeping.close(over=False)
            raise
        if self.recovered is not None:
            self._note(str(self.recovered), self.recovered.level)
        for session, (pid, key) in list(self._processes.items()):
            if has_ended(pid, key):  # with its server, as when a whole run is killed: no row is to blame for that
                self.gone(session, f"process {pid} ended while nobody served", blame=False)
            else:
                self._wire.watch(session, pid, key)
        if start:
            self._tell_again()
            self._wire.start()

    def _listen(
        self, keys: KeyPair | None, insecure: bool, max_call_bytes: int, addresses: list[str], hold: bool
    ) -> Server:
        """Bind to ``addresses``. The key is offered before, so that whoever can connect finds it."""
        run = None if keys is None else keys.run
        offer_key(self.directory.path, addresses, run, bound=False)
        server = Server(
            addresses, self, None if keys is None else keys.server, max_call_bytes, hold=hold, insecure=insecure
        )
        offer_key(self.directory.path, server.addresses, run, bound=True)
        return server

    def _note(self, text: str, level: str) -> None:
        self._emit(ev.Note(time_s=time.monotonic(), text=text, level=level))

    def _note_or_log(self, text: str, level: str) -> None:
        self._note(text, level)
        if self._on_event is None:  # nobody would see it
            _log.log(logging.WARNING if level == "warning" else logging.INFO, text)

    def close(self) -> None:
        """Stop serving and remove the run's segments, unless a journal may want them: one does until the stream has ended
        and every row with it. Views that processes hold stay valid."""
        journal = self._keeping.journal
        self._wire.stop(for_good=lambda: journal is None or self._is_over())
        for kept in list(self._kept):
            kept.now()
        self._remote.close()
        self._mapper.close()
        over = self._is_over()
        if journal is not None and not over:
            live = self.ledger.audit().live
            text = f"{live} live rows are kept for whoever serves this run again; to give them up, remove"
            self._note(f"{text} {journal.path.parent}", "info")
        self._keeping.close(over=over)

    def _is_over(self) -> bool:
        """Whether the stream has ended, and every row with it."""
        return self.ledger.ended and not self.ledger.audit().live

    # ---- called by the wire

    def sink(self, session: str, body: bytes, nbytes: int) -> PayloadSink:
        if session not in self._sessions:
            return Refused(ProtocolError("say hello first"))
        return self._remote.sink(body, nbytes)

    def request(self, session: str, ticket: int, body: bytes, payload: Any) -> None:
        self._hear(session, ticket, body, payload)
        if session not in self._sessions:  # nobody would ever end it, so nothing is remembered of it
            self._wire.forget(session)

    def _hear(self, session: str, ticket: int, body: bytes, payload: IncomingBlock | Refused | None) -> None:
        try:
            call = decode_call(body)
        except UNREADABLE as error:
            self._say(ticket, ProtocolError(f"the server cannot read this call: {error}"))
            return
        if not self._replaying and session in self._sessions:  # a call of any other session is refused below
            for event in call.events:
                self._emit(event)
        if self._is_look(session, call):
            self._look(session, ticket, call.command)
            return
        now = self._clock()
        request = DeferredRequest(session, ticket, *self._wire.numbers(ticket), call, body, payload, now)
        try:
            if isinstance(call.command, Hello) and not self._replaying:
                self._check_room(session)
            self._deferred.check_turn(request)
            self._take(request)
        except MemoryFull as full:
            self._defer(request, full, now)
        except WireError as no_room:
            self._say(ticket, no_room)

    def _take(self, request: DeferredRequest) -> None:
        """Carry out a request, and record it. Raises MemoryFull if the disk has no room: nothing was done."""
        call, body = request.call, request.body
        self._keeping.reserve(len(body), new_rows=request.puts_rows)
        if not self._replaying and (request.payload is not None or call.payload is not None):
            try:
                call = self._remote.store(call, request.payload)
                body = encode(call)
            except AsyncFlowError as error:
                self._say(request.ticket, error)
                return
        self._change(request.session, request.ticket, call, request.since)
        self._record(Asked(request.since, request.session, request.seq, request.done, request.ticket, body))

    # ---- requests that wait for room on the disk

    def _defer(self, request: DeferredRequest, full: MemoryFull, now: float) -> None:
        """Let a request wait up to its deadline, where the disk has no room for it."""
        if not request.may_wait:
            request.release()
            self._say(request.ticket, full, request.call.block)
            return
        if not self._deferred:
            self._note(f"{full}; new rows wait until there is room", "warning")
        self._deferred.add(request, full, now)
        self._end_late(now)

    def _try_deferred(self, now: float) -> None:
        """Carry out what the disk has room for by now. Puts stay in their order."""
        puts_wait = False
        for request in self._deferred.requests:
            if puts_wait and request.puts_rows:
                continue
            try:
                if request.session in self._sessions:
                    self._take(request.at(now))
            except MemoryFull:
                puts_wait |= request.puts_rows
            else:
                self._deferred.drop(request.ticket)
        if not self._deferred:
            self._note("the disk has room again, and what waited for it was carried out", "info")

    def _end_late(self, now: float) -> None:
        for request in self._deferred.take_late(now):
            request.release()
            self._say(request.ticket, request.refused(now), request.call.block)

    def _check_room(self, session: str) -> None:
        """Raises WireError if no further session can be served."""
        if session in self._sessions:
            return
        if len(self._sessions) >= MOST_SESSIONS:
            raise WireError(
                f"this run has {len(self._sessions)} sessions, and takes no more: close clients that are not needed;"
                " queue.status() and `asyncflow top` list them"
            )
        if self._wire.short:
            raise WireError(
                "the server of this run has hardly a file descriptor left: close clients, or raise its limit (ulimit -n)"
            )

    def dropped(self, session: str, seq: int, ticket: int, answer: bytes | None) -> None:
        if session not in self._sessions:
            return
        if (request := self._deferred.drop(ticket)) is not None:  # not recorded; but what it wrote is free
            request.release()
            if request.call.block is None:
                return
            answer = encode(Answer(freed=request.call.block.packed_serial))
        now = self._clock()
        had = self.ledger.state.context.log.record(lambda: answer or b"")
        if had:
            unread = decode_answer(had)
            if unread.freed:
                self._free_later(session, unread.freed)
            if isinstance(unread.reply, cmd.Leased) and unread.reply.token in self.ledger.state.leases.by_token:
                lease = self.ledger.state.leases.by_token[unread.reply.token]
                rank = unread.reply.rank
                back = cmd.GiveBack(token=lease.token, reason="the request for it was cancelled", rank=rank)
                self.ledger.apply(lease.session_of(rank), back, now, 0)
            elif isinstance(unread.reply, cmd.Permitted):
                self.ledger.unheard(self._sessions[session], unread.reply.version, now)
        elif ticket:
            pending = self._pending.pop(ticket, None)
            if pending is not None and pending.block is not None:
                self._free(pending.owner, pending.block)
            self.ledger.forget(ticket, now)
        self._flush()
        self._record(Dropped(now, session, seq))

    def gone(self, session: str, reason: str, blame: bool = True) -> None:
        number = self._sessions.pop(session, None)
        if number is None:
            return
        now = self._clock()
        for request in self._deferred.drop_session(session):
            request.release()
        self.ledger.session_died(number, now, reason, blame=blame)
        self._flush()
        self._close_session(session, number)
        self._record(Gone(now, session, reason, blame))

    def idle(self) -> float | None:
        now = self._clock()
        due = self.ledger.next_deadline()
        if due is not None and due <= now:
            self.tick(now)
        if self._deferred.due(now):
            self._try_deferred(now)
        self._end_late(now)
        if self._on_event is not None and now >= self._next_status:
            self._next_status = now + STATUS_EVERY_S
            self._status()
        deadlines = [self.ledger.next_deadline(), self._deferred.next_s()]
        deadlines.append(self._next_status if self._on_event is not None else None)
        if self._keeping.try_again_s is not None:
            deadlines.append(now + self._keeping.try_again_s)
        return min((d - now for d in deadlines if d is not None), default=None)

    def tick(self, now: float) -> None:
        """Leases and parked requests that are due end."""
        self.ledger.tick(now)
        self._flush()
        self._record(Ticked(now))

    def settle(self) -> bool:
        if not self._keeping.settle(self._emit):
            return False
        self._files.carry_out()
        self._remote.carry_out()
        if not self._deferred:  # the wire knows them, and what a snapshot knows is not asked again
            self._keeping.compact(self)
        return True

    # ---- requests

    def _is_look(self, session: str, call: Call) -> bool:
        """Whether a call changes nothing, and need not be recorded; so its answer carries no notices."""
        if isinstance(call.command, Hello):
            return False
        if call.command is None:
            return not self._freed.get(session)
        return session not in self._sessions or (isinstance(call.command, LOOKS) and call.then is None)

    def _look(self, session: str, ticket: int, command: cmd.AnyCommand | Hello | None) -> None:
        if session not in self._sessions:
            unknown = "say hello first: this session is unknown here, or its process was seen to end"
            self._say(ticket, ProtocolError(unknown))
        elif command is None:
            self._say(ticket, cmd.Done())
        else:
            self.ledger.apply(self._sessions[session], command, self._clock(), ticket)  # type: ignore[arg-type]
            for _, reply in self.ledger.drain().answers:
                if isinstance(reply, cmd.StatusReport):
                    reply = self._deferred.status(reply, self._sessions, self._clock())
                    reply = self._gauges.fill(reply, self._wire.garbage)
                self._say(ticket, reply)

    def _change(self, session: str, ticket: int, call: Call, now: float) -> None:
        try:
            if call.command is None:
                self._answer(ticket, session, Answer(cmd.Done()))
            elif isinstance(call.command, Hello):
                self._hello(session, ticket, call.command, now)
            else:
                self._command(session, ticket, call, now)
        except AsyncFlowError as error:
            self._fail(ticket, session, error)
        except Exception as error:  # a call that should have been refused: it fails alone
            _log.exception("the queue server failed at a call")
            self._fail(ticket, session, ProtocolError(f"the server failed at this call: {error!r}"))

    def _hello(self, session: str, ticket: int, hello: Hello, now: float) -> None:
        if hello.sdk != __version__:
            raise ProtocolError(f"this run is served by asyncflow-sdk {__version__}; {hello.name} has {hello.sdk}")
        if session in self._sessions:
            raise ProtocolError(f"session {session} has already said hello")
        self.ledger.apply(0, cmd.Join(name=hello.name), now, 0)
        (_, joined), *_rest = self.ledger.drain().answers
        assert isinstance(joined, cmd.Joined)
        self._sessions[session] = joined.session
        self._processes[session] = (hello.pid, hello.pid_key)
        rows = "" if self.rows == self.directory.path else str(self.rows)
        welcome = Welcome(joined.session, str(self.directory.path), __version__, self.durability, rows)
        self._gauges.came(joined.session, hello)
        self._answer(ticket, session, Answer(welcome), made=True)
        if not self._replaying:
            self._wire.watch(session, hello.pid, hello.pid_key)

    def make(self, body: bytes) -> tuple[bytes, Sequence[Any]]:
        """The answer to a hello with what is not the same for a server that came back; rows with their values."""
        answer = decode_answer(body)
        if not isinstance(answer.reply, Welcome):
            return self._remote.inline(answer)
        owner = os.stat(self.directory.path / "owner")
        pid = os.getpid()
        reply = msgspec.structs.replace(
            answer.reply,
            owner=(owner.st_dev, owner.st_ino),
            pid=pid,
            pid_key=process_key(pid),
            max_bytes=self._wire.max_bytes,
            addresses=tuple(each for each in self.addresses if each.startswith("tcp://")),
        )
        return encode(msgspec.structs.replace(answer, reply=reply)), ()

    def _command(self, session: str, ticket: int, call: Call, now: float) -> None:
        command = call.command
        assert command is not None
        assert not isinstance(command, Hello)
        number = self._sessions[session]
        if isinstance(command, cmd.Join):
            raise ProtocolError("join is said by hello")
        block, here = call.block, call.payload is not None
        owner, writer = (remote.OWNER, remote.NUMBER) if here else (session, number)
        try:
            ids, step = self._check(writer, command, block)
            if isinstance(command, (cmd.Put, cmd.Complete)):
                command = msgspec.structs.replace(command, nbytes=block.nbytes if block else 0)
            command = self._measuring.fill(command, block)
            lease = (
                self.ledger.state.leases.by_token.get(command.token)
                if isinstance(command, cmd.Complete) and step >= 0
                else None
            )
            unread = self._unread(command)
            trained = self._trained(lease, ids)
            if call.then is not None and not isinstance(command, (cmd.Complete, cmd.GiveBack)):
                raise ProtocolError("a lease rides with a completion or a return of rows, and with nothing else")
            if isinstance(command, cmd.Checkpoint) and not self._replaying:
                self._tell(self._on_final, command.covers)
            self._pending[ticket] = Pending(session, command, owner, block, ids, call.inline, call.then)
            self.ledger.apply(number, command, now, ticket)
            if len(unread):
                self._look_for(unread, now)
        except Exception:
            self._pending.pop(ticket, None)
            if block is not None and owns(writer, block.segment):
                self._free(owner, block)
            raise
        if lease is not None and lease.shards is not None and len(lease.shards.done) < lease.shards.size:
            trained = None  # other ranks have not acknowledged yet
        self._flush(trained)
        if isinstance(command, (cmd.Leave, cmd.Dismiss)):
            for left in [
                each for each, number in self._sessions.items() if number not in self.ledger.state.sessions.by_id
            ]:
                self._close_session(left, self._sessions.pop(left))

    def _unread(self, command: cmd.AnyCommand) -> Ids:
        """Rows that their holder gives back because it cannot read them."""
        if (
            isinstance(command, cmd.GiveBack)
            and command.unread
            and (lease := self.ledger.state.leases.by_token.get(command.token))
        ):
            return lease.ids
        return np.empty(0, np.int64)

    def _check(self, number: int, command: cmd.AnyCommand, block: Block | None) -> tuple[Ids | None, int]:
        """Raises what is wrong with the payload, which only the files tell; a replay is told what was found."""
        if not self.ledger.state.context.log.active:
            return check_call(self.ledger, self.rows, number, command, block)
        found: list[tuple[Ids | None, int]] = []

        def look() -> bytes:
            try:
                found.append(check_call(self.ledger, self.rows, number, command, block))
            except AsyncFlowError as error:
                return encode(failure(error))
            return b""

        if refused := self.ledger.state.context.log.record(look):
            raise by_name(*msgspec.msgpack.decode(refused, type=tuple[str, str]))
        return found[0] if found else completed(self.ledger, command, block)

    def _say(self, ticket: int, reply: cmd.Reply | AsyncFlowError, back: Block | None = None) -> None:
        """The answer to a call that is not recorded. ``back``: a block that came with it and is not taken."""
        freed = b"" if back is None else back.packed_serial
        if isinstance(reply, AsyncFlowError):
            self._wire.answer(ticket, encode(Answer(error=failure(reply), freed=freed)), at_once=True)
        else:
            waits = self._keeping.try_again_s is not None  # a look need not
            self._wire.answer(ticket, encode(Answer(reply)), at_once=waits, recorded=False)  # type: ignore[arg-type]

    def _record(self, record: Record) -> None:
        """An input was carried out."""
        self._keeping.record(self, record)

    def _status(self) -> None:
        status = self._deferred.status(self.ledger.status(), self._sessions, self._clock())
        held = self._gauges.held()
        self._emit(
            ev.Status(
                time_s=time.monotonic(), rows=status.rows, ended=status.ended, waiting=status.waiting, bytes=held
            )
        )
