"""ColumnReader: read block slices as columns, as views if they are contiguous in one block, else as copies.

Copies take no lock: a block loses its serial before anything else in it changes, so a copy is valid if the serial is
unchanged afterwards. Scattered rows are gathered without a Python loop over rows or blocks: the positions of all
bytes are computed from the headers; short pieces are copied by word index, long ones by memcpy. (Measured: 1 ns for
each word, 100 ns for each memcpy.)
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import LeaseLost, SchemaError
from ...memory import HEADER_BYTES, BlockHold, MappedSegment, Mapper
from ...types import Column, ColumnSpec
from ...types.blocks import BlockSlices
from ...types.ragged import Array
from .blocks import BLOCK, MOST_BYTES, RUN, TABLE, Ints, Kind, check_serials, damaged, kind_of, tables

COPY_BYTES = 16 << 10
"""A block up to this size is copied whole: that costs less than a view's lock."""
MOST_PLANS = 256
_WORD, _RUN = struct.Struct("<q"), struct.Struct("<2i")


class _Plan(NamedTuple):
    """The part of a read equal for all batches: columns and their positions in a block's table."""

    schema: dict[str, ColumnSpec]
    kinds: list[tuple[Kind, int]]
    last: int
    head: struct.Struct  # of a block's header, up to the last of these columns


class ColumnReader:
    """Reads block slices as columns. Thread-safe."""

    def __init__(self, mapper: Mapper) -> None:
        self._mapper = mapper
        self._plans: dict[tuple[tuple[str, ...], bytes], _Plan] = {}

    def read(
        self, slices: BlockSlices, schema: Mapping[str, ColumnSpec], most_bytes: int = MOST_BYTES
    ) -> dict[str, Column]:
        """Return the columns of rows. Raises LeaseLost for ended rows, SchemaError for a damaged
        block, and for more than ``most_bytes`` of values of ragged columns of scattered rows."""
        if len(slices.counts) > RUN.size:
            kinds = [kind_of(name, schema[name]) for name in slices.columns]
            return gather(self._mapper, slices, kinds, most_bytes)
        _, start, serial, rows, nbytes, _ = BLOCK.unpack(slices.blocks)
        bytes_of = self._mapper.copy if nbytes <= COPY_BYTES else self._mapper.view
        raw = bytes_of(slices.segments[0], start, serial, nbytes)
        first, count = _RUN.unpack(slices.entries + slices.counts)
        return one_run(raw, rows, nbytes, first, count, self._plan(slices, schema))

    def writable(self, slices: BlockSlices, name: str, schema: Mapping[str, ColumnSpec]) -> Array | None:
        """Return a column's values in a copy-on-write mapping; None if ``read`` gave a copy, or if
        the segment cannot be mapped again: its file is removed or this reader is closed."""
        segment, (_, start, serial, _, nbytes, _) = slices.segments[0], BLOCK.unpack_from(slices.blocks)
        if len(slices.counts) > RUN.size or nbytes <= COPY_BYTES:
            return None
        try:
            whole = self._mapper.view(segment, start, serial, nbytes)
            values = self.read(slices, schema)[name].values
            if not values.size:
                return None
            at = values.ctypes.data - whole.ctypes.data
            own = self._mapper.private_view(segment, start, serial, at + values.nbytes, at)
        except LeaseLost:
            return None
        return own.view(values.dtype).reshape(values.shape)

    def hold(self, slices: BlockSlices) -> list[BlockHold]:
        """Keep the blocks of live rows from reuse, until the returned holds are dropped."""
        blocks = np.frombuffer(slices.blocks, np.int64).reshape(-1, 6)
        return [
            self._mapper.hold(segment, blocks[blocks[:, 0] == number, 1].tolist())
            for number, segment in enumerate(slices.segments)
        ]

    def _plan(self, slices: BlockSlices, schema: Mapping[str, ColumnSpec]) -> _Plan:
        key = slices.columns, slices.fields
        plan = self._plans.get(key)
        if plan is None or plan.schema != schema:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            fields = struct.unpack(f"<{len(slices.columns)}i", slices.fields)
            plan = self._plans[key] = plan_of(slices.columns, fields, schema)
        return plan


def plan_of(columns: Sequence[str], fields: Sequence[int], schema: Mapping[str, ColumnSpec]) -> _Plan:
    """Return the plan to read columns at these positions of a block's table."""
    kinds = [kind_of(name, schema[name]) for name in columns]
    head = struct.Struct(f"<{3 * max(fields) + 6}q")
    return _Plan(dict(schema), list(zip(kinds, fields, strict=True)), max(fields), head)


