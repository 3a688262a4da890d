"""The directory of a run's journal: its current files, and the lock of the server writing them.

    lock               held by the live server; its process and addresses
    snapshot-000003    the state before the first record of journal-000003; the newest one counts
    journal-000003     the inputs since
    damaged-...        a copy of a damaged journal, if valid records follow the damage
    history/RUN/       replaced files, if the run is served with history; RUN: identifier of the run
    segments/          the rows' payload, at durability "host"

A server's start, and each journal that has grown long, begin the next number. The empty journal is
written first; renaming the snapshot into place makes both count; then the old files are removed.
After a crash at any moment, one pair is complete.
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
from .journal import FORMAT, Journal, JournalHead, decode_head

LEVELS = ("process", "host")
LEAST_BYTES = 16 << 20
GROWTH = 4
"""A journal longer than ``LEAST_BYTES`` and this many times its snapshot is replaced."""
_log = logging.getLogger(__name__)


class JournalDirectory:
    """``durability``, ``history``: see ``QueueServer``. ``head``, ``state``: of the newest
    snapshot; ``head`` is None for a new run. ``addresses``: the earlier server's bound addresses,
    by requested address. Not thread-safe.

    Raises ConfigError if another server has locked the directory, or if it cannot be read.
    """

    def __init__(self, path: Path, durability: str | None, history: bool = False) -> None:
        self.path, self._history = path, history
        try:
            make_private_directory(path)
        except OSError as error:
            raise ConfigError(f"cannot create a journal in {path}: {error}") from None
        for parent in (path.parent, path.parent.parent):
            with contextlib.suppress(OSError):  # not accessible, so it existed before
                sync_directory(parent)
        self._lock, self.addresses = _take_lock(path)
        try:
            self._number, self.head, self._state = _newest(path)
            if self.head is not None and durability not in (None, self.head.durability):
                raise ConfigError(
                    f"{self.path} holds a run of durability {self.head.durability!r}; it cannot continue as"
                    f" {durability!r}"
                )
        except BaseException:
            os.close(self._lock)
            raise
        self.durability = self.head.durability if self.head is not None else durability or LEVELS[0]
        self.run = self.head.run if self.head is not None else token_hex(8)
        self.rows = path / "segments" if self.durability == "host" else None
        if self.rows is not None:
            self.rows.mkdir(mode=0o700, exist_ok=True)
        self._least = 0

    @property
    def syncs(self) -> bool:
        """True if the journal is synced to the disk before an answer is sent."""
        return self.durability == "host"

    @property
    def journal_path(self) -> Path:
        """The journal after the newest snapshot."""
        return self._file("journal", self._number)

    def shared_directory(self) -> SharedDirectory:
        """Return the run's shared memory: that of the earlier server, if any."""
        path = Path(self.head.directory) if self.head is not None else None
        return SharedDirectory(journal=self.path, path=path)

    def save_addresses(self, addresses: dict[str, str]) -> None:
        """Save the server's addresses (requested → bound) for the next server."""
        content = msgspec.json.encode({"pid": os.getpid(), "addresses": addresses})
        with contextlib.suppress(OSError):  # a full disk
            os.pwrite(self._lock, content, 0)
            os.ftruncate(self._lock, len(content))

    def take_state(self) -> bytes:
        """Return the newest snapshot's state, once."""
        state, self._state = self._state, b""
        return state

    def begin(self, state: bytes, memory: Path, now: float) -> Journal:
        """Write a snapshot of ``state``, and return the new journal after it.

        ``memory``: the run's shared memory. ``now``: ledger seconds. Raises MemoryFull, OSError;
        then the old files count.
        """
        number = self._number + 1
        rows = str(self.rows) if self.rows is not None else ""
        head = JournalHead(FORMAT, __version__, self.run, self.durability, str(memory), rows, boot(), now)
        path, snapshot_path = self._file("journal", number), self._file("snapshot", number)
        for stale in (path, snapshot_path):  # from a failed attempt: they must never count
            stale.unlink(missing_ok=True)
        journal = Journal.new(path, head, self.syncs)
        try:
            snapshot.write(snapshot_path, msgspec.msgpack.encode(head), state)
        except BaseException as error:
            journal.close()
            for stale in (snapshot_path, path):
                stale.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise MemoryFull(f"no room for a snapshot in {self.path}: {error}") from None
            raise
        self._number, self.head, self._least = number, head, LEAST_BYTES  # the new pair counts from here on
        with contextlib.suppress(OSError):
            self._least = max(LEAST_BYTES, GROWTH * snapshot_path.stat().st_size)
            for old in self.path.glob("*-??????"):
                if old.name.startswith(("journal-", "snapshot-")) and old not in (path, snapshot_path):
                    self._retire_file(old)
            for part in self.path.glob("*.part"):  # from a server killed while writing it
                part.unlink(missing_ok=True)
        return journal

    def continue_journal(self, journal: Journal) -> None:
        """Continue the old journal, for lack of room for a new one, until it is twice as long."""
        self._least = max(LEAST_BYTES, 2 * journal.nbytes)

    def compact(self, journal: Journal, state: Callable[[], bytes], memory: Path, now: float) -> Journal:
        """Return the journal to write from now on: a new one if this one has grown long."""
        if journal.nbytes <= self._least:
            return journal
        try:
            new = self.begin(state(), memory, now)
        except Exception:
            _log.exception("the journal in %s continues without a snapshot", self.path)
            self._least = 2 * journal.nbytes
            return journal
        journal.close()
        return new

    def keep_damaged(self, at: int) -> Path:
        """Keep a copy of the journal damaged at position ``at``. Return its path."""
        aside = self.path / f"damaged-{self._number:06d}-at-{at}"
        try:
            os.link(self.journal_path, aside)
        except FileExistsError:  # from a recovery that was killed
            pass
        except OSError:  # a file system without links
            shutil.copyfile(self.journal_path, aside)
        return aside

    def close(self, *, over: bool) -> None:
        """Release the lock. ``over``: no row is left; remove the files, or move them to history."""
        if self.rows is not None and (over or self.head is None):
            shutil.rmtree(self.rows, ignore_errors=True)
        if over:
            for kind in ("snapshot", "journal"):
                for path in self.path.glob(f"{kind}-*"):
                    self._retire_file(path)
        os.close(self._lock)

    def _retire_file(self, path: Path) -> None:
        if not self._history:
            path.unlink(missing_ok=True)
            return
        aside = self.path / "history" / self.run
        for folder in (aside.parent, aside):
            make_private_directory(folder)
        path.rename(aside / path.name)

    def _file(self, kind: str, number: int) -> Path:
        return self.path / f"{kind}-{number:06d}"


