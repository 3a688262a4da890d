"""The payload of a queue server: which blocks its rows lie in, and which memory may be written again.

Rows find their columns in blocks of shared memory. A block belongs to the session that wrote it, or to the server if it was uploaded.
Its memory is free again when no row needs it: its owner is told with its next answer, and the segments of a session that has ended are
removed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import AsyncFlowError
from ..ledger import StatusReport
from ..ledger import commands as cmd
from ..ledger.commands import Ids
from ..ledger.state import LedgerState
from ..memory import Hold, Mapper, blocks_there
from ..types import Batch, ColumnSpec
from ..wire import PayloadSink
from . import remote
from .blocks import Block, Located
from .places import Places, There
from .protocol import Answer, Call
from .reader import Reader
from .remote import IncomingBlock, Refused, Remote
from .segment_files import SegmentFiles
from .step_reads import DeferredStepRead

MOST_UNREAD = 16
"""Steps that may keep descriptors of their segments open until they are read. Rows of further ones are read at once."""


class PayloadManager:
    """``rows``: directory of the segments of rows; ``weights``: of those of weights. ``synced``: uploads are on the disk before they
    count. Not thread-safe: the server's thread owns it."""

    KEPT = ("_freed", "_unplaced")

    def __init__(self, state: LedgerState, rows: Path, weights: Path, *, synced: bool) -> None:
        self.rows, self._weights = rows, weights
        self.places = Places()
        self.files = SegmentFiles(rows, weights)
        self._rows, self._columns, self._versions = state.rows, state.columns, state.versions
        self._mapper = Mapper(rows)
        self.reader = Reader(self._mapper)
        self._remote = Remote(rows, self.reader, synced=synced)
        self._freed: dict[str, bytes] = {}  # by open session, serials of its blocks that it has not been told of
        self._unplaced: dict[int, tuple[str, Block]] = {}  # by the ticket of a call under way, owner and block
        self._schemas: dict[tuple[tuple[str, ...], int], dict[str, ColumnSpec]] = {}  # by columns, and all rows have
        self._step_reads: weakref.WeakSet[DeferredStepRead] = weakref.WeakSet()

    # ---- sessions

    def open_session(self, session: str) -> None:
        self._freed[session] = b""

    def end_session(self, session: str) -> None:
        """Free blocks of this session for good from now on: it will not write again."""
        self._freed.pop(session, None)

    def remove_segments(self, session: str, number: int) -> None:
        """Remove the segments of a session that has ended, except those that rows or kept versions need."""
        self.files.ended(number, self.places.segments_of(session), self._versions.sessions())

    def take_freed(self, session: str) -> bytes:
        """Return the serials (packed int64) of the session's blocks that were freed since the last call."""
        freed = self._freed.get(session, b"")
        if freed:
            self._freed[session] = b""
        return freed

    def has_freed(self, session: str) -> bool:
        return bool(self._freed.get(session))

    def free_later(self, owner: str, serials: bytes) -> None:
        """Free blocks with the owner's next answer."""
        self._freed[owner] += serials

    # ---- blocks of calls

    def sink(self, body: bytes, nbytes: int) -> PayloadSink:
        """Return the memory for the payload of a call, which is still to come."""
        return self._remote.sink(body, nbytes)

    def store(self, call: Call, incoming: IncomingBlock | Refused | None) -> Call:
        """Return the call as a client on this host would have made it: its payload is a block. Raises SchemaError, MemoryFull."""
        return self._remote.store(call, incoming)

    def hold(self, ticket: int, owner: str, block: Block) -> None:
        """Keep the block of a call that is carried out."""
        self._unplaced[ticket] = owner, block

    def put(self, ticket: int, command: cmd.AddRows, done: cmd.PutDone, groups: Ids) -> None:
        """Place the rows that a put made. ``groups``: of the block, if a repeated put adds only some of them."""
        if ticket not in self._unplaced:
            return
        owner, block = self._unplaced.pop(ticket)
        if done.again:
            self.free(owner, block)
        elif done.groups:
            ids = np.arange(done.first, done.first + done.count)
            self.places.add(ids, block, owner, groups.repeat(command.group_size))
        else:
            self.places.put(done.first, block, owner, command.group_size)

    def complete(self, ticket: int, ids: Ids, revoked: Ids) -> None:
        """Place columns of rows, in the order of the block's entries; except of the revoked ones."""
        if ticket not in self._unplaced:
            return
        owner, block = self._unplaced.pop(ticket)
        entries = np.arange(block.rows)
        if not len(revoked):
            self.places.add(ids, block, owner, entries)
            return
        kept = ~np.isin(ids, revoked)
        self.places.add(ids[kept], block, owner, entries[kept])
        if not kept.any():
            self.free(owner, block)

    def discard(self, ticket: int) -> None:
        """Free the block of a call that failed or was dropped, if it has one."""
        if ticket in self._unplaced:
            self.free(*self._unplaced.pop(ticket))

    def forget(self, ticket: int) -> None:
        """The session of a call has ended: its segments go as a whole, but an uploaded block lies in the server's."""
        if ticket in self._unplaced:
            owner, block = self._unplaced.pop(ticket)
            if owner == remote.OWNER:
                self.free(owner, block)

    def free(self, owner: str, block: Block) -> None:
        self._free(owner, block.segment, block.packed_serial)

    def retire(self, ids: Ids) -> None:
        """Free the blocks that no row needs once these have ended."""
        for owner, segment, serials in self.places.retire(ids):
            self._free(owner, segment, serials)

    def _free(self, owner: str, segment: str, serials: bytes) -> None:
        if owner == remote.OWNER and self._remote.free(segment, serials):
            return
        if owner in self._freed:
            self.free_later(owner, serials)
        elif segment not in {
            *self.places.segments_of(owner),
            *(block.segment for _, block in self._unplaced.values()),
        }:
            self.files.remove(segment)

    def keep_weights(self) -> None:
        """Remove weights of versions that nobody can ask for any more."""
        self.files.keep_weights(self._versions.sessions())

    def settle(self) -> None:
        """Free memory and remove files, now that the records are kept by which they are free."""
        self.files.carry_out()
        self._remote.carry_out()

    # ---- reading rows

    def locate(self, ids: Ids, columns: tuple[str, ...]) -> tuple[tuple[Located, ...], dict[str, ColumnSpec]]:
        """Return where rows find those of ``columns`` that all of them have, and the specs of these."""
        specs = self._columns.specs
        if not len(ids):  # a rank without rows: the columns that there would be
            return (), {name: specs[name] for name in columns if name in specs}
        common = int(np.bitwise_and.reduce(self._rows.columns[self._rows.at(ids)]))
        schema = self._schemas.get((columns, common))
        if schema is None:
            here = [name for name in columns if self._columns.contains(common, name)]
            schema = self._schemas[columns, common] = {name: specs[name] for name in here}
        return self.places.locate(ids, tuple(schema)), schema

    def inline(self, answer: Answer) -> tuple[bytes, Sequence[Any]]:
        """Return an answer and the values of its rows beside it, for a client without shared memory."""
        return self._remote.inline(answer)

    def read_step(self, ids: Ids, groups: Ids, completed_at: Ids) -> DeferredStepRead:
        """Return a reader of rows with every column that they have, for any thread, at any time: their blocks and the mappings of
        them are held until then. The ledger may have forgotten the rows by now; their blocks are known until they are retired."""
        columns_of = self.places.columns_of(ids)
        located = self.places.locate(ids, columns_of)
        schema = {name: self._columns.specs[name] for name in columns_of}
        held: list[Hold] = []
        stretches = self._versions.lineage.offsets

        def read() -> Batch:
            columns = remote.read(self.reader, located, schema)
            held.clear()  # the columns hold their blocks themselves, where they are views
            batch = Batch(ids, groups, columns)
            batch.completed_at, batch.stretches = completed_at, stretches
            return batch

        step = DeferredStepRead(read)
        try:
            if sum(each.unread for each in self._step_reads) >= MOST_UNREAD:
                step.now()
            else:
                held += [hold for part in located for hold in self.reader.hold(part)]
        except (
            AsyncFlowError,
            OSError,
        ):  # no descriptor is left, or a segment is gone: whoever reads the step gets the error
            step.now()
        self._step_reads.add(step)
        return step

    # ---- payload that is gone

    def there(self, segment: str, starts: Ids, serials: Ids, sizes: Ids) -> npt.NDArray[np.bool_]:
        """Return for each block of a segment True if it can be read."""
        return blocks_there(self.rows / segment, starts, serials, sizes)

    def lost(self, there: There, among: Ids | None = None) -> tuple[Ids, list[int]]:
        """Return the rows whose payload is gone, and the tickets of puts under way whose payload is gone. ``among``: return nothing
        unless the payload of one of these rows is gone."""
        if among is not None and not len(self.places.lost(there, among)):
            return np.empty(0, np.int64), []
        waiting = [
            ticket
            for ticket, (_, block) in self._unplaced.items()
            if not there(block.segment, *np.array([[block.start], [block.serial], [block.nbytes]])).all()
        ]
        return self.places.lost(there), waiting

    def reconcile(self, sessions: Collection[int]) -> None:
        """After a crash, remove segments that neither these sessions nor rows need."""
        needed = self.places.segments() | {block.segment for _, block in self._unplaced.values()}
        self.files.reconcile(sessions, needed)

    # ---- status, and the end

    def held_bytes(self) -> int:
        """Return the bytes of shared memory that the run takes."""
        total = 0
        with contextlib.suppress(OSError):  # a file may go meanwhile
            for directory in {self.rows, self._weights}:
                total += sum(path.stat().st_blocks * 512 for path in directory.iterdir())
        return total

    def fill(self, report: StatusReport) -> StatusReport:
        """Return the report with the bytes of payload."""
        return msgspec.structs.replace(
            report, payload_bytes=self.places.live_bytes, held_bytes=self.held_bytes(),
            written_bytes=self.places.written_bytes,
        )  # fmt: skip

    def close(self) -> None:
        """Read the steps that listeners have not read yet, and unmap everything."""
        for step in list(self._step_reads):
            step.now()
        self._remote.close()
        self._mapper.close()
