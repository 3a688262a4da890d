"""Sealed blocks: blocks with digests, for stores that hold bytes by name.

A sealed block is a block as in ``queue.stores.blocks``, then an XXH3 (64 bits) of each piece of PIECE_BYTES, then
one of these digests; all little-endian. A reader can check any range without the whole block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from asyncflow_sdk.errors import DigestMismatch
from asyncflow_sdk.memory import block_header
from asyncflow_sdk.queue.stores.blocks import to_image
from asyncflow_sdk.types import Column

PIECE_BYTES = 64 << 10
Bytes = npt.NDArray[np.uint8]
Range = tuple[int, int]


class SealedBlock:
    """A block to write. ``sealed``: all its bytes. ``memory``: those without the digests."""

    def __init__(self, columns: Mapping[str, Column], serial: int) -> None:
        image = to_image(columns)
        self.rows, self.nbytes = image.rows, image.nbytes
        self.sealed = np.empty(sealed_bytes(self.nbytes), np.uint8)
        at = 0
        for part in image.parts:
            self.sealed[at : at + part.nbytes] = part
            at += part.nbytes
        self._number(serial)

    @property
    def memory(self) -> Bytes:
        return self.sealed[: self.nbytes]

    def renumber(self, serial: int) -> None:
        """Give the block another serial, under which it is written again."""
        self.sealed = self.sealed.copy()  # a write that failed may still be sending the old bytes
        self._number(serial)

    def _number(self, serial: int) -> None:
        self.serial = serial
        header = block_header(serial)
        self.sealed[: len(header)] = np.frombuffer(header, np.uint8)
        digests = _digests(self.sealed, self.nbytes)
        pieces = range(0, self.nbytes, PIECE_BYTES)
        digests[:-1] = [_digest(self.memory[at : at + PIECE_BYTES]) for at in pieces]
        digests[-1] = _digest(digests[:-1])


class PieceReader:
    """A sealed block of ``nbytes`` bytes, read by and by. ``sealed``: its memory.

    request = reader.missing([(0, 100)])       # of whole pieces; read them into ``sealed``, then
    reader.check(request)
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.sealed = np.empty(sealed_bytes(nbytes), np.uint8)
        self._checked = np.zeros(-(-nbytes // PIECE_BYTES), np.bool_)
        self._has_digests = False

    def missing(self, ranges: Sequence[Range]) -> list[Range]:
        """Return the ranges to read so that ``ranges`` are there: whole pieces, and at first the digests."""
        wanted = np.zeros_like(self._checked)
        for start, stop in ranges:
            if start < stop:
                wanted[start // PIECE_BYTES : -(-stop // PIECE_BYTES)] = True
        wanted &= ~self._checked
        edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False)).reshape(-1, 2) * PIECE_BYTES
        out = [(low, min(high, self.nbytes)) for low, high in edges.tolist()]
        if not self._has_digests:
            out = [*out, (self.nbytes, len(self.sealed))]
            if len(out) > 1 and out[-2][1] == self.nbytes:
                out[-2:] = [(out[-2][0], len(self.sealed))]
        return out

    def check(self, ranges: Sequence[Range]) -> None:
        """Check ranges of ``missing`` that were read. Raises DigestMismatch."""
        digests = _digests(self.sealed, self.nbytes)
        if not self._has_digests:
            if digests[-1] != _digest(digests[:-1]):
                raise DigestMismatch("the digests of a block were damaged in its store, or on their way")
            self._has_digests = True
        for low, high in ranges:
            for at in range(low, min(high, self.nbytes), PIECE_BYTES):
                if digests[at // PIECE_BYTES] != _digest(self.sealed[at : min(at + PIECE_BYTES, self.nbytes)]):
                    raise DigestMismatch(f"bytes from {at} of a block were damaged in its store, or on their way")
                self._checked[at // PIECE_BYTES] = True


def sealed_bytes(nbytes: int) -> int:
    """Return the bytes of a sealed block; ``nbytes``: of the block, a multiple of 8."""
    return nbytes + 8 * (-(-nbytes // PIECE_BYTES) + 1)


def _digests(sealed: Bytes, nbytes: int) -> npt.NDArray[np.uint64]:
    return sealed[nbytes:].view("<u8")


def _digest(array: Any) -> int:
    return xxhash.xxh3_64_intdigest(memoryview(array))
