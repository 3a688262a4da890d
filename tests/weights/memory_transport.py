"""A transport within one process, as small as the contract lets it be; and deliberately wrong ones, each in one way."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from asyncflow_sdk.errors import DigestMismatch, ProtocolError, VersionGone
from asyncflow_sdk.interfaces import Fetched, Host, WeightReceiver, WeightSender, WeightTransport
from asyncflow_sdk.interfaces.weights import Room
from asyncflow_sdk.types import Manifest

_senders = itertools.count()
SENT: dict[tuple[int, int], list[Any]] = {}


class MemoryRoom(Room):
    def __init__(self, nbytes: int) -> None:
        self.memory = np.zeros(nbytes, np.uint8)

    def trim(self, nbytes: int) -> None:
        self.memory = self.memory[:nbytes]


class MemorySender(WeightSender):
    def __init__(self) -> None:
        self.number = next(_senders)
        self.rooms: list[MemoryRoom] = []
        self.last: int | None = None

    def room(self, nbytes: int) -> Room:
        self.rooms.append(MemoryRoom(nbytes))
        return self.rooms[-1]

    def send(self, manifest: Manifest) -> bytes:
        SENT[self.number, manifest.version] = [room.memory for room in self.rooms]
        self.rooms, self.last = [], manifest.version
        return msgspec.msgpack.encode((self.number, manifest.version))

    def abandon(self) -> None:
        if not self.rooms and self.last is not None:
            del SENT[self.number, self.last]
        self.rooms, self.last = [], None

    def keep(self, versions: Sequence[int]) -> None:
        self.last = None
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
    sends: type[MemorySender] = MemorySender
    receives: type[MemoryReceiver] = MemoryReceiver

    def sender(self, host: Host) -> WeightSender:
        return self.sends()

    def receiver(self, host: Host) -> WeightReceiver:
        return self.receives()


# ---- wrong senders


class KeepsAll(MemorySender):
    def keep(self, versions: Sequence[int]) -> None:
        pass


class GrowsForEver(MemorySender):
    held = 0

    def room(self, nbytes: int) -> Room:
        self.held += nbytes
        return super().room(nbytes)

    @property
    def nbytes(self) -> int:
        return self.held


class NeverAbandons(MemorySender):
    def abandon(self) -> None:
        pass


class WaitsForReceivers(MemorySender):
    def send(self, manifest: Manifest) -> bytes:
        where = super().send(manifest)
        if manifest.version > 1:
            threading.Event().wait(5.0)
        return where


class TrimsWrongly(MemorySender):
    def room(self, nbytes: int) -> Room:
        room = super().room(nbytes)
        room.trim = lambda nbytes: None  # type: ignore[method-assign]
        return room


class Forgets(MemorySender):
    """Says that it outlives its process, and does not."""

    outlives = True


# ---- wrong receivers


class LosesTheLastByte(MemoryReceiver):
    def find(self, manifest: Manifest, where: bytes) -> list[Any]:
        chunks = [chunk.copy() for chunk in super().find(manifest, where)]
        for chunk in chunks:
            chunk[-1:] = 0
        return chunks

    def verify(self, manifest: Manifest, chunks: list[Any]) -> None:
        pass


class SharesMemory(MemoryReceiver):
    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        return Fetched(manifest, self.find(manifest, where))


class ReadsOnly(MemoryReceiver):
    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        fetched = super().fetch(manifest, where, timeout_s=timeout_s)
        for chunk in fetched.chunks:
            chunk.flags.writeable = False
        return fetched


class ViewChanges(MemoryReceiver):
    """What was fetched turns into what is fetched next."""

    memory: list[Any] = []  # noqa: RUF012 - of all receivers

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        fetched = super().fetch(manifest, where, timeout_s=timeout_s)
        if [len(c) for c in ViewChanges.memory] != [len(c) for c in fetched.chunks]:
            ViewChanges.memory = list(fetched.chunks)
        for shared, chunk in zip(ViewChanges.memory, fetched.chunks, strict=True):
            shared[:] = chunk
        return Fetched(manifest, ViewChanges.memory)


class VerifiesNothing(MemoryReceiver):
    def verify(self, manifest: Manifest, chunks: list[Any]) -> None:
        pass


class NamesNothing(MemoryReceiver):
    def verify(self, manifest: Manifest, chunks: list[Any]) -> None:
        try:
            super().verify(manifest, chunks)
        except DigestMismatch:
            raise DigestMismatch("something is wrong") from None


class NeedsDigests(MemoryReceiver):
    def verify(self, manifest: Manifest, chunks: list[Any]) -> None:
        if not manifest.digested:
            raise DigestMismatch(f"version {manifest.version} has no digests")


class TakesTheNewest(MemoryReceiver):
    def find(self, manifest: Manifest, where: bytes) -> list[Any]:
        number, _ = msgspec.msgpack.decode(where, type=tuple[int, int])
        return SENT[number, max(version for sender, version in SENT if sender == number)]

    def verify(self, manifest: Manifest, chunks: list[Any]) -> None:
        pass


class BuildsInTheBase(MemoryReceiver):
    keeps_base = True

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        fetched = super().fetch(manifest, where, timeout_s=timeout_s)
        if base is not None and [len(c) for c in base.chunks] == [len(c) for c in fetched.chunks]:
            for old, new in zip(base.chunks, fetched.chunks, strict=True):
                old[:] = new
            fetched.chunks = list(base.chunks)
        return fetched


class FallsOver(MemoryReceiver):
    def find(self, manifest: Manifest, where: bytes) -> list[Any]:
        number, version = msgspec.msgpack.decode(where)
        if (number, version) not in SENT:
            raise VersionGone(f"version {manifest.version} is no longer kept")
        return SENT[number, version]


class BelievesSizes(MemoryReceiver):
    def find(self, manifest: Manifest, where: bytes) -> list[Any]:
        np.zeros(len(where) << 20, np.uint8)
        return super().find(manifest, where)


class ReadsTooDeep(MemoryReceiver):
    def find(self, manifest: Manifest, where: bytes) -> list[Any]:
        msgspec.msgpack.decode(where) if where[:99] == b"\x91" * 99 else None
        return super().find(manifest, where)


class TakesOneAtATime(MemoryReceiver):
    turn = threading.Lock()

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        if not TakesOneAtATime.turn.acquire(blocking=False):
            raise VersionGone(f"version {manifest.version}: somebody else is fetching")
        threading.Event().wait(0.2)
        TakesOneAtATime.turn.release()
        return super().fetch(manifest, where, timeout_s=timeout_s)


class StaysInterrupted(MemoryReceiver):
    stopped = False

    def interrupt(self) -> None:
        self.stopped = True

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        if self.stopped:
            raise VersionGone(f"version {manifest.version} is wanted no more")
        return super().fetch(manifest, where, timeout_s=timeout_s)


class TakesBackOnClose(SharesMemory):
    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        self.mine = MemoryReceiver().fetch(manifest, where, timeout_s=timeout_s)
        return Fetched(manifest, self.mine.chunks)

    def close(self) -> None:
        for chunk in self.mine.chunks if hasattr(self, "mine") else ():
            chunk[:] = 0


WRONG: dict[str, list[type[MemorySender] | type[MemoryReceiver]]] = {
    "every_bit": [LosesTheLastByte, ReadsOnly],
    "boundaries": [LosesTheLastByte, TrimsWrongly],
    "versions": [KeepsAll, GrowsForEver, TakesTheNewest],
    "abandoned": [NeverAbandons],
    "held_for_ever": [ViewChanges, WaitsForReceivers],
    "written_into": [SharesMemory],
    "flipped": [VerifiesNothing, NamesNothing],
    "undigested": [NeedsDigests],
    "from_base": [BuildsInTheBase],
    "together": [TakesOneAtATime],
    "interrupted": [StaysInterrupted],
    "closed": [TakesBackOnClose, Forgets],
    "adopted": [Forgets],
    "strange_places": [FallsOver, BelievesSizes, ReadsTooDeep],
}
