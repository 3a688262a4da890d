"""A queue server without sockets or threads: frames go in and answers come out by hand, so that it can be killed between
any two of them and brought back, beside a twin that never dies.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import zmq

from asyncflow_sdk._version import __version__
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.memory import Arena, Mapper
from asyncflow_sdk.queue import QueueServer, blocks, recovery, snapshot
from asyncflow_sdk.queue.protocol import Answer, Call, Hello, decode_answer, encode
from asyncflow_sdk.wire.envelope import decode_request, decode_response
from asyncflow_sdk.wire.numbering import Numbering
from asyncflow_sdk.wire.server import Server


class Tape:
    """Where answers go, in place of a socket."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, Answer]] = []

        self._parts: list[bytes] = []

    def send(self, part: bytes, flags: int = 0) -> None:
        self._parts.append(part)
        if not flags & zmq.SNDMORE:
            (name, envelope), self._parts = self._parts, []
            response = decode_response(envelope)
            self.heard.append((name.decode(), response.seq, decode_answer(response.body)))


def make(journal: Path | None, now: float, durability: str | None = None) -> QueueServer:
    with mock.patch.object(Server, "start"):
        server = QueueServer([], journal=journal, durability=durability or (journal and "process"))
    server._clock.fixed = now
    return server


def kill(server: QueueServer) -> None:
    """What the kernel does at a kill -9: nothing is written, locks fall."""
    if server._keeping.home is None or server._keeping.home._lock < 0:
        return
    server._wire.stop()
    server._remote.close()
    server._mapper.close()
    assert server._keeping.journal is not None
    assert server._keeping.home is not None
    os.close(server._keeping.journal._fd)
    server._keeping.journal._fd = -1
    server.directory.close(keep=True)
    server._keeping.home.close()
    server._keeping.home._lock = -1


def state(server: QueueServer, *parts: str) -> dict[str, bytes]:
    """All of it, as bytes by part. Between a server and one that took it up the clock may differ, and what timers have
    yet to skip."""
    for timers in (server.ledger._lease_ends, server.ledger._request_ends):
        timers._heap = sorted((thing.expires, key) for key, thing in timers._things.items())
    whole = recovery.state_of(server)
    whole["ledger"] = whole["ledger"] | {"_now": 0.0}
    return {name: snapshot.encode(whole[name]) for name in parts or whole}


def differs(one: QueueServer, other: QueueServer, *parts: str) -> list[str]:
    """Which attributes are not the same, for people."""
    a, b = recovery.state_of(one), recovery.state_of(other)
    found: list[str] = []
    for part in parts or a:
        found += [
            f"{part}.{name}: {a[part][name]!r} is not {b[part][name]!r}"
            for name in a[part]
            if name != "_now" and snapshot.encode(a[part][name]) != snapshot.encode(b[part][name])
        ]
    return found


