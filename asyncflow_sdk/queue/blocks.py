"""Blocks: how the columns of one put or one completion lie in a segment, and how rows find theirs.

A block is one piece of a segment: for each column its packed values, then, unless the column is fixed, n + 1
int64 offsets; each at a multiple of 64 bytes. Only this description travels; the bytes stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import SchemaError
from ..memory import Allocation, Arena, Mapper
from ..types import Column, ColumnSpec, carrier
from ..types.batch import concat, take
from ..types.columns import pack
from ..types.ragged import Array

ALIGN = 64


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A column in a segment, in bytes from its start. ``offsets`` is -1 for the fixed kind."""

    name: str
    values: int
    nbytes: int
    offsets: int


class Block(msgspec.Struct, frozen=True, array_like=True):
    """``rows`` entries of every column in ``columns``, in one segment."""

    segment: str
    generation: int
    rows: int
    columns: tuple[Placed, ...]


class Located(msgspec.Struct, frozen=True, array_like=True):
    """Where the rows of a batch find some of their columns: row i is entry ``places[i]`` of block ``which[i]``.

    ``which`` (int32) is empty when there is one block, ``places`` (int32) when the rows are its entries
    ``start``, ``start`` + 1, ....
    """

    columns: tuple[str, ...]
    blocks: tuple[Block, ...]
    which: bytes
    places: bytes
    start: int


def pack_columns(columns: Mapping[str, Any]) -> dict[str, Column]:
    """Pack what a caller hands in. Raises SchemaError when columns differ in their number of rows."""
    packed = {name: pack(name, value) for name, value in columns.items()}
    sizes = {name: len(column) for name, column in packed.items()}
    if len(set(sizes.values())) > 1:
        raise SchemaError(f"columns have different numbers of rows: {sizes}")
    return packed


def write(arena: Arena, columns: Mapping[str, Column]) -> tuple[Block, Allocation]:
    """Copy packed columns into a segment: the one copy between producer and consumer."""
    plan: list[tuple[str, int, Array]] = []
    size = 0
    for name, column in columns.items():
        for array in (column.values, column.offsets):
            if array is not None:
                plan.append((name, size, array))
                size += -(-array.nbytes // ALIGN) * ALIGN
    space = arena.allocate(max(size, 1))
    where: dict[str, list[int]] = {}
    for name, offset, array in plan:
        if array.nbytes:
            space.memory[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        where.setdefault(name, []).append(space.start + offset)
    rows = len(next(iter(columns.values())))
    placed = tuple(
        Placed(name, at[0], columns[name].values.nbytes, at[1] if len(at) > 1 else -1) for name, at in where.items()
    )
    return Block(space.segment, space.generation, rows, placed), space


def extent(block: Block) -> int:
    """Where a block ends, in bytes from the start of its segment."""
    values = max(placed.values + placed.nbytes for placed in block.columns)
    offsets = max(
        (placed.offsets + 8 * (block.rows + 1) for placed in block.columns if placed.offsets >= 0), default=0
    )
    return max(values, offsets)


def payload_bytes(block: Block | None) -> int:
    """Bytes that a block takes."""
    return 0 if block is None else extent(block) - min(placed.values for placed in block.columns)


class Reader:
    """Reads located rows into columns. Thread-safe."""

    def __init__(self, mapper: Mapper) -> None:
        self._mapper = mapper

    def read(self, located: Located, schema: Mapping[str, ColumnSpec], rows: int) -> dict[str, Column]:
        """The columns of ``rows`` rows: views where they lie together in one block, else copies."""
        views = [self._views(block, located.columns, schema) for block in located.blocks]
        places = np.frombuffer(located.places, np.int32)
        if not located.which:
            return {name: _pick(column, places, located.start, rows) for name, column in views[0].items()}
        which = np.frombuffer(located.which, np.int32)
        order = np.argsort(which, kind="stable")
        counts = np.bincount(which, minlength=len(views))
        parts = np.split(places[order], np.cumsum(counts)[:-1])
        back = np.empty_like(order)
        back[order] = np.arange(rows)
        shuffled = bool((np.diff(which) < 0).any())
        out: dict[str, Column] = {}
        for name in located.columns:
            joined = concat([_pick(view[name], part, 0, len(part)) for view, part in zip(views, parts, strict=True)])
            out[name] = take(joined, back) if shuffled else joined
        return out

    def writable(self, located: Located, name: str, schema: Mapping[str, ColumnSpec], rows: int) -> Array | None:
        """The values of a column in a copy-on-write mapping, where ``read`` gave a view; else None."""
        if located.which or located.places:
            return None
        block = located.blocks[0]
        placed = next(p for p in block.columns if p.name == name)
        column = self._views(block, (name,), schema)[name]
        part = _pick(column, np.empty(0, np.int32), located.start, rows)
        if not part.values.size:
            return None
        skip = part.values.ctypes.data - column.values.ctypes.data
        start = placed.values + skip
        own = self._mapper.private(block.segment, block.generation, start, start + part.values.nbytes)
        return own.view(part.values.dtype).reshape(part.values.shape)

    def _views(self, block: Block, names: tuple[str, ...], schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        """All entries of a block, as read-only views."""
        memory = self._mapper.view(block.segment, block.generation, 0, extent(block))
        out: dict[str, Column] = {}
        for placed in block.columns:
            if placed.name not in names:
                continue
            spec = schema[placed.name]
            values = memory[placed.values : placed.values + placed.nbytes].view(carrier(spec.dtype))
            offsets: npt.NDArray[np.int64] | None = None
            if placed.offsets >= 0:
                offsets = memory[placed.offsets : placed.offsets + 8 * (block.rows + 1)].view(np.int64)
            count = block.rows if offsets is None else int(offsets[-1])
            out[placed.name] = Column(spec, values.reshape(count, *spec.shape), offsets)
        return out


def _pick(column: Column, places: npt.NDArray[np.int32], start: int, rows: int) -> Column:
    """Entries of a column: a view where they are consecutive."""
    if len(places):
        if (np.diff(places) == 1).all():
            return _pick(column, places[:0], int(places[0]), rows)
        return take(column, places.astype(np.int64))
    if column.offsets is None:
        return Column(column.spec, column.values[start : start + rows], None)
    low, high = int(column.offsets[start]), int(column.offsets[start + rows])
    offsets = column.offsets[start : start + rows + 1]
    return Column(column.spec, column.values[low:high], offsets - low if low else offsets)
