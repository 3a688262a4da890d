"""Bring a queue server to the state that an earlier one had: its newest snapshot, and the journal since, carried out again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ledger import unpack_ids
from ..ledger.commands import Ids
from ..wire import Server
from . import snapshot
from .call_executor import CallExecutor
from .journal import Asked, Dropped, Gone, Journal, Record, Recorded, Served
from .journal_directory import JournalDirectory, boot
from .listeners import Listeners
from .protocol import decode_call


@dataclass(frozen=True)
class Recovered:
    """What a server found that came back. ``rows``: live; ``lost``: whose payload was gone, and which failed with their groups;
    ``cut``: bytes of the journal that were not applied, of them ``behind`` whole records behind a damage, kept in
    ``damaged``; ``differing``: records that gave other answers than the first time, which is a bug; ``full``: why no new
    journal could begin, so that the old one is written on."""

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
        """Level of the note about it."""
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


class Replica:
    """The parts of a queue server that its inputs determine. Before the server starts."""

    def __init__(self, executor: CallExecutor, wire: Server, listeners: Listeners) -> None:
        self.executor, self._wire, self._listeners = executor, wire, listeners

    def encode(self) -> bytes:
        """Return the whole state: everything that the next answers depend on."""
        parts = self._parts()
        return snapshot.encode({name: snapshot.attributes(part) for name, part in parts.items()}, parts)

    def restore(self, state: bytes) -> None:
        parts = self._parts()
        for name, attributes in snapshot.decode(state, parts).items():
            vars(parts[name]).update(attributes)
        self._wire.finish_replay()

    def replay(
        self, recorded: Recorded, now: float, after: Callable[[Record], None] | None = None
    ) -> tuple[int, float]:
        """Carry out the records of a journal. ``after`` is called with each. Returns how many gave other answers than before, and the
        ledger's time."""
        executor = self.executor
        log, differing = executor.ledger.state.context.log, 0
        self._listeners.muted = executor.payloads.files.replaying = True
        try:
            for entry in recorded.entries():
                executor.clock.fixed = now = entry.record.now
                log.replay(entry.notes)
                self._carry_out(entry.record)
                used = log.replay(None)
                differing += not used or executor.take_digest() != entry.told
                if after is not None:
                    after(entry.record)
        finally:
            self._listeners.muted = executor.payloads.files.replaying = False
            self._wire.finish_replay()
        return differing, now

    def request(self, session: str, ticket: int, body: bytes, payload: Any) -> None:
        """The wire delivers a recorded call."""
        self.executor.execute(session, ticket, decode_call(body), self.executor.clock())

    def dropped(self, session: str, seq: int, ticket: int, answer: bytes | None) -> None:
        """The wire delivers a recorded cancellation."""
        self.executor.drop(session, ticket, answer, self.executor.clock())

    def serve_again(self, found: Served) -> None:
        """Fail rows and puts whose payload is gone, and close sessions that did not outlive their host."""
        if found.lost or found.waiting:
            self.executor.lose(unpack_ids(found.lost), found.waiting, found.now)
        if found.before == found.boot:
            return
        for session, client in list(self.executor.clients.by_session.items()):
            if client.pid_key and client.pid_key.split(" ")[0] == found.before:
                self.executor.close_session(session, "its host was started again", found.now)

    def _carry_out(self, record: Record) -> None:
        if isinstance(record, Asked):
            self._wire.requests.replay(self, record.session, record.seq, record.done, record.ticket, record.body)
        elif isinstance(record, Dropped):
            self._wire.requests.replay_drop(self, record.session, record.seq)
        elif isinstance(record, Gone):
            if record.session in self.executor.clients:
                self.executor.close_session(record.session, record.reason, record.now, blame=record.blame)
        elif isinstance(record, Served):
            self.serve_again(record)
        else:
            self.executor.tick(record.now)

    def _parts(self) -> dict[str, Any]:
        executor = self.executor
        return {
            "calls": executor,
            "clients": executor.clients,
            "payloads": executor.payloads,
            "index": executor.payloads.index,
            "files": executor.payloads.files,
            **{f"ledger.{name}": part for name, part in executor.ledger.parts().items()},
            "requests": self._wire.requests,
        }


@dataclass(frozen=True)
class Resumption:
    """A recovered server, and what it needs to write on in the old journal, should there be no room for a new one."""

    found: Recovered
    served: Served
    recorded: Recorded

    def journal(self, directory: JournalDirectory, results: tuple[bytes, ...], digest: int) -> Journal:
        """Return the old journal. ``results``, ``digest``: recorded when the server came back. Raises OSError."""
        journal = Journal.reopened(self.recorded, self.found.cut, sync=directory.syncs)
        journal.append(self.served, results, digest)
        directory.keep_writing(journal)
        return journal


def recover(directory: JournalDirectory, replica: Replica) -> Resumption | None:
    """Bring a server that has not started to the state of the last one. Returns None for a new run."""
    if directory.head is None:
        return None
    executor = replica.executor
    replica.restore(directory.state)
    directory.state = b""
    recorded = Recorded(directory.journal_path)
    try:
        differing, now = replica.replay(recorded, directory.head.now)
        cut = recorded.cut
        behind = recorded.readable_behind() if cut else 0
    finally:
        recorded.close()
    executor.clock.resume(now)
    executor.ledger.state.context.log.keep = True  # should there be no room for a snapshot
    damaged = str(directory.keep_damaged(recorded.end)) if behind else ""
    # memory that outlived a restart of the host was never synced at level process
    gone = recorded.boot != boot() and directory.durability == "process"

    def there(segment: str, starts: Ids, serials: Ids, sizes: Ids) -> npt.NDArray[np.bool_]:
        return executor.payloads.there(segment, starts, serials, sizes) & (not gone)

    lost, waiting = executor.payloads.lost(there)
    served = Served(executor.clock(), lost.tobytes(), boot(), recorded.boot, tuple(waiting))
    replica.serve_again(served)
    executor.payloads.reconcile(set(executor.clients.numbers().values()))
    live, sessions = executor.ledger.audit().live, len(executor.clients)
    found = Recovered(recorded.records, live, sessions, len(lost), cut, behind, damaged, differing)
    return Resumption(found, served, recorded)
