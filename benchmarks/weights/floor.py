"""Floors: what one copy into memory both can see and one out of it allow, and what a tcp socket does. References, not products.

No names, no versions, nothing kept, nobody who dies. ``floor-shm``: one arena, in place before it is measured and used
again; buckets of 4 MB, each copied out as soon as it is in, with its xxh3 on both sides (``bare``: without). ``floor-staged``: the
same, but nothing is copied out before all of it is in, and verified. ``floor-tcp``: the parameters into a socket, and out of it into the parameters.
"""

from __future__ import annotations

import mmap
import socket
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import torch
import xxhash

from .contender import Replica, Trainer
from .model import Parameters

BUCKET = 4 << 20
PIECE = 512 << 10
Bytes = np.ndarray


def raw(parameters: Parameters) -> list[Bytes]:
    """The parameters' own memory."""
    return [tensor.view(-1).view(torch.uint8).numpy() for tensor in parameters.values()]


def buckets(parts: list[Bytes]) -> Iterator[tuple[int, list[tuple[int, Bytes]]]]:
    """End of each bucket in the arena, and the pieces in it, by where they start there."""
    at, pieces = 0, []
    for part in parts:
        start = 0
        while start < len(part):
            room = BUCKET - at % BUCKET
            pieces.append((at, part[start : start + room]))
            at += len(pieces[-1][1])
            start += len(pieces[-1][1])
            if at % BUCKET == 0:
                yield at, pieces
                pieces = []
    if pieces:
        yield at, pieces


def digest(memory: Bytes) -> bytes:
    state = xxhash.xxh3_128()
    for start in range(0, len(memory), PIECE):
        state.update(memory[start : start + PIECE])
    return state.digest()


def arena(path: str, nbytes: int) -> Bytes:
    """Mapped with every page in place."""
    with open(path, "r+b") as file:
        file.truncate(nbytes)
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)


def connect(address: str) -> socket.socket:
    if address.startswith("/"):
        made = socket.socket(socket.AF_UNIX)
        made.connect(address)
        return made
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)))


class FolderTrainer(Trainer):
    """Meets its replica at a socket in a folder in shared memory, in which versions go over."""

    def start(self, parameters: Parameters) -> str:
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"{self._folder.name}/socket")
        self._listening.listen()
        return self._folder.name

    def meet(self) -> None:
        self._socket, _ = self._listening.accept()

    def close(self) -> None:
        self._socket.close()
        self._folder.cleanup()


class ShmTrainer(FolderTrainer):
    def __init__(self, digests: bool) -> None:
        self._digests = digests

    def start(self, parameters: Parameters) -> str:
        folder = super().start(parameters)
        self._buckets = list(buckets(raw(parameters)))
        open(f"{folder}/arena", "xb").close()
        self._arena = arena(f"{folder}/arena", self._buckets[-1][0])
        return folder

    def publish(self, version: int) -> None:
        start = 0
        for stop, pieces in self._buckets:
            for at, piece in pieces:
                np.copyto(self._arena[at : at + len(piece)], piece)
            self._socket.send(digest(self._arena[start:stop]) if self._digests else b"x" * 16)
            start = stop


class ShmReplica(Replica):
    """``staged``: nothing is copied out before all of it is in, and verified."""

    def __init__(self, digests: bool, staged: bool) -> None:
        self._digests, self._staged = digests, staged

    def start(self, parameters: Parameters, address: str) -> None:
        self._buckets = list(buckets(raw(parameters)))
        self._arena = arena(f"{address}/arena", self._buckets[-1][0])
        self._socket = connect(f"{address}/socket")

    def take(self, version: int) -> float:
        if self._staged:
            sent = [self._next() for _ in self._buckets]
            for number in range(len(sent)):
                self._verify(number, sent[number])
        began = 0.0
        for number, (_, pieces) in enumerate(self._buckets):
            if not self._staged:
                self._verify(number, self._next())
            began = began or time.perf_counter()
            for at, piece in pieces:
                np.copyto(piece, self._arena[at : at + len(piece)])
        return time.perf_counter() - began

    def _next(self) -> bytes:
        return self._socket.recv(16, socket.MSG_WAITALL)

    def _verify(self, number: int, sent: bytes) -> None:
        start = self._buckets[number - 1][0] if number else 0
        if self._digests and digest(self._arena[start : self._buckets[number][0]]) != sent:
            raise RuntimeError("a bucket differs")

    def close(self) -> None:
        self._socket.close()


class TcpTrainer(Trainer):
    def start(self, parameters: Parameters) -> str:
        self._parts = raw(parameters)
        self._listening = socket.create_server(("127.0.0.1", 0))
        return f"127.0.0.1:{self._listening.getsockname()[1]}"

    def meet(self) -> None:
        self._socket, _ = self._listening.accept()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def publish(self, version: int) -> None:
        for part in self._parts:
            self._socket.sendall(part)

    def close(self) -> None:
        self._socket.close()
        self._listening.close()


class TcpReplica(Replica):
    def start(self, parameters: Parameters, address: str) -> None:
        self._parts = raw(parameters)
        self._socket = connect(address)

    def take(self, version: int) -> float:
        began = 0.0
        for part in self._parts:
            view = memoryview(part)
            while view:
                view = view[self._socket.recv_into(view) :]
                began = began or time.perf_counter()
        return time.perf_counter() - began

    def close(self) -> None:
        self._socket.close()


def trainer(name: str) -> Trainer:
    return TcpTrainer() if name == "floor-tcp" else ShmTrainer(not name.endswith("-bare"))


def replica(name: str) -> Replica:
    if name == "floor-tcp":
        return TcpReplica()
    return ShmReplica(not name.endswith("-bare"), staged=name.startswith("floor-staged"))
