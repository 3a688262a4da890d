"""Move weights within one process: the smallest transport to pass ``check_transport``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ..errors import ProtocolError, VersionGone
from ..interfaces import Fetched, Host, Room, WeightReceiver, WeightSender, WeightTransport
from ..interfaces.weights import Bytes
from ..types import Manifest

_numbers = itertools.count()
_senders: dict[int, dict[int, list[Any]]] = {}  # chunks by version, of each sender by its number


class MemoryRoom(Room):
    def __init__(self, nbytes: int) -> None:
        self.memory: Bytes = np.zeros(nbytes, np.uint8)

    def trim(self, nbytes: int) -> None:
        """Drop the bytes from ``nbytes`` on."""
        self.memory = self.memory[:nbytes]


class MemorySender(WeightSender):
    def __init__(self) -> None:
        self._number = next(_numbers)
        self._sent = _senders[self._number] = {}
        self._rooms: list[Room] = []
        self._last = -1  # the version that may still be abandoned

    def room(self, nbytes: int) -> Room:
        """Return new memory for a chunk."""
        self._rooms.append(MemoryRoom(nbytes))
        return self._rooms[-1]

    def send(self, manifest: Manifest) -> bytes:
        """Keep the written rooms as a version; return its key."""
        self._sent[manifest.version] = [room.memory for room in self._rooms]
        self._rooms, self._last = [], manifest.version
        return msgspec.msgpack.encode((self._number, manifest.version))

    def abandon(self) -> None:
        """Drop the rooms in progress, or the version just sent."""
        if not self._rooms:
            self._sent.pop(self._last, None)
        self._rooms, self._last = [], -1

    def keep(self, versions: Sequence[int]) -> None:
        """Drop all other versions."""
        self._last = -1
        for version in self._sent.keys() - set(versions):
            del self._sent[version]

    @property
    def nbytes(self) -> int:
        """The bytes of all kept versions."""
        return sum(len(chunk) for chunks in self._sent.values() for chunk in chunks)

    def close(self) -> None:
        """Drop all versions."""
        self.keep([])
        _senders.pop(self._number, None)


class MemoryReceiver(WeightReceiver):
    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        """Copy and verify a version's chunks. Raises VersionGone, DigestMismatch, ProtocolError."""
        chunks = [chunk.copy() for chunk in self.find(manifest, where)]
        self.verify(manifest, chunks)
        return Fetched(manifest, chunks, moved=manifest.nbytes)

    def find(self, manifest: Manifest, where: bytes) -> list[Any]:
        """Return the sender's chunks."""
        try:
            number, version = msgspec.msgpack.decode(where, type=tuple[int, int])
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ProtocolError(f"version {manifest.version}: {error}") from None
        chunks = _senders.get(number, {}).get(version)
        if chunks is None or version != manifest.version:
            raise VersionGone(f"version {manifest.version} is no longer kept")
        return chunks

    def verify(self, manifest: Manifest, chunks: Sequence[Any]) -> None:
        """Raise DigestMismatch, with bucket and tensors, for a byte other than published."""
        for bucket in manifest.buckets():
            manifest.check(bucket, memoryview(chunks[bucket.chunk][bucket.start : bucket.stop]))

    def close(self) -> None:
        """Do nothing: a receiver holds no resources."""
        pass


class MemoryTransport(WeightTransport):
    """Move weights by a copy within one process.

    An example of a whole transport, and the transport of tests with workers in threads of one process: a plugin names
    it by ``AdapterSpec(kind="transport", name="memory", factory="asyncflow_sdk.testing:MemoryTransport")``. In
    another process ``fetch`` raises VersionGone. Takes no options.
    """

    def sender(self, host: Host) -> WeightSender:
        """Return a sender."""
        return MemorySender()

    def receiver(self, host: Host) -> WeightReceiver:
        """Return a receiver."""
        return MemoryReceiver()
