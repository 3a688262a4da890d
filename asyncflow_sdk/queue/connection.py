"""Connection: a session with a queue server, the memory it writes and reads, and the ways to call it.

A client that sees the server's shared memory writes and reads there, and only places travel. One on another host, or
in a container that has another /dev/shm, sends and gets its columns beside each call, as blocks; the server puts
them where they would have been.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from .._version import __version__
from ..errors import ConfigError, DeadlineExceeded, LeaseLost, MemoryFull, PayloadLost, SchemaError, ServerLost
from ..ledger import commands as cmd
from ..ledger import unpack_ids
from ..memory import HEADER_BYTES, Allocation, Arena, Mapper, NoHole
from ..types import Column, Event, digest_of
from ..wire import Client, Reply, RunKey, await_key, process_key, same_host
from . import blocks
from .arguments import check_arguments
from .deferred import TRY_AGAIN_S
from .payload import BlockImage, from_image, to_image
from .protocol import Answer, Call, Delivered, Hello, Welcome, decode_answer, encode
from .reader import Reader

LARGE_BYTES = 128 << 20
POST_TRIES = 3
"""How often a call is sent whose payload was lost before it was carried out."""
RESPONSE = "response_ids"
"""The column whose lengths a run accounts for."""
_log = logging.getLogger(__name__)
CALL_S = 30.0
"""How long a call that waits for nothing may take before the server counts as lost (seconds)."""

WritingCommand: TypeAlias = cmd.AddRows | cmd.Complete


@dataclass(frozen=True)
class Letter:
    """A command to be sent, and where its payload was written, or itself."""

    command: WritingCommand | cmd.GiveBack
    block: blocks.Block | None = None
    space: Allocation | None = None
    image: BlockImage | None = None


class Connection:
    """A session with a queue server, and the memory it writes and reads. Thread-safe.

    ``key``: a copy of the run's run.key, or its path. Without one, a tcp address of this host gives the key of this user's
    server there; ``insecure``: the run is served without keys. ``shared_memory`` False:
    send columns even where the server's memory is in sight. ``inline`` says whether they are. ``timeout_s``:
    the longest it waits for the server's first word. ``served``: the tcp addresses of the server.
    Raises ConfigError, AccessDenied, ServerLost, ProtocolError.
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
    ) -> None:
        self.name = name
        until = time.monotonic() + timeout_s
        if key is None and not insecure and address.startswith("tcp://"):
            key = await_key(address, timeout_s)
        known = key if key is None or isinstance(key, RunKey) else RunKey.load(key)
        self.wire = Client(address, known, insecure=insecure)
        self.on_lease: Callable[[Any], None] = lambda lease: None
        """Called with each lease, in the thread that asked for it."""
        self._events: list[Event] = []
        self._lock = threading.Lock()
        try:
            welcome = self._hello(max(until - time.monotonic(), 0.0))
        except BaseException:
            self.wire.close()
            raise
        self.wire.max_bytes = welcome.max_bytes
        if not welcome.durability:
            self.wire.watch(welcome.pid, welcome.pid_key)
        self.inline = not (shared_memory and _sees(welcome))
        self.directory = Path(welcome.directory)
        self.session = welcome.session
        self.served = welcome.addresses
        rows = Path(welcome.rows) if welcome.rows else self.directory
        self.arena = Arena(rows, f"s{self.session}-")
        self.mapper = Mapper(rows)
        self.synced = welcome.durability == "host"  # payload is on disk before its command is sent
        self.reader = Reader(self.mapper)

    def _hello(self, timeout_s: float) -> Welcome:
        hello = Hello(self.name, os.getpid(), process_key(os.getpid()), __version__, socket.gethostname())
        answer = decode_answer(self.wire.ask(encode(Call(hello)), timeout_s, grace_s=0.0))
        answer.raise_error()
        assert isinstance(answer.reply, Welcome)
        return answer.reply

    def need_memory(self, what: str) -> None:
        """Raises ConfigError unless this connection shares memory with the server."""
        if self.inline:
            raise ConfigError(
                f"{what} goes through shared memory, which this connection to {self.wire.address} has not: it works"
                " on the server's host alone"
            )

    def report(self, *events: Event) -> None:
        """Tell the run something; it goes with the next call. What cannot be sent is logged and left out: it must not
        keep that call from being made."""
        fit = []
        for event in events:
            try:
                encode(event)
                fit.append(event)
            except (TypeError, ValueError, OverflowError) as error:
                _log.warning("an event cannot be sent and is left out: %s: %r", error, event)
        with self._lock:
            self._events.extend(fit)

    def call(
        self,
        command: cmd.AnyCommand | None,
        block: blocks.Block | None = None,
        then: cmd.LeaseRows | None = None,
        payload: int | None = None,
    ) -> bytes:
        """The encoded call, with the events that were waiting. Raises TypeError and SchemaError for arguments that no
        server could read."""
        for each in (command, then):
            if each is not None:
                check_arguments(each)
        with self._lock:
            body = encode(Call(command, block, tuple(self._events), then, payload, self.inline))
            self._events.clear()
        return body

    def opened(self, reply: Reply) -> Answer:
        """The answer, its notices taken. It may be an error."""
        answer = decode_answer(reply.body)
        if answer.freed:
            self.arena.free(unpack_ids(answer.freed).tolist())
        if reply.payload is None:
            return answer
        reply.payload.flags.writeable = False
        return Delivered(**msgspec.structs.asdict(answer), memory=reply.payload)

    def columns(self, answer: Answer) -> dict[str, Column]:
        """The columns of rows leased: views where they lie together, else copies; or what came with the answer."""
        if isinstance(answer, Delivered):
            assert answer.payload is not None
            return from_image(answer.memory, answer.payload, answer.schema)
        if answer.payload is not None:
            raise LeaseLost("the rows ended before their values were sent")
        columns: dict[str, Column] = {}
        for located in answer.located:
            columns.update(self.reader.read(located, answer.schema))
        return columns

    def answered(self, reply: Reply) -> Answer:
        """The same as ``opened``. Raises what the server reported."""
        answer = self.opened(reply)
        answer.raise_error()
        return answer

    def close(self) -> None:
        """Leave: leases go back. Views of batches stay valid. Idempotent; a server that is gone is left anyway."""
        if self.wire.closed:
            return
        try:
            with contextlib.suppress(ServerLost):
                self.wire.ask(self.call(cmd.CloseSession()), 0.0)
        finally:
            self.wire.close()
            self.arena.close(unlink=False)
            self.mapper.close()


