"""The payload of a queue server: the blocks of its rows, and the memory free for reuse.

A block belongs to the session in its segment's name: its writer, or the server (session 0) if it was
uploaded. Once no row needs it, its owner learns this from its next answer. The segments of an ended
session are removed. Uploads of clients without access to the server's memory are written into the server's own
segments as they arrive, and become ordinary blocks when complete. Downloads are sent from the blocks of their rows.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import AsyncFlowError, ProtocolError, SchemaError
from ..interfaces.store import PayloadStore
from ..ledger import unpack_ids
from ..ledger.commands import AddRows, Complete, Ids
from ..ledger.state import LedgerState
from ..ledger.state.context import HomeLoss, LostColumns
from ..memory import HEADER_BYTES, Allocation, Arena, BlockHold, Mapper, find_blocks
from ..types import Batch, Column, ColumnSpec
from ..types.blocks import Block, BlockSlices
from ..types.reports import HomeStatus
from .block_index import BlockCheck, BlockIndex
from .listeners import GROUPS_PER_SAMPLE, StepRows
from .protocol import WRITING, Call, CallResult, decode_call, encode, failure
from .stores.blocks import to_image
from .stores.fetch import DECODE_ERRORS, FetchRequest, check_parts, read_parts
from .stores.homes import SERVER_MEMORY, HomeId, home_of, session_of
from .stores.reader import ColumnReader, from_image

SERVER = 0
"""The session in the names of the server's own segments."""
MOST_UNREAD = 16
"""Steps that may hold descriptors of their segments until read. Further steps are read at once."""
_log = logging.getLogger(__name__)


class IncomingBlock:
    """A block being received (see ``PayloadSink``)."""

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._arena = arena
        self.space: Allocation = arena.allocate(max(nbytes, HEADER_BYTES))

    def write(self, start: int, data: Any) -> None:
        """Write a part of the block. The arena's header at its start is skipped."""
        skip = max(0, HEADER_BYTES - start)
        self.space.write(start + skip, np.frombuffer(data, np.uint8)[skip:])

    def release(self) -> None:
        """Free the block."""
        self._arena.free([self.space.serial])


