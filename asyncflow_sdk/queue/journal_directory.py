"""The directory of a run's journal: which files count, and who may write them.

lock               held while a server lives; its process, and where it listens
snapshot-000003    the whole state before the first record of journal-000003; the newest one counts
journal-000003     every input since
damaged-...        records of a damaged journal that could not be applied
history/           files that were replaced, if all of a run is kept for replays
segments/          at level host, the rows themselves

Each start, and each journal that has grown long, begins the next number: first the empty journal, then, renamed into
place, the snapshot that makes it count; then the old ones go. A crash in between leaves either pair whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex

import msgspec

from .._version import __version__
from ..errors import ConfigError, MemoryFull, ProtocolError
from ..memory import SharedDirectory, make_private_directory, sync_directory
from ..wire import process_key
from . import snapshot
from .journal import FORMAT, Head, Journal

LEVELS = ("process", "host")
LEAST_BYTES = 16 << 20
GROWTH = 4
"""A journal longer than ``LEAST_BYTES``, and than so many times its snapshot, is replaced by a new snapshot."""
_log = logging.getLogger(__name__)


class JournalDirectory:
    """``durability``, ``history``: see ``QueueServer``. ``head``: of the newest snapshot, None for a new run; ``state``: its content.
    ``bound``: where an earlier server listened, by the address that it was asked for. Not thread-safe.

    Raises ConfigError when another server has the directory, or when it cannot be read.
    """

    def __init__(self, path: Path, durability: str | None, history: bool = False) -> None:
        self.path, self._history = path, history
        try:
            make_private_directory(path)
        except OSError as error:
            raise ConfigError(f"no journal can be kept in {path}: {error}") from None
        for made in (path.parent, path.parent.parent):
            with contextlib.suppress(OSError):  # not ours to open, so not made by us
                sync_directory(made)
        self._lock, self.bound = _take_lock(path)
        try:
            self._number, self.head, self.state = _newest(path)
            if self.head is not None:
                self._check(self.head, durability)
        except BaseException:
            os.close(self._lock)
            raise
        self.durability = self.head.durability if self.head is not None else durability or LEVELS[0]
        self.run = self.head.run if self.head is not None else token_hex(8)
        self.rows = path / "segments" if self.durability == "host" else None
        if self.rows is not None:
            self.rows.mkdir(mode=0o700, exist_ok=True)
        self._least = 0

    def _check(self, head: Head, durability: str | None) -> None:
        if head.sdk != __version__:
            raise ConfigError(
                f"{self.path} was written by asyncflow-sdk {head.sdk}, and this is {__version__}, which may decide"
                " otherwise: continue it with that version, or choose another directory"
            )
        if durability not in (None, head.durability):
            raise ConfigError(
                f"{self.path} holds a run of durability {head.durability!r}; it cannot go on as {durability!r}"
            )

    @property
    def syncs(self) -> bool:
        """True if the journal is on the disk before an answer leaves."""
        return self.durability == "host"

    @property
    def journal_path(self) -> Path:
        """The journal that follows the newest snapshot."""
        return self._file("journal", self._number)

    def shared_directory(self) -> SharedDirectory:
        """Return the run's shared memory: that of the earlier server, if there was one."""
        path = Path(self.head.directory) if self.head is not None else None
        return SharedDirectory(journal=self.path, path=path)

    def listens(self, addresses: dict[str, str]) -> None:
        """Note where the server listens: asked for → bound. The next one listens there too."""
        content = msgspec.json.encode({"pid": os.getpid(), "addresses": addresses})
        with contextlib.suppress(
            OSError
        ):  # a full disk: the old content is written over, and cut to its length later
            os.pwrite(self._lock, content, 0)
            os.ftruncate(self._lock, len(content))

    def begin(self, state: bytes, memory: Path, now: float) -> Journal:
        """Write a snapshot of ``state``, and return the journal that follows it. ``memory``: the run's shared memory. ``now``: ledger
        seconds. Raises MemoryFull, OSError: then the old files count."""
        number = self._number + 1
        rows = str(self.rows) if self.rows is not None else ""
        head = Head(FORMAT, __version__, self.run, self.durability, str(memory), rows, boot(), now)
        path, whole = self._file("journal", number), self._file("snapshot", number)
        for left in (path, whole):  # of an attempt that failed: a stale one must never count
            left.unlink(missing_ok=True)
        journal = Journal(path, head, sync=self.syncs)
        try:
            snapshot.write(whole, msgspec.msgpack.encode(head), state)
        except BaseException as error:
            journal.close()
            for left in (whole, path):
                left.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise MemoryFull(f"no room for a snapshot in {self.path}: {error}") from None
            raise
        self._number, self.head, self._least = number, head, LEAST_BYTES  # from here on it is this one that counts
        with contextlib.suppress(OSError):
            self._least = max(LEAST_BYTES, GROWTH * whole.stat().st_size)
            for old in self.path.glob("*-??????"):
                if old.name.startswith(("journal-", "snapshot-")) and old not in (path, whole):
                    self._put_away(old)
            for part in self.path.glob("*.part"):  # of a server that was killed while it wrote it
                part.unlink(missing_ok=True)
        return journal

    def keep_writing(self, journal: Journal) -> None:
        """There was no room for a new journal, so the old one is written on until it is twice as long."""
        self._least = max(LEAST_BYTES, 2 * journal.nbytes)

    def compact(self, journal: Journal, state: Callable[[], bytes], memory: Path, now: float) -> Journal:
        """Return the journal to write from now on: a new one, if this one has grown long."""
        if journal.nbytes <= self._least:
            return journal
        try:
            new = self.begin(state(), memory, now)
        except Exception:
            _log.exception("the journal in %s goes on without a snapshot", self.path)
            self._least = 2 * journal.nbytes
            return journal
        journal.close()
        return new

    def keep_damaged(self, at: int) -> Path:
        """Keep the newest journal, which is damaged ``at`` this byte, under another name too; return the name."""
        aside = self.path / f"damaged-{self._number:06d}-at-{at}"
        try:
            os.link(self.journal_path, aside)
        except FileExistsError:  # by a recovery that was killed before it was through
            pass
        except OSError:  # a file system without links
            shutil.copyfile(self.journal_path, aside)
        return aside

    def close(self, *, over: bool) -> None:
        """Let another server have it. ``over``: no row is left, and nobody will continue the run."""
        if self.rows is not None and (over or self.head is None):
            shutil.rmtree(self.rows, ignore_errors=True)
        if over:  # the next run in this directory is a new one
            for kind in ("snapshot", "journal"):
                for path in self.path.glob(f"{kind}-*"):
                    self._put_away(path)
        os.close(self._lock)

    def _put_away(self, path: Path) -> None:
        """Remove a file that does not count any more, or move it to the history."""
        if not self._history:
            path.unlink(missing_ok=True)
            return
        aside = self.path / "history"
        aside.mkdir(exist_ok=True)
        path.rename(aside / path.name)

    def _file(self, kind: str, number: int) -> Path:
        return self.path / f"{kind}-{number:06d}"


