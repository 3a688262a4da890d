"""The payload of a queue server: the blocks of its rows, and the memory free for reuse.

A block belongs to the session in its segment's name: its writer, or the server (session 0) if it was
uploaded. Once no row needs it, its owner learns this from its next answer. The segments of an ended
session are removed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import AsyncFlowError
from ..interfaces.store import PayloadStore
from ..ledger import Audit, StatusReport
from ..ledger.commands import Ids
from ..ledger.state import LedgerState
from ..ledger.state.context import HomeLoss, LostColumns
from ..memory import BlockHold, Mapper, find_blocks
from ..types import Batch, Column, ColumnSpec
from ..types.blocks import Block, BlockSlices
from . import remote_payload
from .block_index import BlockCheck, BlockIndex
from .listeners import StepRows, sampled
from .remote_payload import RemotePayload
from .stores.homes import SERVER_MEMORY, HomeId, home_of, session_of
from .stores.reader import ColumnReader

Report = TypeVar("Report", Audit, StatusReport)
MOST_UNREAD = 16
"""Steps that may hold descriptors of their segments until read. Further steps are read at once."""


class Payload:
    """``rows``: directory of the row segments. ``weights``: of the weight segments. ``synced``:
    uploads are synced to the disk before they count. ``remote``: payload of clients without shared
    memory. Not thread-safe: only the server's thread uses it."""

    KEPT = ("_freed",)

    def __init__(self, state: LedgerState, rows: Path, weights: Path, *, synced: bool) -> None:
        self.rows, self._weights = rows, weights
        self.index = BlockIndex()
        self.files = SegmentFiles(rows, weights)
        self._rows, self._columns, self._versions, self._parked = (
            state.rows,
            state.columns,
            state.versions,
            state.parked,
        )
        self._mapper = Mapper(rows)
        self.reader = ColumnReader(self._mapper)
        self.remote = RemotePayload(rows, self.reader, synced=synced)
        self._freed: dict[int, bytes] = {}  # by open session: serials of its freed blocks, for its next answer
        # by wanted columns, and the bit mask of common columns
        self._schemas: dict[tuple[tuple[str, ...], int], dict[str, ColumnSpec]] = {}
        self._homes: PayloadStore | None = None
        self._step_reads: weakref.WeakSet[StepRows] = weakref.WeakSet()

    # ---- sessions

    def open_session(self, session: int) -> None:
        """Register a session as an owner of blocks."""
        self._freed[session] = b""

    def end_session(self, session: int) -> None:
        """Unregister a session, which writes no further blocks."""
        self._freed.pop(session, None)

    def remove_segments(self, session: int) -> None:
        """Remove the segments of an ended session, except those needed by rows or kept versions."""
        self.files.end_session(session, self.index.segments(), self._versions.sessions())

    def take_freed(self, session: int) -> bytes:
        """Return the serials (packed int64) of the session's blocks freed since the last call."""
        freed = self._freed.get(session, b"")
        if freed:
            self._freed[session] = b""
        return freed

    def free_later(self, session: int, serials: bytes) -> None:
        """Free blocks with the session's next answer."""
        self._freed[session] += serials

    def has_freed(self, session: int) -> bool:
        """True if blocks of the session were freed since ``take_freed``."""
        return bool(self._freed.get(session))

    # ---- blocks

    def release(self, block: Block) -> None:
        """Free a block without rows."""
        self.free(block.segment, block.packed_serial)

    def retire(self, ids: Ids) -> None:
        """Free the blocks that no row needs once these rows have ended."""
        for each in self.index.retire(ids):
            self.free(*each)

    def free(self, segment: str, serials: bytes) -> None:
        """Free blocks with the owner's next answer, or remove the segment of an ended session with its last one."""
        owner = session_of(segment)
        if owner in self._freed:
            self.free_later(owner, serials)
        elif not self.remote.free(segment, serials) and segment not in self._needed():
            self.files.remove(segment)

    def _waiting(self) -> dict[int, Block]:
        """Return the blocks of waiting puts, by ticket."""
        parked = self._parked.at("put")
        return {each.ticket: each.command.block for each in parked if each.command.block is not None}

    def _needed(self) -> set[str]:
        """Return the segments needed by rows or waiting puts."""
        return self.index.segments() | {block.segment for block in self._waiting().values()}

    def remove_old_weights(self) -> None:
        """Remove weights of versions that cannot be fetched any more."""
        self.files.set_publishers(self._versions.sessions())

    def settle(self) -> None:
        """Free memory and remove files, once the records are committed."""
        self.files.remove_pending()
        self.remote.free_pending()

    # ---- homes

    def read_homes_by(self, store: PayloadStore) -> None:
        """Read rows with columns in other homes by this store, from any thread but the server's. It is closed with
        this object."""
        self._homes = store

    def drop_lost(self, lost: HomeLoss) -> tuple[list[LostColumns], list[int]]:
        """Forget the blocks in a lost home. Return the lost columns of rows, and the
        tickets of waiting puts with lost payload."""
        where = HomeId(lost.home, lost.epoch)
        waiting = [ticket for ticket, block in self._waiting().items() if home_of(block.segment) == where]
        dropped = self.index.drop(lambda segment: home_of(segment) == where)
        return [LostColumns(ids, columns) for ids, columns in dropped], waiting

    def needed(self, where: HomeId) -> tuple[str, ...]:
        """Return the segments of a home that rows or calls need."""
        return tuple(sorted(segment for segment in self._needed() if home_of(segment) == where))

    # ---- reading rows

    def locate(self, ids: Ids, columns: tuple[str, ...]) -> tuple[tuple[BlockSlices, ...], dict[str, ColumnSpec]]:
        """Return the slices and specs of the ``columns`` common to all rows."""
        specs = self._columns.specs
        if not len(ids):  # a rank without rows still needs the schema
            return (), {name: specs[name] for name in columns if name in specs}
        at = self._rows.at(ids)
        common = int(np.bitwise_and.reduce(self._rows.columns[at] & ~self._rows.lost[at]))
        schema = self._schemas.get((columns, common))
        if schema is None:
            here = [name for name in columns if self._columns.contains(common, name)]
            schema = self._schemas[columns, common] = {name: specs[name] for name in here}
        return self.index.locate(ids, tuple(schema)), schema

    def read_step(self, ids: Ids, groups: Ids, completed_at: Ids) -> StepRows:
        """Return a step's rows, to be read from any thread, at any time.

        They hold their blocks and mappings until then. Call this before the rows are retired; the
        ledger may have forgotten them.
        """
        columns_of = self.index.columns_of(ids)
        schema = {name: self._columns.specs[name] for name in columns_of}
        version_step_offsets = self._versions.lineage.offsets

        def batch_of(at: Ids | slice, columns: dict[str, Column]) -> Batch:
            """Return some rows of the step with these columns."""
            return Batch(
                ids[at], groups[at], columns, completed_at=completed_at[at], version_step_offsets=version_step_offsets
            )

        slices = self.index.locate(ids, columns_of)
        if not all(home_of(segment) == SERVER_MEMORY for part in slices for segment in part.segments):
            # the rows stay until a checkpoint covers them, and this thread must not wait for other hosts
            at, homes = sampled(groups), self._homes
            assert homes is not None
            some = self.index.locate(ids[at], columns_of)
            return StepRows(
                lambda: batch_of(slice(None), homes.read(slices, schema)),
                lambda: batch_of(at, homes.read(some, schema)),
            )
        held: list[BlockHold] = []

        def read() -> Batch:
            """Read the rows."""
            columns = remote_payload.read(self.reader, slices, schema)
            held.clear()  # columns that are views hold their blocks themselves
            return batch_of(slice(None), columns)

        step = StepRows(read)
        try:
            if sum(each.unread for each in self._step_reads) >= MOST_UNREAD:
                step.now()
            else:
                held += [hold for part in slices for hold in self.reader.hold(part)]
        except (AsyncFlowError, OSError):  # no descriptor is left, or a segment is gone: reading raises the error
            step.now()
        self._step_reads.add(step)
        return step

    # ---- lost payload

    def blocks_exist(self, segment: str, starts: Ids, serials: Ids, sizes: Ids) -> npt.NDArray[np.bool_]:
        """Return True for each block of a segment that can be read. Blocks in other homes exist until
        their home is lost."""
        if home_of(segment) != SERVER_MEMORY:
            return np.ones(len(starts), np.bool_)
        return find_blocks(self.rows / segment, starts, serials, sizes)

    def find_lost(self, exist: BlockCheck, among: Ids | None = None) -> tuple[Ids, list[int]]:
        """Return the rows with lost payload, and the tickets of waiting puts with lost payload.

        ``among``: return nothing unless one of these rows has lost its payload.
        """
        if among is not None and not len(self.index.find_lost(exist, among)):
            return np.empty(0, np.int64), []
        waiting = [ticket for ticket, block in self._waiting().items() if not _exists(block, exist)]
        return self.index.find_lost(exist), waiting

    def reconcile(self, sessions: Collection[int]) -> None:
        """After a crash, remove segments needed neither by these sessions nor by rows."""
        self.files.reconcile(sessions, self._needed())

    # ---- status and end

    def held_bytes(self) -> int:
        """Return the bytes of disk and shared memory used by the run's segments."""
        total = 0
        with contextlib.suppress(OSError):  # a file may be removed meanwhile
            for directory in {self.rows, self._weights}:
                total += sum(path.stat().st_blocks * 512 for path in directory.iterdir())
        return total

    def fill_homes(self, report: Report) -> Report:
        """Return a status report or an audit with the bytes of payload of each home."""
        if not report.homes:
            return report
        nbytes: dict[int, int] = {}
        for segment, used in self.index.bytes_by_segment().items():
            where = home_of(segment)
            nbytes[where.home] = nbytes.get(where.home, 0) + used
        homes = tuple(msgspec.structs.replace(each, payload_bytes=nbytes.get(each.home, 0)) for each in report.homes)
        return msgspec.structs.replace(report, homes=homes)

    def fill(self, report: StatusReport) -> StatusReport:
        """Return the report with the bytes of payload."""
        return msgspec.structs.replace(
            self.fill_homes(report), payload_bytes=self.index.live_bytes, held_bytes=self.held_bytes(),
            written_bytes=self.index.written_bytes,
        )  # fmt: skip

    def close(self) -> None:
        """Read the steps not read by listeners yet, and unmap all segments."""
        for step in list(self._step_reads):
            step.now()
        if self._homes is not None:
            self._homes.close()
        self.remote.close()
        self._mapper.close()


