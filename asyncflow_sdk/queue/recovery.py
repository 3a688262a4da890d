"""Recovery: the journal directory of a run, and a queue server as it was when its process died.

lock               held while a server lives; its process, and where it listens
snapshot-000003    the whole state before the first record of journal-000003; the newest one counts
journal-000003     every input since
damaged-...        what could not be applied of a journal that was damaged before its end
history/           those of before, where all of a run is kept for replays
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
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from .._version import __version__
from ..errors import ConfigError, MemoryFull, ProtocolError
from ..ledger import unpack_ids
from ..ledger.commands import Ids
from ..memory import SharedDirectory, blocks_there, private_directory, sync_directory
from ..wire import process_key
from . import snapshot
from .journal import FORMAT, Asked, Dropped, Gone, Head, Journal, Record, Recorded, Served
from .places import LOST

if TYPE_CHECKING:
    from .server import QueueServer

LEVELS = ("process", "host")
LEAST_BYTES = 16 << 20
GROWTH = 4
"""A journal longer than ``LEAST_BYTES``, and than so many times its snapshot, is replaced by a new snapshot."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovered:
    """What a server that came back found. ``rows``: live; ``lost``: whose payload was gone, and ended with their groups
    as failed; ``cut``: bytes of the journal that were not applied, of them ``behind`` whole records behind a damage,
    kept in ``damaged``; ``differing``: records that gave other answers than the first time, which is a bug; ``full``: why
    no new journal could begin, so that the old one is written on."""

    records: int
    rows: int
    sessions: int
    lost: int
    cut: int
    behind: int
    damaged: str
    differing: int
    full: str = ""

    @property
    def level(self) -> str:
        """Of the note that tells it."""
        if self.damaged or self.differing:
            return "error"
        return "warning" if self.lost or self.cut or self.full else "info"

    def __str__(self) -> str:
        text = f"recovered {self.rows} live rows and {self.sessions} sessions; {self.records} records were replayed"
        if self.lost:
            text += f"; the payload of {self.lost} rows is lost, and they failed with their groups"
        if self.damaged:
            text += (
                f"; the journal is damaged: {self.cut} bytes with {self.behind} records that can still be read were not"
                f" applied, and are kept in {self.damaged}"
            )
        elif self.cut:
            text += f"; {self.cut} bytes at the end of the journal were torn and never acknowledged"
        if self.differing:
            text += f"; {self.differing} records gave other answers than before: a bug of the SDK, please report it"
        if self.full:
            text += f"; {self.full}. The rows that are there are served, and new ones wait until there is room"
        return text


