"""Connection: a session with a queue server, the memory it writes and reads, and the ways to call it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from .._version import __version__
from ..errors import ProtocolError, ServerLost
from ..ledger import commands as cmd
from ..ledger import unpack_ids
from ..memory import Allocation, Arena, Mapper
from ..types import Column, Event
from ..wire import Client, process_key
from . import blocks
from .protocol import Answer, Call, Hello, Welcome, decode_answer, encode
from .reader import Reader

CALL_S = 30.0
"""How long a call that waits for nothing may take before the server counts as lost (seconds)."""


WritingCommand: TypeAlias = cmd.Put | cmd.Complete


@dataclass(frozen=True)
class Letter:
    """A command to be sent, and where its payload was written."""

    command: WritingCommand | cmd.GiveBack
    block: blocks.Block | None = None
    space: Allocation | None = None


class Connection:
    """A session with a queue server on this host, and the memory it writes and reads. Thread-safe."""

    def __init__(self, address: str, name: str) -> None:
        self.name = name
        self.wire = Client(address)
        self._events: list[Event] = []
        self._lock = threading.Lock()
        try:
            welcome = self._hello()
        except BaseException:
            self.wire.close()
            raise
        self.directory = Path(welcome.directory)
        self.session = welcome.session
        rows = Path(welcome.rows) if welcome.rows else self.directory
        self.arena = Arena(rows, f"s{self.session}-")
        self.mapper = Mapper(rows)
        self.synced = welcome.durability == "host"  # payload is on disk before its command is sent
        self.reader = Reader(self.mapper)

    def _hello(self) -> Welcome:
        hello = Hello(self.name, os.getpid(), process_key(os.getpid()), __version__, socket.gethostname())
        answer = decode_answer(self.wire.ask(encode(Call(hello)), CALL_S))
        answer.raise_error()
        assert isinstance(answer.reply, Welcome)
        if not Path(answer.reply.directory).is_dir():
            self.wire.ask(encode(Call(cmd.Leave())), 0.0)
            raise ProtocolError(
                f"{answer.reply.directory} is not here: the server at {self.wire.address} runs on another host"
            )
        return answer.reply

    def report(self, *events: Event) -> None:
        """Tell the run something; it goes with the next call."""
        with self._lock:
            self._events.extend(events)

    def call(
        self, command: cmd.AnyCommand | None, block: blocks.Block | None = None, then: cmd.Lease | None = None
    ) -> bytes:
        """The encoded call, with the events that were waiting."""
        with self._lock:
            body = encode(Call(command, block, tuple(self._events), then))
            self._events.clear()
        return body

    def opened(self, body: bytes) -> Answer:
        """The answer, its notices taken. It may be an error."""
        answer = decode_answer(body)
        if answer.freed:
            self.arena.free(unpack_ids(answer.freed).tolist())
        return answer

    def answered(self, body: bytes) -> Answer:
        """The same. Raises what the server reported."""
        answer = self.opened(body)
        answer.raise_error()
        return answer

    def close(self) -> None:
        """Leave: leases go back. Views of batches stay valid. Idempotent; a server that is gone is left anyway."""
        if self.wire.closed:
            return
        try:
            with contextlib.suppress(ServerLost):
                self.wire.ask(self.call(cmd.Leave()), 0.0)
        finally:
            self.wire.close()
            self.arena.close(unlink=False)
            self.mapper.close()


class Port:
    """How verbs reach the server: ``ask`` blocks the thread or suspends the task."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def ask(self, body: bytes, timeout_s: float) -> bytes:
        raise NotImplementedError

    async def answer(self, command: cmd.AnyCommand | None) -> Answer:
        timeout_s: float = getattr(command, "timeout_s", CALL_S)
        return self.connection.answered(await self.ask(self.connection.call(command), timeout_s))

    async def send(self, command: cmd.AnyCommand) -> Any:
        return (await self.answer(command)).reply

    def write(self, command: WritingCommand, columns: Mapping[str, Column]) -> Letter:
        """Write columns to shared memory: the command with their place, ready to be posted, or to be torn."""
        if not columns:
            return Letter(command)
        self.connection.wire.check()  # a forked child must not write into what its parent writes
        specs = {name: column.spec for name, column in columns.items()}
        block, space = blocks.write(self.connection.arena, columns)
        if self.connection.synced:
            self.connection.arena.sync(space)
        return Letter(msgspec.structs.replace(command, columns=specs), block, space)

    async def post(self, letter: Letter, then: cmd.Lease | None = None) -> Answer:
        """Send a letter, and in the same request ask for a lease. The answer may be an error.

        From the moment it is sent, the block is the server's to free: it alone knows whether rows lie in it,
        also when this call is cancelled before the answer is here. So a letter is posted once.
        """
        try:
            body = self.connection.call(letter.command, letter.block, then)
        except BaseException:
            self.tear(letter)
            raise
        timeout_s: float = getattr(then or letter.command, "timeout_s", CALL_S)
        return self.connection.opened(await self.ask(body, timeout_s))

    def tear(self, letter: Letter) -> None:
        """A letter that was never posted: its memory is free again."""
        if letter.space is not None:
            self.connection.arena.free([letter.space.serial])

    async def send_columns(self, command: WritingCommand, columns: Mapping[str, Column]) -> Any:
        """Write and post. Returns the reply, or raises what the server reported."""
        answer = await self.post(self.write(command, columns))
        answer.raise_error()
        return answer.reply


class BlockingPort(Port):
    async def ask(self, body: bytes, timeout_s: float) -> bytes:
        return self.connection.wire.ask(body, timeout_s)


class LoopPort(Port):
    async def ask(self, body: bytes, timeout_s: float) -> bytes:
        return await self.connection.wire.aask(body, timeout_s)
