"""Block, BlockSlices, BlockImage: the location of written columns, of the rows of a batch, and a block
to send. ``queue.stores.blocks`` has their layout in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt


class Block(msgspec.Struct, frozen=True, array_like=True):
    """``rows`` entries of all ``columns``: bytes ``start`` to ``start + nbytes`` of a segment."""

    segment: Annotated[str, msgspec.Meta(max_length=120)]
    start: int
    serial: int
    rows: int
    nbytes: int
    columns: tuple[str, ...]

    @property
    def packed_serial(self) -> bytes:
        """The serial as in ``CallResult.freed``."""
        return (self.serial & (1 << 64) - 1).to_bytes(8, "little")


class BlockSlices(msgspec.Struct, frozen=True, array_like=True):
    """The location of some columns for the rows of a batch: runs of block entries, in order. Run i has entries
    ``entries[i]`` to ``entries[i] + counts[i]`` (both int32) of a block. ``blocks``: int64 (n, 6), number in
    ``segments``, start, serial, rows, nbytes, and number of runs. ``fields``: int32, for each column its number in a
    block's table; one set for all blocks, or one for each."""

    columns: tuple[str, ...]
    fields: bytes
    segments: tuple[str, ...]
    blocks: bytes
    entries: bytes
    counts: bytes


@dataclass(frozen=True)
class BlockImage:
    """A block to send: ``rows`` entries as contiguous buffers, one after another. Its first 16 bytes are zero."""

    rows: int
    nbytes: int
    parts: list[npt.NDArray[np.uint8]]
