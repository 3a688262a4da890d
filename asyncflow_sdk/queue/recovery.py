"""Recovery: restore a queue server from its newest snapshot and the journal after it. Replay: the same offline.

    replayed = replay("runs/mine", on_milestone=print)
    replayed.audit, replayed.digest

A run served with ``history`` is replayed from its beginning, any other from its newest snapshot.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import ConfigError
from ..ledger import Audit, Ledger
from ..ledger import commands as cmd
from ..ledger.commands import Ids
from ..wire import RouterSockets, Server, boot_id
from . import snapshot
from .call_executor import CallExecutor
from .journal import JournalHead, JournalReader, Record, RequestRecord, SessionEndRecord
from .journal_directory import JournalDirectory, read_snapshot
from .listeners import Listeners
from .payload import Payload
from .protocol import ClientHello, Welcome, decode_call
from .stores.homes import SERVER_MEMORY, home_of

NOT_COMPARED = ("now", "deadlines")
"""Attributes that differ after recovery: the clock, and timers, which may hold stale entries."""


@dataclass(frozen=True)
class Recovered:
    """The result of a server's recovery. ``records``: replayed. ``rows``: live. ``lost``: rows with lost payload;
    they failed with their groups. ``discarded_bytes``: bytes at the journal's end that were not replayed.
    ``incomplete``: True if acknowledged work is among them. ``differing``: records with other answers than the first
    time: a bug."""

    records: int
    rows: int
    sessions: int
    lost: int
    discarded_bytes: int
    incomplete: bool
    differing: int

    @property
    def level(self) -> str:
        """Level of the note about it."""
        if self.differing or self.incomplete:
            return "error"
        return "warning" if self.lost or self.discarded_bytes else "info"

    def __str__(self) -> str:
        text = f"recovered {self.rows} live rows and {self.sessions} sessions; {self.records} records were replayed"
        if self.lost:
            text += f"; the payload of {self.lost} rows is lost, and they failed with their groups"
        if self.discarded_bytes:
            text += f"; the last {self.discarded_bytes} bytes of the journal are no whole commit and were left out"
        if self.incomplete:
            text += ", and so was acknowledged work behind them: the host was started again at durability 'process'"
        if self.differing:
            text += f"; {self.differing} records gave other answers than before: a bug of the SDK, please report it"
        return text


def recover(directory: JournalDirectory, executor: CallExecutor) -> Recovered | None:
    """Restore a server that has not started. Return None for a new run."""
    head = directory.head
    if head is None:
        return None
    executor.restore(read_snapshot(directory.file("snapshot", directory.number))[1])
    recorded = JournalReader(directory.file("journal", directory.number), directory.run)
    differing, now = executor.replay(recorded, head.now, lambda record: None)
    executor.clock.resume(now)

    def exist(segment: str, starts: Ids, serials: Ids, sizes: Ids) -> npt.NDArray[np.bool_]:
        """Return True for each readable block that survived."""
        survived = not head.unsynced or home_of(segment) != SERVER_MEMORY
        return executor.payload.blocks_exist(segment, starts, serials, sizes) & survived

    lost, waiting = executor.payload.find_lost(exist)
    if len(lost) or waiting:
        executor.fail_lost(lost, waiting, now)
    for session, client in list(executor.clients.by_session.items()) if head.boot != boot_id() else ():
        if client.hello.pid_key and client.hello.pid_key.split(" ")[0] == head.boot:
            executor.close_session(session, "its host was started again", now)
    executor.payload.reconcile()
    live, sessions = executor.ledger.audit().live, len(executor.clients.by_session)
    discarded = recorded.torn_bytes, recorded.incomplete
    return Recovered(recorded.records, live, sessions, len(lost), *discarded, differing)


@dataclass(frozen=True)
class Milestone:
    """A moment of a run. ``time_s``: since its beginning. ``step``: to train next."""

    time_s: float
    what: str
    step: int
    version: int
    audit: Audit

    def __str__(self) -> str:
        ended = ", ".join(f"{count} {state}" for state, count in self.audit.terminal.items() if count) or "none ended"
        return (
            f"{self.time_s:10.1f} s  {self.what}: step {self.step}, version {self.version}; {self.audit.put} rows ="
            f" {self.audit.live} live, {ended}{'' if self.audit.balanced else '; NOT BALANCED'}"
        )


@dataclass(frozen=True)
class Replayed:
    """The result of a replay. ``differing``: records with other answers than in the run: a bug. ``torn_bytes``,
    ``incomplete``: see ``Recovered``. ``digest``: see ``digest_of``."""

    records: int
    differing: int
    torn_bytes: int
    incomplete: bool
    milestones: tuple[Milestone, ...]
    audit: Audit
    digest: str


def replay(directory: str | Path, on_milestone: Callable[[Milestone], None] | None = None) -> Replayed:
    """Replay the journal of a run directory, also while it is served. After several runs with
    history it is that of the last one; ``DIRECTORY/journal/history/RUN`` is that of an earlier one.

    ``on_milestone`` is called with each milestone: the beginning, new sessions, checkpoints,
    resumed trainers, ended sessions, and the end. Raises ConfigError if the directory cannot be replayed."""
    journals = _journals(Path(directory))
    opened = next(journals)
    first = opened[0]
    listeners, ledger = Listeners(None, None, None), Ledger()
    memory = Path(first.directory)
    payload = Payload(ledger.state, Path(first.rows or memory), memory, synced=False)
    wire = Server(RouterSockets([]), SimpleNamespace(sink=None))  # never started, so it handles nothing
    welcome = Welcome(0, first.directory, first.sdk, first.durability, first.rows)
    executor = CallExecutor(ledger, payload, listeners, welcome, wire)
    milestones: list[Milestone] = []

    def add(what: str, now: float) -> None:
        """Add a milestone if ``what`` names one."""
        if not what:
            return
        state = ledger.state
        step = state.steps.next_to_train() if state.steps.declared else 0
        milestones.append(Milestone(now - first.now, what, step, state.versions.current, ledger.audit()))
        if on_milestone is not None:
            on_milestone(milestones[-1])

    records = differing = torn = 0
    now, incomplete = first.now, False
    try:
        for head, state, recorded in itertools.chain([opened], journals):
            executor.restore(state)
            add("begins" if head is first else "continues after a snapshot", head.now)
            others, now = executor.replay(recorded, head.now, lambda record: add(_milestone(record), record.now))
            records, differing = records + recorded.records, differing + others
            torn, incomplete = recorded.torn_bytes, incomplete or recorded.incomplete
        add("ends", now)
        return Replayed(records, differing, torn, incomplete, tuple(milestones), ledger.audit(), digest_of(ledger))
    finally:
        wire.stop()
        payload.close()


def digest_of(ledger: Ledger) -> str:
    """Return a digest of a ledger's state without its clock: equal for equal ledgers."""
    parts = ledger.parts()
    state = {
        name: {key: value for key, value in snapshot.attributes(part).items() if key not in NOT_COMPARED}
        for name, part in parts.items()
    }
    return xxhash.xxh3_128_hexdigest(snapshot.encode(state, parts))


