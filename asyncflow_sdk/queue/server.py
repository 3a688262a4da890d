"""QueueServer: a ledger, its payload, a journal and a socket. All of it runs in the wire's thread."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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
from ..memory import SIGN_S
from ..types import Event
from ..types import events as ev
from ..types.config import LOCAL
from ..types.reports import ParkedStatus
from ..wire import MAX_BYTES, KeyPair, Server, has_ended, offer_key, own_key, process_key, rotated
from .call_executor import CallExecutor, Clock
from .journal import DropRecord, Record, RequestRecord, SessionEndRecord, TickRecord
from .listeners import Listeners, StepRows
from .payload import Payload
from .protocol import (
    UNRECORDED,
    Call,
    CallCommand,
    CallResult,
    ClientHello,
    CurrentKey,
    KeyRequest,
    LedgerCatalog,
    MemberQuery,
    Members,
    RotateKey,
    Welcome,
    decode_call,
    decode_result,
    encode,
    failure,
)
from .recovery import Durability, RecoverableState, Recovered
from .remote_payload import DECODE_ERRORS, IncomingBlock
from .stores.factory import make_store
from .stores.fetch import FetchRequest, Needed, NeededRequest
from .stores.homes import HomeId

STATUS_EVERY_S = 1.0
GUARDED = frozenset({ClientHello, cmd.OpenHome, cmd.AddCheckpoint})
"""Commands to be refused, or held, before they are recorded."""
MOST_REASONS = 1024
READ_ONLY = UNRECORDED | {
    cmd.GetAudit, cmd.GetFailed, cmd.GetStatus, cmd.GetTrainingPosition, cmd.GetPut, cmd.GetRestoreTarget, cmd.GetHomes,
}  # fmt: skip
"""Commands that change nothing. They are not recorded."""
MOST_WAITING = 100
"""The number of waiting requests listed in a status."""
UNIT_SILENCE_S = 20.0
"""The session of a storage unit ends after this long without a sign of life. Its home is then absent."""


class HeldCheckpoint(NamedTuple):
    """A checkpoint waiting for a listener. It is neither recorded nor executed, so its client resends it to
    a restarted server."""

    request: RequestRecord
    command: cmd.AddCheckpoint

    @property
    def deadline(self) -> float:
        """The ledger time at which it fails."""
        return self.request.now + self.command.timeout_s

    @property
    def why(self) -> str:
        """The reason of its wait."""
        return f"the steps before {self.command.covers} are still read by a listener, as by the recorder"


class QueueServer:
    """Serves a queue and weight versions: at ``addresses``, at a socket on this host, and at
    ``here`` in this process.

    ``on_event`` and ``on_step`` run in the server's thread and must return at once; ``on_final`` runs
    in a thread of its own, and the checkpoint waits for it. Their exceptions are logged. ``on_step``
    gets the number of an acknowledged step, and its rows. A restarted server reports the steps not
    covered by a checkpoint again. ``on_final`` gets a number before a checkpoint makes the steps below
    it final; they are not reported again, so it returns only when they are no longer needed.

    ``keys``: required for tcp addresses unless ``insecure``; this user's clients on this host find
    them. ``save_keys``: stores replaced ones. ``max_call_bytes``: the largest call, with a payload
    sent over the socket; also the limit for all incomplete calls together, with their payload.

    ``journal``: a directory for the recorded inputs. Every input is recorded before its answer is
    sent, so a later server on the same directory continues the run (``recovered``: what it found).
    ``durability``: "process" (any process may die at any time), or "host" (payload is also on disk
    before a put is acknowledged); None: that of the existing journal, else "process". ``history``:
    keep replaced journals for replays. ``store``, ``store_options``: the kind of store of all
    clients, and its options.
    Storage units that give no sign of life for UNIT_SILENCE_S are absent.
    Raises ConfigError if another process serves the directory, or if another version wrote it.
    """

    def __init__(
        self,
        addresses: list[str],
        on_event: Callable[[Event], None] | None = None,
        on_step: Callable[[int, StepRows], None] | None = None,
        *,
        on_final: Callable[[int], None] | None = None,
        journal: Path | None = None,
        durability: str | None = None,
        keys: KeyPair | None = None,
        save_keys: Callable[[KeyPair], None] = lambda keys: None,
        insecure: bool = False,
        max_call_bytes: int = MAX_BYTES,
        samplers: Mapping[str, Callable[..., Sampler]] | None = None,
        policies: Mapping[str, Callable[..., StalenessPolicy]] | None = None,
        history: bool = False,
        store: str = LOCAL,
        store_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._keys, self._save_keys = keys, save_keys
        self._key = own_key()  # of this process, for storage units
        self._store, self._store_options = store, dict(store_options or {})
        self._durability = Durability(journal, durability, history)
        self.durability, self.directory = self._durability.level, self._durability.directory
        self.rows = self._durability.rows
        # libzmq frees the name of an inproc socket some time after it is closed
        self.here = f"inproc://{self.directory.path.name}-{secrets.token_hex(4)}"
        addresses = [self.here, f"ipc://{self.directory.path}/queue", *addresses]
        try:
            self._wire = self._durability.listen(
                addresses, functools.partial(self._listen, keys, insecure, max_call_bytes)
            )
        except BaseException:
            self._durability.close(over=False)
            raise
        self.addresses = self._wire.addresses
        self._listeners = Listeners(on_event, on_step, on_final)
        self._held: dict[int, HeldCheckpoint] = {}  # by ticket
        self._clock = Clock()
        self._next_status = 0.0
        self._next_sign, self._renewing, self._directory_error = 0.0, False, ""
        self._ended: dict[str, str] = {}  # session → why it was ended
        self._ledger = Ledger(
            make_sampler=functools.partial(make_sampler, own=samplers),
            make_policy=functools.partial(make_policy, own=policies),
        )
        path, rows = self.directory.path, self.rows
        self._payload = Payload(self._ledger.state, rows, path, synced=self.durability == "host")
        welcome = Welcome(0, str(path), __version__, self.durability, "" if rows == path else str(rows))
        self._executor = CallExecutor(
            self._ledger, self._payload, self._clock, self._listeners, welcome, self._wire.answer, self._forget
        )
        self._clients = self._executor.clients
        self._recoverable = RecoverableState(self._executor, self._wire, self._listeners)
        self._wire.limiter.on_note(self._note)
        if self.directory.warning:
            self._note(self.directory.warning, "warning")
        self.recovered: Recovered | None = None
        try:
            self.recovered = self._durability.recover(self._recoverable)
            self._ledger.staleness.check_available()
            if store == LOCAL and self._ledger.state.homes.by_number:
                raise ConfigError(
                    "payload of this run is in homes on other hosts: serve it with the same store again"
                )
        except BaseException:
            self._wire.stop()
            self._payload.close()
            self._durability.close(over=False)
            raise
        if self.recovered is not None:
            self._note(str(self.recovered), self.recovered.level)
        for session, client in list(self._clients.by_session.items()):
            if has_ended(client.pid, client.pid_key):  # with its server, for example when a whole run is killed
                self.gone(session, f"process {client.pid} ended while no server was running", blame=False)
            else:
                self._wire.watch(session, client.pid, client.pid_key)
                self._wire.bind(session, *(() if keys is None else keys.server.clients), "", client.public)
        if store != LOCAL:
            self._payload.read_homes_by(self._open_home_reader(store, self._store_options))
        self._units = dict.fromkeys(self._unit_sessions(), self._clock())  # last sign of life
        self._executor.report_steps_again()
        self._wire.start()

    def _listen(
        self, keys: KeyPair | None, insecure: bool, max_call_bytes: int, addresses: list[str], hold: bool
    ) -> Server:
        """Bind to ``addresses``. The key is published first: a client able to connect finds it."""
        run = None if keys is None else keys.run
        offer_key(self.directory.path, addresses, run, bound=False)
        server = Server(
            addresses,
            self,
            None if keys is None else keys.server,
            max_call_bytes,
            hold=hold,
            insecure=insecure,
            ask=lambda key, verdict: verdict(self._executor.admits(key)),
        )
        offer_key(self.directory.path, server.addresses, run, bound=True)
        return server

    def _open_home_reader(self, store: str, options: Mapping[str, Any]) -> PayloadStore:
        """Return the store by which this process reads rows of other homes for its listeners."""
        catalog = LedgerCatalog(lambda command: self._ledger.home_registry.listed())  # the only one asked for here
        context = StoreContext(
            run=self.directory.path.name, session=0, rows=self.rows, check_size=lambda nbytes: None, homes=catalog,
            key=self._key,
        )  # fmt: skip
        return make_store(store, options, context)

    def _note(self, text: str, level: str) -> None:
        self._listeners.event(ev.Note(time_s=time.monotonic(), text=text, level=level))

    def close(self) -> None:
        """Stop serving, and remove the run's segments, unless a journal needs them: until the
        stream and all rows have ended. Views of other processes stay valid."""
        journal = self._durability.path
        self._wire.stop(for_good=lambda: journal is None or self._is_over())
        self._payload.close()
        over = self._is_over()
        if journal is not None and not over:
            live = self._ledger.audit().live
            text = f"{live} live rows are kept for the next server of this run; to discard them, remove"
            self._note(f"{text} {journal.parent}", "info")
        self._durability.close(over=over)
        self._listeners.close()

    def _is_over(self) -> bool:
        return self._ledger.ended and not self._ledger.audit().live

    # ---- called by the wire

    def sink(self, session: str, body: bytes, nbytes: int) -> IncomingBlock:
        """Return the sink for a call's payload. Raises ProtocolError, SchemaError, MemoryFull."""
        if session not in self._clients:
            raise ProtocolError("unknown session: send hello first")
        self._keep_directory()
        return self._payload.remote.sink(body, nbytes)

    def request(self, session: str, ticket: int, body: bytes, payload: IncomingBlock | AsyncFlowError | None) -> None:
        """Handle a call."""
        try:
            call = decode_call(body)
        except DECODE_ERRORS as error:
            self._reply(ticket, ProtocolError(f"the server cannot read this call: {error}"))
        else:
            client, kind = self._clients.by_session.get(session), type(call.command)
            if client is not None:  # a call of any other session is rejected below
                for event in call.events:
                    self._listeners.event(event)
            reads = kind in READ_ONLY and call.then is None
            if kind is not ClientHello and (
                client is None or reads or (call.command is None and not self._payload.has_freed(client.number))
            ):
                self._answer_read_only(session, ticket, call.command)
            else:
                seq, done = self._wire.requests.numbers(ticket) if self._durability.recording else (0, 0)
                request = RequestRecord(self._clock(), session, seq, done, ticket, body)
                if kind not in GUARDED or self._admit(request, call):
                    self._execute(request, call, payload)
        if session not in self._clients.by_session:  # it would never be closed
            self._wire.forget(session)

    def make(self, body: bytes) -> tuple[bytes, Sequence[Any]]:
        """Complete a result when it is sent: a welcome with this process and its store, a lease with its
        columns."""
        answer = decode_result(body)
        if not isinstance(answer.reply, Welcome):
            return self._payload.remote.inline(answer)
        owner = os.stat(self.directory.path / "owner")
        pid = os.getpid()
        reply = msgspec.structs.replace(
            answer.reply,
            owner=(owner.st_dev, owner.st_ino),
            pid=pid,
            pid_key=process_key(pid),
            max_bytes=self._wire.max_bytes,
            addresses=tuple(each for each in self.addresses if each.startswith("tcp://")),
            store=self._store,
            store_options=self._store_options,
        )
        return encode(msgspec.structs.replace(answer, reply=reply)), ()

    def dropped(self, session: str, seq: int, ticket: int, answer: bytes | None) -> None:
        """Undo a cancelled call. ``answer``: its unread answer; None if there is none yet."""
        if session not in self._clients:
            return
        if self._held.pop(ticket, None) is not None:  # not recorded
            return
        now = self._clock()
        self._executor.drop(session, ticket, answer, now)
        self._record(DropRecord(now, session, seq))

    def gone(self, session: str, reason: str, blame: bool = True) -> None:
        """Close the session of a dead process."""
        if session not in self._clients:
            return
        now = self._clock()
        self._ended[session] = reason
        if len(self._ended) > MOST_REASONS:
            del self._ended[next(iter(self._ended))]
        self._executor.close_session(session, reason, now, blame=blame)
        self._record(SessionEndRecord(now, session, reason, blame))

    def _forget(self, session: str) -> None:
        """Drop what a session left: it has ended, by whatever cause."""
        self._held = {ticket: each for ticket, each in self._held.items() if each.request.session != session}
        self._wire.forget(session)

    def idle(self) -> float:
        """Run what is due. Return the seconds until the next call."""
        now = self._clock()
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
        waits = [self._next_sign] if due is None else [self._next_sign, due]
        if self._held:
            for ticket, held in list(self._held.items()):
                if held.deadline <= now:
                    del self._held[ticket]
                    self._reply(ticket, DeadlineExceeded(f"after {now - held.request.now:.1f} s: {held.why}"))
            waits += [held.deadline for held in self._held.values()]
        if self._units:
            waits.append(min(self._units.values()) + UNIT_SILENCE_S)
        if self._listeners.events:
            if now >= self._next_status:
                self._next_status = now + STATUS_EVERY_S
                self._emit_status(now)
            waits.append(self._next_status)
        if self._durability.recording and self._durability.try_again_s is not None:
            waits.append(now + self._durability.try_again_s)
        return min(waits) - now

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
        for session, heard in list(self._units.items()):
            if session not in self._clients:
                del self._units[session]
            elif now - heard >= UNIT_SILENCE_S:
                del self._units[session]
                self.gone(session, f"this storage unit gave no sign of life for {UNIT_SILENCE_S:g} s", blame=False)

    def _unit_sessions(self) -> list[str]:
        """Return the sessions of the homes' storage units."""
        units = {home.unit for home in self._ledger.state.homes.by_number.values()}
        return [session for session, number in self._clients.numbers().items() if number in units]

    def settle(self) -> bool:
        """Commit this round's records. Return True if its answers may be sent."""
        recording = self._durability.recording
        if recording and not self._durability.settle(self._listeners.event):
            return False
        if self._payload.files.pending or self._payload.remote.freed:
            self._payload.settle()
        if recording and not self._held:  # a snapshot would contain them, and their clients would not resend them
            self._durability.compact(self._recoverable)
        return True

    # ---- requests

    def _admit(self, request: RequestRecord, call: Call) -> bool:
        """Return False for a call refused or held by this server."""
        command, session = call.command, request.session
        try:
            if isinstance(command, ClientHello):
                self._check_session_limit(session)
                self._check_key(session)
            elif isinstance(command, cmd.OpenHome):
                if command.store != self._store:
                    raise ConfigError(f"this run has the store {self._store!r}, and no home of {command.store!r}")
                self._units[session] = request.now
            elif self._listeners.finals:
                self._hold_checkpoint(request, call)
                return False
        except (WireError, ConfigError) as refused:
            self._reply(request.ticket, refused)
            return False
        return True

    def _hold_checkpoint(self, request: RequestRecord, call: Call) -> None:
        """Execute a checkpoint once ``on_final`` has returned. It may read rows of other hosts, for which
        this thread must not wait."""
        command = call.command
        assert isinstance(command, cmd.AddCheckpoint)

        def execute() -> None:
            """Called in this thread, unless the request was dropped or has expired."""
            if self._held.pop(request.ticket, None) is not None:
                self._execute(msgspec.structs.replace(request, now=self._clock()), call)

        def call_listener() -> None:
            """Called in a thread of its own."""
            self._listeners.final(command.covers)
            self._wire.call(execute)

        self._held[request.ticket] = HeldCheckpoint(request, command)
        threading.Thread(target=call_listener, name="final", daemon=True).start()

    def _execute(
        self, request: RequestRecord, call: Call, payload: IncomingBlock | AsyncFlowError | None = None
    ) -> None:
        """Execute and record a request. Refuse it, with no effect, if the disk is full."""
        session, ticket = request.session, request.ticket
        try:
            if self._durability.recording:
                self._durability.reserve(len(request.body), call.command)
            if payload is not None or call.payload is not None:
                call = self._payload.remote.store(call, payload)
                request = msgspec.structs.replace(request, body=encode(call))
        except AsyncFlowError as error:
            if isinstance(payload, IncomingBlock) and isinstance(error, MemoryFull):
                payload.release()
            self._reply(ticket, error, call)
            return
        new = session not in self._clients
        self._executor.execute(session, ticket, call, request.now)
        if new and (client := self._clients.by_session.get(session)) is not None:
            self._wire.watch(session, client.pid, client.pid_key)
            self._wire.bind(session, client.public)
        if self._durability.recording:
            self._record(request)

    def _record(self, record: Record) -> None:
        self._durability.record(record, self._recoverable)

    def _check_key(self, session: str) -> None:
        """Raise AccessDenied if the key of this client's connection was replaced since it connected."""
        key = self._wire.key_of(session)
        if key and self._keys is not None and key not in self._keys.server.clients and not self._executor.admits(key):
            raise AccessDenied("the key of this client is accepted no more; ask for the run's new run.key")

    def _rotate_key(self, command: RotateKey) -> CurrentKey:
        """End the evicted sessions, and replace the key for new clients, even if it cannot be saved.
        Raises ConfigError, before anything is changed."""
        sessions = {number: session for session, number in self._clients.numbers().items()}
        unknown = [number for number in command.evict if number not in sessions]
        if unknown:
            known = ", ".join(f"{each.id} ({each.name})" for each in self._ledger.status().sessions)
            raise ConfigError(f"there is no session {unknown[0]}; there are: {known}")
        if self._keys is None and not command.evict:
            raise ConfigError("this run has no keys: it is not served over tcp, or with insecure=True")
        unsaved = "" if self._keys is None else self._replace_keys(rotated(self._keys))
        for number in command.evict:
            self.gone(sessions[number], command.reason)
        return CurrentKey(None if self._keys is None else self._keys.run, unsaved)

    def _replace_keys(self, keys: KeyPair) -> str:
        """Accept new clients with the new key only. Return why it could not be saved; "" if it was."""
        self._keys = keys
        self._wire.sockets.replace_keys(keys.server)
        self._note("the key for new clients was replaced: those on other hosts need the new run.key", "info")
        try:
            self._save_keys(keys)
            offer_key(self.directory.path, self.addresses, keys.run, bound=True)
        except ConfigError as error:
            unsaved = (
                f"{error}. Until it is replaced again and saved, no new client can connect over tcp, and a"
                " restarted server accepts the old key: make room, and run `asyncflow keys rotate`"
            )
            self._note(f"the new key was not saved: {unsaved}", "warning")
            return unsaved
        return ""

    def _check_session_limit(self, session: str) -> None:
        if session in self._clients:
            return
        self._wire.requests.check_room(session)
        if self._wire.limiter.short:
            raise WireError(
                "the server of this run is short of file descriptors: close clients, or raise its limit (ulimit -n)"
            )

    # ---- read-only requests

    def _answer_read_only(self, session: str, ticket: int, command: CallCommand | None) -> None:
        if session not in self._clients:
            why = self._ended.get(session) or "its process has ended"
            self._reply(ticket, ProtocolError(f"unknown session: send hello first, or {why}"))
        elif command is None:
            self._reply(ticket, cmd.Done())
        elif isinstance(command, MemberQuery):
            known = {self._key.public, *self._clients.public_keys()}
            self._reply(ticket, Members(tuple(key for key in command.keys if key in known)))
        elif isinstance(command, KeyRequest):
            self._reply(ticket, CurrentKey(None if self._keys is None else self._keys.run))
        elif isinstance(command, RotateKey):
            try:
                self._reply(ticket, self._rotate_key(command))
            except ConfigError as error:
                self._reply(ticket, error)
        elif isinstance(command, NeededRequest):
            segments = self._payload.needed(HomeId(command.home, command.epoch))
            self._reply(ticket, Needed(segments, tuple(self._clients.numbers().values())))
        elif isinstance(command, FetchRequest):
            make = functools.partial(self._payload.remote.fetch, command)
            self._wire.answer(ticket, b"", at_once=True, recorded=False, make=make)
        else:
            self._ledger.apply(self._clients.number(session), command, self._clock(), ticket)  # type: ignore[arg-type]
            for _, reply in self._ledger.drain().answers:
                self._reply(ticket, self._fill(reply))

    def _reply(
        self,
        ticket: int,
        reply: cmd.Reply | Needed | Members | CurrentKey | AsyncFlowError,
        refused: Call | None = None,
    ) -> None:
        """Answer a call that is not recorded. ``refused``: the client frees its payload."""
        freed = b"" if refused is None else refused.client_serials
        if isinstance(reply, AsyncFlowError):
            self._wire.answer(ticket, encode(CallResult(error=failure(reply), freed=freed)), at_once=True)
        else:
            waits = self._durability.try_again_s is not None  # a read-only answer need not wait for the journal
            self._wire.answer(ticket, encode(CallResult(reply)), at_once=waits, recorded=False)  # type: ignore[arg-type]

    # ---- status

    def _fill(self, reply: Any) -> Any:
        """Add bytes to an audit, and to a status report the held checkpoints and processes, too."""
        if isinstance(reply, Audit):
            return self._payload.fill_homes(reply)
        return self._fill_status(reply) if isinstance(reply, StatusReport) else reply

    def _add_held(self, report: StatusReport) -> StatusReport:
        """Return the report with the checkpoints waiting for a listener."""
        now, names = self._clock(), {session.id: session.name for session in report.sessions}
        parked = []
        for held in self._held.values():
            number, since_s = self._clients.number(held.request.session), now - held.request.now
            parked.append(
                ParkedStatus(
                    session=number, name=names.get(number, ""), verb=verb_of(held.command), why=held.why,
                    since_s=since_s, left_s=held.deadline - now,
                )
            )  # fmt: skip
        return msgspec.structs.replace(
            report, waiting=report.waiting | {each.name: each.why for each in parked},
            parked=(*parked, *report.parked)[:MOST_WAITING], parked_count=report.parked_count + len(parked),
        )  # fmt: skip

    def _fill_status(self, report: StatusReport) -> StatusReport:
        report = self._add_held(report)
        report = self._payload.fill(self._clients.fill(report))
        garbage, pid, host = self._wire.garbage, os.getpid(), socket.gethostname()
        return msgspec.structs.replace(report, garbage=garbage, pid=pid, host=host, sdk=__version__)

    def _emit_status(self, now: float) -> None:
        status = self._add_held(self._ledger.status())
        held = self._payload.held_bytes()
        self._listeners.event(
            ev.Status(
                time_s=time.monotonic(), rows=status.rows, ended=status.ended, waiting=status.waiting, bytes=held
            )
        )
