"""Places: which block holds which columns of which row, for the server. One array per set of columns written
together, indexed like the ledger's rows; no loop over rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..ledger.commands import Ids
from .blocks import Block, Located

_NOWHERE = -1
_SHIFT = 32  # a place is (block number << 32) + entry of the block


@dataclass
class _Live:
    """A block, who wrote it, and how many rows still need it."""

    block: Block
    owner: str
    rows: int


class Places:
    """Not thread-safe: the server's thread owns it."""

    def __init__(self) -> None:
        self._families: dict[tuple[str, ...], npt.NDArray[np.int64]] = {}
        self._of_column: dict[str, list[tuple[str, ...]]] = {}
        self._base = 0
        self._capacity = 1024
        self._blocks: dict[int, _Live] = {}
        self._next_block = 0
        self.live_bytes = 0  # of payload that rows still need
        self.written_bytes = 0  # of payload, ever
        self._segments: defaultdict[str, Counter[str]] = defaultdict(Counter)  # owner → segment → blocks

    def add(self, ids: Ids, block: Block, owner: str, entries: npt.NDArray[np.int64]) -> None:
        """Row ids[i] finds the columns of ``block`` at entry entries[i]."""
        if not len(ids):
            return
        family = tuple(placed.name for placed in block.columns)
        if family not in self._families:
            self._families[family] = np.full(self._capacity, _NOWHERE, np.int64)
            for name in family:
                self._of_column.setdefault(name, []).append(family)
        self._reserve(int(ids.max()))
        number, self._next_block = self._next_block, self._next_block + 1
        self._blocks[number] = _Live(block, owner, len(ids))
        nbytes = _nbytes(block)
        self.live_bytes += nbytes
        self.written_bytes += nbytes
        self._segments[owner][block.segment] += 1
        self._families[family][ids - self._base] = (number << _SHIFT) + entries

    def locate(self, ids: Ids, columns: tuple[str, ...]) -> tuple[Located, ...]:
        """Where rows find columns; every row must have them."""
        at = ids - self._base
        wanted: dict[tuple[str, ...], list[str]] = {}
        for name in columns:
            families = self._of_column[name]
            for family in families if len(families) > 1 else families[:1]:
                wanted.setdefault(family, []).append(name)
        places = {family: self._families[family][at] for family in wanted}
        whole = {f: p for f, p in places.items() if (p >= 0).all()}
        out = [_located(tuple(names), whole[f], self._blocks) for f, names in wanted.items() if f in whole]
        covered = {name for located in out for name in located.columns}
        out += [self._scattered(name, at) for name in columns if name not in covered]
        return tuple(out)

    def columns_of(self, ids: Ids) -> tuple[str, ...]:
        """The columns that every one of these rows has."""
        at = ids - self._base
        return tuple(
            name
            for name, families in self._of_column.items()
            if np.any([self._families[family][at] >= 0 for family in families], axis=0).all()
        )

    def _scattered(self, name: str, at: Ids) -> Located:
        """A column that different rows got in different company."""
        place = np.full(len(at), _NOWHERE, np.int64)
        for family in self._of_column[name]:
            found = self._families[family][at]
            place = np.where(found >= 0, found, place)
        return _located((name,), place, self._blocks)

    def retire(self, ids: Ids) -> list[tuple[str, Block]]:
        """Rows ended: (owner, block) of the blocks nobody needs any more."""
        at = ids - self._base
        freed: list[tuple[str, Block]] = []
        for array in self._families.values():
            known = at[at < len(array)]
            places = array[known]
            numbers, counts = np.unique(places[places >= 0] >> _SHIFT, return_counts=True)
            array[known] = _NOWHERE
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                live = self._blocks[number]
                live.rows -= count
                if not live.rows:
                    del self._blocks[number]
                    self.live_bytes -= _nbytes(live.block)
                    self._forget(live)
                    freed.append((live.owner, live.block))
        return freed

    def segments_of(self, owner: str) -> Collection[str]:
        """Segments of an owner that rows still need."""
        return self._segments.get(owner, ())

    def _forget(self, live: _Live) -> None:
        segments = self._segments[live.owner]
        segments[live.block.segment] -= 1
        if not segments[live.block.segment]:
            del segments[live.block.segment]
            if not segments:
                del self._segments[live.owner]

    def _reserve(self, highest: int) -> None:
        """Room for row ``highest``: forget the front where nothing is placed, or double."""
        if highest - self._base < self._capacity:
            return
        used = [np.flatnonzero(a >= 0) for a in self._families.values()]
        gone = min((int(u[0]) for u in used if len(u)), default=self._capacity)
        capacity = self._capacity
        while highest - self._base - gone >= capacity // 2:
            capacity *= 2
        for family, array in self._families.items():
            new = np.full(capacity, _NOWHERE, np.int64)
            new[: len(array) - gone] = array[gone:]
            self._families[family] = new
        self._base += gone
        self._capacity = capacity


def _nbytes(block: Block) -> int:
    return sum(placed.nbytes + 8 * (block.rows + 1) * (placed.offsets >= 0) for placed in block.columns)


def _located(columns: tuple[str, ...], place: npt.NDArray[np.int64], blocks: dict[int, _Live]) -> Located:
    numbers = place >> _SHIFT
    entries = (place & ((1 << _SHIFT) - 1)).astype(np.int32)
    if not len(numbers) or (numbers == numbers[0]).all():
        block = (blocks[int(numbers[0])].block,) if len(numbers) else ()
        if len(entries) and (np.diff(entries) == 1).all():
            return Located(columns, block, b"", b"", int(entries[0]))
        return Located(columns, block, b"", entries.tobytes(), 0)
    known, which = np.unique(numbers, return_inverse=True)
    return Located(
        columns,
        tuple(blocks[n].block for n in known.tolist()),
        which.astype(np.int32).tobytes(),
        entries.tobytes(),
        0,
    )