class Payload:
    """``rows``: directory of the row segments. ``weights``: of the weight segments. ``synced``:
    uploads are synced to the disk before they count. Not thread-safe: only the server's thread uses it."""

    def __init__(self, state: LedgerState, rows: Path, weights: Path, *, synced: bool) -> None:
        self.rows, self._weights = rows, weights
        self.index = BlockIndex()
        self.files = SegmentFiles(rows, weights)
        self._state, self._rows, self._columns = state, state.rows, state.columns
        self._mapper = Mapper(rows)
        self.reader = ColumnReader(self._mapper)
        self._synced, self._prefix = synced, f"s{SERVER}-{secrets.token_hex(4)}-"
        self._arena = Arena(rows, self._prefix)  # of uploads
        self.freed: list[int] = []  # serials in it
        # by wanted columns, and the bit mask of common columns
        self._schemas: dict[tuple[tuple[str, ...], int], dict[str, ColumnSpec]] = {}
        self._homes: PayloadStore | None = None
        self._step_reads: weakref.WeakSet[StepRows] = weakref.WeakSet()

    # ---- sessions

    def end_session(self, session: int) -> None:
        """Remove the segments of an ended session, except those needed by rows or kept versions."""
        self.files.end_session(session, self.index.segments())
        self.files.remove_weights(self._state.versions.sessions())

    # ---- blocks

    def retire(self, ids: Ids) -> None:
        """Release ended rows, and free the unneeded blocks."""
        for each in self.index.retire(ids):
            self.free(*each)

    def free(self, segment: str, serials: bytes) -> None:
        """Free blocks with the owner's next answer, or remove the segment of an ended session with its last one."""
        owner = session_of(segment)
        if owner in self._state.sessions.by_id:
            self.files.free_later(owner, serials)
        elif segment.startswith(self._prefix):
            self.freed += unpack_ids(serials).tolist()
        elif segment not in self._needed():
            self.files.pending.append(self.rows / segment)

    def _waiting(self) -> dict[int, Block]:
        parked = self._state.parked.at("put")
        return {each.ticket: each.command.block for each in parked if each.command.block is not None}

    def _needed(self) -> set[str]:
        """Return the segments needed by rows or waiting puts."""
        return self.index.segments() | {block.segment for block in self._waiting().values()}

    def settle(self) -> None:
        """Free memory and remove files, once the records of their rows' end are committed."""
        self.files.remove_pending()
        if self.freed:
            freed, self.freed = self.freed, []
            self._arena.free(freed)

    # ---- clients without shared memory

    def sink(self, body: bytes, nbytes: int) -> IncomingBlock:
        """Return a sink for the payload of a call. Raises SchemaError, MemoryFull, ProtocolError."""
        try:
            call = decode_call(body)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"the server cannot read this call: {error}") from None
        if call.payload is None or call.block is not None or type(call.command) not in WRITING:
            raise SchemaError("this command takes no payload")
        return IncomingBlock(self._arena, nbytes)

    def store(self, call: Call, incoming: IncomingBlock | AsyncFlowError | None) -> Call:
        """Return the call with ``block`` set to its complete upload. Raises ``incoming`` if it is an error,
        SchemaError if it does not fit the call, MemoryFull; then its memory is free again."""
        if incoming is None:
            raise SchemaError("the call's payload is missing")
        if isinstance(incoming, AsyncFlowError):
            raise incoming
        assert isinstance(call.command, AddRows | Complete)
        assert call.payload is not None
        space = incoming.space
        try:
            columns = from_image(space.memory, call.payload, call.command.columns)
        except BaseException:
            incoming.release()
            raise
        if self._synced:
            self._arena.sync(space)
        block = Block(space.segment, space.start, space.serial, call.payload, space.nbytes, tuple(columns))
        return msgspec.structs.replace(call, command=msgspec.structs.replace(call.command, block=block))

    def inline(self, answer: CallResult) -> tuple[bytes, Sequence[Any]]:
        """Return an encoded result and the columns of its rows, read anew each time it is sent. If they have ended,
        the result has no payload. If some are in another home, the result is unchanged: the client reads all of them
        where they are."""
        if any(home_of(segment) != SERVER_MEMORY for part in answer.slices for segment in part.segments):
            return encode(answer), ()
        rows, parts = 0, list[Any]()
        try:
            image = to_image(self._read(answer.slices, answer.schema))
            rows, parts = image.rows, list[Any](image.parts)
        except AsyncFlowError as error:
            _log.warning("rows leased to a client without shared memory cannot be read: %s", error)
        return encode(msgspec.structs.replace(answer, slices=(), payload=rows)), parts

    def fetch(self, request: FetchRequest) -> tuple[bytes, Sequence[Any]]:
        """Return an encoded result and the columns of rows in the server's memory."""
        try:
            check_parts(request.parts)
            reply, frames = read_parts(self.reader, request.parts)
        except AsyncFlowError as error:
            return encode(CallResult(error=failure(error))), ()
        return encode(CallResult(reply)), frames

    def _read(self, slices: Sequence[BlockSlices], schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        """Return the columns of rows, in the order of ``schema``."""
        columns: dict[str, Column] = {}
        for part in slices:
            columns.update(self.reader.read(part, schema))
        return {name: columns[name] for name in schema}

    # ---- homes

    def read_homes_by(self, store: PayloadStore) -> None:
        """Read rows with columns in other homes by this store, from any thread but the server's. It is closed with
        this object."""
        self._homes = store

    def drop_lost(self, lost: list[HomeLoss]) -> tuple[list[tuple[HomeLoss, list[LostColumns]]], list[int]]:
        """Forget the blocks in lost homes. Return the lost columns of rows by home, and the tickets of waiting puts
        with lost payload."""
        homes = {HomeId(each.home, each.epoch): each for each in lost}
        waiting = [ticket for ticket, block in self._waiting().items() if home_of(block.segment) in homes]
        losses = []
        for where, each in homes.items():
            dropped = self.index.drop({segment for segment in self.index.segments() if home_of(segment) == where})
            losses.append((each, [LostColumns(ids, columns) for ids, columns in dropped]))
        return losses, waiting

    def needed(self, where: HomeId) -> tuple[str, ...]:
        """Return the segments of a home that rows or calls need."""
        return tuple(sorted(segment for segment in self._needed() if home_of(segment) == where))

    # ---- reading rows

    def locate(self, ids: Ids, columns: tuple[str, ...]) -> tuple[tuple[BlockSlices, ...], dict[str, ColumnSpec]]:
        """Return the slices and specs of the ``columns`` common to all rows."""
        specs = self._columns.specs
        if ids.size == 0:  # a rank without rows still needs the schema
            return (), {name: specs[name] for name in columns if name in specs}
        at = self._rows.at(ids)
        common = int(np.bitwise_and.reduce(self._rows.columns[at] & ~self._rows.lost[at]))
        if (columns, common) not in self._schemas:
            here = [name for name in columns if self._columns.contains(common, name)]
            self._schemas[columns, common] = {name: specs[name] for name in here}
        schema = self._schemas[columns, common]
        return self.index.locate(ids, tuple(schema)), schema

    def read_step(self, ids: Ids, groups: Ids, completed_at: Ids) -> StepRows:
        """Return a step's rows, to be read from any thread, at any time. They hold their blocks and mappings until
        then. Call this before the rows are retired; the ledger may have forgotten them."""
        columns_of = self.index.columns_of(ids)
        schema = {name: self._columns.specs[name] for name in columns_of}
        version_step_offsets = self._state.versions.lineage.offsets

        def batch_of(at: Ids | slice, columns: dict[str, Column]) -> Batch:
            """Return some rows of the step with these columns."""
            return Batch(
                ids[at], groups[at], columns, completed_at=completed_at[at], version_step_offsets=version_step_offsets
            )

        slices = self.index.locate(ids, columns_of)
        if not all(home_of(segment) == SERVER_MEMORY for part in slices for segment in part.segments):
            # the rows stay until a checkpoint covers them, and this thread must not wait for other hosts
            at, homes = np.flatnonzero(np.isin(groups, np.unique(groups)[::GROUPS_PER_SAMPLE])), self._homes
            assert homes is not None
            some = self.index.locate(ids[at], columns_of)
            return StepRows(
                lambda: batch_of(slice(None), homes.read(slices, schema)),
                lambda: batch_of(at, homes.read(some, schema)),
            )
        held: list[BlockHold] = []

        def read() -> Batch:
            """Read the rows."""
            columns = self._read(slices, schema)
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
        """Return the rows with lost payload, and the tickets of waiting puts with lost payload. ``among``: return
        nothing unless one of these rows has lost its payload."""
        if among is not None and not len(self.index.find_lost(exist, among)):
            return np.empty(0, np.int64), []
        waiting = [ticket for ticket, block in self._waiting().items() if not _exists(block, exist)]
        return self.index.find_lost(exist), waiting

    def reconcile(self) -> None:
        """After a replay, remove segments needed neither by open sessions nor by rows."""
        state = self._state
        self.files.reconcile(state.sessions.by_id, self._needed(), state.versions.sessions())

    # ---- status and end

    def held_bytes(self) -> int:
        """Return the bytes of disk and shared memory used by the run's segments."""
        total = 0
        with contextlib.suppress(OSError):  # a file may be removed meanwhile
            for directory in {self.rows, self._weights}:
                total += sum(path.stat().st_blocks * 512 for path in directory.iterdir())
        return total

    def fill_homes(self, homes: tuple[HomeStatus, ...]) -> tuple[HomeStatus, ...]:
        """Return the homes with the bytes of payload of each."""
        nbytes = Counter[int]()
        for segment, used in self.index.bytes_by_segment().items():
            nbytes[home_of(segment).home] += used
        return tuple(msgspec.structs.replace(each, payload_bytes=nbytes[each.home]) for each in homes)

    def close(self) -> None:
        """Read the steps not read by listeners yet, and unmap all segments."""
        for step in list(self._step_reads):
            step.now()
        if self._homes is not None:
            self._homes.close()
        self._arena.close(unlink=False)
        self._mapper.close()


def _exists(block: Block, exist: BlockCheck) -> bool:
    return bool(exist(block.segment, *np.array([[block.start], [block.serial], [block.nbytes]])).all())


class SegmentFiles:
    """The segment files of sessions, and their freed blocks. Not thread-safe: only the server's thread uses it.

    Session 7 writes rows into ``s7-*`` and, as rank 0 of a publisher, weights into ``w0.7-*``. After it has ended,
    each file is removed once no live row and no kept version needs it: it is ``pending`` until ``remove_pending``.
    ``freed``: by open session, the serials (packed int64) of its freed blocks, for its next answer."""

    TRANSIENT = frozenset({"_rows", "_weights", "pending"})

    def __init__(self, rows: Path, weights: Path) -> None:
        self._rows, self._weights = rows, weights
        self.pending: list[Path] = []
        self.freed: dict[int, bytes] = {}
        self._ended: set[int] = set()  # ended sessions with weights

    def free_later(self, session: int, serials: bytes) -> None:
        """Free blocks with the session's next answer."""
        self.freed[session] = self.freed.get(session, b"") + serials

    def end_session(self, session: int, needed: Collection[str]) -> None:
        """Remove an ended session's segments of rows, unless ``needed``."""
        self.freed.pop(session, None)
        self.pending += [path for path in self._rows.glob(f"s{session}-*") if path.name not in needed]
        self._ended.add(session)

    def remove_weights(self, publishers: Collection[int]) -> None:
        """Remove weights of ended sessions. ``publishers``: the sessions of kept versions."""
        for session in self._ended.difference(publishers):
            self._ended.discard(session)
            self.pending += self._weights.glob(f"w[0-9]*.{session}-*")

    def reconcile(self, sessions: Collection[int], needed: Collection[str], publishers: Collection[int]) -> None:
        """After a replay, remove segments of sessions other than these, unless ``needed``."""
        rows = [path for path in self._rows.glob("s[0-9]*-*") if path.name not in needed]
        self.pending = [path for path in rows if int(path.name[1:].split("-")[0]) not in sessions]
        for path in self._weights.glob("w[0-9]*.[0-9]*-*"):  # w<rank>.<session>-...
            if int(path.name.split(".")[1].split("-")[0]) not in {*sessions, *publishers}:
                self.pending.append(path)

    def remove_pending(self) -> None:
        """Remove the files; call it once the records of their end are committed."""
        pending, self.pending = self.pending, []
        for path in pending:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # it stays: a leak must not stop the server
                _log.error("%s cannot be removed: %s", path, error)
