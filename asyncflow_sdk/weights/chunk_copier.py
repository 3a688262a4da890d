"""ChunkCopier: the buckets of a version, copied and hashed by the publishing thread and one helper.

Each thread takes the next bucket, copies it in pieces, and hashes each piece while it is in the
core's cache: a hash from the cache costs a fraction of one from memory. Buckets that others copy (a
device, threads of torch) are hashed by a background thread.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from concurrent.futures import Executor, Future, wait
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ..types import carrier
from ..types.manifest import digest
from .tensor_sources import TensorSource, has_nan

SPAN_BUCKETS = 8  # buckets of a large tensor that others copy before their digests are requested
HELPER_BUCKETS = 1  # buckets left to the helper while more are added: only adding holds the interpreter lock
MANY_TENSORS = 8  # the adding thread copies a bucket of more tensors: the helper would wait for the lock
PIECE_BYTES = 512 << 10  # bytes hashed at a time: they are still in the cache


class BucketDigests:
    """The digests of one version, collected by ``add`` or ``add_memory`` for each bucket of a chunk, in any order and
    thread."""

    def __init__(self, background: Executor) -> None:
        self._background = background
        self._found: dict[tuple[int, int], Future[bytes] | bytes] = {}

    def add(self, chunk: int, bucket: int, found: bytes) -> None:
        """Add the digest of a bucket."""
        self._found[chunk, bucket] = found

    def add_memory(self, chunk: int, bucket: int, memory: Any) -> None:
        """Add the bytes of a bucket, to be hashed in the background."""
        self._found[chunk, bucket] = self._background.submit(_digest, memory)

    def wait(self) -> list[tuple[bytes, ...]]:
        """Return the digests of each chunk's buckets, once all are hashed."""
        ready = [(place[0], d if isinstance(d, bytes) else d.result()) for place, d in sorted(self._found.items())]
        return [tuple(d for _, d in chunk) for _, chunk in itertools.groupby(ready, key=lambda found: found[0])]

    def cancel(self) -> None:
        """Hash no more: the version was given up."""
        for each in self._found.values():
            if not isinstance(each, bytes):
                each.cancel()


def _digest(memory: Any) -> bytes:
    array = memory if isinstance(memory, np.ndarray) else memory.cpu().numpy()
    return digest(memoryview(array))  # type: ignore[arg-type]


class _CopyPart(NamedTuple):
    """Bytes ``start`` to ``stop`` of a chunk are elements of ``source`` from ``first`` on."""

    start: int
    stop: int
    name: str
    source: TensorSource
    dtype: str
    first: int


class _Bucket:
    """Bytes ``start`` to ``stop`` of a chunk. ``parts``: still to be copied. ``hasher``: None if
    the bucket is hashed in the background."""

    def __init__(self, chunk: int, memory: Any, start: int, hashed: bool) -> None:
        self.chunk, self.memory, self.start = chunk, memory, start
        self.stop = self._hashed = start
        self.hasher = xxhash.xxh3_128() if hashed else None
        self.parts: list[_CopyPart] = []

    def extend(self, stop: int, part: _CopyPart | None) -> None:
        """Let it end here. ``part``: its last bytes; None if they are copied, and the bucket is to be hashed later."""
        self.stop = stop
        if part is None:
            self.hasher = None
        else:
            self.parts.append(part)

    def copy(self, with_nan: list[str]) -> None:
        """Copy and hash all parts. ``with_nan``: receives the names of tensors with NaN."""
        for start, stop, name, source, dtype, first in self.parts:
            width = carrier(dtype).itemsize
            for low in range(start, stop, PIECE_BYTES):
                high = min(low + PIECE_BYTES, stop)
                begin, end = first + (low - start) // width, first + (high - start) // width
                source.copy(self.memory[low:high], dtype, begin, end)
                if has_nan(self.memory[low:high], dtype):
                    with_nan.append(name)
                self._hash(high)
        self.parts.clear()
        self._hash(self.stop)  # the padding after the last part

    def _hash(self, stop: int) -> None:
        if self.hasher is not None and self._hashed < stop:
            self.hasher.update(self.memory[self._hashed : stop])
            self._hashed = stop


