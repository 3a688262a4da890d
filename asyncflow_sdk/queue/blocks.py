"""Blocks: how the columns of one put or one completion lie in shared memory, and how rows find theirs.

A block describes itself. From its start, as little-endian int64: the arena's magic number and serial, rows, number of
columns, bytes in all, and for each column where its values lie, how many bytes they are, and where its rows + 1
offsets lie (-1 for the fixed kind). Then values and offsets, each at a multiple of 64 bytes. What lies where is in
bytes from the block's start. Readers trust none of it (see ``layout``).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ..errors import SchemaError
from ..memory import HEADER_BYTES, Allocation, Arena
from ..types import Column, check_column_name
from ..types.columns import pack
from ..types.ragged import Array

ALIGN = 64
JOIN_BYTES = 64 << 10
"""Up to here columns are joined before they are copied: two copies in the cache cost less than a call each."""
_PAD = bytes(ALIGN)


class Block(msgspec.Struct, frozen=True, array_like=True):
    """``rows`` entries of every column in ``columns``: bytes ``start`` to ``start + nbytes`` of a segment."""

    segment: str
    start: int
    serial: int
    rows: int
    nbytes: int
    columns: tuple[str, ...]

    @property
    def packed_serial(self) -> bytes:
        """As notices of freed blocks carry it."""
        return (self.serial & (1 << 64) - 1).to_bytes(8, "little")


class BlockSlices(msgspec.Struct, frozen=True, array_like=True):
    """Where the rows of a batch find some of their columns.

    They are runs of entries, in order: ``entries[i]`` to ``entries[i] + counts[i]`` (both int32) of a block.
    ``blocks`` is int64 (n, 6): number in ``segments``, start, serial, rows, nbytes, and how many of the runs are in
    it. ``fields``: int32, for each column its number in a block's table; one set for all blocks, or one for each.
    """

    columns: tuple[str, ...]
    fields: bytes
    segments: tuple[str, ...]
    blocks: bytes
    entries: bytes
    counts: bytes


def pack_columns(columns: Mapping[str, Any]) -> dict[str, Column]:
    """Pack what a caller hands in. Raises SchemaError when columns differ in their number of rows, and for what is no
    mapping of names to columns."""
    if not isinstance(columns, Mapping):
        raise SchemaError(f"columns are given by name, as a dict; not as a {type(columns).__name__}")
    for name in columns:
        check_column_name(name)
    packed = {name: pack(name, value) for name, value in columns.items()}
    sizes = {name: len(column) for name, column in packed.items()}
    if len(set(sizes.values())) > 1:
        raise SchemaError(f"columns have different numbers of rows: {sizes}")
    return packed


def arrange(columns: Mapping[str, Column]) -> tuple[int, int, bytes, list[Array]]:
    """How columns lie in a block: its rows and bytes, its header behind the arena's, and the arrays that follow in order, each
    at a multiple of ALIGN."""
    rows = len(next(iter(columns.values())))
    end = -(-(HEADER_BYTES + 24 + 24 * len(columns)) // ALIGN) * ALIGN
    head = [rows, len(columns), 0]
    arrays: list[Array] = []
    for column in columns.values():
        size, offsets = column.values.nbytes, column.offsets
        head += (end, size, -1)
        arrays.append(column.values)
        end += -(-size // ALIGN) * ALIGN
        if offsets is not None:
            head[-1] = end
            arrays.append(offsets)
            end += -(-offsets.nbytes // ALIGN) * ALIGN
    head[2] = end
    return rows, end, struct.pack(f"<{len(head)}q", *head), arrays


def write(arena: Arena, columns: Mapping[str, Column], *, grow: bool = True) -> tuple[Block, Allocation]:
    """Copy packed columns into shared memory: the one copy between producer and consumer. ``grow``, and what it raises:
    see ``Arena.allocate``."""
    rows, end, header, arrays = arrange(columns)
    space = arena.allocate(end, grow=grow)
    if end <= JOIN_BYTES:
        pieces: list[Any] = [header, _PAD[: -(len(header) + HEADER_BYTES) % ALIGN]]
        for array in arrays:
            pieces += (np.ascontiguousarray(array), _PAD[: -array.nbytes % ALIGN])
        space.memory[HEADER_BYTES:] = np.frombuffer(b"".join(pieces), np.uint8)
    else:
        space.memory[HEADER_BYTES : HEADER_BYTES + len(header)] = np.frombuffer(header, np.uint8)
        at = -(-(HEADER_BYTES + len(header)) // ALIGN) * ALIGN
        for array in arrays:
            if array.nbytes:  # also of a view with steps this is the only copy
                space.memory[at : at + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
            at += -(-array.nbytes // ALIGN) * ALIGN
    return Block(space.segment, space.start, space.serial, rows, end, tuple(columns)), space