def one_run(raw: Any, rows: int, nbytes: int, first: int, count: int, plan: _Plan) -> dict[str, Column]:
    """Return the columns of ``count`` entries from ``first`` on, over the bytes ``raw`` of a block.

    It checks in plain numbers what ``blocks.tables`` checks for many blocks in arrays.
    """
    try:
        header_rows, columns, header_nbytes, *table = plan.head.unpack_from(raw, HEADER_BYTES)
    except struct.error:
        raise damaged(plan.kinds[0][0].name) from None
    body = 8 * TABLE + 24 * columns
    if header_rows != rows or header_nbytes != nbytes or not plan.last < columns <= nbytes // 24:
        raise damaged(plan.kinds[0][0].name)
    if not 0 <= first <= first + count <= rows:
        raise LeaseLost(f"entries {first} to {first + count} of a block of {rows}")
    out = {}
    for (name, spec, dtype, width, ragged), field in plan.kinds:
        values, size, at = table[3 * field : 3 * field + 3]
        if values < body or values % 64 or not 0 <= size <= nbytes - values:
            raise damaged(name)
        offsets: npt.NDArray[np.int64] | None = None
        low, length = first, count
        if not ragged:
            if size != rows * width or at != -1:
                raise damaged(name)
        else:
            if at < body or at % 64 or 8 * (rows + 1) > nbytes - at:
                raise damaged(name)
            (low,), (high,) = _WORD.unpack_from(raw, at + 8 * first), _WORD.unpack_from(raw, at + 8 * (first + count))
            length = high - low
            if low < 0 or length < 0 or high > (size // width if width else MOST_BYTES):
                raise damaged(name)
            offsets = np.ndarray((count + 1,), np.int64, raw, at + 8 * first)
            if low:
                offsets = offsets - low
        array: Array = np.ndarray((length, *spec.shape), dtype, raw, values + low * width)
        out[name] = Column(spec, array, offsets)
    return out


def from_image(memory: npt.NDArray[np.uint8], rows: int, specs: Mapping[str, ColumnSpec]) -> dict[str, Column]:
    """Return columns over a block's memory. Raises SchemaError if it does not have them."""
    if not specs or not 0 < rows < 1 << 31:
        raise SchemaError(f"the payload has {rows} rows and {len(specs)} columns; it needs at least one of each")
    plan = plan_of(tuple(specs), range(len(specs)), specs)
    columns = one_run(memory, rows, len(memory), 0, rows, plan)
    for name, column in columns.items():
        offsets = column.offsets
        if offsets is not None and (offsets[1:] < offsets[:-1]).any():
            raise SchemaError(f"column {name!r} has decreasing offsets")
    return columns


JOIN_BYTES = 256
_WORD_TYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.int64}
Segments = Sequence[npt.NDArray[np.uint8]]


class _Runs(NamedTuple):
    """Runs of entries, and their rows. int64; ``values``, ``sizes``, ``offsets``: (columns, runs)."""

    segment: Ints
    values: Ints  # bytes from the start of the segment
    sizes: Ints
    offsets: Ints
    entry: Ints
    length: Ints
    of_row: Ints  # (rows,): the run of each row
    place: Ints  # (rows,): its place in that run

    def pick(self, columns: list[int]) -> _Runs:
        """Return the runs with these columns only."""
        return self._replace(values=self.values[columns], sizes=self.sizes[columns], offsets=self.offsets[columns])


def gather(
    mapper: Mapper, slices: BlockSlices, wanted: list[Kind], most_bytes: int = MOST_BYTES
) -> dict[str, Column]:
    """Return copies of the columns of scattered rows. Raises LeaseLost, SchemaError."""
    blocks = np.frombuffer(slices.blocks, np.int64).reshape(-1, 6)
    number, starts, serials, _, nbytes, _ = blocks.T
    with contextlib.ExitStack() as stack:
        parts: list[tuple[MappedSegment, Any]] = []
        for at, name in enumerate(slices.segments):
            mine: Any = number == at if len(slices.segments) > 1 else slice(None)
            segment = stack.enter_context(mapper.mapped(name, int((starts[mine] + nbytes[mine]).max())))
            parts.append((segment, mine))
            if not stack.enter_context(segment.keep_pages()):
                stack.enter_context(contextlib.closing(BlockHold(segment, starts[mine].tolist())))
                for start, serial in zip(starts[mine].tolist(), serials[mine].tolist(), strict=True):
                    segment.check(start, serial)
        try:
            table = _table(slices, blocks, parts, wanted)
            return copy_runs(
                [segment.bytes for segment, _ in parts], runs_of(slices, blocks, table), wanted, most_bytes
            )
        finally:  # data that seems damaged may have been overwritten meanwhile: LeaseLost, not SchemaError
            for segment, mine in parts:
                check_serials(segment.bytes.view(np.int64), starts[mine], serials[mine])


def _table(slices: BlockSlices, blocks: Ints, parts: list[tuple[MappedSegment, Any]], wanted: list[Kind]) -> Ints:
    out = np.empty((len(blocks), len(wanted), 3), np.int64)
    fields = np.frombuffer(slices.fields, np.int32).astype(np.int64).reshape(-1, len(wanted))
    for segment, mine in parts:
        words = segment.bytes.view(np.int64)
        out[mine] = tables(words, blocks[mine], fields[mine] if len(fields) > 1 else fields, wanted)
    return out


