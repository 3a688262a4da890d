"""Replay a run's journal offline. Nothing of the run is changed.

    replayed = replay("runs/mine", on_milestone=print)
    replayed.audit, replayed.digest

A run served with ``history`` is replayed from its beginning, any other from its newest snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import xxhash

from ..errors import ConfigError, ProtocolError
from ..ledger import Audit, Ledger
from ..ledger import commands as cmd
from ..wire import Server
from . import snapshot
from .call_executor import CallExecutor, Clock
from .journal import JournalHead, JournalReader, Record, RequestRecord, SessionEndRecord, decode_head
from .listeners import Listeners
from .payload import Payload
from .protocol import ClientHello, Welcome, decode_call
from .recovery import RecoverableState

NOT_COMPARED = ("now", "deadlines")
"""Attributes that differ after recovery: the clock, and timers, which may hold stale entries."""


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
    """The result of a replay.

    ``differing``: records with other answers than in the run, which is a bug. ``torn_bytes``: at
    the journal's end. ``digest``: see ``digest_of``.
    """

    records: int
    differing: int
    torn_bytes: int
    milestones: tuple[Milestone, ...]
    audit: Audit
    digest: str


def replay(directory: str | Path, on_milestone: Callable[[Milestone], None] | None = None) -> Replayed:
    """Replay the journal of a run directory, also while it is served. After several runs with
    history it is that of the last one; ``DIRECTORY/journal/history/RUN`` is that of an earlier one.

    ``on_milestone`` is called with each milestone: the beginning, new sessions, checkpoints,
    resumed trainers, ended sessions, and the end. Raises ConfigError if the directory cannot be
    replayed.
    """
    parts = _parts(Path(directory))
    first, _ = _read(parts[0][0])
    listeners, ledger = Listeners(None, None, None), Ledger()
    memory = Path(first.directory)
    rows = Path(first.rows) if first.rows else memory
    payload = Payload(ledger.state, rows, memory, synced=False)
    wire = Server([], SimpleNamespace(sink=None))  # never started, so it handles nothing
    welcome = Welcome(0, first.directory, first.sdk, first.durability, first.rows)
    executor = CallExecutor(ledger, payload, Clock(), listeners, welcome, wire.answer, wire.forget)
    recoverable, watch = RecoverableState(executor, wire, listeners), _Watch(ledger, on_milestone)
    records = differing = torn = 0
    try:
        for number, (snapshot_path, journal) in enumerate(parts):
            head, state = _read(snapshot_path)
            recoverable.restore(state)
            watch.add("begins" if not number else "continues after a snapshot", head.now)
            recorded = JournalReader(journal, head.run)
            try:
                now_differing, now = recoverable.replay(recorded, head.now, watch.after)
                records, differing, torn = records + recorded.records, differing + now_differing, recorded.torn_bytes
            finally:
                recorded.close()
        watch.add("ends", now)
        return Replayed(records, differing, torn, tuple(watch.milestones), ledger.audit(), digest_of(ledger))
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


class _Watch:
    """Collects the milestones of a replay."""

    def __init__(self, ledger: Ledger, on_milestone: Callable[[Milestone], None] | None) -> None:
        self._ledger, self._on_milestone = ledger, on_milestone
        self.milestones: list[Milestone] = []
        self._began = 0.0

    def add(self, what: str, now: float) -> None:
        """Add a milestone."""
        ledger = self._ledger
        step = ledger.state.steps.next_to_train() if ledger.state.steps.declared else 0
        if not self.milestones:
            self._began = now
        self.milestones.append(
            Milestone(now - self._began, what, step, ledger.state.versions.current, ledger.audit())
        )
        if self._on_milestone is not None:
            self._on_milestone(self.milestones[-1])

    def after(self, record: Record) -> None:
        """Add a milestone if a record is one."""
        if isinstance(record, SessionEndRecord):
            self.add(f"session {record.session} is gone ({record.reason})", record.now)
        elif isinstance(record, RequestRecord):
            command = decode_call(record.body).command
            if isinstance(command, cmd.AddCheckpoint):
                self.add(f"a checkpoint of step {command.step} covers the steps before {command.covers}", record.now)
            elif isinstance(command, cmd.Resume):
                self.add(f"a trainer continues with step {command.step}", record.now)
            elif isinstance(command, ClientHello):
                self.add(f"{command.name} opens session {record.session}", record.now)


def _parts(directory: Path) -> list[tuple[Path, Path]]:
    """Return the snapshots of the directory's newest run with their journals, in order."""
    home = directory / "journal" if (directory / "journal").is_dir() else directory
    found = sorted(home.glob("snapshot-??????"))
    if found:
        found = sorted((home / "history" / _read(found[-1])[0].run).glob("snapshot-??????")) + found
    elif runs := sorted(home.glob("history/*/"), key=lambda path: path.stat().st_mtime_ns):
        found = sorted(runs[-1].glob("snapshot-??????"))
    pairs = [
        (snapshot_path, snapshot_path.with_name(snapshot_path.name.replace("snapshot", "journal")))
        for snapshot_path in found
    ]
    pairs = [pair for pair in pairs if pair[1].exists()]
    if not pairs:
        raise ConfigError(
            f"{directory} holds no journal: its run is over, or had none; serve a run with"
            ' durability="process" and history=True to replay it later'
        )
    return pairs


def _read(path: Path) -> tuple[JournalHead, bytes]:
    try:
        head, state = snapshot.read(path)
    except ProtocolError as error:
        raise ConfigError(f"{path} cannot be replayed: {error}") from None
    return decode_head(head, path), state
