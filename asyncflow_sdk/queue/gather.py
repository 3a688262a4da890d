"""Gather: rows that lie in many places are copied together, column by column.

No loop in Python over rows or blocks: where bytes lie is computed for all of them from the headers. Short pieces are
taken by an index of their words, long ones are joined by memcpy. (Measured: a taken word costs a nanosecond, a
joined piece a hundred.)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..memory import BlockHold, MappedSegment, Mapper
from ..types import Column
from .blocks import BlockSlices
from .layout import MOST_BYTES, Ints, Kind, check_serials, damaged, tables

JOIN_BYTES = 256
_WORD: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.int64}
Segments = Sequence[npt.NDArray[np.uint8]]


class _Runs(NamedTuple):
    """Runs of entries of blocks, and their rows. int64; ``values``, ``sizes`` and ``offsets`` are (columns, runs)."""

    segment: Ints
    values: Ints  # bytes from the start of the segment
    sizes: Ints
    offsets: Ints
    entry: Ints
    length: Ints
    of_row: Ints  # (rows,): the run of each row
    place: Ints  # (rows,): its place in that run

    def pick(self, columns: list[int]) -> _Runs:
        return self._replace(values=self.values[columns], sizes=self.sizes[columns], offsets=self.offsets[columns])


def gather(mapper: Mapper, located: BlockSlices, wanted: list[Kind]) -> dict[str, Column]:
    """Copies of the columns of located rows. Raises LeaseLost, SchemaError."""
    blocks = np.frombuffer(located.blocks, np.int64).reshape(-1, 6)
    number, starts, serials, _, nbytes, _ = blocks.T
    with contextlib.ExitStack() as stack:
        parts: list[tuple[MappedSegment, Any]] = []
        for at, name in enumerate(located.segments):
            mine: Any = number == at if len(located.segments) > 1 else slice(None)
            segment = stack.enter_context(mapper.mapped(name, int((starts[mine] + nbytes[mine]).max())))
            parts.append((segment, mine))
            if not stack.enter_context(segment.keep_pages()):
                stack.enter_context(contextlib.closing(BlockHold(segment, starts[mine].tolist())))
                for start, serial in zip(starts[mine].tolist(), serials[mine].tolist(), strict=True):
                    segment.check(start, serial)
        try:
            table = _table(located, blocks, parts, wanted)
            return _copy([segment.bytes for segment, _ in parts], _runs(located, blocks, table), wanted)
        finally:  # also when something seems damaged that was only overwritten meanwhile
            for segment, mine in parts:
                check_serials(segment.bytes.view(np.int64), starts[mine], serials[mine])


def _table(located: BlockSlices, blocks: Ints, parts: list[tuple[MappedSegment, Any]], wanted: list[Kind]) -> Ints:
    """Where the columns of the blocks lie: (blocks, columns, 3)."""
    out = np.empty((len(blocks), len(wanted), 3), np.int64)
    fields = np.frombuffer(located.fields, np.int32).astype(np.int64).reshape(-1, len(wanted))
    for segment, mine in parts:
        words = segment.bytes.view(np.int64)
        out[mine] = tables(words, blocks[mine], fields[mine] if len(fields) > 1 else fields, wanted)
    return out


def _runs(located: BlockSlices, blocks: Ints, table: Ints) -> _Runs:
    number, starts, _, rows, _, runs = blocks.T
    block = np.repeat(np.arange(len(blocks)), runs)
    entry = np.frombuffer(located.entries, np.int32).astype(np.int64)
    count = np.frombuffer(located.counts, np.int32).astype(np.int64)
    if (
        not len(block) == len(entry) == len(count)
        or ((entry < 0) | (count < 1) | (entry + count > rows[block])).any()
    ):
        raise damaged(located.columns[0])
    values, sizes, offsets = (table[block, :, part].T for part in range(3))
    start = starts[block]
    of_row = np.arange(len(block))
    place = np.zeros(len(block), np.int64)
    if (count != 1).any():
        of_row = np.repeat(of_row, count)
        place = np.arange(len(of_row)) - np.repeat(np.cumsum(count) - count, count)
    return _Runs(number[block], values + start, sizes, offsets + start, entry, count, of_row, place)


def _copy(segments: Segments, runs: _Runs, wanted: list[Kind]) -> dict[str, Column]:
    out: dict[str, Column] = {}
    narrow: dict[int, list[int]] = {}
    ragged = [c for c, kind in enumerate(wanted) if kind.ragged]
    for c, kind in enumerate(wanted):
        if not kind.ragged:
            if kind.width in _WORD and len(runs.of_row) * kind.width < JOIN_BYTES * len(runs.entry):
                narrow.setdefault(kind.width, []).append(c)
            else:
                raw = _move(
                    segments, runs.segment, runs.values[c] + runs.entry * kind.width, runs.length * kind.width, kind
                )
                out[kind.name] = Column(kind.spec, _array(raw, kind, len(runs.of_row)), None)
    for width, columns in narrow.items():
        at = runs.values[columns] // width + runs.entry
        words = _take(segments, _WORD[width], runs.segment[runs.of_row], at[:, runs.of_row] + runs.place)
        for c, row in zip(columns, words, strict=True):
            out[wanted[c].name] = Column(wanted[c].spec, _array(row, wanted[c], len(row)), None)
    if ragged:
        out |= _ragged(segments, runs.pick(ragged), [wanted[c] for c in ragged])
    return {kind.name: out[kind.name] for kind in wanted}


def _ragged(segments: Segments, runs: _Runs, wanted: list[Kind]) -> dict[str, Column]:
    """Columns with offsets."""
    out: dict[str, Column] = {}
    at = (runs.offsets // 8 + runs.entry)[:, runs.of_row] + runs.place
    segment = runs.segment[runs.of_row]
    low, high = (_take(segments, np.int64, segment, at + more) for more in (0, 1))
    first = np.cumsum(runs.length) - runs.length
    offsets = np.zeros((len(wanted), len(segment) + 1), np.int64)
    for c, kind in enumerate(wanted):
        most = runs.sizes[c][runs.of_row] // kind.width if kind.width else MOST_BYTES
        if ((low[c] < 0) | (high[c] < low[c]) | (high[c] > most)).any():
            raise damaged(kind.name)
        np.cumsum(high[c] - low[c], out=offsets[c, 1:])
        begin = runs.values[c] + low[c][first] * kind.width
        nbytes = (high[c][first + runs.length - 1] - low[c][first]) * kind.width
        raw = _move(segments, runs.segment, begin, nbytes, kind)
        out[kind.name] = Column(kind.spec, _array(raw, kind, int(offsets[c, -1])), offsets[c])
    return out


def _move(segments: Segments, segment: Ints, start: Ints, nbytes: Ints, kind: Kind) -> Any:
    """Pieces of segments, one after another."""
    total = int(nbytes.sum())
    if total >= JOIN_BYTES * len(start) or not kind.width:
        pieces = map(slice, start.tolist(), (start + nbytes).tolist())
        views = [memoryview(each) for each in segments]  # type: ignore[arg-type]
        of = repeat(views[0]) if len(views) == 1 else map(views.__getitem__, segment.tolist())
        return b"".join(map(memoryview.__getitem__, of, pieces))
    unit = math.gcd(kind.width, 8)
    words = nbytes // unit
    index = np.repeat(start // unit - (np.cumsum(words) - words), words)
    index += np.arange(total // unit)
    return _take(segments, _WORD[unit], np.repeat(segment, words) if len(segments) > 1 else segment, index)


def _take(segments: Segments, unit: Any, segment: Ints, index: Ints) -> npt.NDArray[Any]:
    """Words of segments. ``segment`` belongs to the last axis of ``index``."""
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