def _exists(block: Block, exist: BlockCheck) -> bool:
    return bool(exist(block.segment, *np.array([[block.start], [block.serial], [block.nbytes]])).all())


class SegmentFiles:
    """The segment files of sessions. Not thread-safe: only the server's thread uses it.

    Session 7 writes rows into ``s7-*`` and, as rank 0 of a publisher, weights into ``w0.7-*``.
    After it has ended, each file is removed once no live row and no kept version needs it: it is
    ``pending`` until ``remove_pending``.
    """

    TRANSIENT = frozenset({"_rows", "_weights", "pending", "_replaying"})

    def __init__(self, rows: Path, weights: Path) -> None:
        self._rows, self._weights = rows, weights
        self.pending: list[Path] = []
        self._replaying = False
        self._publishers: set[int] = set()  # sessions that published the versions kept
        self._ended: set[int] = set()  # ended sessions whose weights are not removed yet

    def replay(self, replaying: bool) -> None:
        """Remove no file from now on, in a replay; or remove them again."""
        self._replaying = replaying

    def remove(self, segment: str) -> None:
        """Remove a segment of an ended session: its last row has ended."""
        if not self._replaying:
            self.pending.append(self._rows / segment)

    def end_session(self, session: int, needed: Collection[str], publishers: Collection[int]) -> None:
        """Remove an ended session's segments but those ``needed`` or written by ``publishers``."""
        if not self._replaying:
            self.pending += [path for path in self._rows.glob(f"s{session}-*") if path.name not in needed]
        self._ended.add(session)
        self.set_publishers(publishers)

    def set_publishers(self, publishers: Collection[int]) -> None:
        """Set the sessions that published the versions kept."""
        self._publishers = set(publishers)
        for session in self._ended - self._publishers:
            self._ended.discard(session)
            if not self._replaying:
                self.pending += self._weights.glob(f"w[0-9]*.{session}-*")

    def reconcile(self, sessions: Collection[int], needed: Collection[str]) -> None:
        """After a crash, remove segments of sessions other than these, unless ``needed``."""
        for path in self._rows.glob("s[0-9]*-*"):
            if int(path.name[1:].split("-")[0]) not in sessions and path.name not in needed:
                self.pending.append(path)
        publishers = {*sessions, *self._publishers}
        for path in self._weights.glob("w[0-9]*.[0-9]*-*"):  # w<rank>.<session>-...
            if int(path.name.split(".")[1].split("-")[0]) not in publishers:
                self.pending.append(path)

    def remove_pending(self) -> None:
        """Remove the files; call it once the records that allow it are committed."""
        doomed, self.pending = self.pending, []
        for path in doomed:
            path.unlink(missing_ok=True)
