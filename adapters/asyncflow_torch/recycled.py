"""Recycled: host memory of versions that were released, used again for the next one."""

from __future__ import annotations

import sys

import numpy as np

from asyncflow_sdk.errors import MemoryFull
from asyncflow_sdk.interfaces.weights import Bytes
from asyncflow_sdk.types import Manifest


class Recycled:
    """Fresh pages cost more than a copy of them."""

    def __init__(self) -> None:
        self._lent: list[Bytes] = []

    def take(self, manifest: Manifest) -> list[Bytes]:
        """uint8 (nbytes,) for each chunk, of memory that nobody refers to any more. Raises MemoryFull."""
        counts = _references(self._lent)
        free = [array for array, count in zip(self._lent, counts, strict=True) if count == _UNUSED]
        self._lent = [array for array, count in zip(self._lent, counts, strict=True) if count != _UNUSED]
        chunks = []
        for chunk in manifest.chunks:
            fits = next((i for i, array in enumerate(free) if array.nbytes == chunk.nbytes), None)
            try:
                own = np.empty(chunk.nbytes, np.uint8) if fits is None else free.pop(fits)
            except MemoryError:
                raise MemoryFull(
                    f"version {manifest.version}: no memory for a chunk of {chunk.nbytes} bytes"
                ) from None
            self._lent.append(own)
            chunks.append(own[:])
        return chunks

    def close(self) -> None:
        self._lent.clear()


def _references(arrays: list[Bytes]) -> list[int]:
    """To each of them; a view of an array refers to it, and so does a tensor of torch over a view."""
    return [sys.getrefcount(array) for array in arrays]


_UNUSED = _references([np.empty(1, np.uint8)])[0]