class Client:
    """A session: it numbers its requests as clients do, and writes its payload where clients do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.numbering = Numbering(name)
        self.number = 0  # the server's
        self.open: dict[int, bytes] = {}  # requests without an answer yet
        self.answers: dict[int, Answer] = {}
        self.commands: dict[int, Any] = {}
        self.leases: dict[int, cmd.Leased] = {}
        self.arena: Arena | None = None
        self.dropped: set[int] = set()

    def call(self, command: Any, block: Any = None, then: Any = None) -> int:
        seq = self.numbering.begin()
        self.open[seq] = encode(Call(command, block, (), then))
        self.commands[seq] = command
        return seq

    def heard(self, seq: int, answer: Answer) -> None:
        if seq not in self.open:
            return
        del self.open[seq]
        self.numbering.answered(seq)
        self.answers[seq] = answer
        if answer.freed and self.arena is not None:
            self.arena.free(np.frombuffer(answer.freed, "<i8").tolist())
        if isinstance(answer.reply, cmd.Leased):
            self.leases[answer.reply.token] = answer.reply


class Bench:
    """A server with a journal, its twin without, and clients. What was done since the last settling is done again after
    a kill: that is what clients and the kernel do, who got no answer."""

    def __init__(self, path: Path) -> None:
        self.now = 100.0
        self.tape, self.silent = Tape(), Tape()
        self.path = path
        self.server = make(path, self.now)
        self.twin = make(None, self.now)
        self.twin.rows = self.server.rows
        self.twin._reader._mapper = Mapper(self.server.rows)  # it measures the same payload
        self.clients: dict[str, Client] = {}
        self.round: list[tuple[int, Callable[[QueueServer, Tape], None]]] = []  # and the next ticket
        self.kills = 0

    def do(self, action: Callable[[QueueServer, Tape], None]) -> None:
        self.round.append((self.twin._wire._next_ticket, action))
        action(self.server, self.tape)
        action(self.twin, self.silent)

    def send(self, client: Client, seq: int, again: bool = False) -> None:
        """A request over the wire; ``again``: only to the server, which has it already."""
        frame = client.numbering.frame(seq, client.open.get(seq, b"") if seq else b"")
        now, request = self.now, decode_request(frame)

        def action(server: QueueServer, tape: Tape) -> None:
            server._clock.fixed = now
            server._wire._accept((tape, client.name.encode()), request, None)  # type: ignore[arg-type]

        if again:
            action(self.server, self.tape)
        else:
            self.do(action)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        now = self.now

        def action(server: QueueServer, _: Tape) -> None:
            server._clock.fixed = now
            server.idle()

        self.do(action)

    def gone(self, client: Client) -> None:
        now = self.now

        def action(server: QueueServer, _: Tape) -> None:
            server._clock.fixed = now
            server.gone(client.name, "its process ended")

        self.do(action)
        self.clients.pop(client.name, None)

    def settle(self) -> None:
        """The end of a round: answers leave."""
        self.server._wire._flush()
        self.twin._wire._flush()
        self.round.clear()
        for name, seq, answer in self.tape.heard:
            if name in self.clients:
                self.clients[name].heard(seq, answer)
        self.tape.heard.clear()
        self.silent.heard.clear()

    def kill(self, *, torn: int = 0) -> None:
        """kill -9 with a round under way, of which ``torn`` bytes came to be written; then another server."""
        self.kills += 1
        journal = self.server._keeping.journal
        assert journal is not None
        if torn:
            os.pwrite(journal._fd, bytes(journal._buffer[:torn]), journal._written)
        kill(self.server)
        self.server = make(self.path, self.now)
        recovered = self.server.recovered
        assert recovered is not None
        assert recovered.differing == 0
        assert recovered.lost == 0
        assert not recovered.damaged
        for ticket, action in self.round:
            self.server._wire._next_ticket = ticket
            action(self.server, self.tape)
        self.server._wire._next_ticket = self.twin._wire._next_ticket

    def join(self, name: str) -> Client:
        client = self.clients[name] = Client(name)
        self.send(client, client.call(Hello(name, os.getpid(), "", __version__)))
        self.settle()
        welcome: Any = next(iter(client.answers.values())).reply
        client.number = welcome.session
        client.arena = Arena(self.server.rows, f"s{client.number}-", 1 << 16)
        return client

    def put(self, client: Client, values: Any, **more: Any) -> int:
        """A put, or with ``command`` a completion, of a column."""
        assert client.arena is not None
        command = more.pop("command", None)
        columns = blocks.pack_columns(values)
        block, _ = blocks.write(client.arena, columns)
        specs = {name: column.spec for name, column in columns.items()}
        if command is None:
            command = cmd.Put(groups=block.rows, columns=specs, **more)
        else:
            command = type(command)(
                **{f: getattr(command, f) for f in command.__struct_fields__} | {"columns": specs}
            )
        return client.call(command, block)

    def close(self) -> None:
        for client in self.clients.values():
            if client.arena is not None:
                client.arena.close(unlink=False)
        kill(self.server)
        self.twin._wire.stop()
        self.twin.directory.close()
        self.server.directory = self.server._keeping.home.directory()  # type: ignore[union-attr]
        self.server.directory.close()
