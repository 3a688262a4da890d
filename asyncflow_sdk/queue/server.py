"""QueueServer: the ledger, the places of payload and the wire, put together. Everything runs in the wire's thread."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from .._version import __version__
from ..errors import AsyncFlowError, MemoryFull, ProtocolError, by_name
from ..interfaces import Sampler
from ..ledger import Ledger, unpack_ids
from ..ledger import commands as cmd
from ..ledger.choosing import make_sampler
from ..ledger.commands import Ids
from ..ledger.state import Held
from ..memory import Mapper
from ..types import Batch, ColumnSpec, Event
from ..types import events as ev
from ..wire import MAX_BYTES, Server, ServerKeys, process_key
from . import remote
from .blocks import Block, Located
from .checks import check_call, completed, owns
from .clock import Clock
from .files import Files
from .gauges import Gauges
from .journal import Asked, Dropped, Gone, Record, Ticked
from .keeping import Keeping
from .measuring import Measuring
from .places import Places
from .protocol import Answer, Call, Hello, Welcome, decode_answer, decode_call, encode, failure
from .reader import Reader
from .recovery import Recovered
from .remote import Remote

STATUS_EVERY_S = 0.5
LOOKS = (cmd.GetAudit, cmd.GetFailed, cmd.GetStatus)
"""Commands that change nothing."""
_log = logging.getLogger(__name__)


class _Pending(NamedTuple):
    """A request under way, with what only the command that began it knows."""

    session: str
    command: cmd.AnyCommand
    owner: str  # of the block
    block: Block | None
    ids: Ids | None  # of a completion, in the order of the block's entries
    inline: bool  # whether payload goes beside the answer
    then: cmd.Lease | None = None  # to be carried out when this one has had its effect
    first: cmd.Reply | None = None  # what came of the command that this one rode with


class QueueServer:
    """Serves a queue and versions, at a socket of its own on this host and at ``addresses``, and to
    its own process at ``here``.

    ``on_event``, and ``on_step`` with the number of an acknowledged step and a function that reads its rows
    (every column they have; in any thread, once), are called in the server's thread and must return at
    once. What they raise is logged and changes nothing. ``keys``: for the addresses that are tcp.
    ``max_call_bytes``: of the largest call taken, with its payload where that comes over the socket.

    ``journal``: a directory where every input is kept before its answer leaves, so that a server that is made with it
    later goes on where this one died (``recovered`` tells what it found). ``durability``: "process" (any process may
    die at any time) or "host" (the payload is on disk, too, before a put is acknowledged); None: what it was. Raises
    ConfigError when the directory is served by another process or was written by another version.
    """

    KEPT = ("_sessions", "_processes", "_pending", "_freed")

    def __init__(
        self,
        addresses: list[str],
        on_event: Callable[[Event], None] | None = None,
        on_step: Callable[[int, Callable[[], Batch]], None] | None = None,
        *,
        journal: Path | None = None,
        durability: str | None = None,
        keys: ServerKeys | None = None,
        max_call_bytes: int = MAX_BYTES,
        samplers: Mapping[str, Callable[..., Sampler]] | None = None,
    ) -> None:
        self._keeping = Keeping(journal, durability)
        self.durability, self.directory = self._keeping.durability, self._keeping.directory
        self.rows = self._keeping.rows
        # the name of an inproc socket is free a while after its server is gone
        self.here = f"inproc://{self.directory.path.name}-{secrets.token_hex(4)}"
        addresses = [self.here, f"ipc://{self.directory.path}/queue", *addresses]
        self.ledger = Ledger()
        self.ledger.make_sampler = functools.partial(make_sampler, own=samplers)
        self._places = Places()
        self._files = Files(self.rows, self.directory.path)
        self._mapper = Mapper(self.rows)
        self._reader = Reader(self._mapper)
        self._remote = Remote(self.rows, self._reader, synced=self.durability == "host")
        self._measuring = Measuring(self.ledger, self._places, self._reader)
        self._gauges = Gauges({self.directory.path, self.rows}, self._places)
        self._on_event = on_event
        self._on_step = on_step
        self._clock = Clock()
        self._replaying = False
        self._sessions: dict[str, int] = {}
        self._processes: dict[str, tuple[int, str]] = {}  # pid and key of each session's
        self._pending: dict[int, _Pending] = {}
        self._schemas: dict[
            tuple[tuple[str, ...], int], dict[str, ColumnSpec]
        ] = {}  # columns, and all that rows have
        self._freed: dict[str, bytes] = {}  # session → serials of its blocks
        self._next_status = 0.0
        self.recovered: Recovered | None = None
        try:
            self._wire = self._keeping.listen(
                addresses, lambda at, hold: Server(at, self, keys, max_call_bytes, hold=hold)
            )
        except BaseException:
            self._keeping.close(over=False)
            raise
        self.addresses = self._wire.addresses
        if self.directory.warning:
            self._note(self.directory.warning, "warning")
            if on_event is None:  # nobody would see it
                _log.warning(self.directory.warning)
        try:
            self.recovered = self._keeping.recover(self)
        except BaseException:
            self._wire.stop()
            self._mapper.close()
            self._keeping.close(over=False)
            raise
        if self.recovered is not None:
            self._note(str(self.recovered), self.recovered.level)
        for session, (pid, key) in self._processes.items():
            self._wire.watch(session, pid, key)
        self._wire.start()

    def _note(self, text: str, level: str) -> None:
        self._emit(ev.Note(time_s=time.monotonic(), text=text, level=level))

    def close(self) -> None:
        """Stop serving and remove the run's segments, unless a journal may want them: one does until the stream has ended
        and every row with it. Views that processes hold stay valid."""
        self._wire.stop()
        self._remote.close()
        self._mapper.close()
        live = self.ledger.audit().live
        over = self.ledger.ended and not live
        if self._keeping.journal is not None and not over:
            text = f"{live} live rows are kept for whoever serves this run again; to give them up, remove"
            self._note(f"{text} {self._keeping.journal.path.parent}", "info")
        self._keeping.close(over=over)

    # ---- called by the wire

    def request(self, session: str, ticket: int, body: bytes, frames: Sequence[Any]) -> None:
        try:
            call = decode_call(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._say(ticket, ProtocolError(f"the server cannot read this call: {error}"))
            return
        if not self._replaying:
            for event in call.events:
                self._emit(event)
        if self._is_look(session, call):
            self._look(session, ticket, call.command)
            return
        seq, done = self._wire.numbers(ticket)
        try:
            self._keeping.reserve(len(body))
        except MemoryFull as full:
            self._say(ticket, full, call.block)
            return
        if not self._replaying and (frames or call.payload is not None):
            try:
                call = self._remote.store(call, frames)
                body = encode(call)
            except AsyncFlowError as error:
                self._say(ticket, error)
                return
        now = self._clock()
        self._change(session, ticket, call, now)
        self._record(Asked(now, session, seq, done, ticket, body))

    def dropped(self, session: str, seq: int, ticket: int, answer: bytes | None) -> None:
        if session not in self._sessions:
            return
        now = self._clock()
        had = self.ledger.outside(lambda: answer or b"")
        if had:
            unread = decode_answer(had)
            if unread.freed:
                self._free_later(session, unread.freed)
            if isinstance(unread.reply, cmd.Leased) and unread.reply.token in self.ledger.leases:
                lease = self.ledger.leases[unread.reply.token]
                rank = unread.reply.rank
                back = cmd.GiveBack(token=lease.token, reason="the request for it was cancelled", rank=rank)
                self.ledger.apply(lease.session_of(rank), back, now, 0)
        elif ticket:
            pending = self._pending.pop(ticket, None)
            if pending is not None and pending.block is not None:
                self._free(pending.owner, pending.block)
            self.ledger.forget(ticket)
        self._flush()
        self._record(Dropped(now, session, seq))

    def gone(self, session: str, reason: str) -> None:
        number = self._sessions.pop(session, None)
        if number is None:
            return
        now = self._clock()
        self.ledger.session_died(number, now, reason)
        self._flush()
        self._close_session(session, number)
        self._record(Gone(now, session, reason))

    def idle(self) -> float | None:
        now = self._clock()
        due = self.ledger.next_deadline()
        if due is not None and due <= now:
            self.tick(now)
        if self._on_event is not None and now >= self._next_status:
            self._next_status = now + STATUS_EVERY_S
            self._status()
        deadlines = [self.ledger.next_deadline(), self._next_status if self._on_event is not None else None]
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
        if command is None:
            self._say(ticket, cmd.Done())
        elif session not in self._sessions:
            unknown = "say hello first: this session is unknown here, or its process was seen to end"
            self._say(ticket, ProtocolError(unknown))
        else:
            self.ledger.apply(self._sessions[session], command, self._clock(), ticket)  # type: ignore[arg-type]
            for _, reply in self.ledger.drain().answers:
                if isinstance(reply, cmd.StatusReport):
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
            lease = self.ledger.leases.get(command.token) if isinstance(command, cmd.Complete) and step >= 0 else None
            trained = self._trained(lease, ids)
            if call.then is not None and not isinstance(command, (cmd.Complete, cmd.GiveBack)):
                raise ProtocolError("a lease rides with a completion or a return of rows, and with nothing else")
            self._pending[ticket] = _Pending(session, command, owner, block, ids, call.inline, call.then)
            self.ledger.apply(number, command, now, ticket)
        except Exception:
            self._pending.pop(ticket, None)
            if block is not None and owns(writer, block.segment):
                self._free(owner, block)
            raise
        if lease is not None and lease.crew is not None and len(lease.crew.done) < lease.crew.size:
            trained = None  # other ranks have not acknowledged yet
        self._flush(trained)
        if isinstance(command, cmd.Leave):
            del self._sessions[session]
            self._close_session(session, number)

    def _trained(self, lease: Held | None, ids: Ids | None) -> tuple[int, Ids, Ids] | None:
        """Step, rows and groups of rows of a step that are acknowledged now; of a team's, all of its rows."""
        if lease is None or ids is None:
            return None
        ids = ids if lease.crew is None else lease.ids
        return lease.step, ids, self.ledger.rows.first[self.ledger.rows.at(ids)]

    def _check(self, number: int, command: cmd.AnyCommand, block: Block | None) -> tuple[Ids | None, int]:
        """Raises what is wrong with the payload, which only the files tell; a replay is told what was found."""
        if not self.ledger.outside.noting:
            return check_call(self.ledger, self.rows, number, command, block)
        found: list[tuple[Ids | None, int]] = []

        def look() -> bytes:
            try:
                found.append(check_call(self.ledger, self.rows, number, command, block))
            except AsyncFlowError as error:
                return encode(failure(error))
            return b""

        if refused := self.ledger.outside(look):
            raise by_name(*msgspec.msgpack.decode(refused, type=tuple[str, str]))
        return found[0] if found else completed(self.ledger, command, block)

    def _keep(self, ids: Ids, groups: Ids) -> Callable[[], Batch]:
        """A way to read rows with every column they have, in any thread, also after their memory was freed.

        The ledger may have forgotten them by now; their places are known until they are retired.
        """
        columns_of = self._places.columns_of(ids)
        located = self._places.locate(ids, columns_of)
        schema = {name: self.ledger.schema[name] for name in columns_of}
        held = [hold for part in located for hold in self._reader.hold(part)]

        def read() -> Batch:
            columns = remote.read(self._reader, located, schema)
            held.clear()  # the columns hold their blocks themselves, where they are views
            return Batch(ids, groups, columns)

        return read

    def _locate(self, ids: Ids, columns: tuple[str, ...]) -> tuple[tuple[Located, ...], dict[str, ColumnSpec]]:
        if not len(ids):  # a rank of a team without rows: what they would be
            return (), {name: self.ledger.schema[name] for name in columns if name in self.ledger.schema}
        have = self.ledger.rows.columns[self.ledger.rows.at(ids)]
        common = int(np.bitwise_and.reduce(have)) if len(have) else 0
        schema = self._schemas.get((columns, common))
        if schema is None:
            here = [name for name in columns if common >> self.ledger._places[name] & 1]
            schema = self._schemas[columns, common] = {name: self.ledger.schema[name] for name in here}
        return self._places.locate(ids, tuple(schema)), schema

    # ---- what came of them

    def _flush(self, trained: tuple[int, Ids, Ids] | None = None) -> None:
        """Answer, tell, and free. ``trained``: step, rows and groups of rows of a step being acknowledged."""
        effects = self.ledger.drain()
        following: list[tuple[int, _Pending, cmd.Lease]] = []
        for ticket, reply in effects.answers:
            pending = self._pending.pop(ticket, None)
            if pending is None:
                continue
            answer = self._carry_out(pending, reply)
            if pending.then is not None and answer.error is None:
                rider = _Pending(
                    pending.session,
                    pending.then,
                    remote.OWNER,
                    None,
                    None,
                    pending.inline,
                    first=reply,  # type: ignore[arg-type]
                )
                following.append((ticket, rider, pending.then))
            else:
                self._answer(ticket, pending.session, answer, made=pending.inline and bool(answer.located))
        if (
            trained is not None
            and self._on_step is not None
            and not self._replaying
            and any(isinstance(reply, cmd.Completed) for _, reply in effects.answers)
        ):
            step, ids, groups = trained
            self._tell(self._on_step, step, self._keep(ids, groups))
        if not self._replaying:
            for event in effects.events:
                self._emit(self._clock.told(event))
        for ids in effects.retired:
            for owner, segment, serials in self._places.retire(ids):
                self._free_in(owner, segment, serials)
        for ticket, rider, lease in following:
            self._pending[ticket] = rider
            self.ledger.apply(self._sessions[rider.session], lease, self.ledger.now, ticket)
        if following:
            self._flush()

    def _carry_out(self, pending: _Pending, reply: cmd.Reply | AsyncFlowError) -> Answer:
        """What a reply means for payload, and the answer to send."""
        located: tuple[Located, ...] = ()
        schema: dict[str, ColumnSpec] = {}
        block = pending.block
        if isinstance(reply, AsyncFlowError) or (isinstance(reply, cmd.PutDone) and reply.again):
            if block is not None:  # once sent, a block is its writer's again by the server's word alone
                self._free(pending.owner, block)
        elif isinstance(reply, cmd.PutDone):
            assert block is not None
            assert isinstance(pending.command, cmd.Put)
            self._places.put(reply.first, block, pending.owner, pending.command.group_size)
        elif isinstance(reply, cmd.Completed):
            self._place_completion(pending, unpack_ids(reply.revoked + reply.again))
        elif isinstance(pending.command, cmd.Publish):
            self._files.published(pending.command.version, self._sessions[pending.session], self.ledger.versions)
        elif isinstance(reply, cmd.Leased):
            needs = self.ledger.tasks[reply.task].spec.needs
            if isinstance(pending.command, cmd.Lease) and pending.command.columns is not None:
                needs = pending.command.columns
            located, schema = self._locate(unpack_ids(reply.ids), needs)
        if isinstance(reply, AsyncFlowError):
            return Answer(error=failure(reply), first=pending.first)  # type: ignore[arg-type]
        return Answer(reply, None, located, schema, first=pending.first)  # type: ignore[arg-type]

    def _place_completion(self, pending: _Pending, revoked: Ids) -> None:
        if pending.block is None or pending.ids is None:
            return
        entries = np.arange(pending.block.rows)
        if not len(revoked):
            self._places.add(pending.ids, pending.block, pending.owner, entries)
            return
        kept = ~np.isin(pending.ids, revoked)
        self._places.add(pending.ids[kept], pending.block, pending.owner, entries[kept])
        if not kept.any():
            self._free(pending.owner, pending.block)

    def _free(self, owner: str, block: Block) -> None:
        self._free_in(owner, block.segment, block.packed_serial)

    def _free_in(self, owner: str, segment: str, serials: bytes) -> None:
        if owner == remote.OWNER and self._remote.free(segment, serials):
            return
        if owner in self._sessions:
            self._free_later(owner, serials)
        elif segment not in self._places.segments_of(owner):
            self._files.remove(segment)

    def _free_later(self, owner: str, serials: bytes) -> None:
        """With the owner's next answer."""
        self._freed[owner] = self._freed.get(owner, b"") + serials

    def _close_session(self, session: str, number: int) -> None:
        self._wire.forget(session)
        self._freed.pop(session, None)
        self._processes.pop(session, None)
        for ticket in [ticket for ticket, pending in self._pending.items() if pending.session == session]:
            pending = self._pending.pop(ticket)
            if pending.owner == remote.OWNER and pending.block is not None:
                self._free(remote.OWNER, pending.block)
        self._gauges.went(number)
        self._files.ended(number, self._places.segments_of(session))

    def _answer(self, ticket: int, session: str, answer: Answer, made: bool = False) -> None:
        """The answer to a call that is recorded, with the news of freed memory. ``made``: see ``make``."""
        freed = self._freed.pop(session, b"")
        if freed:
            answer = msgspec.structs.replace(answer, freed=freed)
        body = encode(answer)
        if self.ledger.outside.keep or self._replaying:
            self._keeping.telling(body)
        self._wire.answer(ticket, body, made)

    def _say(self, ticket: int, reply: cmd.Reply | AsyncFlowError, back: Block | None = None) -> None:
        """The answer to a call that is not recorded. ``back``: a block that came with it and is not taken."""
        freed = b"" if back is None else back.packed_serial
        if isinstance(reply, AsyncFlowError):
            self._wire.answer(ticket, encode(Answer(error=failure(reply), freed=freed)), at_once=True)
        else:
            waits = self._keeping.try_again_s is not None  # a look need not
            self._wire.answer(ticket, encode(Answer(reply)), at_once=waits)  # type: ignore[arg-type]

    def _record(self, record: Record) -> None:
        """An input was carried out."""
        self._keeping.record(self, record)

    def _fail(self, ticket: int, session: str, error: AsyncFlowError) -> None:
        self._answer(ticket, session, Answer(error=failure(error)))

    def _status(self) -> None:
        status = self.ledger.status()
        held = self._gauges.held()
        self._emit(
            ev.Status(
                time_s=time.monotonic(), rows=status.rows, ended=status.ended, waiting=status.waiting, bytes=held
            )
        )

    def _emit(self, event: Event) -> None:
        self._tell(self._on_event, event)

    def _tell(self, listener: Callable[..., None] | None, *what: object) -> None:
        if listener is not None:
            try:
                listener(*what)
            except Exception:
                _log.exception("a listener of the queue server failed")
