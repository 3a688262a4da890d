"""Keeping: what a queue server asks of its journal. Without one nothing is kept, nothing waits, and nothing comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from ..errors import ConfigError, MemoryFull
from ..memory import SharedDirectory
from ..types import events as ev
from ..wire import Server
from .journal import FOR_ENDS, FOR_PROGRESS, Journal, Record
from .recovery import Home, Recovered

if TYPE_CHECKING:
    from .server import QueueServer

TRY_AGAIN_S = 0.5
"""How often a journal that could not be written is tried again."""


class Keeping:
    """Not thread-safe: the server's thread owns it. Raises ConfigError."""

    def __init__(self, path: Path | None, durability: str | None, history: bool = False) -> None:
        self.home = Home(path.absolute(), durability, history) if path is not None else None
        self.journal: Journal | None = None
        self.durability = self.home.durability if self.home is not None else ""
        self.told = 0  # a digest of the answers since the last record
        try:
            self.directory = SharedDirectory() if self.home is None else self.home.directory()
        except BaseException:
            if self.home is not None:
                self.home.close()
            raise
        self.rows = self.directory.path
        """Where segments of rows lie."""
        if self.home is not None and self.home.rows is not None:
            self.rows = self.home.rows

    # ---- the life of a server

    def listen(self, addresses: list[str], make: Callable[[list[str], bool], Server]) -> Server:
        """Where an earlier server of the run listened, if that is possible. ``make``: of addresses, and whether answers
        are held until they are settled."""
        if self.home is None:
            return make(addresses, False)
        try:
            wire = make([self.home.bound.get(address, address) for address in addresses], True)
        except ConfigError:  # its port is somebody else's now
            wire = make(addresses, True)
        self.home.listens(dict(zip(addresses, wire.addresses, strict=True)))
        return wire

    def recover(self, server: QueueServer) -> Recovered | None:
        """Make the server what the last one was, and begin to record."""
        if self.home is None:
            return None
        recovered = self.home.recover(server)
        try:
            self.journal = self.home.begin(server)
        except MemoryFull as full:
            if recovered is None or recovered.damaged:
                raise
            self.journal = self.home.go_on(server.ledger.state.context.log.take(), self.told)
            recovered = replace(recovered, full=str(full))
        server.ledger.state.context.log.take()
        server.ledger.state.context.log.keep = True
        self.told = 0
        return recovered

    def close(self, *, over: bool) -> None:
        """``over``: nobody will want the rows again."""
        if self.journal is not None:
            self.journal.close(keep_room=not over)
        keep = self.home is not None and self.home.head is not None and not over
        self.directory.close(keep=keep)
        if self.home is not None:
            if not keep:
                self.home.remove_rows()
            if over:  # the next run in this directory is a new one
                self.home.forget()
            self.home.close()

    # ---- what is recorded

    def reserve(self, nbytes: int, *, new_rows: bool = False) -> None:
        """See to it that a request of so many bytes can be recorded. ``new_rows``: it puts some. Raises MemoryFull."""
        if self.journal is not None:
            self.journal.reserve(nbytes, FOR_PROGRESS if new_rows else FOR_ENDS)

    def record(self, server: QueueServer, record: Record) -> None:
        """An input was carried out."""
        if self.journal is not None:
            told, self.told = self.told, 0
            self.journal.append(record, server.ledger.state.context.log.take(), told)

    def telling(self, answer: bytes) -> None:
        """An answer to what is recorded."""
        self.told = xxhash.xxh3_64_intdigest(answer, self.told)

    @property
    def try_again_s(self) -> float | None:
        """When to settle again what the disk did not take; None when it took all."""
        return TRY_AGAIN_S if self.journal is not None and self.journal.failure is not None else None

    def settle(self, emit: Callable[[ev.Event], None]) -> bool:
        """Whether all that was recorded is kept."""
        if self.journal is None:
            return True
        failed, kept = self.journal.failure, self.journal.commit()
        if not kept and failed is None:
            text = f"{self.journal.path} cannot be written: {self.journal.failure}; answers wait"
            emit(ev.Note(time_s=time.monotonic(), text=text, level="error"))
        if kept and failed is not None:
            emit(ev.Note(time_s=time.monotonic(), text=f"{self.journal.path} can be written again"))
        return kept

    def compact(self, server: QueueServer) -> None:
        """A snapshot, if the journal has grown long."""
        if self.journal is not None and self.home is not None:
            self.journal = self.home.compact(server, self.journal)
