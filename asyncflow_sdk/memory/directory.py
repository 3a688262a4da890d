"""The shared-memory directory of a run: made by its server, removed with it, swept up after a kill -9.

Every segment of a run lies in one directory below /dev/shm (or the temporary directory, where /dev/shm is
small). A lock on ``owner`` is held while the server lives: a directory whose lock is free belongs to a dead
run, and the next start removes it.

A directory that a journal owns says so in a file ``journal``, with the path of that journal: while that is there, the
rows may still be wanted, and nobody removes them but the server that takes the journal up again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

from ..errors import ConfigError

MARK = "journal"
PREFIX = "asyncflow-"
SMALL_BYTES = 256 << 20
LEFTOVER_S = 60.0


class SharedDirectory:
    """Make and own a directory for segments. ``warning`` says where it had to go and why, else "".

    ``journal``: the path of a journal that owns it. ``path``: the one that this journal had before, which is taken up
    again, or made again if it is gone. Raises ConfigError when it is somebody else's.
    """

    def __init__(self, base: Path | None = None, *, journal: Path | None = None, path: Path | None = None) -> None:
        self.warning = ""
        if path is not None and path.parent.is_dir():
            base = path.parent
        else:
            path = None
        if base is None:
            base, self.warning = _choose_base()
        sweep(base)
        if path is None:
            self.path, self._lock = _make(base)
            while not os.fstat(self._lock).st_nlink:  # swept up by another start, between its making and its lock
                os.close(self._lock)
                self.path, self._lock = _make(base)
        else:
            self.path, self._lock = _take_up(path)
        if journal is not None:
            (self.path / MARK).write_text(str(journal))
            _remove_abandoned(base, journal, self.path)

    def close(self, *, keep: bool = False) -> None:
        """Remove the directory, unless it is to be taken up again. Views that processes still hold stay valid.
        Idempotent."""
        if self._lock >= 0:
            if not keep:
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _make(base: Path) -> tuple[Path, int]:
    """A new directory and the descriptor that holds its lock."""
    path = base / f"{PREFIX}{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    return path, _lock(path)


def _take_up(path: Path) -> tuple[Path, int]:
    """The directory of an earlier server, and the descriptor that holds its lock."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{path}, where this run had its shared memory, belongs to somebody else now")
    return path, _lock(path)


def _lock(path: Path) -> int:
    lock = os.open(path / "owner", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _remove_abandoned(base: Path, journal: Path, but: Path) -> None:
    """What a start of this journal left that got no further than making it."""
    for path in _ours(base):
        with contextlib.suppress(OSError):
            if path != but and (path / MARK).read_text() == str(journal):
                shutil.rmtree(path, ignore_errors=True)


def journal_owns(path: Path) -> bool:
    """True if a journal exists whose next server may take the directory up again."""
    try:
        return Path((path / MARK).read_text()).exists()
    except OSError:
        return False


def sweep(base: Path) -> list[Path]:
    """Remove what dead runs of this user left below ``base``; returns what was removed."""
    return [path for path in _ours(base) if remove_if_ownerless(path)]


def _ours(base: Path) -> list[Path]:
    """Directories of this user's runs; whatever others have put there under such a name is not looked into."""
    found = []
    for path in base.glob(f"{PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            state = path.lstat()
            if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid():
                found.append(path)
    return found


def own_directories() -> list[Path]:
    """Directories of this user's runs on this host, also of servers that have ended."""
    bases = {Path("/dev/shm"), Path(tempfile.gettempdir())}
    return [path for base in bases for path in _ours(base)]


def is_served(path: Path) -> bool:
    """True if the server of a run's directory lives: it holds the lock."""
    try:
        lock = os.open(path / "owner", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def remove_if_ownerless(path: Path, wait_s: float = 0.0) -> bool:
    """Remove a run's directory if the server that owned it is gone. ``wait_s``: for a server that is known to be
    dying, since the kernel closes its files one by one: its pipes may end before its lock does. One that a journal
    owns stays."""
    if journal_owns(path):
        return False
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
                if journal_owns(path):  # marked since
                    return False
                shutil.rmtree(path, ignore_errors=True)
                return True
    finally:
        os.close(lock)


def directory_at(address: str) -> Path | None:
    """The directory of the run that is served at an address of this host, as the address itself says; else None."""
    path = Path(address.removeprefix("ipc://")).parent
    ours = address.startswith("ipc://") and path.name.startswith(f"{PREFIX}{os.getuid()}-")
    return path if ours else None


def _choose_base() -> tuple[Path, str]:
    shm = Path("/dev/shm")
    with contextlib.suppress(OSError):
        sweep(shm)  # what dead runs left there may be what makes it small
        found = os.statvfs(shm)
        free = found.f_bavail * found.f_frsize
        if free >= SMALL_BYTES and os.access(shm, os.W_OK):
            return shm, ""
        files = Path(tempfile.gettempdir())
        return files, (
            f"/dev/shm has only {free >> 20} MB free; segments go to files in {files}, which is slower. In a"
            " container, start it with a larger --shm-size"
        )
    files = Path(tempfile.gettempdir())
    return files, f"there is no /dev/shm here; segments go to files in {files}, which is slower"