def is_unfinished(path: Path) -> bool:
    """Return True if a journal directory holds a run that is not over: another server may continue it. False if it cannot be
    read."""
    try:
        return next(path.glob("snapshot-??????"), None) is not None
    except OSError:
        return False


def boot() -> str:
    """Return a name of this boot of the host, so that a restart can be seen."""
    return process_key(os.getpid()).split(" ")[0]


def _newest(path: Path) -> tuple[int, Head | None, bytes]:
    """Return number, head and state of the newest snapshot; 0, None and nothing where there is none yet."""
    numbers = sorted(int(found.name[-6:]) for found in path.glob("snapshot-??????"))
    failed = ""
    for number in reversed(numbers):
        if not (path / f"journal-{number:06d}").exists():
            failed = failed or f"journal-{number:06d} is missing"
            continue
        try:
            head_bytes, state = snapshot.read(path / f"snapshot-{number:06d}")
            head = msgspec.msgpack.decode(head_bytes, type=Head)
        except (ProtocolError, msgspec.MsgspecError) as error:
            failed = failed or str(error)
        else:
            return number, head, state
    if numbers:
        raise ConfigError(f"{path} holds a run that cannot be read: {failed}. Move it away to begin anew")
    return 0, None, b""


def _take_lock(path: Path) -> tuple[int, dict[str, str]]:
    """Return the lock's descriptor, and where the last server that had it listened."""
    lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        said = msgspec.json.decode(os.pread(lock, 1 << 16, 0) or b"{}")
        addresses = {str(asked): str(bound) for asked, bound in said.get("addresses", {}).items()}
        pid = said.get("pid", "?")
    except (msgspec.MsgspecError, AttributeError):
        addresses, pid = {}, "?"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        where = ", ".join(addresses.values()) or "this host alone"
        raise ConfigError(
            f"{path.parent} is being served by process {pid}, on {where}; connect to it, or end that process and those"
            " it forked"
        ) from None
    return lock, addresses
