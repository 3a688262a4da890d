"""The shared-memory directory of a run, made and removed by its server; after a kill -9, removed by the next one.

All segments of a run are files of one directory below /dev/shm, or below the temporary directory if that is small.
The server locks the file ``owner``. A directory with a free lock belongs to a dead run: the next server removes it.

The file ``journal`` names the journal that owns a directory, and ``owner`` the device and inode of the folder of the
run's directory: another container may have another journal of this path. While this journal exists, the rows may
still be needed, and only a server that continues it removes the directory. A process unable to see the journal, for
example in another container, removes the directory UNSEEN_S after the last sign of life of its server.

The file ``home`` names the run of a storage unit, which touches it while it lives. Its directory outlives the unit's
process: the next unit of the run on this host finds it again, or it is removed KEEP_S after the last touch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path

import msgspec

from ..errors import ConfigError

MARK = "journal"
HOME = "home"
PREFIX = "asyncflow-"
KEEP_S = 3600.0
SMALL_BYTES = 256 << 20
LEFTOVER_S = 60.0
UNSEEN_S = 7 * 24 * 3600.0
LOCK_S = 10.0
"""Longest wait for a process that looks into an earlier directory, or removes it."""
SIGN_S = 5.0  # interval of an owner's signs of life


class SharedDirectory:
    """Makes and owns a directory for segments. ``warning``: why it is not below /dev/shm, else "". ``journal``: path
    of the journal that owns it. ``path``: the journal's earlier directory, reused, or made again. Raises ConfigError
    if ``path`` belongs to another user, or stays locked. Not thread-safe."""

    def __init__(self, base: Path | None = None, *, journal: Path | None = None, path: Path | None = None) -> None:
        self.warning = ""
        if path is not None and path.parent.is_dir():
            base = path.parent
        else:
            path = None
        if base is None:
            base, self.warning = _choose_base()
        sweep(base)
        try:
            self.path, self._lock = _make(base) if path is None else _reuse(path)
        except BlockingIOError as error:
            raise ConfigError(f"{error}; it is in use, or its holder stands still: end that") from None
        self._mark = None if journal is None else (str(journal), _identity(journal.parent.parent))
        self._next_sign_s = 0.0
        if self._mark is not None:
            self._write_mark(*self._mark)
            for other in user_directories(base):  # left by servers of this journal that failed to start
                with contextlib.suppress(OSError):
                    mark = (other / MARK).read_text(), (other / "owner").read_text()
                    if other != self.path and mark == self._mark:
                        shutil.rmtree(other, ignore_errors=True)

    def keep(self) -> bool:
        """Give a sign of life, and make the directory again if it was removed. Return True if it was.
        With a journal, call it at least every SIGN_S. Raises OSError, ConfigError."""
        removed = os.fstat(self._lock).st_nlink == 0
        if not removed and time.monotonic() < self._next_sign_s:
            return False
        self._next_sign_s = time.monotonic() + SIGN_S
        if removed:
            lost, (_, self._lock) = self._lock, _reuse(self.path, wait_s=0.0)
            os.close(lost)
        if self._mark is not None:
            try:
                os.utime(self.path / MARK)
            except FileNotFoundError:
                self._write_mark(*self._mark)
        return removed

    def _write_mark(self, journal: str, folder: str) -> None:
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, folder.encode(), 0)
        (self.path / MARK).write_text(journal)

    def close(self, *, keep: bool = False) -> None:
        """Remove the directory, unless ``keep``. Existing views stay valid. Idempotent."""
        if self._lock >= 0:
            if not keep:
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _make(base: Path) -> tuple[Path, int]:
    """Return a new directory and the descriptor with its lock."""
    while True:
        path = base / f"{PREFIX}{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # another server removes it
            return path, _lock(path, fcntl.LOCK_EX, 0.0)


def meeting_directory(name: str) -> tuple[Path, int]:
    """Return a directory of this user's processes in /dev/shm, and a descriptor to keep it: close it, then call
    ``remove_if_ownerless``. Raises ConfigError, OSError; BlockingIOError, FileNotFoundError while it is removed."""
    path, lock = _reuse(Path("/dev/shm") / f"{PREFIX}{os.getuid()}-{name}", fcntl.LOCK_SH, 0.0)
    sweep(path.parent)
    return path, lock


def _reuse(path: Path, kind: int = fcntl.LOCK_EX, wait_s: float | None = None) -> tuple[Path, int]:
    """Return the directory of an earlier server and the descriptor with its lock."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{path}, where this run had its shared memory, belongs to another user now")
    return path, _lock(path, kind, LOCK_S if wait_s is None else wait_s)


def _lock(path: Path, kind: int, wait_s: float) -> int:
    lock = os.open(path / "owner", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        _take(lock, kind, wait_s)
        if os.fstat(lock).st_nlink:
            return lock
        raise FileNotFoundError("its directory was removed")
    except OSError as error:
        os.close(lock)
        raise type(error)(f"the lock {path / 'owner'} cannot be taken: {error}") from None


def _take(lock: int, kind: int, wait_s: float) -> None:
    """Lock a file. Raises BlockingIOError if another process has its lock for longer."""
    until = time.monotonic() + wait_s
    while True:
        try:
            return fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.01)


def _identity(folder: Path) -> str:
    found = os.stat(folder)
    return f"{found.st_dev} {found.st_ino}"


def is_kept_home(path: Path) -> bool:
    """True if a directory is of a storage unit alive less than KEEP_S ago."""
    try:
        return time.time() - (path / HOME).stat().st_mtime < KEEP_S
    except OSError:
        return False


