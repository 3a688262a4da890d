"""Durability: record a server's inputs and recover from them; nothing without a journal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..errors import ConfigError, MemoryFull
from ..ledger import commands as cmd
from ..memory import SharedDirectory
from ..types import events as ev
from ..wire import Server
from .journal import DISK_RETRY_S, FOR_ENDS, FOR_PROGRESS, Journal, Record
from .journal_directory import JournalDirectory
from .protocol import CallCommand
from .recovery import RecoverableState, Recovered, recover


class Durability:
    """``path``: the journal's directory, or None. ``level``: "process" or "host"; "" without a
    journal. ``directory``: of the run's shared memory. ``rows``: directory of the row segments. Not
    thread-safe: only the server's thread uses it. Raises ConfigError."""

    def __init__(self, path: Path | None, level: str | None, history: bool = False) -> None:
        self._files = JournalDirectory(path.absolute(), level, history) if path is not None else None
        self._journal: Journal | None = None
        self.level = self._files.durability if self._files is not None else ""
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
            keep = FOR_PROGRESS if isinstance(command, cmd.AddRows) else FOR_ENDS
            self._journal.reserve(nbytes, 0 if isinstance(command, cmd.CloseSession) else keep)  # anyone may leave

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
