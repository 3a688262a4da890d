"""ReplicaArenas: replicas of blocks in other homes, kept by a storage unit for their writers.

The writer frees its replicas with its next chunk. The unit frees those that it cannot free: of ended
sessions, and of calls that were never executed, as the run's server lists the needed ones. An arena
lives as long as the unit's process; of the segments of an earlier process, only whole files are
removed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import LeaseLost
from ...memory import HEADER_BYTES, Allocation, Arena
from ...types.blocks import BlockPlace
from .homes import HomeId, is_replica_segment, replica_prefix
from .replica_chunks import ReplicaChunk, check_chunk

ORPHAN_S = 600.0
"""A replica unknown to the server for this long is freed: its call was never sent."""
SWEEP_S = 60.0
"""Interval of requests for the needed replicas."""


class SessionReplicas:
    """The replicas of one session's blocks in one epoch of this home. Thread-safe."""

    def __init__(self, directory: Path, where: HomeId, session: int) -> None:
        self.prefix = replica_prefix(where, session)
        self._arena = Arena(directory, self.prefix)
        self._since: dict[int, float] = {}  # by serial: when its first chunk arrived
        self._incomplete: dict[int, Allocation] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._since)

    def write(self, chunk: ReplicaChunk, data: Any) -> BlockPlace:
        """Write a checked chunk. Raises MemoryFull, LeaseLost if its replica was freed."""
        space = self._space(chunk)
        stop = chunk.start + memoryview(data).nbytes
        skip = max(0, HEADER_BYTES - chunk.start)  # the arena's header
        space.memory[chunk.start + skip : stop] = np.frombuffer(data, np.uint8)[skip:]
        with self._lock:
            if stop < chunk.nbytes:
                self._incomplete[space.serial] = space
            else:
                self._incomplete.pop(space.serial, None)
        if stop == chunk.nbytes and chunk.synced:
            self._arena.sync(space)
        return BlockPlace(space.segment, space.start, space.serial)

    def _space(self, chunk: ReplicaChunk) -> Allocation:
        if not chunk.serial:
            space = self._arena.allocate(max(chunk.nbytes, HEADER_BYTES))
            with self._lock:
                self._since[space.serial] = time.monotonic()
            return space
        with self._lock:
            found = self._incomplete.get(chunk.serial)
        if found is None or found.nbytes != chunk.nbytes:
            raise LeaseLost("the first chunks of this replica are gone")
        return found

    def free(self, serials: Iterable[int]) -> None:
        """Free replicas. Ignores unknown serials."""
        serials = list(serials)
        with self._lock:
            for serial in serials:
                self._since.pop(serial, None)
                self._incomplete.pop(serial, None)
        self._arena.free(serials)

    def older(self, age_s: float) -> list[int]:
        """Return the serials of replicas of at least this age."""
        until = time.monotonic() - age_s
        with self._lock:
            return [serial for serial, since in self._since.items() if since <= until]

    def close(self, *, unlink: bool) -> None:
        """Write no more."""
        self._arena.close(unlink=unlink)


class HeldReplicas(NamedTuple):
    """The replicas at one moment, by epoch and session: of all ages, and those old enough to be
    orphans."""

    all: dict[tuple[HomeId, int], list[int]]
    old: dict[tuple[HomeId, int], list[int]]


class ReplicaArenas:
    """``directory``: of the home's segments. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sessions: dict[tuple[HomeId, int], SessionReplicas] = {}
        self._lock = threading.Lock()
        self._began = self._swept = time.monotonic()

    def write(self, where: HomeId, chunk: ReplicaChunk, data: Any) -> BlockPlace:
        """Write a chunk to the epoch ``where`` of this home. Raises MemoryFull, LeaseLost,
        DigestMismatch, ProtocolError."""
        if where != (chunk.home, chunk.epoch):
            raise LeaseLost(f"epoch {chunk.epoch} of home {chunk.home} is not served here")
        check_chunk(chunk, data)
        with self._lock:
            key = where, chunk.session
            if key not in self._sessions:
                self._sessions[key] = SessionReplicas(self._directory, *key)
            mine = self._sessions[key]
        if chunk.freed:
            mine.free(np.frombuffer(chunk.freed[: len(chunk.freed) // 8 * 8], np.int64).tolist())
        return mine.write(chunk, data)

    def held(self) -> HeldReplicas:
        """Return the replicas held now. Call it before the server lists sessions."""
        with self._lock:
            mine = list(self._sessions.items())
        return HeldReplicas(
            {key: each.older(0.0) for key, each in mine}, {key: each.older(ORPHAN_S) for key, each in mine}
        )

    def sweep(self, held: HeldReplicas, where: HomeId, sessions: Set[int], needed: Callable[[], Set[int]]) -> None:
        """Free the replicas among ``held`` that nobody needs. ``sessions``: open ones. ``needed``:
        returns the serials that rows and calls need; it is called once in SWEEP_S."""
        ended = [key for key in held.all if key[1] not in sessions]
        doubtful = {key: held.all[key] if key in ended else held.old[key] for key in held.all if key[0] == where}
        if any(doubtful.values()) and time.monotonic() - self._swept >= SWEEP_S:
            self._swept = time.monotonic()
            keep = needed()
            for key, serials in doubtful.items():
                self._sessions[key].free(serial for serial in serials if serial not in keep)
        for key in list(held.all):
            if key[0] != where or (key in ended and not len(self._sessions[key])):
                with self._lock:
                    self._sessions.pop(key).close(unlink=True)

    def abandoned(self, segment: str) -> bool:
        """True if a replica segment is of an earlier process, and no call can name it any more."""
        if not is_replica_segment(segment) or time.monotonic() - self._began < ORPHAN_S:
            return False
        with self._lock:
            return not any(segment.startswith(each.prefix) for each in self._sessions.values())

    def close(self) -> None:
        """Write no more. The files stay."""
        with self._lock:
            for each in self._sessions.values():
                each.close(unlink=False)
            self._sessions.clear()