def _sees(welcome: Welcome) -> bool:
    """Whether this process can write and map what the server wrote and mapped."""
    try:
        found = os.stat(f"{welcome.directory}/owner")
    except OSError:
        return False
    seen = same_host(welcome.pid_key) and (found.st_dev, found.st_ino) == welcome.owner
    return seen and os.access(welcome.rows or welcome.directory, os.W_OK)


class Port(ABC):
    """How verbs reach the server: ``ask`` blocks the thread or suspends the task."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @abstractmethod
    async def ask(self, body: bytes, timeout_s: float, payload: Sequence[Any] = ()) -> Reply:
        """Send a request and wait for its answer. Raises ServerLost, AccessDenied."""

    @abstractmethod
    async def pause(self, seconds: float) -> None:
        """Block the thread, or suspend the task, for so long."""

    _copies = False
    """True if columns must be copied before they are sent: other tasks may change them meanwhile."""

    async def answer(self, command: cmd.AnyCommand | None) -> Answer:
        timeout_s: float = getattr(command, "timeout_s", CALL_S)
        return self.connection.answered(await self.ask(self.connection.call(command), timeout_s))

    async def send(self, command: cmd.AnyCommand) -> Any:
        return (await self.answer(command)).reply

    def write(
        self, command: WritingCommand, columns: Mapping[str, Column], *, keep: bool = True, grow: bool = True
    ) -> Letter:
        """Write columns to shared memory: the command with their place, ready to be posted, or to be torn.
        ``keep``: the columns may change before it is posted. ``grow``: see ``Arena.allocate``."""
        if not columns:
            return Letter(command)
        self.connection.wire.check()  # a forked child must not write into what its parent writes
        specs = {name: column.spec for name, column in columns.items()}
        if (response := columns.get(RESPONSE)) is not None and response.offsets is not None:
            command = msgspec.structs.replace(command, lengths=np.diff(response.offsets).astype("<i4").tobytes())
        if isinstance(command, cmd.AddRows) and command.key:
            command = msgspec.structs.replace(command, digest=b"".join(map(digest_of, columns.values())))
        if self.connection.inline:
            self.connection.wire.fits(sum(column.values.nbytes for column in columns.values()))
            image = to_image(columns, copy=keep or self._copies)
            return Letter(msgspec.structs.replace(command, columns=specs), image=image)
        block, space = blocks.write(self.connection.arena, columns, grow=grow)
        if self.connection.synced:
            self.connection.arena.sync(space)
        return Letter(msgspec.structs.replace(command, columns=specs), block, space)

    async def post(self, letter: Letter, then: cmd.LeaseRows | None = None) -> Answer:
        """Send a letter, and in the same request ask for a lease. The answer may be an error.

        From the moment it is sent, the block is the server's to free: it alone knows whether rows lie in it,
        also when this call is cancelled before the answer is here. So a letter is posted once; if its payload was lost
        on the way, with the run's shared memory, a copy is posted in its place.
        """
        began = time.monotonic()
        for left in reversed(range(POST_TRIES)):
            try:
                image = letter.image
                body = self.connection.call(letter.command, letter.block, then, None if image is None else image.rows)
            except BaseException:
                self.tear(letter)
                raise
            timeout_s: float = getattr(then or letter.command, "timeout_s", CALL_S)
            answer = self.connection.opened(await self.ask(body, timeout_s, () if image is None else image.parts))
            if not left or answer.error is None or answer.error[0] != PayloadLost.__name__:
                break
            if letter.space is not None and not self.connection.arena.lost(letter.space):
                break  # it is here, where the server does not see it
            letter = self._copy(letter, time.monotonic() - began)
        return answer

    def _copy(self, letter: Letter, waited_s: float) -> Letter:
        """The same letter, its payload in another place: the memory it was written into is this process's still."""
        command, block, old = letter.command, letter.block, letter.space
        if isinstance(command, cmd.AddRows):
            command = msgspec.structs.replace(command, timeout_s=max(command.timeout_s - waited_s, 0.0))
        if block is None or old is None:
            return dataclasses.replace(letter, command=command)
        space = self.connection.arena.allocate(old.nbytes)
        space.memory[HEADER_BYTES:] = old.memory[HEADER_BYTES:]
        if self.connection.synced:
            self.connection.arena.sync(space)
        block = msgspec.structs.replace(block, segment=space.segment, start=space.start, serial=space.serial)
        return Letter(command, block, space)

    def tear(self, letter: Letter) -> None:
        """A letter that was never posted: its memory is free again."""
        if letter.space is not None:
            self.connection.arena.free([letter.space.serial])

    async def send_columns(self, command: WritingCommand, columns: Mapping[str, Column]) -> Any:
        """Write and post. Return the reply, or raise what the server reported. Where rows lie on the disk and it is full, a put
        waits up to its deadline, and raises DeadlineExceeded."""
        size = sum(column.values.nbytes for column in columns.values())
        if size >= LARGE_BYTES and isinstance(command, cmd.AddRows):
            room = (await self.send(cmd.GetStatus())).capacity_bytes
            if size > room:  # seen before so much is written only to be refused
                raise SchemaError(
                    f"{size} bytes in one put are more than the whole queue holds (capacity_bytes={room}); put fewer"
                    " at a time"
                )
        timeout_s: float = getattr(command, "timeout_s", CALL_S)
        began, asked = time.monotonic(), command
        while True:
            try:
                answer = await self.post(await self._written(asked, columns))
                answer.raise_error()
                return answer.reply
            except MemoryFull as full:
                if not (self.connection.synced and isinstance(command, cmd.AddRows)):
                    raise
                waited = time.monotonic() - began
                if waited >= timeout_s:
                    raise DeadlineExceeded(f"after {waited:.1f} s: {full}") from None
            await self.pause(min(TRY_AGAIN_S, timeout_s - waited))
            left = max(0.0, timeout_s - (time.monotonic() - began))
            asked = msgspec.structs.replace(command, timeout_s=left)

    async def _written(self, command: WritingCommand, columns: Mapping[str, Column]) -> Letter:
        """Write columns. Raises MemoryFull."""
        try:
            return self.write(command, columns, keep=False, grow=False)
        except (
            NoHole,
            ServerLost,
        ):  # rows that ended may have left room; a server that comes back makes its directory
            check_arguments(command)
        timeout_s: float = getattr(command, "timeout_s", CALL_S)
        self.connection.answered(await self.ask(self.connection.call(None), timeout_s))
        return self.write(command, columns, keep=False)


class BlockingPort(Port):
    async def ask(self, body: bytes, timeout_s: float, payload: Sequence[Any] = ()) -> Reply:
        return self.connection.wire.exchange(body, timeout_s, payload)

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - a blocking call is what this port is for


class LoopPort(Port):
    _copies = True

    async def ask(self, body: bytes, timeout_s: float, payload: Sequence[Any] = ()) -> Reply:
        return await self.connection.wire.aexchange(body, timeout_s, payload)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