class ChunkCopier:
    """Copies one version, called by one thread, in the order of the version's bytes. ``digests``: of its buckets;
    None: nothing is hashed. ``helper``: an executor with a thread that copies, too. ``with_nan``: tensors with NaN."""

    def __init__(self, bucket_bytes: int, digests: BucketDigests | None, helper: Executor | None) -> None:
        self._bucket_bytes, self._digests, self._helper = bucket_bytes, digests, helper
        self.with_nan: list[str] = []
        self._chunk, self._memory = -1, np.empty(0, np.uint8)
        self._partial: _Bucket | None = None  # more tensors may be added to it
        self._todo: deque[_Bucket] = deque()  # complete, to be copied
        self._helping: Future[None] | None = None

    def open(self, memory: Any) -> None:
        """Begin the next chunk."""
        self._chunk, self._memory = self._chunk + 1, memory

    def add(self, name: str, source: TensorSource, dtype: str, start: int, stop: int) -> None:
        """Put a tensor at ``start``, and zeros from its end to ``stop``; copied by ``flush`` at last."""
        width = carrier(dtype).itemsize
        end = start + source.size * width
        self._memory[end:stop] = 0
        local = source.local and source.contiguous and isinstance(self._memory, np.ndarray)
        span = stop - start if local or not source.contiguous else SPAN_BUCKETS * self._bucket_bytes
        for low in range(start, stop, span):
            high = min(low + span, stop)
            if not local:
                to = min(high, end)
                source.copy(self._memory[low:to], dtype, (low - start) // width, (to - start) // width)
                if has_nan(self._memory[low:to], dtype):
                    self.with_nan.append(name)
            while low < high:
                if self._partial is None:
                    self._partial = _Bucket(self._chunk, self._memory, low, self._digests is not None)
                to = min(low - low % self._bucket_bytes + self._bucket_bytes, high)
                part = _CopyPart(low, min(to, end), name, source, dtype, (low - start) // width)
                self._partial.extend(to, part if local else None)
                if to % self._bucket_bytes == 0:
                    self._complete()
                low = to

    def close(self) -> None:
        """End the chunk."""
        if self._partial is not None:
            self._complete()

    def flush(self) -> None:
        """Copy everything that was added. Raises the errors of the sources."""
        try:
            if self._partial is not None:
                self._partial.copy(self.with_nan)
            self._copy_until(0)
        finally:
            self.stop()
        if self._helping is not None and not self._helping.cancelled():
            self._helping.result()

    def stop(self) -> None:
        """Copy nothing more. Returns once the helper has stopped, too."""
        self._todo.clear()
        if self._helping is not None and not self._helping.cancel():
            wait([self._helping])

    def _complete(self) -> None:
        """End the partial bucket, and copy it now, or let either thread do it."""
        bucket, self._partial = self._partial, None
        assert bucket is not None
        if len(bucket.parts) > MANY_TENSORS or (not bucket.parts and bucket.hasher is None):
            bucket.copy(self.with_nan)
            self._finish(bucket)
            return
        self._todo.append(bucket)
        if self._helper is not None and len(self._todo) > 1 and (self._helping is None or self._helping.done()):
            self._helping = self._helper.submit(self._copy_until, 0)
        self._copy_until(HELPER_BUCKETS)

    def _copy_until(self, left: int) -> None:
        """Copy buckets until only ``left`` are to be copied. Called by both threads."""
        while len(self._todo) > left:
            with contextlib.suppress(IndexError):  # the other thread took it
                bucket = self._todo.popleft()
                bucket.copy(self.with_nan)
                self._finish(bucket)

    def _finish(self, bucket: _Bucket) -> None:
        if self._digests is not None:
            index = bucket.start // self._bucket_bytes
            if bucket.hasher is not None:
                self._digests.add(bucket.chunk, index, bucket.hasher.digest())
            else:
                self._digests.add_memory(bucket.chunk, index, bucket.memory[bucket.start : bucket.stop])
