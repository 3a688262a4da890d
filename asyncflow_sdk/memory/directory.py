"""The shared-memory directory of a run: made by its server, removed with it, swept up after a kill -9.

Every segment of a run lies in one directory below /dev/shm (or the temporary directory, where /dev/shm is
small). A lock on ``owner`` is held while the server lives: a directory whose lock is free belongs to a dead
run, and the next start removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "asyncflow-"
SMALL_BYTES = 256 << 20
LEFTOVER_S = 60.0


class SharedDirectory:
    """Make and own a directory for segments. ``warning`` says where it had to go and why, else ""."""

    def __init__(self, base: Path | None = None) -> None:
        self.warning = ""
        if base is None:
            base, self.warning = _choose_base()
        sweep(base)
        self.path, self._lock = _make(base)
        while not os.fstat(self._lock).st_nlink:  # swept up by another start, between its making and its lock
            os.close(self._lock)
            self.path, self._lock = _make(base)

    def close(self) -> None:
        """Remove the directory. Views that processes still hold stay valid. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _make(base: Path) -> tuple[Path, int]:
    """A new directory and the descriptor that holds its lock."""
    path = base / f"{PREFIX}{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    lock = os.open(path / "owner", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return path, lock


def sweep(base: Path) -> list[Path]:
    """Remove what dead runs of this user left below ``base``; returns what was removed."""
    return [path for path in base.glob(f"{PREFIX}{os.getuid()}-*") if remove_if_ownerless(path)]


def remove_if_ownerless(path: Path, wait_s: float = 0.0) -> bool:
    """Remove a run's directory if the server that owned it is gone. ``wait_s``: for a server that is known to be
    dying, since the kernel closes its files one by one: its pipes may end before its lock does."""
    try:
        lock = os.open(path / "owner", os.O_RDWR)
    except OSError:  # being made or removed by somebody else this moment; or their leftover, which age tells
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > LEFTOVER_S:
                shutil.rmtree(path, ignore_errors=True)
                return True
        return False
    until = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() >= until:
                    return False
                time.sleep(0.01)
            else:
                shutil.rmtree(path, ignore_errors=True)
                return True
    finally:
        os.close(lock)


def _choose_base() -> tuple[Path, str]:
    shm = Path("/dev/shm")
    with contextlib.suppress(OSError):
        room = os.statvfs(shm)
        free = room.f_bavail * room.f_frsize
        if free >= SMALL_BYTES and os.access(shm, os.W_OK):
            return shm, ""
        files = Path(tempfile.gettempdir())
        return files, (
            f"/dev/shm has only {free >> 20} MB free; segments go to files in {files}, which is slower. In a"
            " container, start it with a larger --shm-size"
        )
    files = Path(tempfile.gettempdir())
    return files, f"there is no /dev/shm here; segments go to files in {files}, which is slower"
