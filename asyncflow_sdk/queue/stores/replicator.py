"""Replicator: sends a block to the storage unit of a second home, before its call is sent.

The home is chosen for each block by rendezvous hashing, so the blocks of a run spread evenly. A home
that does not answer is avoided for some time, and the next one is tried.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

from ...errors import AsyncFlowError, LeaseLost, WireError
from ...interfaces.store import StorageHome
from ...types.blocks import BlockPlace
from .home_clients import HomeClients
from .homes import HomeId, KnownHomes
from .replica_chunks import CHUNK_BYTES, ReplicaChunk, decode_kept, digest_of_chunk, encode

CHUNK_S = 5.0
"""Longest wait for the answer to one chunk, beside the time for its bytes."""
LOOK_S = 5.0
"""Homes are looked up at this interval."""
MOST_FREED = 1 << 16
"""Serials kept for the next chunk to a home. The unit finds further ones itself."""
_log = logging.getLogger(__name__)


class Replicator:
    """``session``: of the writer. ``synced``: replicas have to be on disk. Thread-safe."""

    def __init__(self, homes: KnownHomes, clients: HomeClients, session: int, *, synced: bool) -> None:
        self._homes, self._clients, self._session, self._synced = homes, clients, session, synced
        self._home_of: dict[int, HomeId] = {}  # by serial of a replica
        self._freed: dict[HomeId, list[int]] = {}  # to be sent with the next chunk
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def keep(self, memory: Any, first: HomeId) -> BlockPlace | None:
        """Send the bytes of a block. ``first``: the home that has them. Return the place of the
        replica; None if no other home keeps it now. Raises LeaseLost after ``HomeClients.close``."""
        for home in self._candidates(first):
            where = HomeId(home.home, home.epoch)
            try:
                place = self._send(where, memory)
            except AsyncFlowError as error:
                if self._clients.closed:
                    raise LeaseLost("the connection that writes these rows was closed") from None
                self._homes.avoid(where)
                _log.info("home %d (%s) keeps no replica now: %s", home.home, home.name, error)
            else:
                with self._lock:
                    self._home_of[place.serial] = where
                return place
        return None

    def free(self, serials: Iterable[int]) -> None:
        """Free replicas with the next chunk to their home. Ignores unknown serials."""
        with self._lock:
            for serial in serials:
                where = self._home_of.pop(serial, None)
                if where is not None and len(freed := self._freed.setdefault(where, [])) < MOST_FREED:
                    freed.append(serial)

    def _candidates(self, first: HomeId) -> list[StorageHome]:
        """Return the other homes, in the order of this block. Memory visible here is of this host."""
        with contextlib.suppress(WireError):
            self._homes.refresh(after_s=LOOK_S)
        number = next(self._numbers)
        others = [
            home
            for home in self._homes.served()
            if not (self._homes.sees(home) or self._homes.is_avoided(HomeId(home.home, home.epoch)))
            and home.home != first.home
        ]
        return sorted(
            others, key=lambda home: xxhash.xxh3_64_intdigest(f"{self._session} {number} {home.home}".encode())
        )

    def _send(self, where: HomeId, memory: Any) -> BlockPlace:
        """Send a block in chunks. Raises WireError, LeaseLost, MemoryFull, DigestMismatch,
        ProtocolError, AccessDenied."""
        client = self._clients.client(where)
        with self._lock:
            freed = self._freed.pop(where, [])
        place: BlockPlace | None = None
        try:
            for start in range(0, len(memory), CHUNK_BYTES):
                data = memory[start : start + CHUNK_BYTES]
                chunk = ReplicaChunk(
                    *where, self._session, len(memory), start, digest_of_chunk(data),
                    0 if place is None else place.serial, self._synced, np.array(freed, np.int64).tobytes(),
                )  # fmt: skip
                what = f"a replica in home {where.home}"
                place, freed = decode_kept(client.call(encode(chunk), CHUNK_S, what, (data,)).body), []
        except BaseException:
            self._return(where, freed if place is None else [place.serial])
            raise
        assert place is not None, "a block has a header"
        return place

    def _return(self, where: HomeId, serials: list[int]) -> None:
        """Free these with the next chunk."""
        with self._lock:
            self._freed[where] = (serials + self._freed.get(where, []))[:MOST_FREED]