def is_unfinished(path: Path) -> bool:
    """Return True if a server can continue the run of a journal directory; False if unreadable."""
    try:
        return next(path.glob("snapshot-" + "[0-9]" * 6), None) is not None
    except OSError:
        return False


def boot() -> str:
    """Return an identifier of this boot of the host."""
    return process_key(os.getpid()).split(" ")[0]


def _newest(path: Path) -> tuple[int, JournalHead | None, bytes]:
    """Return number, head and state of the newest snapshot; 0, None and b"" if there is none."""
    numbers = sorted(int(found.name[-6:]) for found in path.glob("snapshot-" + "[0-9]" * 6))
    failed = ""
    for number in reversed(numbers):
        if not (path / f"journal-{number:06d}").exists():
            failed = failed or f"journal-{number:06d} is missing"
            continue
        try:
            head, state = snapshot.read(path / f"snapshot-{number:06d}")
        except ProtocolError as error:
            failed = failed or str(error)
        else:
            return number, decode_head(head, path / f"snapshot-{number:06d}"), state
    if numbers:
        raise ConfigError(f"{path} holds a run that cannot be read: {failed}. Move it away to start a new run")
    return 0, None, b""


def _take_lock(path: Path) -> tuple[int, dict[str, str]]:
    """Lock the directory. Return the lock's descriptor, and the last server's addresses."""
    lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        saved = msgspec.json.decode(os.pread(lock, 1 << 16, 0) or b"{}")
        addresses = {str(asked): str(bound) for asked, bound in saved.get("addresses", {}).items()}
        pid = saved.get("pid", "?")
    except (msgspec.MsgspecError, AttributeError):
        addresses, pid = {}, "?"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        where = ", ".join(addresses.values()) or "this host alone"
        raise ConfigError(
            f"{path.parent} is being served by process {pid}, on {where}; connect to it, or end that process and its"
            " forked children"
        ) from None
    return lock, addresses
