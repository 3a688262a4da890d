"""QueueServer: a ledger, its payload, a journal and a socket. All of it runs in the wire's thread."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from .._version import __version__
from ..errors import AccessDenied, AsyncFlowError, ConfigError, DeadlineExceeded, MemoryFull, ProtocolError, WireError
from ..interfaces import Sampler, StalenessPolicy
from ..interfaces.store import PayloadStore, StoreContext
from ..ledger import Audit, Ledger, StatusReport
from ..ledger import commands as cmd
from ..ledger.samplers import make_sampler
from ..ledger.staleness import make_policy
from ..ledger.status import verb_of
from ..memory import SIGN_S, SharedDirectory
from ..types import events as ev
from ..types.config import LOCAL, Store
from ..types.reports import ParkedStatus
from ..wire import MAX_BYTES, KeyPair, RouterSockets, Server, has_ended, offer_key, own_key, process_key, rotated
from . import protocol
from .call_executor import CallExecutor
from .journal import DISK_RETRY_S, DropRecord, Record, RequestRecord, SessionEndRecord, TickRecord
from .journal_directory import JournalDirectory
from .listeners import Listeners
from .payload import IncomingBlock, Payload
from .recovery import Recovered, recover
from .stores.fetch import DECODE_ERRORS, FetchRequest, Needed, NeededRequest
from .stores.homes import HomeId
from .stores.local import make_store

STATUS_EVERY_S = 1.0
GUARDED = frozenset({protocol.ClientHello, cmd.OpenHome, cmd.AddCheckpoint})
"""Commands to be refused, or held, before they are recorded."""
MOST_REASONS = 1024
READ_ONLY = protocol.UNRECORDED | {
    cmd.GetAudit, cmd.GetFailed, cmd.GetStatus, cmd.GetTrainingPosition, cmd.GetPut, cmd.GetRestoreTarget, cmd.GetHomes,
}  # fmt: skip
"""Commands that change nothing. They are not recorded."""
MOST_WAITING = 100
"""The number of waiting requests listed in a status."""
UNIT_SILENCE_S = 20.0
"""The session of a storage unit ends after this long without a sign of life. Its home is then absent."""


class HeldCheckpoint(NamedTuple):
    """A checkpoint waiting for a listener. It is neither recorded nor executed: its client resends it to a restarted
    server. ``deadline``: in ledger seconds."""

    request: RequestRecord
    command: cmd.AddCheckpoint
    deadline: float
    why: str


class QueueServer:
    """Serves a queue and weight versions: at ``addresses``, at a socket on this host, and at ``here`` in this
    process.

    ``files``: a directory for the recorded inputs, closed with the server. Every input is recorded before its answer
    is sent, so a later server on the same directory continues the run (``recovered``: its result). ``keys``: required
    for tcp addresses unless ``insecure``; this user's clients on this host find them. ``save_keys``: stores replaced
    ones. ``max_call_bytes``: the largest call, with a payload sent over the socket; also the limit for all incomplete
    calls together, with their payload. ``store``: of all clients. Raises ConfigError if the directory was written by
    another version or is damaged; MemoryFull without room to begin a journal.
    """

    def __init__(
        self,
        addresses: list[str],
        listeners: Listeners | None = None,
        files: JournalDirectory | None = None,
        *,
        keys: KeyPair | None = None,
        save_keys: Callable[[KeyPair], None] = lambda keys: None,
        insecure: bool = False,
        max_call_bytes: int = MAX_BYTES,
        samplers: Mapping[str, Callable[..., Sampler]] | None = None,
        policies: Mapping[str, Callable[..., StalenessPolicy]] | None = None,
        store: Store | None = None,
    ) -> None:
        self._keys, self._save_keys = keys, save_keys
        self._key = own_key()  # of this process, for storage units
        self._store, self._files, self._listeners = store or Store(), files, listeners or Listeners()
        self.directory = SharedDirectory() if files is None else files.shared_directory()
        path = self.directory.path
        # libzmq frees the name of an inproc socket some time after it is closed
        self.here = f"inproc://{path.name}-{secrets.token_hex(4)}"
        try:
            self._wire = self._bind([self.here, f"ipc://{path}/queue", *addresses], insecure, max_call_bytes)
        except BaseException:
            self._close_directories(over=False)
            raise
        self.addresses = self._wire.addresses
        self.durability = "" if files is None else files.durability
        rows = None if files is None else files.rows
        self.rows = rows or path
        self._held: dict[int, HeldCheckpoint] = {}  # by ticket
        self._units: dict[str, float] = {}  # last sign of life of each, by session
        self._reports, self._next_status = self._listeners.has("event"), 0.0
        self._next_sign, self._renewing, self._directory_error = 0.0, False, ""
        self._ended: dict[str, str] = {}  # session → why it was ended
        self._ledger = Ledger(
            make_sampler=functools.partial(make_sampler, own=samplers),
            make_policy=functools.partial(make_policy, own=policies),
        )
        self._payload = Payload(self._ledger.state, self.rows, path, synced=self.durability == "host")
        welcome = protocol.Welcome(0, str(path), __version__, self.durability, "" if rows is None else str(rows))
        self._executor = CallExecutor(self._ledger, self._payload, self._listeners, welcome, self._wire)
        self._clock, self._clients = self._executor.clock, self._executor.clients
        self._wire.limiter.on_note(self._note)
        if self.directory.warning:
            self._note(self.directory.warning, "warning")
        self.recovered: Recovered | None = None
        try:
            if files is not None:
                self.recovered = recover(files, self._executor)
                files.begin(self._executor.encode(), path, self._clock())
                self._ledger.state.context.log.begin()
            self._ledger.staleness.check_available()
            if self._store.kind == LOCAL and self._ledger.state.homes.by_number:
                raise ConfigError(
                    "payload of this run is in homes on other hosts: serve it with the same store again"
                )
        except BaseException:
            self._wire.stop()
            self._payload.close()
            self._close_directories(over=False)
            raise
        if self.recovered is not None:
            self._note(str(self.recovered), self.recovered.level)
        for session, client in list(self._clients.by_session.items()):
            pid, pid_key = client.hello.pid, client.hello.pid_key
            if has_ended(pid, pid_key):  # with its server, for example when a whole run is killed
                self.gone(session, f"process {pid} ended while no server was running", blame=False)
            else:
                self._wire.watch(session, pid, pid_key)
                run_keys = () if keys is None else keys.server.clients
                self._wire.requests.sessions[session].accept(*run_keys, "", client.hello.public)
        if self._store.kind != LOCAL:
            self._payload.read_homes_by(self._open_home_reader())
        units = {home.unit for home in self._ledger.state.homes.by_number.values()}
        self._units = {name: self._clock() for name, number in self._clients.numbers().items() if number in units}
        self._executor.report_steps_again()
        self._wire.start()

    def _bind(self, addresses: list[str], insecure: bool, max_call_bytes: int) -> Server:
        """Bind to the addresses of the run's earlier server if they are free, else to new ones."""
        if self._files is None:
            return self._listen(addresses, insecure, max_call_bytes)
        try:
            known = [self._files.addresses.get(address, address) for address in addresses]
            wire = self._listen(known, insecure, max_call_bytes)
        except ConfigError:  # another process has its port now
            wire = self._listen(addresses, insecure, max_call_bytes)
        self._files.save_addresses(dict(zip(addresses, wire.addresses, strict=True)))
        return wire

    def _listen(self, addresses: list[str], insecure: bool, max_call_bytes: int) -> Server:
        """Bind to ``addresses``. The key is published first: a client able to connect finds it."""
        keys, run = (None, None) if self._keys is None else (self._keys.server, self._keys.run)
        offer_key(self.directory.path, addresses, run, bound=False)
        sockets = RouterSockets(
            addresses, keys, insecure=insecure, ask=lambda key, verdict: verdict(self._executor.admits(key))
        )
        server = Server(sockets, self, max_call_bytes)
        offer_key(self.directory.path, server.addresses, run, bound=True)
        return server

    def _close_directories(self, *, over: bool) -> None:
        """``over``: remove the run's memory and journal."""
        self.directory.close(keep=self._files is not None and self._files.head is not None and not over)
        if self._files is not None:
            self._files.close(over=over)

    def _open_home_reader(self) -> PayloadStore:
        """Return the store by which this process reads rows of other homes for its listeners."""
        catalog = protocol.LedgerCatalog(lambda command: self._ledger.state.homes.listed())
        context = StoreContext(
            run=self.directory.path.name, session=0, rows=self.rows, check_size=lambda nbytes: None, homes=catalog,
            key=self._key,
        )  # fmt: skip
        return make_store(self._store.kind, self._store.options, context)

    def _note(self, text: str, level: str) -> None:
        self._listeners.event(ev.Note(time_s=time.monotonic(), text=text, level=level))

    def close(self) -> None:
        """Stop serving, and remove the run's segments, unless a journal needs them: until the
        stream and all rows have ended. Views of other processes stay valid."""
        self._wire.stop(for_good=lambda: self._files is None or self._is_over())
        self._payload.close()
        over = self._is_over()
        if self._files is not None and not over:
            text = f"{self._ledger.audit().live} live rows are kept for the next server of this run"
            self._note(f"{text}; to discard them, remove {self._files.path}", "info")
        self._close_directories(over=over)
        self._listeners.close()

    def _is_over(self) -> bool:
        return self._ledger.ended and not self._ledger.audit().live

    # ---- called by the wire

    def sink(self, session: str, body: bytes, nbytes: int) -> IncomingBlock:
        """Return the sink for a call's payload. Raises ProtocolError, SchemaError, MemoryFull."""
        if session not in self._clients.by_session:
            raise ProtocolError("unknown session: send hello first")
        self._keep_directory()
        return self._payload.sink(body, nbytes)

    def request(self, session: str, ticket: int, body: bytes, payload: IncomingBlock | AsyncFlowError | None) -> None:
        """Handle a call."""
        known = session in self._clients.by_session
        try:
            call = protocol.decode_call(body)
        except DECODE_ERRORS as error:
            self._reply(ticket, ProtocolError(f"the server cannot read this call: {error}"))
        else:
            command = call.command
            kind = type(command)
            for event in call.events if known else ():
                self._listeners.event(event)
            if not known and kind is not protocol.ClientHello:
                why = self._ended.get(session, "its process has ended")
                self._reply(ticket, ProtocolError(f"unknown session: send hello first, or {why}"))
            elif kind in READ_ONLY and call.then is None:
                self._answer_read_only(self._clients.by_session[session].number, ticket, command)
            elif command is None and self._clients.by_session[session].number not in self._payload.files.freed:
                self._reply(ticket, cmd.Done())
            elif self._files is None and kind not in GUARDED and payload is None and call.payload is None:
                self._executor.execute(session, ticket, call, time.monotonic() + self._clock.offset)
            else:
                seq, done = self._wire.requests.numbers(ticket) if self._files is not None else (0, 0)
                request = RequestRecord(self._clock(), session, seq, done, ticket, body)
                if kind not in GUARDED or self._admit(request, call):
                    self._execute(request, call, payload)
        if session not in self._clients.by_session:  # it would never be closed
            self._wire.forget(session)

    def make(self, body: bytes) -> tuple[bytes, Sequence[Any]]:
        """Complete a result when it is sent: a welcome with this process and its store, a lease with its columns."""
        answer = protocol.decode_result(body)
        if not isinstance(answer.reply, protocol.Welcome):
            return self._payload.inline(answer)
        owner, pid = os.stat(self.directory.path / "owner"), os.getpid()
        remote = tuple(each for each in self.addresses if each.startswith("tcp://"))
        reply = msgspec.structs.replace(
            answer.reply, owner=(owner.st_dev, owner.st_ino), pid=pid, pid_key=process_key(pid),
            max_bytes=self._wire.max_bytes, addresses=remote, store=self._store.kind, store_options=dict(self._store.options),
        )  # fmt: skip
        return protocol.encode(msgspec.structs.replace(answer, reply=reply)), ()

    def dropped(self, session: str, seq: int, ticket: int, answer: bytes | None) -> None:
        """Undo a cancelled call. ``answer``: its unread answer; None if there is none yet."""
        if session not in self._clients.by_session or self._held.pop(ticket, None) is not None:  # not recorded
            return
        now = self._clock()
        self._executor.drop(session, ticket, answer, now)
        self._record(DropRecord(now, session, seq))

    def gone(self, session: str, reason: str, blame: bool = True) -> None:
        """Close the session of a dead process."""
        if session not in self._clients.by_session:
            return
        now = self._clock()
        self._ended[session] = reason
        if len(self._ended) > MOST_REASONS:
            del self._ended[next(iter(self._ended))]
        self._executor.close_session(session, reason, now, blame=blame)
        self._record(SessionEndRecord(now, session, reason, blame))

    def idle(self) -> float:
        """Run timers. Return the seconds until the next call."""
        now = time.monotonic() + self._clock.offset
        if now >= self._next_sign:
            self._next_sign = now + SIGN_S
            self._keep_directory()
        if self._units:
            self._end_silent_units(now)
        due = self._ledger.next_deadline()
        if due is not None and due <= now:
            self._executor.tick(now)
            self._record(TickRecord(now))
            due = self._ledger.next_deadline()
        until = self._next_sign if due is None or due > self._next_sign else due
        if self._held:
            for ticket, (request, _, deadline, why) in list(self._held.items()):
                if deadline > now and request.session in self._clients.by_session:
                    until = min(until, deadline)
                    continue
                del self._held[ticket]
                self._reply(ticket, DeadlineExceeded(f"after {now - request.now:.1f} s: {why}"))
        if self._units:
            until = min(until, min(self._units.values()) + UNIT_SILENCE_S)
        if self._reports:
            if now >= self._next_status:
                self._next_status = now + STATUS_EVERY_S
                self._emit_status()
            until = min(until, self._next_status)
        if self._files is not None and self._files.journal.failure is not None:
            until = min(until, now + DISK_RETRY_S)
        return until - now

    def _keep_directory(self) -> None:
        """Make the directory of shared memory again if somebody removed it: clients go on there."""
        try:
            self._renewing |= self.directory.keep()
            if not self._renewing:
                return
            self._wire.limiter.renew_ipc()
            if self._keys is not None:
                offer_key(self.directory.path, self.addresses, self._keys.run, bound=True)
            self._renewing = False
        except (OSError, ConfigError) as error:
            if str(error) != self._directory_error:
                self._directory_error = str(error)
                self._note(f"the removed directory of shared memory cannot be made again: {error}", "error")
        else:
            self._note(f"{self.directory.path} was removed, and is made again; the rows in it are lost", "warning")

    def _end_silent_units(self, now: float) -> None:
        for session in [session for session, heard in self._units.items() if now - heard >= UNIT_SILENCE_S]:
            del self._units[session]  # it may have ended since
            self.gone(session, f"this storage unit gave no sign of life for {UNIT_SILENCE_S:g} s", blame=False)

    def settle(self) -> bool:
        """Commit this round's records. Return True if its answers may be sent."""
        if self._files is not None and not self._files.journal.commit(self._note):
            return False
        if self._payload.files.pending or self._payload.freed:
            self._payload.settle()
        if self._files is not None and not self._held:
            # a snapshot would contain held checkpoints, and their clients would not resend them
            self._files.compact(self._executor.encode, self.directory.path, self._clock)
        return True

    # ---- requests

    def _admit(self, request: RequestRecord, call: protocol.Call) -> bool:
        """Return False for a call refused or held by this server."""
        command, session = call.command, request.session
        try:
            if isinstance(command, protocol.ClientHello):
                self._check_client(session)
            elif isinstance(command, cmd.OpenHome):
                if (store := command.offer.store) != self._store.kind:
                    raise ConfigError(f"this run has the store {self._store.kind!r}, and no home of {store!r}")
                self._units[session] = request.now
            elif self._listeners.has("final"):
                self._hold_checkpoint(request, call)
                return False
        except (WireError, ConfigError) as refused:
            self._reply(request.ticket, refused)
            return False
        return True

    def _hold_checkpoint(self, request: RequestRecord, call: protocol.Call) -> None:
        """Execute a checkpoint once ``on_final`` has returned. It may read rows of other hosts, and this
        thread must not wait for them."""
        command = call.command
        assert isinstance(command, cmd.AddCheckpoint)

        def execute() -> None:
            """Called in this thread, unless the request was dropped or has expired."""
            if self._held.pop(request.ticket, None) is not None and request.session in self._clients.by_session:
                self._execute(msgspec.structs.replace(request, now=self._clock()), call)

        def call_listener() -> None:
            """Called in a thread of its own."""
            self._listeners.call("final", command.covers)
            self._wire.call(execute)

        why = f"the steps before {command.covers} are still read by a listener, as by the recorder"
        self._held[request.ticket] = HeldCheckpoint(request, command, request.now + command.timeout_s, why)
        threading.Thread(target=call_listener, name="final", daemon=True).start()

    def _execute(
        self, request: RequestRecord, call: protocol.Call, payload: IncomingBlock | AsyncFlowError | None = None
    ) -> None:
        """Execute and record a request. Refuse it, with no effect, if the disk is full."""
        session, ticket = request.session, request.ticket
        try:
            if self._files is not None:
                self._files.journal.reserve(len(request.body), type(call.command))
            if payload is not None or call.payload is not None:
                call = self._payload.store(call, payload)
                request = msgspec.structs.replace(request, body=protocol.encode(call))
        except AsyncFlowError as error:
            if isinstance(payload, IncomingBlock) and isinstance(error, MemoryFull):
                payload.release()
            self._reply(ticket, error, b"" if call.block is None else call.block.packed_serial)
            return
        new = session not in self._clients.by_session
        self._executor.execute(session, ticket, call, request.now)
        if new and (client := self._clients.by_session.get(session)) is not None:
            self._wire.watch(session, client.hello.pid, client.hello.pid_key)
            self._wire.requests.sessions[session].accept(client.hello.public)
        self._record(request)

    def _record(self, record: Record) -> None:
        if self._files is not None:
            results = self._ledger.state.context.log.take()
            self._files.journal.append(record, results, self._executor.take_digest())

    def _check_client(self, session: str) -> None:
        """Raise WireError for a session too many, AccessDenied if the key of its connection was replaced since."""
        if session not in self._clients.by_session:
            self._wire.requests.check_room(session)
            if self._wire.limiter.short:
                raise WireError(
                    "the server of this run is short of file descriptors: close clients, or raise its limit (ulimit -n)"
                )
        key = self._wire.key_of(session)
        if key and self._keys is not None and key not in self._keys.server.clients and not self._executor.admits(key):
            raise AccessDenied("the key of this client is accepted no more; ask for the run's new run.key")

    def _rotate_key(self, command: protocol.RotateKey) -> protocol.CurrentKey:
        """End the evicted sessions, and replace the key for new clients, even if it cannot be saved.
        Raises ConfigError, before anything is changed."""
        sessions = {number: session for session, number in self._clients.numbers().items()}
        unknown = [number for number in command.evict if number not in sessions]
        if unknown:
            known = ", ".join(f"{each.id} ({each.name})" for each in self._ledger.status().sessions)
            raise ConfigError(f"there is no session {unknown[0]}; there are: {known}")
        if self._keys is None and not command.evict:
            raise ConfigError("this run has no keys: it is not served over tcp, or with insecure=True")
        unsaved = ""
        if self._keys is not None:
            self._keys = rotated(self._keys.server)
            self._wire.sockets.replace_keys(self._keys.server)
            self._note("the key for new clients was replaced: those on other hosts need the new run.key", "info")
            try:
                self._save_keys(self._keys)
                offer_key(self.directory.path, self.addresses, self._keys.run, bound=True)
            except ConfigError as error:
                unsaved = (
                    f"{error}. Until it is replaced again and saved, no new client can connect over tcp, and a"
                    " restarted server accepts the old key: make room, and run `asyncflow keys rotate`"
                )
                self._note(f"the new key was not saved: {unsaved}", "warning")
        for number in command.evict:
            self.gone(sessions[number], command.reason)
        return protocol.CurrentKey(None if self._keys is None else self._keys.run, unsaved)

    # ---- read-only requests

    def _answer_read_only(self, number: int, ticket: int, command: Any) -> None:
        reply: Any
        if isinstance(command, FetchRequest):
            make = functools.partial(self._payload.fetch, command)
            self._wire.answer(ticket, b"", recorded=False, make=make)
            return
        try:
            match command:
                case protocol.MemberQuery():
                    known = {self._key.public, *self._clients.public_keys()}
                    reply = protocol.Members(tuple(key for key in command.keys if key in known))
                case protocol.KeyRequest():
                    reply = protocol.CurrentKey(None if self._keys is None else self._keys.run)
                case protocol.RotateKey():
                    reply = self._rotate_key(command)
                case NeededRequest():
                    segments = self._payload.needed(HomeId(command.home, command.epoch))
                    reply = Needed(segments, tuple(self._clients.numbers().values()))
                case _:
                    self._ledger.apply(number, command, self._clock(), ticket)
                    ((_, reply),) = self._ledger.drain().answers
                    reply = self._fill(reply)
        except ConfigError as error:
            reply = error
        self._reply(ticket, reply)

    def _reply(self, ticket: int, reply: Any, freed: bytes = b"") -> None:
        """Answer a call without a record, even if the journal cannot be written. ``freed``: the serial of its
        payload."""
        failed = isinstance(reply, AsyncFlowError)
        fields: dict[str, Any] = {"error": protocol.failure(reply)} if failed else {"reply": reply}
        self._wire.answer(ticket, protocol.encode(protocol.CallResult(**fields, freed=freed)), recorded=False)

    # ---- status

    def _fill(self, reply: Any) -> Any:
        """Add bytes to an audit; to a status report also the held checkpoints, and processes."""
        if isinstance(reply, Audit):
            return msgspec.structs.replace(reply, homes=self._payload.fill_homes(reply.homes))
        if not isinstance(reply, StatusReport):
            return reply
        known = {client.number: client.hello for client in self._clients.by_session.values()}
        sessions = tuple(
            msgspec.structs.replace(each, pid=known[each.id].pid, host=known[each.id].host) for each in reply.sessions
        )
        return msgspec.structs.replace(
            self._add_held(reply), sessions=sessions, homes=self._payload.fill_homes(reply.homes),
            payload_bytes=self._payload.index.live_bytes, held_bytes=self._payload.held_bytes(),
            written_bytes=self._payload.index.written_bytes, garbage=self._wire.garbage, pid=os.getpid(),
            host=socket.gethostname(), sdk=__version__,
        )  # fmt: skip

    def _add_held(self, report: StatusReport) -> StatusReport:
        now, names = self._clock(), {session.id: session.name for session in report.sessions}
        parked = []
        for request, command, deadline, why in self._held.values():
            if request.session not in self._clients.by_session:
                continue
            number, verb = self._clients.by_session[request.session].number, verb_of(command)
            name, since_s, left_s = names.get(number, ""), now - request.now, deadline - now
            parked.append(ParkedStatus(session=number, name=name, verb=verb, why=why, since_s=since_s, left_s=left_s))
        return msgspec.structs.replace(
            report, waiting=report.waiting | {each.name: each.why for each in parked},
            parked=(*parked, *report.parked)[:MOST_WAITING], parked_count=report.parked_count + len(parked),
        )  # fmt: skip

    def _emit_status(self) -> None:
        status = self._add_held(self._ledger.status())
        rows, ended, waiting, held = status.rows, status.ended, status.waiting, self._payload.held_bytes()
        self._listeners.event(ev.Status(time_s=time.monotonic(), rows=rows, ended=ended, waiting=waiting, bytes=held))
