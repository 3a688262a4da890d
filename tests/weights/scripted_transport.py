"""The transport "scripted" within one process, for a plugin.

``Scripted.end`` is the receiver of every replica; a test tells it what each fetch does before it fetches. ``Scripted.send``
is called with each manifest before it is sent.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

import asyncflow_sdk as af
from asyncflow_sdk.errors import ProtocolError, VersionGone, WireError
from asyncflow_sdk.interfaces import Fetched, Host, WeightReceiver, WeightSender, WeightTransport
from asyncflow_sdk.interfaces.weights import Room
from asyncflow_sdk.plugins import AdapterSpec
from asyncflow_sdk.types import Manifest

SENT: dict[tuple[int, int], list[Any]] = {}
"""Chunks by sender and version."""
_senders = itertools.count()
LIMIT_S = 60.0
"""Only ends a test that would hang."""


class MemoryRoom(Room):
    def __init__(self, nbytes: int) -> None:
        self.memory = np.zeros(nbytes, np.uint8)

    def trim(self, nbytes: int) -> None:
        self.memory = self.memory[:nbytes]


class MemorySender(WeightSender):
    def __init__(self) -> None:
        self.number, self.rooms, self.last = next(_senders), list[Room](), -1

    def room(self, nbytes: int) -> Room:
        self.rooms.append(MemoryRoom(nbytes))
        return self.rooms[-1]

    def send(self, manifest: Manifest) -> bytes:
        SENT[self.number, manifest.version] = [room.memory for room in self.rooms]
        self.rooms, self.last = [], manifest.version
        return msgspec.msgpack.encode((self.number, manifest.version))

    def abandon(self) -> None:
        if not self.rooms:
            SENT.pop((self.number, self.last), None)
        self.rooms, self.last = [], -1

    def keep(self, versions: Sequence[int]) -> None:
        self.last = -1
        for key in [key for key in SENT if key[0] == self.number and key[1] not in versions]:
            del SENT[key]

    @property
    def nbytes(self) -> int:
        return sum(len(c) for key, chunks in SENT.items() if key[0] == self.number for c in chunks)

    def close(self) -> None:
        self.keep([])


class MemoryReceiver(WeightReceiver):
    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        chunks = [chunk.copy() for chunk in self.find(manifest, where)]
        self.verify(manifest, chunks)
        return Fetched(manifest, chunks, moved=manifest.nbytes)

    def find(self, manifest: Manifest, where: bytes) -> list[Any]:
        try:
            number, version = msgspec.msgpack.decode(where, type=tuple[int, int])
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ProtocolError(f"version {manifest.version}: {error}") from None
        if version != manifest.version or (number, version) not in SENT:
            raise VersionGone(f"version {manifest.version} is no longer kept")
        return SENT[number, version]

    def verify(self, manifest: Manifest, chunks: list[Any]) -> None:
        for bucket in manifest.buckets():
            manifest.check(bucket, memoryview(chunks[bucket.chunk][bucket.start : bucket.stop]))

    def close(self) -> None:
        pass


class MemoryTransport(WeightTransport):
    """Within one process, and as small as the contract allows."""

    def sender(self, host: Host) -> WeightSender:
        return MemorySender()

    def receiver(self, host: Host) -> WeightReceiver:
        return MemoryReceiver()


Step = Callable[["ScriptedReceiver", Manifest], Any]


class ScriptedReceiver(MemoryReceiver):
    """``script``: what each fetch does before it fetches, one call after another; those after it just fetch."""

    keeps_base: ClassVar[bool] = True

    def __init__(self) -> None:
        self.script: list[Step] = []
        self.fetched: list[tuple[int, int | None]] = []  # version, base
        self.given: list[Fetched] = []
        self.interrupted, self.closed = threading.Event(), threading.Event()
        self._busy = threading.Lock()

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        assert self._busy.acquire(blocking=False), "two fetches at once"
        try:
            self.interrupted.clear()
            self.fetched.append((manifest.version, base.manifest.version if base is not None else None))
            assert base is None or len(base.chunks), "the base was released"
            if self.script:
                self.script.pop(0)(self, manifest)
            self.given.append(super().fetch(manifest, where, timeout_s=timeout_s))
            return self.given[-1]
        finally:
            self._busy.release()

    def interrupt(self) -> None:
        self.interrupted.set()

    def close(self) -> None:
        self.closed.set()

    @property
    def held(self) -> list[int]:
        """Versions that were fetched and not released."""
        return [fetched.manifest.version for fetched in self.given if len(fetched.chunks)]


class ScriptedSender(MemorySender):
    outlives = True

    def send(self, manifest: Manifest) -> bytes:
        Scripted.send(manifest)
        return super().send(manifest)

    def keep(self, versions: Sequence[int]) -> None:
        Scripted.keep(versions)
        super().keep(versions)

    def close(self) -> None:
        pass


class Scripted(MemoryTransport):
    end: ClassVar[ScriptedReceiver]
    send: ClassVar[Callable[[Manifest], Any]]
    keep: ClassVar[Callable[[Sequence[int]], Any]]

    def sender(self, host: Host) -> WeightSender:
        return ScriptedSender()

    def receiver(self, host: Host) -> WeightReceiver:
        return Scripted.end

    @classmethod
    def reset(cls) -> None:
        cls.end, cls.send, cls.keep = ScriptedReceiver(), lambda manifest: None, lambda versions: None


def fails(error: Exception) -> Step:
    def step(receiver: ScriptedReceiver, manifest: Manifest) -> None:
        raise error

    return step


def until_interrupted(receiver: ScriptedReceiver, manifest: Manifest) -> None:
    assert receiver.interrupted.wait(LIMIT_S), "was not interrupted"
    raise WireError(f"interrupted while fetching version {manifest.version}")


@af.hookimpl
def asyncflow_adapters() -> list[AdapterSpec]:
    return [AdapterSpec(kind="transport", name="scripted", factory="scripted_transport:Scripted")]
