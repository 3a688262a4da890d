"""Recovery: restore an earlier queue server from its newest snapshot and the journal after it. Durability:
record a server's inputs, and recover from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, MemoryFull
from ..ledger import commands as cmd
from ..ledger import unpack_ids
from ..ledger.commands import Ids
from ..memory import SharedDirectory
from ..types import events as ev
from ..wire import Server
from . import snapshot
from .call_executor import CallExecutor
from .journal import (
    DISK_RETRY_S,
    FOR_ENDS,
    FOR_PROGRESS,
    DropRecord,
    Journal,
    JournalReader,
    Record,
    RequestRecord,
    RestartRecord,
    SessionEndRecord,
)
from .journal_directory import JournalDirectory, boot
from .listeners import Listeners
from .protocol import CallCommand, decode_call
from .stores.homes import SERVER_MEMORY, home_of

KEPT: dict[object, int] = {
    cmd.AddRows: FOR_PROGRESS, cmd.Renew: FOR_ENDS // 2, cmd.GiveBack: FOR_ENDS // 2, cmd.Dismiss: FOR_ENDS // 4,
    cmd.CloseSession: 0,
}  # fmt: skip
"""Bytes of a full journal that a command leaves to others; FOR_ENDS by default. Holders keep their rows, and leave."""


@dataclass(frozen=True)
class Recovered:
    """The result of a server's recovery.

    ``records``: replayed. ``rows``: live. ``lost``: rows with lost payload; they failed with their
    groups. ``discarded_bytes``: journal bytes not replayed. ``discarded_records``: valid records
    among them, after damage; ``damaged``: the path of a copy with them. ``differing``: records with
    other answers than the first time: a bug. ``full``: the reason for continuing the old journal;
    "" if a new one was begun.
    """

    records: int
    rows: int
    sessions: int
    lost: int
    discarded_bytes: int
    discarded_records: int
    damaged: str
    differing: int
    full: str = ""

    @property
    def level(self) -> str:
        """Level of the note about it."""
        if self.damaged or self.differing:
            return "error"
        return "warning" if self.lost or self.discarded_bytes or self.full else "info"

    def __str__(self) -> str:
        text = f"recovered {self.rows} live rows and {self.sessions} sessions; {self.records} records were replayed"
        if self.lost:
            text += f"; the payload of {self.lost} rows is lost, and they failed with their groups"
        if self.damaged:
            text += (
                f"; the journal is damaged: {self.discarded_bytes} bytes with {self.discarded_records} valid records"
                f" were not replayed; a copy is {self.damaged}"
            )
        elif self.discarded_bytes:
            text += f"; {self.discarded_bytes} bytes at the journal's end were torn; they were never acknowledged"
        if self.differing:
            text += f"; {self.differing} records gave other answers than before: a bug of the SDK, please report it"
        if self.full:
            text += f"; {self.full}. Existing rows are served; new rows are refused until the disk has room"
        return text


class RecoverableState:
    """The state of a queue server determined by its inputs. Use it before the server starts."""

    def __init__(self, executor: CallExecutor, wire: Server, listeners: Listeners) -> None:
        self.executor, self._wire, self._listeners = executor, wire, listeners

    def encode(self) -> bytes:
        """Return the whole state as bytes."""
        parts = self._parts()
        return snapshot.encode({name: snapshot.attributes(part) for name, part in parts.items()}, parts)

    def restore(self, state: bytes) -> None:
        """Set the state to that of ``encode``."""
        parts = self._parts()
        for name, attributes in snapshot.decode(state, parts).items():
            vars(parts[name]).update(attributes)
        self._wire.finish_replay()

    def replay(
        self, recorded: JournalReader, now: float, after: Callable[[Record], None] | None = None
    ) -> tuple[int, float]:
        """Replay the records of a journal, and call ``after`` with each.

        Return the number of records with other answers than before, and the ledger's time.
        """
        executor = self.executor
        log, differing = executor.ledger.state.context.log, 0
        self._listeners.mute(True)
        executor.payload.files.replay(True)
        try:
            for entry in recorded.entries():
                now = entry.record.now
                executor.clock.stop(now)
                log.replay(entry.results)
                self._replay_record(entry.record)
                used = log.replay(None)
                differing += not used or executor.take_digest() != entry.digest
                if after is not None:
                    after(entry.record)
        finally:
            self._listeners.mute(False)
            executor.payload.files.replay(False)
            self._wire.finish_replay()
        return differing, now

    def request(self, session: str, ticket: int, body: bytes, payload: Any) -> None:
        """Execute a recorded call; called by the wire."""
        self.executor.execute(session, ticket, decode_call(body), self.executor.clock())
        if session not in self.executor.clients:  # it would never be closed
            self._wire.forget(session)

    def dropped(self, session: str, seq: int, ticket: int, answer: bytes | None) -> None:
        """Undo a recorded cancelled call; called by the wire."""
        self.executor.drop(session, ticket, answer, self.executor.clock())

    def apply_restart(self, found: RestartRecord) -> None:
        """Fail rows and puts with lost payload, and close sessions that ended with their host."""
        if found.lost or found.waiting:
            self.executor.fail_lost(unpack_ids(found.lost), found.waiting, found.now)
        if found.before == found.boot:
            return
        for session, client in list(self.executor.clients.by_session.items()):
            if client.pid_key and client.pid_key.split(" ")[0] == found.before:
                self.executor.close_session(session, "its host was started again", found.now)

    def _replay_record(self, record: Record) -> None:
        if isinstance(record, RequestRecord):
            self._wire.requests.replay(self, record.session, record.seq, record.done, record.ticket, record.body)
        elif isinstance(record, DropRecord):
            self._wire.requests.replay_drop(self, record.session, record.seq)
        elif isinstance(record, SessionEndRecord):
            if record.session in self.executor.clients:
                self.executor.close_session(record.session, record.reason, record.now, blame=record.blame)
        elif isinstance(record, RestartRecord):
            self.apply_restart(record)
        else:
            self.executor.tick(record.now)

    def _parts(self) -> dict[str, Any]:
        executor = self.executor
        return {
            "clients": executor.clients,
            "payload": executor.payload,
            "index": executor.payload.index,
            "files": executor.payload.files,
            **{f"ledger.{name}": part for name, part in executor.ledger.parts().items()},
            "requests": self._wire.requests,
        }


@dataclass(frozen=True)
class Resumption:
    """A recovered server, and the data to continue the old journal if the disk is full."""

    found: Recovered
    restart: RestartRecord
    recorded: JournalReader

    def journal(self, directory: JournalDirectory, results: tuple[bytes, ...], digest: int) -> Journal:
        """Return the old journal. ``results``, ``digest``: recorded in the restart. Raises OSError."""
        journal = Journal.reopened(self.recorded, self.found.discarded_bytes, sync=directory.syncs)
        journal.append(self.restart, results, digest)
        directory.continue_journal(journal)
        return journal


def recover(directory: JournalDirectory, recoverable: RecoverableState) -> Resumption | None:
    """Restore a server that has not started. Return None for a new run."""
    if directory.head is None:
        return None
    executor = recoverable.executor
    recoverable.restore(directory.take_state())
    recorded = JournalReader(directory.journal_path, directory.run)
    try:
        differing, now = recoverable.replay(recorded, directory.head.now)
        torn = recorded.torn_bytes
        valid_behind = recorded.count_records_behind() if torn else 0
    finally:
        recorded.close()
    executor.clock.resume(now)
    executor.ledger.state.context.log.begin()  # in case the old journal must be continued
    damaged = str(directory.keep_damaged(recorded.end)) if valid_behind else ""
    # at durability "process", payload was never synced: files that survived a host crash may be incomplete
    gone = recorded.boot != boot() and directory.durability == "process"

    def exist(segment: str, starts: Ids, serials: Ids, sizes: Ids) -> npt.NDArray[np.bool_]:
        """Return True for each readable block that survived."""
        survived = not gone or home_of(segment) != SERVER_MEMORY
        return executor.payload.blocks_exist(segment, starts, serials, sizes) & survived

    lost, waiting = executor.payload.find_lost(exist)
    restart = RestartRecord(executor.clock(), lost.tobytes(), boot(), recorded.boot, tuple(waiting))
    recoverable.apply_restart(restart)
    executor.payload.reconcile(set(executor.clients.numbers().values()))
    live, sessions = executor.ledger.audit().live, len(executor.clients)
    found = Recovered(recorded.records, live, sessions, len(lost), torn, valid_behind, damaged, differing)
    return Resumption(found, restart, recorded)


class Durability:
    """Nothing without a journal. ``recording``: True with one. ``path``: the journal's directory, or
    None. ``level``: "process" or "host"; "" without a journal. ``directory``: of the run's shared
    memory. ``rows``: directory of the row segments. Not thread-safe: only the server's thread uses it.
    Raises ConfigError."""

    def __init__(self, path: Path | None, level: str | None, history: bool = False) -> None:
        self._files = JournalDirectory(path.absolute(), level, history) if path is not None else None
        self._journal: Journal | None = None
        self.level = self._files.durability if self._files is not None else ""
        self.recording = self._files is not None
        try:
            self.directory = SharedDirectory() if self._files is None else self._files.shared_directory()
        except BaseException:
            if self._files is not None:
                self._files.close(over=False)
            raise
        self.rows = self.directory.path
        if self._files is not None and self._files.rows is not None:
            self.rows = self._files.rows

    @property
    def path(self) -> Path | None:
        """The current journal file; None without one."""
        return None if self._journal is None else self._journal.path

    # ---- the life of a server

    def listen(self, addresses: list[str], make: Callable[[list[str], bool], Server]) -> Server:
        """Bind to the addresses of the run's earlier server if they are free, else to new ones.

        ``make``: makes the server from addresses, and from True if answers wait for ``settle``.
        """
        if self._files is None:
            return make(addresses, False)
        try:
            wire = make([self._files.addresses.get(address, address) for address in addresses], True)
        except ConfigError:  # another process has its port now
            wire = make(addresses, True)
        self._files.save_addresses(dict(zip(addresses, wire.addresses, strict=True)))
        return wire

    def recover(self, recoverable: RecoverableState) -> Recovered | None:
        """Restore the state of the last server, and begin to record. Return None for a new run."""
        if self._files is None:
            return None
        executor = recoverable.executor
        log = executor.ledger.state.context.log
        resumption = recover(self._files, recoverable)
        found = None if resumption is None else resumption.found
        try:
            self._journal = self._files.begin(recoverable.encode(), self.directory.path, executor.clock())
        except MemoryFull as full:
            if resumption is None or resumption.found.damaged:
                raise
            self._journal = resumption.journal(self._files, log.take(), executor.take_digest())
            found = replace(resumption.found, full=str(full))
        log.take()
        executor.take_digest()
        log.begin()
        return found

    def close(self, *, over: bool) -> None:
        """Close the journal. ``over``: remove the run's memory and journal."""
        if self._journal is not None:
            self._journal.close(keep_room=not over)
        keep = self._files is not None and self._files.head is not None and not over
        self.directory.close(keep=keep)
        if self._files is not None:
            self._files.close(over=over)

    # ---- records

    def reserve(self, nbytes: int, command: CallCommand | None) -> None:
        """Reserve room to record a call of ``nbytes``. Raises MemoryFull."""
        if self._journal is not None:
            self._journal.reserve(nbytes, KEPT.get(type(command), FOR_ENDS))

    def record(self, record: Record, recoverable: RecoverableState) -> None:
        """Record an executed input, with the nondeterministic results it used."""
        if self._journal is not None:
            executor = recoverable.executor
            self._journal.append(record, executor.ledger.state.context.log.take(), executor.take_digest())

    @property
    def try_again_s(self) -> float | None:
        """Seconds until the next try to write rejected records; None if all are written."""
        return DISK_RETRY_S if self._journal is not None and self._journal.failure is not None else None

    def settle(self, emit: Callable[[ev.Event], None]) -> bool:
        """Commit this round's records. Return True if all are committed."""
        if self._journal is None:
            return True
        failed, kept = self._journal.failure, self._journal.commit()
        if not kept and failed is None:
            text = f"{self._journal.path} cannot be written: {self._journal.failure}; answers wait"
            emit(ev.Note(time_s=time.monotonic(), text=text, level="error"))
        if kept and failed is not None:
            emit(ev.Note(time_s=time.monotonic(), text=f"{self._journal.path} can be written again"))
        return kept

    def compact(self, recoverable: RecoverableState) -> None:
        """Replace a long journal by a snapshot and a new journal."""
        if self._journal is not None and self._files is not None:
            now = recoverable.executor.clock()
            self._journal = self._files.compact(self._journal, recoverable.encode, self.directory.path, now)
