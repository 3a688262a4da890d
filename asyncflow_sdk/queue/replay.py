"""Replaying: what a run's journal says happened, carried out again offline; nothing of the run is touched.

replayed = replay("runs/mine", told=print)
replayed.audit, replayed.digest

Where a run was served with ``history``, all of it is replayed; else what the newest snapshot left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from .._version import __version__
from ..errors import ConfigError, ProtocolError
from ..ledger import Audit, Ledger
from ..ledger import commands as cmd
from ..wire import PayloadSink, Server
from . import snapshot
from .call_executor import CallExecutor, RunMemory
from .clock import Clock
from .journal import Asked, Gone, Head, Record, Recorded
from .listeners import Listeners
from .payload_manager import PayloadManager
from .protocol import Hello, decode_call
from .recovery import Replica

NOT_COMPARED = ("now", "deadlines")
"""Attributes of a ledger's parts that differ between a ledger that ran on and one that was recovered: the clock, and the timers, which
may still hold entries of things that are gone."""


@dataclass(frozen=True)
class Cut:
    """A moment of a run. ``time_s``: since the journal begins; ``what``: happened; ``step``: the first that is not acknowledged."""

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
    """What a replay came to. ``differing``: records that gave other answers than in the run, which is a bug. ``cut``: bytes that
    were torn. ``digest``: of the ledger's state, as ``digest_of`` says."""

    records: int
    differing: int
    cut: int
    cuts: tuple[Cut, ...]
    audit: Audit
    digest: str


def replay(directory: str | Path, told: Callable[[Cut], None] | None = None) -> Replayed:
    """Replay the journal of a run directory, also while it is served. ``told`` is called with every cut: the beginning, checkpoints,
    trainers that resumed, ranks and workers whose process ended, and the end. Raises ConfigError for what cannot be replayed."""
    parts = _parts(Path(directory))
    first, _ = _read(parts[0][0])
    listeners, ledger = Listeners(None, None, None), Ledger()
    memory = Path(first.directory)
    rows = Path(first.rows) if first.rows else memory
    payloads = PayloadManager(ledger.state, rows, memory, synced=False)
    wire = Server([], _NoHandler())
    executor = CallExecutor(
        ledger, payloads, Clock(), listeners, RunMemory(first.directory, first.rows, first.durability), wire.answer,
        wire.forget,
    )  # fmt: skip
    replica, watch = Replica(executor, wire, listeners), _Watch(ledger, told)
    records = differing = torn = 0
    try:
        for number, (whole, journal) in enumerate(parts):
            head, state = _read(whole)
            replica.restore(state)
            watch.cut("begins" if not number else "is served again, or its journal was cut short", head.now)
            recorded = Recorded(journal)
            try:
                now_differing, now = replica.replay(recorded, head.now, watch.after)
                records, differing, torn = records + recorded.records, differing + now_differing, recorded.cut
            finally:
                recorded.close()
        watch.cut("ends", now)
        return Replayed(records, differing, torn, tuple(watch.cuts), ledger.audit(), digest_of(ledger))
    finally:
        wire.stop()
        payloads.close()


def digest_of(ledger: Ledger) -> str:
    """Of all of a ledger's state but its clock: equal for equal ledgers."""
    parts = ledger.parts()
    state = {
        name: {key: value for key, value in snapshot.attributes(part).items() if key not in NOT_COMPARED}
        for name, part in parts.items()
    }
    return xxhash.xxh3_128_hexdigest(snapshot.encode(state, parts))


class _NoHandler:
    """Nobody calls a server that is never started."""

    def request(self, session: str, ticket: int, body: bytes, payload: Any) -> None:
        raise AssertionError

    def dropped(self, session: str, seq: int, ticket: int, answer: bytes | None) -> None:
        raise AssertionError

    def sink(self, session: str, body: bytes, nbytes: int) -> PayloadSink:
        raise AssertionError

    def make(self, answer: bytes) -> tuple[bytes, Sequence[Any]]:
        raise AssertionError

    def gone(self, session: str, reason: str) -> None:
        raise AssertionError

    def idle(self) -> float | None:
        raise AssertionError

    def settle(self) -> bool:
        raise AssertionError


class _Watch:
    def __init__(self, ledger: Ledger, told: Callable[[Cut], None] | None) -> None:
        self._ledger, self._told = ledger, told
        self.cuts: list[Cut] = []
        self._began = 0.0

    def cut(self, what: str, now: float) -> None:
        ledger = self._ledger
        step = ledger.state.steps.next_to_train() if ledger.state.steps.declared else 0
        if not self.cuts:
            self._began = now
        self.cuts.append(Cut(now - self._began, what, step, ledger.state.versions.current, ledger.audit()))
        if self._told is not None:
            self._told(self.cuts[-1])

    def after(self, record: Record) -> None:
        if isinstance(record, Gone):
            self.cut(f"session {record.session} is gone ({record.reason})", record.now)
        elif isinstance(record, Asked):
            command = decode_call(record.body).command
            if isinstance(command, cmd.AddCheckpoint):
                self.cut(f"a checkpoint of step {command.step} covers the steps before {command.covers}", record.now)
            elif isinstance(command, cmd.Resume):
                self.cut(f"a trainer goes on with step {command.step}", record.now)
            elif isinstance(command, Hello):
                self.cut(f"{command.name} comes as session {record.session}", record.now)


def _parts(directory: Path) -> list[tuple[Path, Path]]:
    """Snapshots with the journals that follow them, in order."""
    home = directory / "journal" if (directory / "journal").is_dir() else directory
    found = sorted([*home.glob("history/snapshot-??????"), *home.glob("snapshot-??????")], key=lambda path: path.name)
    pairs = [(whole, whole.with_name(whole.name.replace("snapshot", "journal"))) for whole in found]
    pairs = [pair for pair in pairs if pair[1].exists()]
    if not pairs:
        raise ConfigError(
            f"{directory} holds no journal: it belonged to a run that is over, or that had none; serve a run with"
            ' durability="process" and history=True to replay it later'
        )
    return pairs


def _read(path: Path) -> tuple[Head, bytes]:
    try:
        head_bytes, state = snapshot.read(path)
        head = msgspec.msgpack.decode(head_bytes, type=Head)
    except (ProtocolError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be replayed: {error}") from None
    if head.sdk != __version__:
        raise ConfigError(
            f"{path} was written by asyncflow-sdk {head.sdk}, and this is {__version__}: replay it with that"
        )
    return head, state
