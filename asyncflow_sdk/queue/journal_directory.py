"""The directory of a run's journal: its current files, the lock of the server writing them, and the open journal.

    lock               held by the live server; its process and addresses
    snapshot-000003    the state before the first record of journal-000003; the newest one counts
    journal-000003     the inputs since
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
from ..errors import ConfigError, MemoryFull
from ..memory import SharedDirectory, make_private_directory, private_opener, sync_directory
from ..wire import boot_id
from .journal import FORMAT, RESTORE, Journal, JournalHead, decode_head, framed, record_at

MAGIC = b"asyncflow-state\n"
LEAST_BYTES = 16 << 20
GROWTH = 4
"""A journal longer than ``LEAST_BYTES`` and this many times its snapshot is replaced."""
_log = logging.getLogger(__name__)


class JournalDirectory:
    """``durability``: "process" (any process may die at any time), or "host" (payload is also on disk before a put is
    acknowledged); None: as in the existing journal, else "process". ``history``: keep replaced journals for replays.
    ``number``, ``head``: those of the newest snapshot; 0 and None for a new run. ``addresses``: the earlier server's
    bound addresses, by requested address. ``rows``: directory of the row segments, None for the run's shared memory.
    Not thread-safe. Raises ConfigError if another server has locked the directory, or if it cannot be read."""

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
            self.number, self.head = _newest(path)
            if self.head is not None and durability not in (None, self.head.durability):
                raise ConfigError(
                    f"{self.path} holds a run of durability {self.head.durability!r}; it cannot continue as"
                    f" {durability!r}"
                )
        except BaseException:
            os.close(self._lock)
            raise
        self.durability = self.head.durability if self.head is not None else durability or "process"
        self.run = self.head.run if self.head is not None else token_hex(8)
        self.rows = path / "segments" if self.durability == "host" else None
        if self.rows is not None:
            self.rows.mkdir(mode=0o700, exist_ok=True)
        self._least = 0
        self._journal: Journal | None = None

    def shared_directory(self) -> SharedDirectory:
        """Return the run's shared memory: that of the earlier server, if any. Raises ConfigError, OSError; then the
        lock is released."""
        try:
            return SharedDirectory(journal=self.path, path=None if self.head is None else Path(self.head.directory))
        except BaseException:
            self.close(over=False)
            raise

    def save_addresses(self, addresses: dict[str, str]) -> None:
        """Save the server's addresses (requested → bound) for the next server."""
        content = msgspec.json.encode({"pid": os.getpid(), "addresses": addresses})
        with contextlib.suppress(OSError):  # a full disk
            os.pwrite(self._lock, content, 0)
            os.ftruncate(self._lock, len(content))

    def begin(self, state: bytes, memory: Path, now: float) -> None:
        """Write a snapshot of ``state``, and begin the journal after it. ``memory``: the run's shared memory.
        ``now``: ledger seconds. Raises MemoryFull; then the old files count."""
        number, rows = self.number + 1, str(self.rows or "")
        head = JournalHead(FORMAT, __version__, self.run, self.durability, str(memory), rows, boot_id(), now)
        path, snapshot_path = self.file("journal", number), self.file("snapshot", number)
        try:
            with contextlib.ExitStack() as undo:
                for stale in (path, snapshot_path):  # they must never count
                    undo.callback(stale.unlink, missing_ok=True)
                journal = Journal(path, head, self.durability == "host")
                undo.callback(journal.close)
                _write_snapshot(snapshot_path, head, state)
                undo.pop_all()
        except (OSError, MemoryFull) as error:
            raise MemoryFull(f"no room to begin {path}, so the old files count: {error.__cause__ or error}") from None
        if self._journal is not None:
            self._journal.close()
        self.number, self.head, self._least = number, head, LEAST_BYTES  # the new pair counts from here on
        self._journal = journal
        with contextlib.suppress(OSError):
            self._least = max(LEAST_BYTES, GROWTH * snapshot_path.stat().st_size)
            for old in self.path.glob("*-??????"):
                if old.name.startswith(("journal-", "snapshot-")) and old not in (path, snapshot_path):
                    self._retire_file(old)

    @property
    def journal(self) -> Journal:
        """The journal since ``begin``."""
        assert self._journal is not None
        return self._journal

    def compact(self, state: Callable[[], bytes], memory: Path, clock: Callable[[], float]) -> None:
        """Replace a long journal by a snapshot and a new journal."""
        if self.journal.nbytes <= self._least:
            return
        try:
            self.begin(state(), memory, clock())
        except Exception:
            _log.exception("the journal in %s continues without a snapshot", self.path)
            self._least = 2 * self.journal.nbytes

    def close(self, *, over: bool) -> None:
        """Close the journal, and release the lock. ``over``: no row is left; remove the files, or move them to
        history."""
        if self._journal is not None:
            self._journal.close()
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

    def file(self, kind: str, number: int) -> Path:
        """Return the path of a "journal" or a "snapshot"."""
        return self.path / f"{kind}-{number:06d}"


def is_unfinished(path: Path) -> bool:
    """Return True if a server can continue the run of a journal directory; False if unreadable."""
    try:
        return next(path.glob("snapshot-" + "[0-9]" * 6), None) is not None
    except OSError:
        return False


def read_snapshot(path: Path) -> tuple[JournalHead, bytes]:
    """Return head and encoded state of a snapshot. Raises ConfigError."""
    data = path.read_bytes()
    head = record_at(data, len(MAGIC))
    state = record_at(data, head.end) if head is not None else None
    if not data.startswith(MAGIC) or head is None or state is None:
        earlier = "of an earlier version of the SDK: continue its run with that version"
        raise ConfigError(f"{path} is {earlier if data.startswith(b'asyncfl-snapsh') else 'damaged'}. {RESTORE}")
    return decode_head(head.content, path), state.content


def _write_snapshot(path: Path, head: JournalHead, state: bytes) -> None:
    """Write a file atomically, also if the host crashes. Raises OSError."""
    part = path.with_suffix(".part")
    try:
        with open(part, "wb", opener=private_opener) as file:
            mark, encoded = MAGIC[:8], msgspec.msgpack.encode(head)  # it is never searched for
            file.writelines((MAGIC, framed(mark, 0, encoded), framed(mark, 1, state)))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_directory(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _newest(path: Path) -> tuple[int, JournalHead | None]:
    """Return number and head of the newest snapshot; 0 and None if there is none."""
    found = max(path.glob("snapshot-" + "[0-9]" * 6), default=None)
    if found is None:
        return 0, None
    journal = found.with_name(f"journal-{found.name[-6:]}")
    if not journal.exists():
        raise ConfigError(f"{journal} is missing. {RESTORE}")
    return int(found.name[-6:]), read_snapshot(found)[0]


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
