"""Hashing: digests of the buckets of a version, taken while it is written.

What this thread copied a moment ago lies in its core's cache: hashed then, it costs next to nothing, and nobody has
to be woken. What others copied (a device, threads of torch) is hashed by a thread behind.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import xxhash

from ..types.manifest import digest


class Hashing:
    """Of one version: ``fresh`` and ``filled`` by whoever writes it, in the order of its bytes, then ``digests``."""

    def __init__(self, background: Executor) -> None:
        self._background = background
        self._found: list[list[Future[bytes] | bytes]] = []
        self._state, self._hashed = xxhash.xxh3_128(), 0  # of the bucket that is being written

    def fresh(self, memory: Any) -> None:
        """The next bytes of the bucket, just copied by this thread: hashed now."""
        self._state.update(memory)
        self._hashed += len(memory)

    def filled(self, chunk: int, memory: Any) -> None:
        """The next bucket of a chunk has its bytes. Unless all of them were told to be fresh, it is hashed behind."""
        while len(self._found) <= chunk:
            self._found.append([])
        whole = self._hashed == len(memory)
        self._found[chunk].append(self._state.digest() if whole else self._background.submit(_digest, memory))
        if self._hashed:
            self._state, self._hashed = xxhash.xxh3_128(), 0

    def digests(self) -> list[tuple[bytes, ...]]:
        """Of each chunk's buckets, once all are hashed."""
        return [tuple(each if isinstance(each, bytes) else each.result() for each in of) for of in self._found]

    def cancel(self) -> None:
        """The version will not be."""
        for each in itertools.chain.from_iterable(self._found):
            if not isinstance(each, bytes):
                each.cancel()


def _digest(memory: Any) -> bytes:
    """Of a bucket, brought to the host if it is not there."""
    return digest(memoryview(memory if isinstance(memory, np.ndarray) else memory.cpu().numpy()))  # type: ignore[arg-type]
