"""Reader: located rows become columns: views where they lie together in one block, else copies.

Copies take no lock: a block loses its serial before anything else of it changes, so what was copied is right if the
serial is still there afterwards.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import LeaseLost
from ..memory import HEADER_BYTES, BlockHold, Mapper
from ..types import Column, ColumnSpec
from ..types.ragged import Array
from .blocks import BlockSlices
from .gather import gather
from .layout import MOST_BYTES, TABLE, Kind, damaged, kind_of

COPY_BYTES = 16 << 10
"""A block up to this size is copied whole: that costs less than the lock that a view holds."""
MOST_PLANS = 256
_BLOCK = struct.Struct("<6q")
_RUN = struct.Struct("<i")
_WORD = struct.Struct("<q")


class _Plan(NamedTuple):
    """What does not change from one batch to the next: the columns wanted and their places in the table of a block."""

    schema: dict[str, ColumnSpec]
    kinds: list[tuple[Kind, int]]
    last: int
    head: struct.Struct  # up to the last of them


class Reader:
    """Reads located rows into columns. Thread-safe."""

    def __init__(self, mapper: Mapper) -> None:
        self._mapper = mapper
        self._plans: dict[tuple[tuple[str, ...], bytes], _Plan] = {}

    def read(self, located: BlockSlices, schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        """The columns of rows. Raises LeaseLost when they ended, SchemaError when they are damaged."""
        if len(located.counts) > _RUN.size:
            return gather(self._mapper, located, [kind_of(name, schema[name]) for name in located.columns])
        _, start, serial, _, nbytes, _ = _BLOCK.unpack(located.blocks)
        raw: Any
        if nbytes <= COPY_BYTES:
            raw = self._mapper.copy(located.segments[0], start, serial, nbytes)
        else:
            raw = self._mapper.view(located.segments[0], start, serial, nbytes)
        return {name: column for name, column, _ in _one_run(raw, located, self._plan(located, schema))}

    def writable(self, located: BlockSlices, name: str, schema: Mapping[str, ColumnSpec]) -> Array | None:
        """The values of a column in a copy-on-write mapping, where ``read`` gave a view; else None, as for a view whose segment
        cannot be mapped again because its file is gone or this reader is closed."""
        if len(located.counts) > _RUN.size:
            return None
        _, start, serial, _, nbytes, _ = _BLOCK.unpack(located.blocks)
        if nbytes <= COPY_BYTES:
            return None
        try:
            raw = self._mapper.view(located.segments[0], start, serial, nbytes)
            ((_, column, at),) = _one_run(raw, located, self._plan(located, schema), name)
            values = column.values
            if not values.size:
                return None
            own = self._mapper.private_view(located.segments[0], start, serial, at + values.nbytes, at)
        except LeaseLost:
            return None
        return own.view(values.dtype).reshape(values.shape)

    def hold(self, located: BlockSlices) -> list[BlockHold]:
        """Keep the blocks of rows that live from being used again, until the answer goes."""
        blocks = np.frombuffer(located.blocks, np.int64).reshape(-1, 6)
        return [
            self._mapper.hold(segment, blocks[blocks[:, 0] == number, 1].tolist())
            for number, segment in enumerate(located.segments)
        ]

    def _plan(self, located: BlockSlices, schema: Mapping[str, ColumnSpec]) -> _Plan:
        key = located.columns, located.fields
        plan = self._plans.get(key)
        if plan is None or plan.schema != schema:
            fields = struct.unpack(f"<{len(located.columns)}i", located.fields)
            kinds = [kind_of(name, schema[name]) for name in located.columns]
            head = struct.Struct(f"<{3 * max(fields) + 6}q")
            plan = _Plan(dict(schema), list(zip(kinds, fields, strict=True)), max(fields), head)
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan


def read_block(raw: Any, rows: int, schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
    """The columns of ``schema``, which are the first of a block, in that order, with all its ``rows``; over its bytes. Raises
    SchemaError where it has not got them."""
    count = len(schema)
    kinds = [(kind_of(name, spec), field) for field, (name, spec) in enumerate(schema.items())]
    plan = _Plan(dict(schema), kinds, count - 1, struct.Struct(f"<{3 * count + 3}q"))
    block = _BLOCK.pack(0, 0, 0, rows, len(raw), 1)
    whole = BlockSlices(tuple(schema), b"", (), block, _RUN.pack(0), _RUN.pack(rows))
    return {name: column for name, column, _ in _one_run(raw, whole, plan)}


def _one_run(raw: Any, located: BlockSlices, plan: _Plan, only: str | None = None) -> list[tuple[str, Column, int]]:
    """Columns of one run of entries of one block, over its bytes, and where their values begin.

    What is checked here in plain numbers, ``layout`` checks for many blocks in arrays.
    """
    _, _, _, rows, nbytes, _ = _BLOCK.unpack(located.blocks)
    (first,), (count,) = _RUN.unpack(located.entries), _RUN.unpack(located.counts)
    try:
        said_rows, columns, said_nbytes, *table = plan.head.unpack_from(raw, HEADER_BYTES)
    except struct.error:
        raise damaged(located.columns[0]) from None
    body = 8 * TABLE + 24 * columns
    if said_rows != rows or said_nbytes != nbytes or not plan.last < columns <= nbytes // 24:
        raise damaged(located.columns[0])
    if not 0 <= first <= first + count <= rows:
        raise LeaseLost(f"entries {first} to {first + count} of a block of {rows}")
    out = []
    for (name, spec, dtype, width, ragged), field in plan.kinds:
        if only is not None and name != only:
            continue
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
        begin = values + low * width
        array: Array = np.ndarray((length, *spec.shape), dtype, raw, begin)
        out.append((name, Column(spec, array, offsets), begin))
    return out
