"""Relay: one process's memory with the versions for all replicas of its host; it serves them to other
hosts, too.

    relay = Relay(host, insecure=False, deltas=True)
    chunks = relay.begin(manifest)            # to be filled; each verified bucket is announced by
    relay.arrive(number)                      # and served from now on
    places = relay.complete()                 # replicas of this host map it, also by a ShareRequest

It keeps the newest complete version beside the arriving one: for slower hosts, and as the base of
deltas.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from pathlib import Path

from ...errors import MemoryFull, ProtocolError
from ...interfaces.weights import Bytes, Host
from ...types import Manifest
from .bucket_server import BucketServer, HeldVersion
from .tcp_messages import Join, ShareReply, ShareRequest, encode
from .version_memory import ChunkPlace, VersionMemory

DELTA_BYTES = 64 << 20


class Relay:
    """One process's memory for others. ``deltas``: True to make deltas for other hosts. One thread
    fills it; requests are answered in another."""

    def __init__(self, host: Host, *, insecure: bool, deltas: bool) -> None:
        self._memory = VersionMemory.private(host.name)
        try:
            self._server = BucketServer(
                host, insecure=insecure, delta_bytes=DELTA_BYTES if deltas else 0, on_call=self._share, relay=True
            )
        except BaseException:
            self._memory.close()
            raise
        self.where = self._server.where
        self._arriving: HeldVersion | None = None
        self._places: dict[str, tuple[ChunkPlace, ...]] = {}  # by root
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Host memory held for weights and deltas."""
        return self._memory.nbytes + self._server.nbytes

    @property
    def directory(self) -> Path:
        """The directory of the chunks."""
        return self._memory.directory

    def begin(self, manifest: Manifest) -> list[Bytes]:
        """Return memory for the chunks of a version. Frees older versions, except the newest
        complete one. Raises MemoryFull."""
        complete = [each.manifest.version for each in self._server.versions if each.complete]
        self._keep(complete[-1:])
        try:
            rooms = [self._memory.room(chunk.nbytes) for chunk in manifest.chunks]
        except MemoryFull:
            self._memory.abandon()
            self._server.refuse_older(manifest.version)
            self._server.update()
            raise
        views = [self._memory.view(room.place) for room in rooms]
        self._arriving = HeldVersion(manifest, views, arriving=True)
        self._server.add(self._arriving)
        return [room.memory for room in rooms]

    def arrive(self, number: int) -> None:
        """Serve a verified bucket of the arriving version. Thread-safe."""
        assert self._arriving is not None
        self._arriving.arrive(number)
        self._server.update()

    def has(self, number: int) -> bool:
        """True if a bucket has arrived."""
        assert self._arriving is not None
        return self._arriving.has(number)

    def complete(self) -> Sequence[ChunkPlace]:
        """End the arriving version. Return the places of its chunks."""
        version, self._arriving = self._arriving, None
        assert version is not None
        places = tuple(self._memory.seal(version.manifest.version))
        version.end(self._memory.chunks(version.manifest.version))
        with self._lock:
            self._places[version.root] = places
        self._server.update()
        return places

    def abandon(self) -> None:
        """Give up the arriving version, if any: requests for it are refused."""
        version, self._arriving = self._arriving, None
        if version is not None:
            self._server.keep([each.manifest.version for each in self._server.versions if each.complete])
            self._memory.abandon()
            self._server.update()

    def clear(self) -> None:
        """Free all versions."""
        self._keep(())

    def close(self) -> None:
        """Stop serving. Mapped versions stay valid. Idempotent."""
        self._server.close()
        self._memory.close()

    def _keep(self, versions: Sequence[int]) -> None:
        self._server.keep(versions)
        self._memory.keep(versions)
        roots = {each.root for each in self._server.versions}
        with self._lock:
            self._places = {root: places for root, places in self._places.items() if root in roots}

    # ---- in the service's thread

    def _share(self, peer: str, ticket: int, call: Join | ShareRequest) -> None:
        if not isinstance(call, ShareRequest):
            raise ProtocolError("a relay does not decide where other hosts fetch; ask the publisher")
        self._server.answer_when(ticket, functools.partial(self._answer_share, ticket, call))

    def _answer_share(self, ticket: int, call: ShareRequest, last: bool) -> bool:
        version = self._server.find_arriving(call.version, call.root)
        with self._lock:
            places = self._places.get(call.root)
        if places is None and not last:
            return False
        if places is not None:
            reply = ShareReply(str(self.directory), places)
        else:
            reply = ShareReply(received=0 if version is None else version.received)
        self._server.service.answer(ticket, encode(reply))
        return True
