"""Floors: what sockets and one copy allow a program that does nothing else. References, not products.

A put is a block; a task takes blocks whose columns it needs are there; one request each. No rows, no leases, no
types, no checks, no books, nothing freed. ``shm``: payload in one pre-faulted arena, only its places travel.
``zmq-tcp``: payload in frames of the messages, never copied by this code.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from .contender import Client, Service, Task
from .samples import Columns

ARENA_BYTES = 3 << 30
PIECE_BYTES = 64 << 20  # of the arena, handed to a client at a time
ALIGN = 64

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode


class _Server:
    """Blocks, the queue of each task, and the requests that wait for one."""

    def __init__(self, needs: dict[str, list[str]], socket: Any) -> None:
        self.needs, self.socket = needs, socket
        self.blocks: dict[int, dict[str, Any]] = {}
        self.ready: defaultdict[str, deque[int]] = defaultdict(deque)
        self.parked: defaultdict[str, deque[bytes]] = defaultdict(deque)
        self.given = 0
        self.ended = False

    def run(self) -> None:
        while True:
            frames = self.socket.recv_multipart(copy=False)
            client, (verb, *what) = frames[0].bytes, decode(frames[1].buffer)
            if verb == "quit":
                return
            getattr(self, verb)(client, frames[2:], *what)

    def put(self, client: bytes, payload: list[Any], columns: list[Any], number: int | None) -> None:
        if number is None:
            number = len(self.blocks)
        block = self.blocks.setdefault(number, {})
        had = set(block)
        for at, (name, *what) in enumerate(columns):
            block[name] = what, payload[at] if payload else None
        for task, needs in self.needs.items():
            if not had.issuperset(needs) and block.keys() >= set(needs):
                self.ready[task].append(number)
                if self.parked[task]:
                    self.take(self.parked[task].popleft(), [], task)
        self.answer(client, number)

    def take(self, client: bytes, payload: list[Any], task: str) -> None:
        if self.ready[task]:
            number = self.ready[task].popleft()
            columns = [(name, *self.blocks[number][name]) for name in self.needs[task]]
            frames = [frame for *_, frame in columns if frame is not None]
            self.answer(client, [number, [(name, what) for name, what, _ in columns]], frames)
        elif self.ended:
            self.answer(client, None)
        else:
            self.parked[task].append(client)

    def piece(self, client: bytes, payload: list[Any], nbytes: int) -> None:
        if self.given + nbytes > ARENA_BYTES:
            self.given = 0
        self.answer(client, self.given)
        self.given += nbytes

    def end(self, client: bytes, payload: list[Any]) -> None:
        self.ended = True
        for waiting in self.parked.values():
            while waiting:
                self.answer(waiting.popleft(), None)
        self.answer(client, None)

    def answer(self, client: bytes, body: Any, frames: list[Any] | None = None) -> None:
        self.socket.send_multipart([client, encode(body), *(frames or ())], copy=False)


def _serve(needs: dict[str, list[str]], address: str, ready: Any) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.sndhwm = socket.rcvhwm = 0
        socket.bind(address)
        ready.send(socket.get_string(zmq.LAST_ENDPOINT))
        _Server(needs, socket).run()


class Floor(Service):
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def start(self, tasks: dict[str, Task]) -> str:
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm" if self._kind == "shm" else None)
        arena = ""
        if self._kind == "shm":
            arena = f"{self._folder.name}/arena"
            np.memmap(arena, np.uint8, "w+", shape=(ARENA_BYTES,))[:] = 0
        needs = {name: list(task.needs) for name, task in tasks.items()}
        wanted = "tcp://127.0.0.1:*" if self._kind == "zmq-tcp" else f"ipc://{self._folder.name}/floor"
        here, there = mp.Pipe()
        self._process = mp.get_context("spawn").Process(target=_serve, args=(needs, wanted, there), daemon=True)
        self._process.start()
        self._endpoint = here.recv()
        return f"{self._endpoint} {arena}"

    def end(self) -> None:
        FloorClient(f"{self._endpoint} ").ask("end")

    def check(self, put: int) -> None:
        """It keeps no books."""

    def stop(self) -> None:
        FloorClient(f"{self._endpoint} ").tell("quit")
        self._process.join(10)
        self._folder.cleanup()


def _mapped(path: Path) -> Any:
    """An arena with every page in place, so that no fault is measured."""
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)


class FloorClient(Client):
    def __init__(self, address: str) -> None:
        endpoint, arena = address.split(" ")
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.connect(endpoint)
        self._memory = _mapped(Path(arena)) if arena else None
        self._at = self._end = 0

    def tell(self, *message: Any, frames: tuple[Any, ...] = ()) -> None:
        self._socket.send_multipart([encode(message), *frames], copy=False)

    def ask(self, *message: Any, frames: tuple[Any, ...] = ()) -> list[Any]:
        self.tell(*message, frames=frames)
        body, *payload = self._socket.recv_multipart(copy=False)
        return [decode(body.buffer), payload]

    def prepare(self, columns: Columns) -> Columns:
        return columns

    def put(self, prepared: Columns, number: int | None = None) -> None:
        described, frames = [], []
        for name, column in prepared.items():
            values, offsets = column if isinstance(column, tuple) else (column, None)
            frames.append(values)
            ends = None if offsets is None else offsets.tobytes()
            described.append((name, values.dtype.str, list(values.shape), ends, self._place(values)))
        self.ask("put", described, number, frames=() if self._memory is not None else tuple(frames))

    def take(self, task: str, count: int, more: Callable[[], bool]) -> Any:
        answer, frames = self.ask("take", task)
        if answer is None:
            return None
        number, described = answer
        columns = []
        for at, (_name, (dtype, shape, ends, place)) in enumerate(described):
            raw = self._memory[place[0] : place[1]] if self._memory is not None else frames[at].buffer
            values = np.frombuffer(raw, dtype).reshape(shape)
            columns.append((values, None if ends is None else np.frombuffer(ends, np.int64)))
        return number, columns

    def finish(self, taken: Any, prepared: Any = None) -> None:
        if prepared is not None:
            self.put(prepared, taken[0])

    def settle(self) -> None:
        """Nothing waits."""

    def values(self, taken: Any) -> list[Any]:
        return [values for values, _ in taken[1]]

    def rows(self, taken: Any) -> int:
        values, ends = taken[1][0]
        return len(values) if ends is None else len(ends) - 1

    def close(self) -> None:
        self._socket.close(0)

    def _place(self, values: Any) -> tuple[int, int] | None:
        """Copy into the arena. Returns start and end."""
        if self._memory is None:
            return None
        nbytes = -(-values.nbytes // ALIGN) * ALIGN
        if self._at + nbytes > self._end:
            piece = max(nbytes, PIECE_BYTES)
            self._at = self.ask("piece", piece)[0]
            self._end = self._at + piece
        start = self._at
        self._at += nbytes
        self._memory[start : start + values.nbytes] = values.reshape(-1).view(np.uint8)
        return start, start + values.nbytes


def service(name: str) -> Service:
    return Floor(name)


def client(name: str, address: str) -> Client:
    return FloorClient(address)
