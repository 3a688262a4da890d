"""HostShare: one process of a host fetches a version into shared memory, and the others map it.

    share = HostShare(host, rank)
    fetched = share.fetch(manifest, receive, until, stopped)     # receive(chunks, on_bucket) fills them

The holder of a file lock fetches: the kernel frees the lock of a dead process, and the next one
fetches. The lock lies in a directory of this user, named by a digest of the run's random name. Once all
chunks are verified, their places are written to a file beside them: no other version is mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ...errors import ConfigError, DeadlineExceeded, DigestMismatch, MemoryFull, VersionGone, WireError
from ...interfaces.weights import Bytes, Fetched, Host
from ...memory import meeting_directory, own_directories, remove_if_ownerless
from ...types import Manifest
from .shm import ShmReceiver
from .version_memory import VersionMemory

HEAD_START_S = 0.05
"""For the fetcher of the last version: it has memory and mappings to use again."""
STALL_S = 60.0
"""Longest wait for the next bucket of another process; this one then fetches for itself."""
_POLL_S = 0.01

Receive = Callable[[Sequence[Bytes], Callable[[], None]], Fetched]


class NotShared(Exception):
    """Internal: this host cannot share a version now. The process fetches it for itself."""


class HostShare:
    """The versions of a publishing rank on this host. One ``fetch`` at a time. Raises NotShared."""

    def __init__(self, host: Host, rank: int) -> None:
        self._host = host
        self._memory: VersionMemory | None = None
        self._places: Path | None = None
        self._maps: dict[Path, ShmReceiver] = {}
        self._name = hashlib.blake2b(f"{host.identity} {host.run} {rank}".encode(), digest_size=16).hexdigest()
        try:
            self._path, self._owner = meeting_directory(self._name)
            self._lock = os.open(self._path / "fetching", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except (ConfigError, OSError) as error:
            raise NotShared(str(error)) from error

    @property
    def nbytes(self) -> int:
        """Host memory held for all processes of this host."""
        return 0 if self._memory is None else self._memory.nbytes

    def fetch(self, manifest: Manifest, receive: Receive, until: float, stopped: threading.Event) -> Fetched:
        """Map a version fetched by a process of this host; ``receive`` fetches it here. Raises NotShared,
        errors of ``receive``, WireError once ``stopped``, DeadlineExceeded."""
        notes = list[str]()
        try:
            if self._places is None:
                stopped.wait(HEAD_START_S)
            touched, since = 0, time.monotonic()
            while not stopped.is_set():
                with contextlib.suppress(BlockingIOError):
                    for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):  # shared to map, alone to fetch
                        fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
                        fetched = self._map_shared(manifest, notes)
                        if fetched is None and kind == fcntl.LOCK_EX:
                            fetched = self._receive(manifest, receive)
                        if fetched is not None:
                            fetched.notes = notes
                            return fetched
                now, before, touched = time.monotonic(), touched, os.fstat(self._lock).st_mtime_ns
                since = since if touched == before else now
                holder = f"another process of this host fetches it, and holds the lock {self._path / 'fetching'}"
                if now >= until:
                    raise DeadlineExceeded(f"version {manifest.version} was not here in time: {holder}")
                if now >= since + STALL_S:
                    raise NotShared(f"{holder}, and nothing has arrived for {STALL_S:g} s")
                stopped.wait(_POLL_S)
            raise WireError(f"the fetch of version {manifest.version} was interrupted: it is wanted no more")
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Stop. Fetched versions stay valid."""
        os.close(self._lock)
        os.close(self._owner)
        remove_if_ownerless(self._path)
        if self._memory is not None:
            self._memory.close()
        for each in self._maps.values():
            each.close()

    # ---- with the lock held

    def _map_shared(self, manifest: Manifest, notes: list[str]) -> Fetched | None:
        """Map a version fetched by a process of this host, and free older ones fetched here."""
        for directory in own_directories():
            places = directory / f"{self._name}-{manifest.root}"
            try:
                fetched = self._map(directory, manifest, places.read_bytes())
            except (OSError, VersionGone):
                continue
            except DigestMismatch as error:
                notes[:] = [f"version {manifest.version} in the memory of this host is damaged: {error}"]
                continue
            if places != self._places and self._memory is not None:
                self._withdraw()
                self._memory.free()
            return fetched
        return None

    def _map(self, directory: Path, manifest: Manifest, places: bytes) -> Fetched:
        if directory not in self._maps:
            self._maps[directory] = ShmReceiver(directory)
        for former in [each for each in self._maps if each != directory]:
            self._maps.pop(former).close()
        return self._maps[directory].fetch(manifest, places, timeout_s=0.0)

    def _receive(self, manifest: Manifest, receive: Receive) -> Fetched:
        """Fetch a version for this host. The one before stays until it is complete."""
        try:
            memory = self._memory = self._memory or VersionMemory.private(self._host.name)
        except (MemoryFull, OSError) as error:
            raise NotShared(str(error)) from error
        try:
            try:
                rooms = [memory.room(chunk.nbytes) for chunk in manifest.chunks]
            except MemoryFull as error:
                raise NotShared(str(error)) from error
            received = receive([room.memory for room in rooms], lambda: os.utime(self._lock))
            places = msgspec.msgpack.encode(memory.seal(manifest.version))
            fetched = self._map(memory.directory, manifest, places)
        except BaseException:
            memory.abandon()
            raise
        self._withdraw()
        memory.keep([manifest.version])
        self._places = memory.directory / f"{self._name}-{manifest.root}"
        draft = memory.directory / "places"
        with contextlib.suppress(OSError):  # others then fetch for themselves
            draft.write_bytes(places)
            os.replace(draft, self._places)
        fetched.moved, fetched.encoding = received.moved, received.encoding
        return fetched

    def _withdraw(self) -> None:
        """Let no other process map the version fetched here from now on."""
        if self._places is not None:
            self._places.unlink(missing_ok=True)
            self._places = None