def journal_owns(path: Path) -> bool:
    """True if a journal's next server may reuse a directory: the journal exists, or is unseen for up to UNSEEN_S."""
    try:
        journal, age_s = Path((path / MARK).read_text()), time.time() - (path / MARK).stat().st_mtime
    except OSError:
        return False
    with contextlib.suppress(OSError):  # in another container, or on a disk that is not mounted
        if journal.exists():
            return True
        if _identity(journal.parent.parent) == (path / "owner").read_text():
            return False
    return age_s < UNSEEN_S


def sweep(base: Path) -> list[Path]:
    """Remove the directories of this user's dead runs below ``base``, and return them."""
    return [path for path in user_directories(base) if remove_if_ownerless(path)]


def user_directories(base: Path) -> list[Path]:
    """Return the directories of this user's runs, opening no others."""
    found = []
    for path in base.glob(f"{PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            state = path.lstat()
            if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid():
                found.append(path)
    return found


def own_directories() -> list[Path]:
    """Return the directories of this user's runs on this host, also of ended servers."""
    return [path for base in {Path("/dev/shm"), Path(tempfile.gettempdir())} for path in user_directories(base)]


def is_served(path: Path) -> bool:
    """True if a server holds the lock of a run's directory."""
    with contextlib.suppress(OSError), open(path / "owner", "r+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def remove_if_ownerless(path: Path, wait_s: float = 0.0) -> bool:
    """Remove a run's directory without a server, unless a journal or the next unit needs it. Return True if removed.
    ``wait_s``: wait for the lock of a dying server: the kernel closes its files one by one."""
    if journal_owns(path) or is_kept_home(path):
        return False
    try:
        lock = os.open(path / "owner", os.O_RDWR)
    except OSError:  # being made or removed now, or abandoned long ago
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > LEFTOVER_S:
                shutil.rmtree(path, ignore_errors=True)
                return True
        return False
    try:
        _take(lock, fcntl.LOCK_EX, wait_s)
        if journal_owns(path) or is_kept_home(path):  # marked meanwhile
            return False
        shutil.rmtree(path, ignore_errors=True)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def directory_at(address: str) -> Path | None:
    """Return the run's directory contained in an ipc address of a server of this user, else None."""
    path = Path(address.removeprefix("ipc://")).parent
    ours = address.startswith("ipc://") and path.name.startswith(f"{PREFIX}{os.getuid()}-")
    return path if ours else None


def _choose_base() -> tuple[Path, str]:
    shm, files = Path("/dev/shm"), Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        sweep(shm)  # directories of dead runs may fill it
        found = os.statvfs(shm)
        free = found.f_bavail * found.f_frsize
        if free >= SMALL_BYTES and os.access(shm, os.W_OK):
            return shm, ""
        return files, (
            f"/dev/shm has only {free >> 20} MB free; segments go to files in {files}, which is slower. In a"
            " container, start it with a larger --shm-size"
        )
    return files, f"there is no /dev/shm here; segments go to files in {files}, which is slower"


class HomeMark(msgspec.Struct, frozen=True):
    """Content of the file ``home``: the run, the name of the host, and an identity of the contents."""

    run: str
    host: str
    contents: str


class HomeDirectory:
    """Makes or finds the directory of a run's home on this host, and owns it. ``path``: the directory. ``contents``:
    an identity of its files. ``base``: the folder where it is made, and looked for; default: as for a server's.
    Raises ConfigError if another process owns it, or if ``base`` cannot be used."""

    def __init__(self, run: str, base: Path | None = None) -> None:
        self._run = run
        earlier = find_home_directory(run, base)
        if earlier is not None and is_served(earlier):
            raise ConfigError(f"a storage unit of run {run} serves {earlier} already")
        try:
            if earlier is not None:
                os.utime(earlier / HOME)  # now nobody removes it meanwhile
            self._directory = SharedDirectory(base, path=earlier)
            self.path, self.warning = self._directory.path, self._directory.warning
            if earlier is None:
                self.begin_anew()
            else:
                self.contents = _read_mark(self.path).contents
        except OSError as error:
            raise ConfigError(f"a storage unit cannot keep columns in {base or 'memory'}: {error}") from None

    def begin_anew(self) -> None:
        """Give the contents another identity: some of them are lost."""
        self.contents = secrets.token_hex(8)
        mark = HomeMark(self._run, socket.gethostname(), self.contents)
        (self.path / HOME).write_bytes(msgspec.json.encode(mark))

    def touch(self) -> None:
        """Give a sign of life. Raises FileNotFoundError if the directory is gone."""
        os.utime(self.path / HOME)

    def segments(self) -> list[Path]:
        """Return the segments of all epochs."""
        with contextlib.suppress(OSError):
            return list(self.path.glob("h*!s*-*"))
        return []

    def close(self, *, keep: bool) -> None:
        """Give it up to the next unit, or remove it. Views stay valid. Idempotent."""
        self._directory.close(keep=keep)


def find_home_directory(run: str, base: Path | None = None) -> Path | None:
    """Return the directory of a run's home on this host; None if there is none."""
    for path in own_directories() if base is None else user_directories(base):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            mark = _read_mark(path)
            if (mark.run, mark.host) == (run, socket.gethostname()):
                return path
    return None


def _read_mark(path: Path) -> HomeMark:
    return msgspec.json.decode((path / HOME).read_bytes(), type=HomeMark)


def make_private_directory(path: Path) -> None:
    """Make a directory of mode 0700, unless it exists, and missing parents by the umask. Raises OSError."""
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        path.chmod(0o700)  # the umask may restrict the owner, too


def private_opener(path: str, flags: int) -> int:
    """An ``opener`` for ``open``: new files get mode 0600, existing ones keep theirs."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
