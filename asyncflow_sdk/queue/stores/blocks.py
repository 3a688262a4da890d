"""Blocks: the layout in shared memory of the columns of one put or one completion.

A block starts with int64 words, little-endian: the arena's magic number and serial, rows, number of columns, total
bytes, and for each column the position of its values, their bytes, and the position of its rows + 1 offsets (-1 for
fixed columns). Values and offsets follow, each at a multiple of 64 bytes. Positions are bytes from the block's start.

Any process of this user can write shared memory, so readers check headers against the segment and the schema: a
damaged header raises SchemaError, and never gives an array beyond its block.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import LeaseLost, SchemaError
from ...memory import HEADER_BYTES, Allocation, Arena
from ...types import Column, ColumnSpec, carrier, check_column_name
from ...types.blocks import Block, BlockImage
from ...types.columns import pack
from ...types.ragged import Array

ALIGN = 64
JOIN_BYTES = 64 << 10
"""Columns up to this size are joined first: two copies in the cache cost less than two calls."""
BLOCK, RUN = struct.Struct("<6q"), struct.Struct("<i")
"""A row of ``BlockSlices.blocks``, and an item of ``entries`` and of ``counts``."""
_PAD = bytes(ALIGN)
_PADDING: Any = np.zeros(ALIGN, np.uint8)
_check_name = functools.lru_cache(4096)(check_column_name)


def pack_columns(columns: Mapping[str, Any]) -> dict[str, Column]:
    """Pack a caller's columns. Raises SchemaError if they differ in rows, or are no mapping."""
    if type(columns) is not dict and not isinstance(columns, Mapping):
        raise SchemaError(f"columns must be a dict of columns by name, not a {type(columns).__name__}")
    packed = {}
    for name in columns:
        _check_name(name)
        packed[name] = pack(name, columns[name])
    if len(packed) > 1:
        sizes = {name: len(column) for name, column in packed.items()}
        if len(set(sizes.values())) > 1:
            raise SchemaError(f"columns have different numbers of rows: {sizes}")
    return packed


