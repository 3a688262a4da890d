"""What a queue server keeps of its inputs. Without a journal nothing is kept, nothing waits, and nothing comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..errors import ConfigError, MemoryFull
from ..memory import SharedDirectory
from ..types import events as ev
from ..wire import Server
from .journal import FOR_ENDS, FOR_PROGRESS, Journal, Record
from .journal_directory import JournalDirectory
from .recovery import Recovered, Replica, recover

TRY_AGAIN_S = 0.5
"""How often a journal that could not be written is tried again."""


class Durability:
    """``path``: of the journal's directory, or None. ``level``: "process" or "host"; "" without a journal. ``directory``: of the run's
    shared memory. ``rows``: where segments of rows lie. Not thread-safe: the server's thread owns it. Raises ConfigError."""

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
        """The journal, if one is written."""
        return None if self._journal is None else self._journal.path

    # ---- the life of a server

    def listen(self, addresses: list[str], make: Callable[[list[str], bool], Server]) -> Server:
        """Listen where an earlier server of the run did, if that is possible. ``make``: called with addresses, and True if answers are
        held until they are settled."""
        if self._files is None:
            return make(addresses, False)
        try:
            wire = make([self._files.bound.get(address, address) for address in addresses], True)
        except ConfigError:  # its port is somebody else's now
            wire = make(addresses, True)
        self._files.listens(dict(zip(addresses, wire.addresses, strict=True)))
        return wire

    def recover(self, replica: Replica) -> Recovered | None:
        """Bring the server to the state of the last one, and begin to record. Returns None for a new run."""
        if self._files is None:
            return None
        executor = replica.executor
        log = executor.ledger.state.context.log
        resumption = recover(self._files, replica)
        found = None if resumption is None else resumption.found
        try:
            self._journal = self._files.begin(replica.encode(), self.directory.path, executor.clock())
        except MemoryFull as full:
            if resumption is None or resumption.found.damaged:
                raise
            self._journal = resumption.journal(self._files, log.take(), executor.take_digest())
            found = replace(resumption.found, full=str(full))
        log.take()
        executor.take_digest()
        log.keep = True
        return found

    def close(self, *, over: bool) -> None:
        """``over``: nobody will want the rows again."""
        if self._journal is not None:
            self._journal.close(keep_room=not over)
        keep = self._files is not None and self._files.head is not None and not over
        self.directory.close(keep=keep)
        if self._files is not None:
            self._files.close(over=over)

    # ---- records

    def reserve(self, nbytes: int, *, new_rows: bool = False) -> None:
        """Make sure that a request of so many bytes can be recorded. ``new_rows``: it puts some. Raises MemoryFull."""
        if self._journal is not None:
            self._journal.reserve(nbytes, FOR_PROGRESS if new_rows else FOR_ENDS)

    def record(self, record: Record, replica: Replica) -> None:
        """Record an input that was carried out, with what user code and files said meanwhile."""
        if self._journal is not None:
            executor = replica.executor
            self._journal.append(record, executor.ledger.state.context.log.take(), executor.take_digest())

    @property
    def try_again_s(self) -> float | None:
        """Seconds until the disk is asked again to take records that it refused; None if it took all."""
        return TRY_AGAIN_S if self._journal is not None and self._journal.failure is not None else None

    def settle(self, emit: Callable[[ev.Event], None]) -> bool:
        """Write the records of this round. Return True if all are kept."""
        if self._journal is None:
            return True
        failed, kept = self._journal.failure, self._journal.commit()
        if not kept and failed is None:
            text = f"{self._journal.path} cannot be written: {self._journal.failure}; answers wait"
            emit(ev.Note(time_s=time.monotonic(), text=text, level="error"))
        if kept and failed is not None:
            emit(ev.Note(time_s=time.monotonic(), text=f"{self._journal.path} can be written again"))
        return kept

    def compact(self, replica: Replica) -> None:
        """Begin a new journal after a snapshot, if this one has grown long."""
        if self._journal is not None and self._files is not None:
            now = replica.executor.clock()
            self._journal = self._files.compact(self._journal, replica.encode, self.directory.path, now)