class Home:
    """The journal directory of one run. Raises ConfigError when another server has it, or when it cannot be read."""

    def __init__(self, path: Path, durability: str | None, history: bool = False) -> None:
        self.path, self._history = path, history
        try:
            private_directory(path)
        except OSError as error:
            raise ConfigError(f"no journal can be kept in {path}: {error}") from None
        for made in (path.parent, path.parent.parent):
            with contextlib.suppress(OSError):  # not ours to open, so not made by us
                sync_directory(made)
        self._lock, self.bound = _take(path)
        try:
            self._number, self.head, self._state = _newest(path)
            if self.head is not None:
                self._check(durability)
        except BaseException:
            os.close(self._lock)
            raise
        self.durability = self.head.durability if self.head is not None else durability or LEVELS[0]
        self.run = self.head.run if self.head is not None else token_hex(8)
        self.rows = path / "segments" if self.durability == "host" else None
        if self.rows is not None:
            self.rows.mkdir(mode=0o700, exist_ok=True)
        self._least = 0
        self._recorded: Recorded | None = None  # the journal that was read
        self._cut = 0  # bytes behind its end that were torn
        self._served: Served | None = None  # what was found then

    def _check(self, durability: str | None) -> None:
        assert self.head is not None
        if self.head.sdk != __version__:
            raise ConfigError(
                f"{self.path} was written by asyncflow-sdk {self.head.sdk}, and this is {__version__}, which may decide"
                " otherwise: continue it with that version, or choose another directory"
            )
        if durability not in (None, self.head.durability):
            raise ConfigError(
                f"{self.path} holds a run of durability {self.head.durability!r}; it cannot go on as {durability!r}"
            )

    def directory(self) -> SharedDirectory:
        """The run's shared memory: the same as before."""
        path = Path(self.head.directory) if self.head is not None else None
        return SharedDirectory(journal=self.path, path=path)

    def remove_rows(self) -> None:
        """Nobody wants the segments any more."""
        if self.rows is not None:
            shutil.rmtree(self.rows, ignore_errors=True)

    def forget(self) -> None:
        """The run is over, every row of it."""
        for kind in ("snapshot", "journal"):
            for path in self.path.glob(f"{kind}-*"):
                self._put_away(path)

    def _put_away(self, path: Path) -> None:
        """It does not count any more."""
        if not self._history:
            path.unlink(missing_ok=True)
            return
        aside = self.path / "history"
        aside.mkdir(exist_ok=True)
        path.rename(aside / path.name)

    def listens(self, addresses: dict[str, str]) -> None:
        """Note where the server listens: asked for → bound. The next one listens there too."""
        content = msgspec.json.encode({"pid": os.getpid(), "addresses": addresses})
        with contextlib.suppress(OSError):  # a full disk: what is there is written over, and cut to its length then
            os.pwrite(self._lock, content, 0)
            os.ftruncate(self._lock, len(content))

    def recover(self, server: QueueServer) -> Recovered | None:
        """Bring a server that has not started to where the last one was; None for a run that is new."""
        if self.head is None:
            return None
        restore(server, self._state)
        self._state = b""
        recorded = Recorded(self._file("journal", self._number))
        try:
            differing, now = replay(server, recorded, self.head.now)
            cut = recorded.cut
            behind = recorded.readable_behind() if cut else 0
            self._recorded, self._cut = recorded, cut
        finally:
            recorded.close()
        server._clock.resume(now)
        server.ledger.state.context.log.keep = True  # should there be no room for a snapshot
        damaged = ""
        if behind:
            aside = self.path / f"damaged-{self._number:06d}-at-{recorded.end}"
            _keep(recorded.path, aside)
            damaged = str(aside)
        lost = self._lose(server)
        needed = server._places.segments() | {block.segment for _, block in server._waiting_blocks()}
        server._files.reconcile(server._sessions.values(), needed)
        audit = server.ledger.audit()
        return Recovered(recorded.records, audit.live, len(server._sessions), lost, cut, behind, damaged, differing)

    def go_on(self, notes: tuple[bytes, ...], told: int) -> Journal:
        """The journal that was read, to be written on where a new one has no room. ``notes``, ``told``: of what the server
        found when it came back. Raises OSError."""
        assert self._recorded is not None
        assert self._served is not None
        journal = Journal.reopened(self._recorded, self._cut, sync=self.durability == "host")
        journal.append(self._served, notes, told)
        self._least = max(LEAST_BYTES, 2 * journal.nbytes)
        return journal

    def begin(self, server: QueueServer) -> Journal:
        """A snapshot of the server, and the journal that follows it. Raises MemoryFull, OSError: the old ones count."""
        number = self._number + 1
        rows = str(self.rows) if self.rows is not None else ""
        head = Head(
            FORMAT, __version__, self.run, self.durability, str(server.directory.path), rows, _boot(), server._clock()
        )
        path, whole = self._file("journal", number), self._file("snapshot", number)
        for left in (path, whole):  # of an attempt that failed: a stale one must never count
            left.unlink(missing_ok=True)
        journal = Journal(path, head, sync=self.durability == "host")
        try:
            snapshot.write(whole, msgspec.msgpack.encode(head), state_of(server))
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
            for part in self.path.glob("*.part"):  # of one that was killed while it wrote it
                part.unlink(missing_ok=True)
        return journal

    def compact(self, server: QueueServer, journal: Journal) -> Journal:
        """The journal to go on with: the same, until it has grown long."""
        if journal.nbytes <= self._least:
            return journal
        try:
            new = self.begin(server)
        except Exception:
            _log.exception("the journal in %s goes on without a snapshot", self.path)
            self._least = 2 * journal.nbytes
            return journal
        journal.close()
        return new

    def close(self) -> None:
        """Let another server have it."""
        os.close(self._lock)

    def _file(self, kind: str, number: int) -> Path:
        return self.path / f"{kind}-{number:06d}"

    def _lose(self, server: QueueServer) -> int:
        """End rows whose payload is gone, and refuse puts that wait and have lost theirs. Return the number of rows. Memory
        that outlived a restart of the host was never synced at level process."""
        assert self._recorded is not None
        rows = self.rows if self.rows is not None else server.directory.path
        gone = self._recorded.boot != _boot() and self.durability == "process"

        def there(segment: str, starts: Ids, serials: Ids, sizes: Ids) -> npt.NDArray[np.bool_]:
            return blocks_there(rows / segment, starts, serials, sizes) & (not gone)

        lost, waiting = server._lost(there)
        self._served = Served(server._clock(), lost.tobytes(), _boot(), self._recorded.boot, tuple(waiting))
        _serve_again(server, self._served)
        return len(lost)