def _milestone(record: Record) -> str:
    if isinstance(record, SessionEndRecord):
        return f"session {record.session} is gone ({record.reason})"
    command = decode_call(record.body).command if isinstance(record, RequestRecord) else None
    if isinstance(command, cmd.AddCheckpoint):
        return f"a checkpoint of step {command.step} covers the steps before {command.covers}"
    if isinstance(command, cmd.Resume):
        return f"a trainer continues with step {command.step}"
    if isinstance(command, ClientHello) and isinstance(record, RequestRecord):
        return f"{command.name} opens session {record.session}"
    return ""


def _journals(directory: Path) -> Iterator[tuple[JournalHead, bytes, JournalReader]]:
    """Yield head and state of each snapshot of the newest run with the journal after it, in order, up to the newest of
    now. A live server may replace and move the files meanwhile."""
    last, newest, missing, path = "", "", None, directory
    while not last or last < newest:
        try:
            following = [pair for pair in _snapshots(directory) if pair[0].name > last]
            if not following:
                break
            newest, (path, journal) = newest or following[-1][0].name, following[0]
            head, state = read_snapshot(path)
            reader = JournalReader(journal, head.run)
        except FileNotFoundError:
            if path == missing:
                raise
            missing = path  # replaced since it was listed
            continue
        last = path.name
        yield head, state, reader
    if not last:
        raise ConfigError(
            f"{directory} holds no journal: its run is over, or had none; serve a run with"
            ' durability="process" and history=True to replay it later'
        )


def _snapshots(directory: Path) -> list[tuple[Path, Path]]:
    home = directory / "journal" if (directory / "journal").is_dir() else directory
    found = sorted(home.glob("snapshot-??????"))
    if found:
        found = sorted((home / "history" / read_snapshot(found[-1])[0].run).glob("snapshot-??????")) + found
    elif runs := sorted(home.glob("history/*/"), key=lambda path: path.stat().st_mtime_ns):
        found = sorted(runs[-1].glob("snapshot-??????"))
    pairs = [(path, path.with_name(path.name.replace("snapshot", "journal"))) for path in found]
    return [pair for pair in pairs if pair[1].exists()]