def runs_of(slices: BlockSlices, blocks: Ints, table: Ints) -> _Runs:
    number, starts, _, rows, _, runs = blocks.T
    block = np.repeat(np.arange(len(blocks)), runs)
    entry = np.frombuffer(slices.entries, np.int32).astype(np.int64)
    count = np.frombuffer(slices.counts, np.int32).astype(np.int64)
    if (
        not len(block) == len(entry) == len(count)
        or ((entry < 0) | (count < 1) | (entry + count > rows[block])).any()
    ):
        raise damaged(slices.columns[0])
    values, sizes, offsets = (table[block, :, part].T for part in range(3))
    start = starts[block]
    of_row = np.arange(len(block))
    place = np.zeros(len(block), np.int64)
    if (count != 1).any():
        of_row = np.repeat(of_row, count)
        place = np.arange(len(of_row)) - np.repeat(np.cumsum(count) - count, count)
    return _Runs(number[block], values + start, sizes, offsets + start, entry, count, of_row, place)


def copy_runs(segments: Segments, runs: _Runs, wanted: list[Kind], most_bytes: int) -> dict[str, Column]:
    out: dict[str, Column] = {}
    narrow: dict[int, list[int]] = {}
    ragged = [c for c, kind in enumerate(wanted) if kind.ragged]
    for c, kind in enumerate(wanted):
        if not kind.ragged:
            if kind.width in _WORD_TYPES and len(runs.of_row) * kind.width < JOIN_BYTES * len(runs.entry):
                narrow.setdefault(kind.width, []).append(c)
            else:
                start, nbytes = runs.values[c] + runs.entry * kind.width, runs.length * kind.width
                raw = _move(segments, runs.segment, start, nbytes, kind, most_bytes)
                out[kind.name] = Column(kind.spec, _array(raw, kind, len(runs.of_row)), None)
    for width, columns in narrow.items():
        at = runs.values[columns] // width + runs.entry
        words = take_words(segments, _WORD_TYPES[width], runs.segment[runs.of_row], at[:, runs.of_row] + runs.place)
        for c, row in zip(columns, words, strict=True):
            out[wanted[c].name] = Column(wanted[c].spec, _array(row, wanted[c], len(row)), None)
    if ragged:
        out |= _ragged(segments, runs.pick(ragged), [wanted[c] for c in ragged], most_bytes)
    return {kind.name: out[kind.name] for kind in wanted}


def _ragged(segments: Segments, runs: _Runs, wanted: list[Kind], most_bytes: int) -> dict[str, Column]:
    out: dict[str, Column] = {}
    at = (runs.offsets // 8 + runs.entry)[:, runs.of_row] + runs.place
    segment = runs.segment[runs.of_row]
    low, high = (take_words(segments, np.int64, segment, at + more) for more in (0, 1))
    first = np.cumsum(runs.length) - runs.length
    offsets = np.zeros((len(wanted), len(segment) + 1), np.int64)
    for c, kind in enumerate(wanted):
        most = runs.sizes[c][runs.of_row] // kind.width if kind.width else MOST_BYTES
        if ((low[c] < 0) | (high[c] < low[c]) | (high[c] > most)).any():
            raise damaged(kind.name)
        np.cumsum(high[c] - low[c], out=offsets[c, 1:])
        begin = runs.values[c] + low[c][first] * kind.width
        nbytes = (high[c][first + runs.length - 1] - low[c][first]) * kind.width
        raw = _move(segments, runs.segment, begin, nbytes, kind, most_bytes)
        most_bytes -= int(nbytes.sum())
        out[kind.name] = Column(kind.spec, _array(raw, kind, int(offsets[c, -1])), offsets[c])
    return out


def _move(segments: Segments, segment: Ints, start: Ints, nbytes: Ints, kind: Kind, most_bytes: int) -> Any:
    total = int(nbytes.sum())
    if total > most_bytes:
        raise SchemaError(
            f"column {kind.name!r} of these rows has {total} bytes, and {most_bytes} more may be copied at once;"
            " lease fewer rows"
        )
    if total >= JOIN_BYTES * len(start) or not kind.width:
        pieces = map(slice, start.tolist(), (start + nbytes).tolist())
        views = [memoryview(each) for each in segments]  # type: ignore[arg-type]
        of = repeat(views[0]) if len(views) == 1 else map(views.__getitem__, segment.tolist())
        return b"".join(map(memoryview.__getitem__, of, pieces))
    unit = math.gcd(kind.width, 8)
    words = nbytes // unit
    index = np.repeat(start // unit - (np.cumsum(words) - words), words)
    index += np.arange(total // unit)
    return take_words(segments, _WORD_TYPES[unit], np.repeat(segment, words) if len(segments) > 1 else segment, index)


def take_words(segments: Segments, unit: Any, segment: Ints, index: Ints) -> npt.NDArray[Any]:
    """Copy words of segments. ``segment`` belongs to the last axis of ``index``."""
    if len(segments) == 1:
        only: npt.NDArray[Any] = segments[0].view(unit).take(index)
        return only
    out = np.empty(index.shape, unit)
    for number, each in enumerate(segments):
        mine = segment == number
        out[..., mine] = each.view(unit).take(index[..., mine])
    return out


def _array(raw: Any, kind: Kind, rows: int) -> npt.NDArray[Any]:
    return np.ndarray((rows, *kind.spec.shape), kind.dtype, raw if len(raw) else b"")
