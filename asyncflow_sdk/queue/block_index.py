"""BlockIndex: the block of each row and column, kept by the server.

One array for each set of columns written together (a family), indexed like the ledger's rows, and
one for each property of blocks; no loop over rows or blocks. It never reads shared memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..ledger.commands import Ids
from ..types.blocks import Block, BlockSlices
from .stores.blocks import BLOCK, RUN

_NOWHERE = -1
_SHIFT = 32  # a place is (slot of a block << 32) + entry in the block
_ENTRY = (1 << _SHIFT) - 1
_SERIAL = struct.Struct("<q")
Family = tuple[str, ...]
BlockCheck: TypeAlias = Callable[[str, Ids, Ids, Ids], npt.NDArray[np.bool_]]
FreedBlocks: TypeAlias = tuple[str, bytes]
"""A segment, and the serials of its unneeded blocks as packed int64."""


class BlockIndex:
    """Not thread-safe: only the server's thread uses it."""

    def __init__(self) -> None:
        self._families: dict[Family, npt.NDArray[np.int64]] = {}
        self._of_column: dict[str, list[Family]] = {}
        self._plans: dict[tuple[str, ...], list[tuple[Family, tuple[str, ...], bytes]]] = {}
        self._base = 0
        self._capacity = 1024
        # by slot: number of the segment, start, serial, rows, nbytes, rows that need it
        self._blocks = np.zeros((1024, 6), np.int64)
        self._free = list(range(1023, -1, -1))  # slots; the lowest is used first
        self._names: list[str] = []  # of segments, by number
        self._numbers: dict[str, int] = {}
        self.live_bytes = 0  # of blocks in use, each counted once
        self.written_bytes = 0  # of all blocks so far

    def add(self, ids: Ids, block: Block, entries: npt.NDArray[np.int64]) -> None:
        """Assign entry entries[i] of ``block`` to row ids[i]."""
        rows = ids.size
        if not rows:
            return
        lowest, highest = int(np.minimum.reduce(ids)), int(np.maximum.reduce(ids))
        if lowest < self._base or highest >= self._base + self._capacity:
            self._reserve(lowest, highest)
        if block.columns not in self._families:
            self._families[block.columns] = np.full(self._capacity, _NOWHERE, np.int64)
            self._plans.clear()
            for name in block.columns:
                self._of_column.setdefault(name, []).append(block.columns)
        if not self._free:
            count = len(self._blocks)
            self._blocks = np.concatenate([self._blocks, np.zeros_like(self._blocks)])
            self._free = list(range(2 * count - 1, count - 1, -1))
        number = self._numbers.get(block.segment)
        if number is None:
            number = self._enter(block.segment)
        slot = self._free.pop()
        self._blocks[slot] = number, block.start, block.serial, block.rows, block.nbytes, rows
        self.live_bytes += block.nbytes
        self.written_bytes += block.nbytes
        self._families[block.columns][ids - self._base] = (slot << _SHIFT) + entries

    def locate(self, ids: Ids, columns: tuple[str, ...]) -> tuple[BlockSlices, ...]:
        """Return the slices of columns for these rows; every row must have them."""
        count = ids.size
        if not count:
            return ()
        if columns not in self._plans:
            self._plans[columns] = self._plan(columns)
        at = ids - self._base
        out: list[BlockSlices] = []
        located: tuple[str, ...] = ()
        for family, names, fields in self._plans[columns]:
            places = self._families[family][at]
            first = int(places[0])
            if first >= 0 and (
                count == 1
                or (int(places[-1]) - first == count - 1 and np.logical_and.reduce(places[1:] - places[:-1] == 1))
            ):  # the common case: successive entries of one block
                segment, *block, _ = self._blocks[first >> _SHIFT].tolist()
                packed = BLOCK.pack(0, *block, 1), RUN.pack(first & _ENTRY), RUN.pack(count)
                out.append(BlockSlices(names, fields, (self._names[segment],), *packed))
            elif np.minimum.reduce(places) >= 0:
                out.append(self._slices(names, fields, places))
            else:
                continue
            located += names
        if located != columns:  # in another order, or not in one family for all rows
            out += [self._scattered(name, at) for name in columns if name not in located]
        return tuple(out)

    def bytes_by_segment(self) -> dict[str, int]:
        """Return the bytes of blocks in use, by segment."""
        used = self._blocks[self._used()]
        numbers, at = np.unique(used[:, 0], return_inverse=True)
        sums = np.bincount(at, used[:, 4], len(numbers)).astype(np.int64)
        return {self._names[number]: int(nbytes) for number, nbytes in zip(numbers, sums, strict=True)}

    def columns_of(self, ids: Ids) -> tuple[str, ...]:
        """Return the columns of all these rows."""
        at = ids - self._base
        return tuple(
            name
            for name, families in self._of_column.items()
            if np.any([self._families[family][at] >= 0 for family in families], axis=0).all()
        )

    def retire(self, ids: Ids) -> list[FreedBlocks]:
        """Release ended rows, and return the unneeded blocks."""
        at = ids - self._base
        at = at[(at >= 0) & (at < self._capacity)]
        freed: list[FreedBlocks] = []
        need = self._blocks[:, 5]
        for array in self._families.values() if len(at) else ():
            slots = array[at] >> _SHIFT
            first = int(slots[0])
            together = bool((slots == first).all())  # the common case: in one block, or in none
            if together and first < 0:
                continue
            array[at] = _NOWHERE
            if not together:
                slots = slots[slots >= 0]
                np.subtract.at(need, slots, 1)
                freed += self._forget(np.unique(slots[need[slots] == 0]))
                continue
            need[first] -= at.size
            if not need[first]:
                segment, _, serial, _, nbytes, _ = self._blocks[first].tolist()
                freed.append((self._names[segment], _SERIAL.pack(serial)))
                self._free.append(first)
                self.live_bytes -= nbytes
        return freed

    def find_lost(self, exist: BlockCheck, among: Ids | None = None) -> Ids:
        """Return the rows of lost blocks. ``among``: check only the blocks of these rows; the
        result includes other rows of these blocks."""
        used = self._used()
        if among is not None:
            at = among - self._base
            at = at[(at >= 0) & (at < self._capacity)]
            theirs = np.concatenate([np.empty(0, np.int64), *(array[at] for array in self._families.values())])
            wanted = np.zeros_like(used)
            wanted[theirs[theirs >= 0] >> _SHIFT] = True
            used &= wanted
        gone = np.zeros_like(used)
        for number in self._live_segments():
            slots = np.flatnonzero(used & (self._blocks[:, 0] == number))
            if len(slots):
                _, starts, serials, _, sizes, _ = self._blocks[slots].T
                gone[slots] = ~exist(self._names[number], starts, serials, sizes)
        found = [np.empty(0, np.int64), *(self._rows_in(array, gone) for array in self._families.values())]
        return np.unique(np.concatenate(found)) + self._base

    def _rows_in(self, array: Ids, slots: npt.NDArray[np.bool_]) -> Ids:
        """Return the positions in a family of rows with a block in some slots."""
        return np.flatnonzero((array >= 0) & slots[np.maximum(array, 0) >> _SHIFT])

    def _used(self) -> npt.NDArray[np.bool_]:
        """Return True for each slot with a block."""
        used: npt.NDArray[np.bool_] = self._blocks[:, 5] > 0
        return used

    def drop(self, segments: Collection[str]) -> list[tuple[Ids, Family]]:
        """Forget all blocks in some segments. Return their rows by family."""
        numbers = [self._numbers[name] for name in segments if name in self._numbers]
        lost = self._used() & np.isin(self._blocks[:, 0], numbers)
        dropped = []
        for family, array in self._families.items():
            at = self._rows_in(array, lost)
            if len(at):
                array[at] = _NOWHERE
                dropped.append((at + self._base, family))
        self._forget(np.flatnonzero(lost))
        return dropped

    def segments(self) -> set[str]:
        """Return the segments needed by rows."""
        return {self._names[number] for number in self._live_segments()}

    def _live_segments(self) -> list[int]:
        numbers: list[int] = np.unique(self._blocks[self._used(), 0]).tolist()
        return numbers

    def _enter(self, segment: str) -> int:
        """Give a new segment the lowest number without a block."""
        live = set(self._live_segments())
        number = next(each for each in range(len(live) + 1) if each not in live)
        if number < len(self._names):
            del self._numbers[self._names[number]]
        self._names[number : number + 1] = [segment]
        self._numbers[segment] = number
        return number

    def _plan(self, columns: tuple[str, ...]) -> list[tuple[Family, tuple[str, ...], bytes]]:
        """Return for each family with some of these columns: the columns and their positions in it."""
        wanted: dict[Family, list[str]] = {}
        for name in columns:
            for family in self._of_column[name]:
                wanted.setdefault(family, []).append(name)
        return [
            (family, tuple(names), np.array([family.index(name) for name in names], np.int32).tobytes())
            for family, names in wanted.items()
        ]

    def _scattered(self, name: str, at: Ids) -> BlockSlices:
        """Return the slices of a column in different families for different rows."""
        place = np.full(len(at), _NOWHERE, np.int64)
        field = np.zeros(len(at), np.int32)
        for family in self._of_column[name]:
            found = self._families[family][at]
            field[found >= 0] = family.index(name)
            place = np.where(found >= 0, found, place)
        assert place.min() >= 0, "every row has the column"
        return self._slices((name,), field, place)

    def _slices(self, names: tuple[str, ...], fields: bytes | npt.NDArray[np.int32], places: Ids) -> BlockSlices:
        """Return the slices at places. ``fields``: packed, for all blocks; or an array, by row."""
        run = np.flatnonzero(_steps(places, int(places[0]) - 2) != 1)  # starts of runs
        slots = places[run] >> _SHIFT
        new = np.flatnonzero(_steps(slots, -1))  # the first run of each block
        blocks = self._blocks[slots[new]]
        blocks[:, 5] = _sizes(new, len(run))
        segments, blocks[:, 0] = _numbered(blocks[:, 0])
        return BlockSlices(
            names,
            fields if isinstance(fields, bytes) else fields[run[new]].tobytes(),
            tuple(self._names[segment] for segment in segments),
            blocks.tobytes(),
            (places[run] & _ENTRY).astype(np.int32).tobytes(),
            _sizes(run, len(places)).astype(np.int32).tobytes(),
        )

    def _forget(self, slots: Ids) -> list[FreedBlocks]:
        if not len(slots):
            return []
        self._free.extend(slots.tolist())
        self._blocks[slots, 5] = 0
        blocks = self._blocks[slots]
        self.live_bytes -= int(blocks[:, 4].sum())
        segments, which = _numbered(blocks[:, 0])
        return [(self._names[each], blocks[which == number, 2].tobytes()) for number, each in enumerate(segments)]

    def _reserve(self, lowest: int, highest: int) -> None:
        """Make room for rows ``lowest`` to ``highest``: drop the unused ends, and grow."""
        used = [np.flatnonzero(array >= 0) for array in self._families.values()]
        ends = [int(each) for at in used if len(at) for each in (at[0], at[-1])]
        first, last = min([*ends, lowest - self._base]), max([*ends, highest - self._base])
        while last - first >= self._capacity // 2:
            self._capacity *= 2
        for family, array in self._families.items():
            kept, at = array[max(first, 0) : max(last + 1, 0)], max(-first, 0)  # rows below the base had no columns
            self._families[family] = np.full(self._capacity, _NOWHERE, np.int64)
            self._families[family][at : at + len(kept)] = kept
        self._base += first


def _numbered(values: npt.NDArray[Any]) -> tuple[list[int], npt.NDArray[Any]]:
    """Return the distinct values, and the index of each value among them."""
    if (values == values[0]).all():
        return [int(values[0])], np.zeros(len(values), np.int64)
    known, which = np.unique(values, return_inverse=True)
    return known.tolist(), which


def _steps(values: Ids, before: int) -> Ids:
    """Return the differences of successive values, four times as fast as ``np.diff`` with prepend."""
    steps = values.copy()
    steps[1:] -= values[:-1]
    steps[0] -= before
    return steps


def _sizes(starts: Ids, end: int) -> Ids:
    """Return the sizes of parts with these ``starts``, up to ``end``."""
    sizes = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=sizes[:-1])
    sizes[-1] = end - starts[-1]
    return sizes
