"""HeldUpdate: a version in plain memory, without a transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...interfaces import Fetched, WeightUpdate
from ...types import Chunk, Manifest
from ...weights.update import Update
from ..transport_harness import digests_of, layout

BUCKET = 1 << 20


class HeldUpdate(WeightUpdate):
    """A version like a fetched one, with faults of memory and transfer.

    ``breaks_after``: raise OSError after so many tensors. ``halfway``: called before the middle
    one. ``scribble`` overwrites all bytes, like the next version in the same memory.
    """

    def __init__(
        self,
        version: int,
        tensors: Mapping[str, npt.NDArray[Any]],
        rename: Callable[[str], str] | None = None,
        *,
        breaks_after: int | None = None,
        halfway: Callable[[], None] = lambda: None,
    ) -> None:
        infos, sizes = layout(tensors, 1 << 26)
        self._chunks = [np.zeros(size, np.uint8) for size in sizes]
        for info in infos:
            raw = np.ascontiguousarray(tensors[info.name]).reshape(-1).view(np.uint8)
            self._chunks[info.chunk][info.offset : info.offset + info.nbytes] = raw
        chunks = tuple(Chunk(len(chunk), digests_of(chunk, BUCKET)) for chunk in self._chunks)
        whole = Update(version, [Fetched(Manifest(version, tuple(infos), chunks, BUCKET), self._chunks)], rename)
        self.version, self.tensors, self.root, self._whole = version, whole.tensors, whole.root, whole
        self.untrained = whole.untrained
        self._breaks_after, self._halfway = breaks_after, halfway

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Yield names and numpy arrays."""
        return self._breaking(self._whole.arrays())

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self._breaking(iter(self._whole))

    def release(self) -> None:
        """Release the memory."""
        self._whole.release()

    def scribble(self) -> None:
        """Overwrite all bytes."""
        for chunk in self._chunks:
            chunk[:] = 0x3F

    def _breaking(self, tensors: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for number, each in enumerate(tensors):
            if number == self._breaks_after:
                raise OSError(f"version {self.version}: told to break off before tensor {each[0]!r}")
            if number == len(self.tensors) // 2:
                self._halfway()
            yield each
