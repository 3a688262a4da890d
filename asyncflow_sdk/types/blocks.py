"""Block, BlockPlace, BlockSlices, BlockImage: the location of written columns, of their replica, of the
rows of a batch, and a block to send. ``queue.stores.blocks`` has their layout in memory."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt


def _packed(serial: int) -> bytes:
    return (serial & (1 << 64) - 1).to_bytes(8, "little")


class BlockPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of a block's replica: the same bytes in another home."""

    segment: str
    start: int
    serial: int

    @property
    def packed_serial(self) -> bytes:
        """The serial as in ``CallResult.freed``."""
        return _packed(self.serial)


class Block(msgspec.Struct, frozen=True, array_like=True):
    """``rows`` entries of all ``columns``: bytes ``start`` to ``start + nbytes`` of a segment."""

    segment: str
    start: int
    serial: int
    rows: int
    nbytes: int
    columns: tuple[str, ...]

    @property
    def packed_serial(self) -> bytes:
        """The serial as in ``CallResult.freed``."""
        return _packed(self.serial)


class BlockSlices(msgspec.Struct, frozen=True, array_like=True):
    """The location of some columns for the rows of a batch: runs of block entries, in order.

    Run i has entries ``entries[i]`` to ``entries[i] + counts[i]`` (both int32) of a block.
    ``blocks``: int64 (n, 6), number in ``segments``, start, serial, rows, nbytes, and number of
    runs. ``fields``: int32, for each column its number in a block's table; one set for all blocks,
    or one for each.

    If blocks have replicas, n rows more in ``blocks`` are their places, in the same order: number in
    ``segments`` (-1: no replica), start and serial; their number of runs is 0.
    ``queue.stores.replica_choice`` chooses one place of each block.
    """

    columns: tuple[str, ...]
    fields: bytes
    segments: tuple[str, ...]
    blocks: bytes
    entries: bytes
    counts: bytes


@dataclass(frozen=True)
class BlockImage:
    """A block to send: ``rows`` entries as contiguous buffers, one after another.

    The arena's 16 bytes at its start are zero. The server receives it where its rows stay.
    """

    rows: int
    nbytes: int
    parts: list[npt.NDArray[np.uint8]]