def _serve_again(server: QueueServer, found: Served) -> None:
    """End rows whose payload is gone, refuse waiting puts whose payload is gone, and end sessions that did not outlive their host."""
    if found.lost or found.waiting:
        server.ledger.lose(unpack_ids(found.lost), found.now, LOST, found.waiting)
        server._flush()
    if found.before == found.boot:
        return
    for session, (_, key) in list(server._processes.items()):
        if key and key.split(" ")[0] == found.before:
            server.gone(session, "its host was started again")


def is_unfinished(path: Path) -> bool:
    """True if a journal directory holds a run that is not over: another server may continue it. False if it cannot be
    read."""
    try:
        return next(path.glob("snapshot-??????"), None) is not None
    except OSError:
        return False


def replay(
    server: QueueServer, recorded: Recorded, now: float, after: Callable[[Record], None] | None = None
) -> tuple[int, float]:
    """Carry out what was recorded. ``after`` is told of each record that was. Returns how many records gave other answers than
    before, and the ledger's time."""
    differing = 0
    log = server.ledger.state.context.log
    server._replaying = server._files.replaying = True
    try:
        for entry in recorded.entries():
            record = entry.record
            server._clock.fixed = now = record.now
            log.replay(entry.notes)
            if isinstance(record, Asked):
                server._wire.replay(record.session, record.seq, record.done, record.ticket, record.body)
            elif isinstance(record, Dropped):
                server._wire.replay_drop(record.session, record.seq)
            elif isinstance(record, Gone):
                server.gone(record.session, record.reason, record.blame)
            elif isinstance(record, Served):
                _serve_again(server, record)
            else:
                server.tick(record.now)
            used = log.replay(None)
            differing += not used or server._keeping.told != entry.told
            server._keeping.told = 0
            if after is not None:
                after(record)
    finally:
        server._replaying = server._files.replaying = False
        server._wire.replayed()
    return differing, now


def state_of(server: QueueServer) -> bytes:
    """Everything that a server's next answers depend on."""
    parts = _parts(server)
    return snapshot.encode({name: snapshot.attributes(part) for name, part in parts.items()}, parts)


def restore(server: QueueServer, state: bytes) -> None:
    parts = _parts(server)
    for name, attributes in snapshot.decode(state, parts).items():
        vars(parts[name]).update(attributes)
    server._wire.replayed()


def _parts(server: QueueServer) -> dict[str, Any]:
    return {
        "server": server,
        **{f"ledger.{name}": part for name, part in server.ledger.parts().items()},
        "places": server._places,
        "files": server._files,
        "gauges": server._gauges,
        "wire": server._wire,
    }


def _newest(path: Path) -> tuple[int, Head | None, bytes]:
    """Number, head and state of the newest snapshot; (0, None, None) where there is none yet."""
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


def _take(path: Path) -> tuple[int, dict[str, str]]:
    """The lock, and where the last server that had it listened."""
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


def _keep(path: Path, aside: Path) -> None:
    """Under another name, too; perhaps by a recovery already that was killed before it was through."""
    try:
        os.link(path, aside)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        shutil.copyfile(path, aside)


def _boot() -> str:
    """Of the host, so that its restart can be seen."""
    return process_key(os.getpid()).split(" ")[0]
