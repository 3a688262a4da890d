"""Connection: a session with a queue server, the store of its payload, and its ports for calls.

A client on the server's host writes payload into shared memory and sends only its location. A
client without this memory (another host, or a container with its own /dev/shm) sends and receives
columns beside each call, as blocks. See ``PayloadStore``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

import msgspec
import numpy as np

from .._version import __version__
from ..errors import AccessDenied, ConfigError, PayloadLost, ProtocolError, ServerLost, StoreUnavailable
from ..interfaces.store import HomeCatalog, PayloadStore, StorageHome, StoreContext, StoredBlock
from ..ledger import commands as cmd
from ..ledger import unpack_ids
from ..memory import GrowthNeeded
from ..types import Column, Event, digest_of
from ..types.config import LOCAL
from ..types.defaults import CALL_S
from ..types.events import Span
from ..wire import Client, Member, RunKey, WireReply, await_key, own_address, own_key, process_key, same_host
from . import protocol
from .checks import check_arguments, measures_of
from .stores.fetch import FetchReply, FetchRequest, open_unit
from .stores.homes import SERVER_MEMORY, KnownHomes, home_of
from .stores.local import InlineStore, make_store
from .stores.unit import UnitConfig, ensure_unit

ADMIT_S = 8.0
"""Limit of the wait for an answer about a key: less than that of a handshake."""
SEND_TRIES = 3
"""The number of times a call is sent if its payload is lost before it is executed."""
RESPONSE = "response_ids"
"""The column of response tokens. The run counts its lengths."""
_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
WritingCommand: TypeAlias = cmd.AddRows | cmd.Complete


class PendingWrite(msgspec.Struct, frozen=True):
    """A checked command, and its payload as the store has written it."""

    command: WritingCommand | cmd.GiveBack
    stored: StoredBlock = StoredBlock()


class Connection:
    """A session with a queue server, and the store of its payload. Thread-safe.

    ``key``: a copy of the run's run.key, or its path. Default: for a tcp address of this host, the key of this user's
    server. ``insecure``: the run is served without keys. ``shared_memory`` False: columns and weights go over sockets
    even if the server's memory is accessible. ``timeout_s``: the longest wait for the server's first answer.
    ``start_unit``: start a storage unit on this host for the first write, if the run has them and none is here.
    Raises ConfigError, AccessDenied, ServerLost, ProtocolError, PluginError.

    Attributes: ``store``: the payload. ``directory``: the run's shared memory; None if it is not visible here.
    ``run``: the name of that directory. ``server_addresses``: the server's tcp addresses. ``key``: this client's own,
    accepted while the session lives.
    """

    def __init__(
        self,
        address: str,
        name: str,
        *,
        key: RunKey | str | os.PathLike[str] | None = None,
        insecure: bool = False,
        shared_memory: bool = True,
        timeout_s: float = CALL_S,
        start_unit: bool = False,
    ) -> None:
        self.name, self.shared_memory = name, shared_memory
        until = time.monotonic() + timeout_s
        if key is None and not insecure and address.startswith("tcp://"):
            key = await_key(address, timeout_s)
        known = key if key is None or isinstance(key, RunKey) else RunKey.load(key)
        self.wire = Client(address, known, insecure=insecure)
        self.key = own_key(None if known is None else known.server)
        self.renewer: Any = None
        """The ``LeaseRenewer`` that gets each new lease, in the thread that asked for it."""
        self.unreturned: deque[cmd.GiveBack] = deque()
        """Leases whose rows could not be read, and that the server does not know to be given back."""
        self._events: list[Event] = []
        self._lock = threading.Lock()
        try:
            pid = os.getpid()
            hello = protocol.ClientHello(
                name, pid, process_key(pid), __version__, socket.gethostname(), self.key.public
            )
            welcome = self.ask(hello, max(until - time.monotonic(), 0.0))
            assert isinstance(welcome, protocol.Welcome)
            self.wire.limit(welcome.max_bytes)
            if not welcome.durability:
                self.wire.watch(welcome.pid, welcome.pid_key)
            self.run, self.session = Path(welcome.directory).name, welcome.session
            self.server_addresses = welcome.addresses
            visible = shared_memory and _shares_memory(welcome)
            self.directory = Path(welcome.directory) if visible else None
            if known is not None:
                self.wire.use_key(self.key)
            self.store = self._open_store(welcome, start_unit)
        except BaseException:
            self.wire.close()
            raise

    def _open_store(self, welcome: protocol.Welcome, start_unit: bool) -> PayloadStore:
        rows = None if self.directory is None else Path(welcome.rows or welcome.directory)
        context = StoreContext(
            run=self.run,
            session=self.session,
            host=own_address(self.wire.address, welcome.addresses),
            rows=rows,
            synced=welcome.durability == "host",
            check_size=self.wire.check_size,
            homes=None if welcome.store == LOCAL else self.homes(),
            fetch=self.fetch,
            key=self.key,
            start_unit=self._start_unit if start_unit else None,
        )
        return make_store(welcome.store, welcome.store_options, context)

    def _start_unit(self) -> None:
        key = None if self.wire.key is None else self.run_key()
        config = UnitConfig(self.wire.address, key=key, insecure=self.wire.insecure)
        ensure_unit(self.run, config, KnownHomes(self.homes()).is_here)

    def homes(self) -> HomeCatalog:
        """Return the catalog of the run's homes."""
        return protocol.LedgerCatalog(self.ask)

    def ping_home(self, home: StorageHome, timeout_s: float) -> float:
        """Reach the storage unit of a home from here. Return the seconds it took to connect and to be
        answered. Raises StoreUnavailable, AccessDenied."""
        began = time.monotonic()
        if not home.address:
            raise StoreUnavailable(f"home {home.home} ({home.name}) has no storage unit now")
        with contextlib.closing(open_unit(home, self.key)) as unit:
            try:
                unit.greet(timeout_s, f"home {home.home} ({home.name})")
            except ServerLost as error:
                raise StoreUnavailable(f"{error}; does the network reach {home.address} from this host?") from None
        return time.monotonic() - began

    def fetch(self, request: FetchRequest, timeout_s: float) -> tuple[FetchReply, Any]:
        """Fetch columns of rows in the server's memory. Return the reply, and the bytes of its blocks."""
        received = self.wire.exchange(protocol.encode(protocol.Call(request)), timeout_s, grace_s=0.0)
        answer = self.unpack(received)
        answer.raise_error()
        if not isinstance(answer.reply, FetchReply) or received.payload is None:
            raise ProtocolError(f"{self.wire.address} gave no columns in its answer to a request for columns")
        return answer.reply, received.payload

    def renew_by(self, renewer: Any) -> None:
        """Set the ``LeaseRenewer``, to be closed with the connection."""
        self.renewer = renewer

    @property
    def member(self) -> Member:
        """This client for the services of other clients, and theirs for its own."""
        return Member(self.key, self.members)

    def members(self, keys: Collection[str]) -> Collection[str]:
        """Return those of some public keys that belong to clients of the run. Raises WireError, ProtocolError."""
        reply = self.ask(protocol.MemberQuery(tuple(keys)), ADMIT_S)
        return reply.keys if isinstance(reply, protocol.Members) else ()

    def run_key(self) -> RunKey | None:
        """Return the key for new clients; None without keys. Raises WireError, ProtocolError."""
        reply = self.ask(protocol.KeyRequest())
        return reply.key if isinstance(reply, protocol.CurrentKey) else None

    def rotate_key(self, evict: Collection[int] = (), reason: str = "") -> None:
        """Replace the key for new clients, and end sessions. Raises ConfigError, also if the new key
        could not be saved; WireError, ProtocolError."""
        reply = self.ask(protocol.RotateKey(tuple(evict), reason))
        if isinstance(reply, protocol.CurrentKey) and reply.unsaved:
            done = "the sessions were evicted, and the key" if evict else "the key"
            raise ConfigError(f"{done} was replaced, but not saved: {reply.unsaved}")

    def ask(self, request: protocol.CallCommand, timeout_s: float = CALL_S) -> Any:
        """Send a request without columns, also before the store is open. Raises the server's error."""
        answer = self.unpack(self.wire.exchange(protocol.encode(protocol.Call(request)), timeout_s, grace_s=0.0))
        answer.raise_error()
        return answer.reply

    def report(self, *events: Event) -> None:
        """Send events with the next call. An event that cannot be encoded is logged and dropped."""
        fit = []
        for event in events:
            try:
                protocol.encode(event)
                fit.append(event)
            except (TypeError, ValueError, OverflowError) as error:
                _log.warning("an event cannot be encoded and is dropped: %s: %r", error, event)
        with self._lock:
            self._events.extend(fit)

    def report_wait(self, began: float) -> None:
        """Report a wait that began at a time of the monotonic clock, if it took more than a millisecond."""
        if (seconds := time.monotonic() - began) > 0.001:
            self.report(Span(time_s=began, worker=self.name, kind="wait", seconds=seconds))

    def encode_call(
        self, command: cmd.AnyCommand | None, then: cmd.LeaseRows | None = None, payload: int | None = None
    ) -> bytes:
        """Return the encoded call, with waiting events. Raises TypeError."""
        if not self._events:
            return protocol.encode(protocol.Call(command, (), then, payload))
        with self._lock:
            body = protocol.encode(protocol.Call(command, tuple(self._events), then, payload))
            self._events.clear()
        return body

    def unpack(self, reply: WireReply) -> protocol.CallResult:
        """Decode a reply, possibly an error, and free the blocks listed in it."""
        answer = protocol.decode_result(reply.body)
        if answer.freed:
            self.store.free(unpack_ids(answer.freed).tolist())
        if reply.payload is None:
            return answer
        reply.payload.setflags(write=False)
        return protocol.ResultWithPayload(**msgspec.structs.asdict(answer), memory=reply.payload)

    def close(self, *, ended: bool = False) -> None:
        """End the session: its leases are given back. Views stay valid. Idempotent; needs no live
        server. ``ended``: True if the server has ended it already, and may not answer it any more."""
        if self.wire.closed:
            return
        if self.renewer is not None:
            self.renewer.close()
        try:
            if not ended:
                with contextlib.suppress(ServerLost, AccessDenied):
                    self.wire.request(self.encode_call(cmd.CloseSession()), 0.0)
        finally:
            self.wire.close()
            self.store.close()


