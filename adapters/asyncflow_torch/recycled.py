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
        free = [array for array in self._lent if sys.getrefcount(array) == _UNUSED]
        self._lent = [array for array in self._lent if all(array is not other for other in free)]
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


def _unused() -> int:
    array = np.empty(1, np.uint8)
    lent = [array]
    del array
    return next(sys.getrefcount(array) for array in lent)


_UNUSED = _unused()
"""References to an array in a list, as the loop in ``take`` counts them."""
