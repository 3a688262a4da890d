"""BucketDigests: digests of the buckets of a version, as they are found by whoever copies them, or by a thread behind."""

from __future__ import annotations

import itertools
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from ..types.manifest import digest


class BucketDigests:
    """Of one version: ``hashed`` or ``filled`` for each bucket, in the order of its bytes, then ``digests``."""

    def __init__(self, background: Executor) -> None:
        self._background = background
        self._found: list[list[Future[bytes] | bytes]] = []

    def hashed(self, chunk: int, found: bytes) -> None:
        """The next bucket of a chunk has its bytes, and this digest."""
        self._of(chunk).append(found)

    def filled(self, chunk: int, memory: Any) -> None:
        """The next bucket of a chunk has its bytes: it is hashed behind."""
        self._of(chunk).append(self._background.submit(_digest, memory))

    def digests(self) -> list[tuple[bytes, ...]]:
        """Of each chunk's buckets, once all are hashed."""
        return [tuple(each if isinstance(each, bytes) else each.result() for each in of) for of in self._found]

    def cancel(self) -> None:
        """The version will not be."""
        for each in itertools.chain.from_iterable(self._found):
            if not isinstance(each, bytes):
                each.cancel()

    def _of(self, chunk: int) -> list[Future[bytes] | bytes]:
        while len(self._found) <= chunk:
            self._found.append([])
        return self._found[chunk]


def _digest(memory: Any) -> bytes:
    """Of a bucket, brought to the host if it is not there."""
    return digest(memoryview(memory if isinstance(memory, np.ndarray) else memory.cpu().numpy()))  # type: ignore[arg-type]