def _shares_memory(welcome: protocol.Welcome) -> bool:
    """Return True if this process can write the server's files and map its memory."""
    try:
        found = os.stat(f"{welcome.directory}/owner")
    except OSError:
        return False
    seen = same_host(welcome.pid_key) and (found.st_dev, found.st_ino) == welcome.owner
    return seen and os.access(welcome.rows or welcome.directory, os.W_OK)


class Port(ABC):
    """A way to call the server: ``BlockingPort`` blocks the thread, ``LoopPort`` suspends the task."""

    _must_copy = False
    """True if columns must be copied before they are sent: other tasks may change them meanwhile."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @abstractmethod
    async def request(self, body: bytes, timeout_s: float, payload: Sequence[Any] = ()) -> WireReply:
        """Send a request and wait for its answer. Raises ServerLost, AccessDenied."""

    @abstractmethod
    async def in_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that may wait: in this thread, or in another one beside an event loop."""

    async def call(self, command: cmd.AnyCommand | None) -> protocol.CallResult:
        """Send a checked command, or only waiting events; return the result. Raises the server's error."""
        timeout_s: float = getattr(command, "timeout_s", CALL_S)
        answer = self.connection.unpack(await self.request(self.connection.encode_call(command), timeout_s))
        if answer.error is not None:
            answer.raise_error()
        return answer

    async def send(self, command: cmd.AnyCommand) -> Any:
        """Send a command and return its reply. Raises TypeError, SchemaError, and the server's error."""
        check_arguments(command)
        return (await self.call(command)).reply

    def write(
        self, command: WritingCommand, columns: Mapping[str, Column], *, keep: bool = True, grow: bool = True
    ) -> PendingWrite:
        """Write columns to the store. Return the command with them, for ``submit``. ``keep``: the
        caller may change the columns before they are sent. ``grow``: see ``PayloadStore.write``.
        Raises TypeError, SchemaError, MemoryFull."""
        check_arguments(command)
        if not columns:
            return PendingWrite(command)
        wire, store, copy = self.connection.wire, self.connection.store, keep or self._must_copy
        if wire.closed:
            wire.check()  # a closed store would make a new segment
        fields: dict[str, Any] = {}
        if RESPONSE in columns and (offsets := columns[RESPONSE].offsets) is not None:
            fields["lengths"] = np.diff(offsets).astype("<i4").tobytes()
        if type(command) is cmd.AddRows and command.key:
            fields["digest"] = b"".join(map(digest_of, columns.values()))
        try:
            stored = store.write(columns, copy=copy, grow=grow)
        except ServerLost as lost:  # its memory was removed: the server makes it again
            try:
                stored = InlineStore(wire.check_size).write(columns, copy=copy)
            except ProtocolError:  # too large to be sent beside the call
                raise lost from None
        if (block := stored.block) is not None:
            fields["nbytes"] = block.nbytes
            if home_of(block.segment) != SERVER_MEMORY:
                fields["measures"] = measures_of(columns)
        fields["columns"] = specs = {}
        for name in columns:
            specs[name] = columns[name].spec
        return PendingWrite(msgspec.structs.replace(command, block=block, **fields), stored)

    async def submit(self, pending: PendingWrite, then: cmd.LeaseRows | None = None) -> protocol.CallResult:
        """Send a write, with a lease request if ``then`` is given. The result may be an error.

        Once the request is sent, only the server frees the block, because only it knows if rows use
        it; this also holds if the call is cancelled before the answer arrives. A write is therefore
        sent once. If its payload was lost with the store's memory, a copy is sent.
        """
        connection, began = self.connection, time.monotonic()
        for left in reversed(range(SEND_TRIES)):
            command, stored = pending.command, pending.stored
            image = stored.image
            try:
                body = connection.encode_call(command, then, None if image is None else image.rows)
            except BaseException:
                if stored.block is not None:
                    connection.store.discard(stored)
                raise
            timeout_s: float = getattr(then or command, "timeout_s", CALL_S)
            answer = connection.unpack(await self.request(body, timeout_s, () if image is None else image.parts))
            if not left or answer.error is None or answer.error[0] != PayloadLost.__name__:
                break
            again = stored if stored.block is None else connection.store.rewrite(stored)
            if again is None:
                break
            command = msgspec.structs.replace(command, block=again.block)
            if isinstance(command, cmd.AddRows):
                waited_s = time.monotonic() - began
                command = msgspec.structs.replace(command, timeout_s=max(command.timeout_s - waited_s, 0.0))
            pending = PendingWrite(command, again)
        return answer

    async def send_columns(self, command: WritingCommand, columns: Mapping[str, Column]) -> Any:
        """Write and send columns; return the reply or raise the server's error. Raises MemoryFull."""
        try:
            pending = self.write(command, columns, keep=False, grow=False)
        except GrowthNeeded:  # ended rows may have left room: get the blocks freed since
            await self.call(None)
            pending = self.write(command, columns, keep=False)
        answer = await self.submit(pending)
        if answer.error is not None:
            answer.raise_error()
        return answer.reply


class BlockingPort(Port):
    """Calls that block the thread."""

    async def request(self, body: bytes, timeout_s: float, payload: Sequence[Any] = ()) -> WireReply:
        return self.connection.wire.exchange(body, timeout_s, payload)

    async def in_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)


class LoopPort(Port):
    """Calls that suspend the task."""

    _must_copy = True

    async def request(self, body: bytes, timeout_s: float, payload: Sequence[Any] = ()) -> WireReply:
        return await self.connection.wire.aexchange(body, timeout_s, payload)

    async def in_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(function, *args, **kwargs)
