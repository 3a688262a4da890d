"""HostShare: one process of a host fetches a version into shared memory, and the others map it.

    share = HostShare(host, rank, stopped)
    fetched = share.fetch(manifest, receive, until)     # receive(chunks, on_bucket) fills them

The processes meet in a directory of their user. The holder of the lock of its file ``fetching`` fetches: the kernel
frees the lock of a dead process, and the next one fetches. The file ``last`` gets the places of a version, by
renaming, once all its chunks are verified. The others map them without a lock: a block with a reader is not reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from ... import errors
from ...interfaces.weights import Fetched, Host
from ...memory import meeting_directory, remove_if_ownerless
from ...types import Manifest
from .shm import ShmReceiver, VersionMemory

HEAD_START_S = 0.05  # for the fetcher of the last version: it has memory and mappings to use again
STALL_S = 60.0  # longest time without a bucket of another process that fetches
_GRACE_S, _POLL_S = 1.0, 0.01  # after the grace, a holder of the lock has given a sign of life
Receive = Callable[..., Fetched]


class HostShare:
    """The versions of a publishing rank on this host. One ``fetch`` at a time."""

    def __init__(self, host: Host, rank: int, stopped: threading.Event) -> None:
        self._host, self._stopped = host, stopped
        self._name = hashlib.blake2b(f"{host.identity} {host.run} {rank}".encode(), digest_size=16).hexdigest()
        self._opened, self._path, self._lock = contextlib.ExitStack(), Path(), -1
        self._last = self._own = b""  # content of the file ``last``: as read, and as written by this process
        self._memory: VersionMemory | None = None
        self._directory, self._receiver = "", ShmReceiver(Path())

    @property
    def nbytes(self) -> int:
        """Host memory held for all processes of this host."""
        return 0 if self._memory is None else self._memory.nbytes

    def fetch(self, manifest: Manifest, receive: Receive, until: float) -> Fetched:
        """Map a version fetched by a process of this host; ``receive`` fetches it here, into memory of its own if
        this host cannot share it. Raises errors of ``receive``, WireError once stopped, DeadlineExceeded."""
        self._what, self._until, self._last = f"version {manifest.version}", until, b""
        began = time.monotonic()
        try:
            while (fetched := self._attempt(manifest, receive, time.monotonic() - began)) is None:
                self._wait()
            return fetched
        except (errors.WireError, errors.WeightError, errors.DeadlineExceeded):
            if self._memory is not None:
                self._memory.abandon()
            raise
        except BaseException as error:
            self.close()  # the memory has no room, or threads may still write there
            if not isinstance(error, (errors.ConfigError, errors.MemoryFull, msgspec.MsgspecError, OSError)):
                raise
            reason = str(error)
        return replace(receive(), notes=[f"{self._what} is not shared on this host: {reason}"])

    def close(self) -> None:
        """Free everything, until the next fetch. Fetched versions stay valid."""
        self._opened.close()
        self._receiver.close()
        if self._memory is not None:
            self._memory.close()
        self._directory, self._memory, self._lock = "", None, -1

    def _open(self) -> None:
        """Open the directory and its lock, again if somebody removed them."""
        if self._lock < 0 or not os.fstat(self._lock).st_nlink:
            self.close()
            self._path, owner = meeting_directory(self._name)
            self._opened.callback(remove_if_ownerless, self._path)
            self._opened.callback(os.close, owner)
            self._lock = os.open(self._path / "fetching", os.O_CREAT | os.O_RDWR, 0o600)
            self._opened.callback(os.close, self._lock)

    def _wait(self) -> None:
        """Wait a moment. Raise an error if the version is wanted no more, or late."""
        if self._stopped.wait(_POLL_S):
            raise errors.WireError(f"the fetch of {self._what} was interrupted: it is wanted no more")
        if time.monotonic() >= self._until:
            raise errors.DeadlineExceeded(f"{self._what} was not here in time: {self._waits_for}")

    def _attempt(self, manifest: Manifest, receive: Receive, waited_s: float) -> Fetched | None:
        """Map the version, or fetch it. Return None if another process does, or comes first."""
        try:
            self._open()
            self._waits_for = f"another process of this host fetches it, and holds the lock {self._path / 'fetching'}"
            fetched = self._map(manifest)
            if fetched is None and (waited_s >= HEAD_START_S or self._last in (b"", self._own)):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fetched = self._map(manifest) or self._receive(manifest, receive)
            return fetched
        except (BlockingIOError, FileNotFoundError) as error:  # the lock is held, or the directory is removed now
            self._waits_for = self._waits_for if self._lock >= 0 else str(error)
            if waited_s >= _GRACE_S and (self._lock < 0 or time.time() >= os.fstat(self._lock).st_mtime + STALL_S):
                raise OSError(f"{self._waits_for}, and nothing has arrived for {STALL_S:g} s") from None
            return None
        finally:
            if self._lock >= 0:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _map(self, manifest: Manifest) -> Fetched | None:
        """Map the version fetched last, if it is wanted and was not tried. Free older ones fetched here."""
        before = self._last
        with contextlib.suppress(FileNotFoundError):
            self._last = (self._path / "last").read_bytes()
        if self._last == before:
            return None
        root, directory, places = msgspec.msgpack.decode(self._last, type=tuple[str, str, msgspec.Raw])
        if root != manifest.root:
            return None
        if directory != self._directory:
            self._receiver.close()
            self._directory, self._receiver = directory, ShmReceiver(Path(directory), self._stopped)
        if self._memory is not None and self._last != self._own:
            self._memory.free()
        try:
            return self._receiver.fetch(manifest, bytes(places), timeout_s=self._until - time.monotonic())
        except errors.VersionGone:
            return None
        except errors.DigestMismatch as error:
            raise OSError(f"the memory of this host is damaged: {error}") from error

    def _receive(self, manifest: Manifest, receive: Receive) -> Fetched | None:
        """Fetch a version for this host, with the lock held. The one before stays until it is complete."""
        memory = self._memory = self._memory or VersionMemory.private(self._host.name, self._path.parent)
        rooms = []
        for chunk in manifest.chunks:
            os.utime(self._lock)
            try:
                rooms.append(memory.room(chunk.nbytes))
            except errors.ServerLost as error:
                raise OSError(str(error)) from error
        own = msgspec.msgpack.encode((manifest.root, str(memory.directory), [room.place for room in rooms]))
        (self._path / "next").write_bytes(own)  # now, since there may be no room
        received = receive([room.memory for room in rooms], lambda: os.utime(self._lock))
        memory.seal(manifest.version)
        os.replace(self._path / "next", self._path / "last")
        self._own = own
        memory.keep([manifest.version])
        fetched = self._map(manifest)
        return fetched and replace(fetched, moved=received.moved, encoding=received.encoding)