def arrange(columns: Mapping[str, Column]) -> tuple[int, int, bytes, list[Array]]:
    """Return a block's rows, bytes, header (after the arena's, up to the first array), and arrays,
    to be aligned to ALIGN."""
    count = len(columns)
    layout = _head_of(count)
    end = HEADER_BYTES + layout.size
    head, arrays = list[int](), list[Array]()
    for column in columns.values():
        values, offsets = column.values, column.offsets
        size = values.nbytes
        head += (end, size, -1)
        arrays.append(values)
        end += -(-size // ALIGN) * ALIGN
        if offsets is not None:
            head[-1] = end
            arrays.append(offsets)
            end += -(-offsets.nbytes // ALIGN) * ALIGN
    rows = len(values) if offsets is None else len(offsets) - 1
    return rows, end, layout.pack(rows, count, end, *head), arrays


@functools.lru_cache(256)
def _head_of(columns: int) -> struct.Struct:
    """Return the struct of a block's header without the arena's part, padded up to the first array."""
    nbytes = HEADER_BYTES + 24 + 24 * columns
    return struct.Struct(f"<{3 + 3 * columns}q{-nbytes % ALIGN}x")


def write(arena: Arena, columns: Mapping[str, Column], *, grow: bool = True) -> tuple[Block, Allocation]:
    """Copy packed columns into shared memory: the only copy between producer and consumer.
    ``grow``, errors: see ``Arena.allocate``."""
    rows, end, header, arrays = arrange(columns)
    space = arena.allocate(end, grow=grow)
    if end <= JOIN_BYTES:
        pieces: list[Any] = [header]
        for array in arrays:
            pieces += (
                array if array.flags.c_contiguous else np.ascontiguousarray(array),
                _PAD[: -array.nbytes % ALIGN],
            )
        memory = space.memory.data
        memory[HEADER_BYTES:end] = b"".join(pieces)
    else:
        space.write(HEADER_BYTES, header)
        at = HEADER_BYTES + len(header)
        for array in arrays:
            if array.nbytes:  # a strided view is copied only once, too
                space.memory[at : at + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
            at += -(-array.nbytes // ALIGN) * ALIGN
    return Block(space.segment, space.start, space.serial, rows, end, tuple(columns)), space


def to_image(columns: Mapping[str, Column], *, copy: bool = False) -> BlockImage:
    """Return columns as an image. It refers to their memory unless ``copy``."""
    rows, nbytes, header, arrays = arrange(columns)
    parts = [np.frombuffer(bytes(HEADER_BYTES) + header, np.uint8)]
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts += (flat.copy() if copy else flat, _PADDING[: -flat.nbytes % ALIGN])
    return BlockImage(rows, nbytes, [part for part in parts if part.nbytes])


ROWS, COLUMNS, NBYTES, TABLE = range(HEADER_BYTES // 8, HEADER_BYTES // 8 + 4)
"""Positions in a header, in words of 8 bytes. The table has three words for each column."""
MOST_BYTES = 1 << 48
Ints = npt.NDArray[np.int64]


class Kind(NamedTuple):
    """A column's bytes: ``width`` is that of a row (fixed) or of an element (ragged)."""

    name: str
    spec: ColumnSpec
    dtype: np.dtype[Any]
    width: int
    ragged: bool


@functools.lru_cache(4096)
def kind_of(name: str, spec: ColumnSpec) -> Kind:
    """Return the expected bytes of a column. Raises SchemaError for an impossible shape or dtype."""
    dtype = carrier(spec.dtype)
    width = dtype.itemsize
    for length in spec.shape:
        width *= length
    if min(spec.shape, default=0) < 0 or width > MOST_BYTES:
        raise SchemaError(f"column {name!r} cannot have the shape {spec.shape}")
    return Kind(name, spec, dtype, width, spec.kind != "fixed")


def _wrong(wanted: list[Kind], table: Ints, rows: Ints, nbytes: Ints, body: Ints) -> npt.NDArray[np.bool_]:
    """Return True for each column (n, columns) outside its block. No sum overflows."""
    values, size, offsets = table[:, :, 0], table[:, :, 1], table[:, :, 2]
    ragged = np.array([kind.ragged for kind in wanted])
    width = np.array([kind.width for kind in wanted])
    rows, nbytes, body = rows[:, None], nbytes[:, None], body[:, None]
    bad = (values < body) | (values > nbytes) | (values & 63 != 0) | (size < 0) | (size > nbytes - values)
    fixed = (size != rows * width) | (offsets != -1)
    packed = (offsets < body) | (offsets > nbytes) | (offsets & 63 != 0) | (8 * (rows + 1) > nbytes - offsets)
    found: npt.NDArray[np.bool_] = bad | np.where(ragged, packed, fixed)
    return found


def damaged(name: str) -> SchemaError:
    """Return the error for a damaged block."""
    return SchemaError(
        f"column {name!r}: its block in shared memory is damaged: another process wrote there; these rows cannot be"
        " read"
    )


def tables(words: Ints, blocks: Ints, fields: Ints, wanted: list[Kind]) -> Ints:
    """Return the tables of n blocks: int64 (n, columns, 3), each (values, nbytes, offsets).

    ``words``: a whole segment. ``blocks``: as in BlockSlices. ``fields``: (n or 1, columns). Raises
    SchemaError, LeaseLost.
    """
    _, starts, serials, rows, nbytes, _ = blocks.T
    first = starts // 8
    if (starts % 64).any() or first.min() < 0 or (first + TABLE > len(words)).any():
        raise damaged(wanted[0].name)
    check_serials(words, starts, serials)
    head = words.take(first[:, None] + np.arange(ROWS, TABLE))
    columns = head[:, 1]
    bad = (head[:, 0] != rows) | (head[:, 2] != nbytes) | (columns <= 0) | (columns > nbytes // 24)
    body = 8 * TABLE + 24 * np.where(bad, 0, columns)
    bad |= (body > nbytes) | (nbytes > 8 * len(words) - starts)
    if bad.any() or fields.min() < 0 or (fields >= columns[:, None]).any():
        raise damaged(wanted[0].name)
    table: Ints = words.take((first[:, None] + TABLE + 3 * fields)[:, :, None] + np.arange(3))
    found = _wrong(wanted, table, rows, nbytes, body).any(axis=0)
    if found.any():
        raise damaged(wanted[int(found.argmax())].name)
    return table


def check_serials(words: Ints, starts: Ints, serials: Ints) -> None:
    """Raises LeaseLost unless every block still has its serial."""
    if (words.take(starts // 8 + 1) != serials).any():
        raise LeaseLost("the rows ended and their memory was reused before this reader was done")
