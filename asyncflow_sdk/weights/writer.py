"""VersionWriter: copies the tensors of a version into chunks.

A chunk takes tensors until the next one does not fit; a larger tensor gets its own chunk. The layout depends only on
the order and sizes of the tensors. So equal weights have equal manifests, and successive versions of a model need
rooms of equal sizes. The first chunks are smaller than the rest, for small models.

The publishing thread and one helper take turns at the buckets: each thread copies its bucket in pieces, and hashes
each piece while it is in the core's cache. Buckets that others copy (a device, threads of torch) are hashed by a
background thread.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import xxhash

from ..errors import MemoryFull, SchemaError, WeightMismatch
from ..interfaces.weights import Room
from ..types import Shard, TensorInfo
from ..types.dtypes import FLOATS, carrier
from ..types.manifest import BUCKET_BYTES, CHUNK_BYTES, FIRST_CHUNK_BYTES, digest
from .tensor_sources import TensorSource, has_nan, tensor_source

ALIGN = 64
DtypePolicy: TypeAlias = str | Callable[[str, str], str]
"""The dtype of published floating-point tensors (those of 8 bits and fewer are kept), or a function
from name and dtype to dtype."""
Rename: TypeAlias = Callable[[str], str]
WIDE = ("float16", "bfloat16", "float32", "float64")
SPAN_BUCKETS = 8  # buckets of a large tensor that others copy before their digests are requested
HELPER_BUCKETS = 1  # buckets left to the helper while more are added: only adding holds the interpreter lock
MANY_TENSORS = 8  # the adding thread copies a bucket of more tensors: the helper would wait for the lock
PIECE_BYTES = 512 << 10  # bytes hashed at a time: they are still in the cache


class BucketDigests:
    """The digests of one version, collected by ``add`` for each bucket of a chunk, in any order and thread."""

    def __init__(self, background: Executor) -> None:
        self._background = background
        self._found: dict[tuple[int, int], Future[bytes] | bytes] = {}

    def add(self, bucket: _Bucket) -> None:
        """Add the digest of a copied bucket. One without hasher is hashed in the background."""
        found = bucket.hasher and bucket.hasher.digest()
        memory = bucket.memory[bucket.start : bucket.stop]
        place = bucket.chunk, bucket.start // BUCKET_BYTES
        self._found[place] = found or self._background.submit(_digest, memory)

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

    def __init__(self, digests: BucketDigests | None, helper: Executor | None) -> None:
        self._digests, self._helper = digests, helper
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
        span = stop - start if local or not source.contiguous else SPAN_BUCKETS * BUCKET_BYTES
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
                to = min(low - low % BUCKET_BYTES + BUCKET_BYTES, high)
                part = _CopyPart(low, min(to, end), name, source, dtype, (low - start) // width)
                self._partial.extend(to, part if local else None)
                if to % BUCKET_BYTES == 0:
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
            self._copy(bucket)
            return
        self._todo.append(bucket)
        if self._helper is not None and len(self._todo) > 1 and (self._helping is None or self._helping.done()):
            self._helping = self._helper.submit(self._copy_until, 0)
        self._copy_until(HELPER_BUCKETS)

    def _copy_until(self, left: int) -> None:
        """Copy buckets until only ``left`` are to be copied. Called by both threads."""
        while len(self._todo) > left:
            with contextlib.suppress(IndexError):  # the other thread took it
                self._copy(self._todo.popleft())

    def _copy(self, bucket: _Bucket) -> None:
        bucket.copy(self.with_nan)
        if self._digests is not None:
            self._digests.add(bucket)


def chunk_capacity(chunk: int) -> int:
    """Return the size of chunk number ``chunk`` in bytes, unless one tensor is larger."""
    return min(FIRST_CHUNK_BYTES << min(chunk, 16), CHUNK_BYTES)


class VersionWriter:
    """Writes one version. ``room`` allocates the next chunk. ``digests``, ``helper``: see ChunkCopier. ``sizes``: the
    expected sizes of the chunks."""

    def __init__(
        self,
        version: int,
        room: Callable[[int], Room],
        digests: BucketDigests | None,
        *,
        helper: Executor | None = None,
        dtype: DtypePolicy | None = None,
        rename: Rename | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self._version, self._room = version, room
        self._dtype, self._rename = dtype, rename
        self._copier = ChunkCopier(digests, helper)
        self._expected = sizes
        self._rooms: list[Room] = []
        self._used = 0  # of the last room, in bytes
        self.sizes: list[int] = []
        """The chunk sizes of a version like this one."""
        self.tensors: list[TensorInfo] = []
        self._names: dict[tuple[str, tuple[int, ...]], str] = {}  # published name and start → given name
        self._seen: dict[tuple[Any, ...], tuple[TensorInfo, Callable[[], bool]]] = {}

    def write(self, weights: Iterable[tuple[str, Any]], *, stable: bool = False) -> list[int]:
        """Copy all tensors, and return the size of each chunk. Each tensor is released before the next is requested,
        unless they are ``stable``: all exist, and do not change during the call. Raises WeightMismatch, SchemaError,
        MemoryFull, and the errors of ``weights``."""
        try:
            for name, tensor in weights:
                self._add(name, tensor)
                if not stable:
                    self._flush()
                del tensor
            self._close()
            self._flush()
        except BaseException:
            self._copier.stop()
            raise
        return [len(room.memory) for room in self._rooms]

    def _flush(self) -> None:
        self._copier.flush()
        if self._copier.with_nan:
            raise SchemaError(
                f"version {self._version}: tensor {self._copier.with_nan[0]!r} has NaN among its numbers"
            )

    def _add(self, name: str, tensor: Any) -> None:
        shard = tensor if isinstance(tensor, Shard) else None
        public = self._published_name(name, shard)
        try:
            if shard is not None and (problem := shard.problem()):
                raise SchemaError(problem)
            source = tensor_source(tensor if shard is None else shard.tensor)
            dtype = self._target_dtype(name, source.dtype)
        except SchemaError as error:
            raise SchemaError(f"version {self._version}: tensor {name!r}: {error}") from None
        start, whole = ((), ()) if shard is None else (tuple(shard.start), tuple(shard.whole))
        info = TensorInfo(public, dtype, source.shape, max(len(self._rooms) - 1, 0), self._used, start, whole)
        if info.nbytes:
            try:
                info = self._tied(info, source) or self._written(info, source)
            except MemoryFull as error:
                raise MemoryFull(f"version {self._version}: tensor {name!r}: {error}") from None
        self.tensors.append(info)

    def _published_name(self, name: str, shard: Shard | None) -> str:
        """Return the published name. Raises SchemaError, and WeightMismatch for a duplicate."""
        public = self._rename(name) if self._rename is not None and isinstance(name, str) else name
        if not isinstance(public, str):
            raise SchemaError(f"version {self._version}: {public!r}, for tensor {name!r}, is no name")
        key = public, () if shard is None else tuple(shard.start)
        other = self._names.get(key)
        if other is not None:
            twice = (
                f"tensor {name!r} is sent twice" if other == name else f"{other!r} and {name!r} are both {public!r}"
            )
            raise WeightMismatch(f"version {self._version}: {twice}")
        self._names[key] = name
        return public

    def _target_dtype(self, name: str, dtype: str) -> str:
        if self._dtype is None:
            return dtype
        if isinstance(self._dtype, str):
            return self._dtype if dtype in WIDE else dtype
        wanted = self._dtype(name, dtype)
        carrier(wanted)
        if dtype != wanted and not {dtype, wanted} <= set(FLOATS):
            raise SchemaError(
                f"{dtype} is not converted to {wanted}: only floating-point numbers are, into such; leave {name!r} out"
                " of the dtype policy"
            )
        return wanted

    def _tied(self, info: TensorInfo, source: TensorSource) -> TensorInfo | None:
        """Return the place of an earlier tensor in the same memory, if that memory was not freed and still holds the
        written bytes. A buffer that is refilled for each tensor has the same memory, too."""
        there, held = self._seen.get((*source.identity, info.dtype), (None, None))
        if there is None or held is None or not held():
            return None
        self._copier.flush()
        room = self._rooms[there.chunk].memory[there.offset : there.offset + there.nbytes]
        if not source.equals(room, info.dtype):
            return None
        return msgspec.structs.replace(info, chunk=there.chunk, offset=there.offset)

    def _written(self, info: TensorInfo, source: TensorSource) -> TensorInfo:
        size = -(-info.nbytes // ALIGN) * ALIGN
        if self.sizes and self.sizes[-1] + size <= chunk_capacity(len(self.sizes) - 1):
            self.sizes[-1] += size
        else:
            self.sizes.append(size)
        if not self._rooms or self._used + size > len(self._rooms[-1].memory):
            self._open(size)
        info = msgspec.structs.replace(info, chunk=len(self._rooms) - 1, offset=self._used)
        self._used += size
        self._copier.add(info.name, source, info.dtype, info.offset, self._used)  # padding is part of the digest
        self._seen[(*source.identity, info.dtype)] = info, source.held
        return info

    def _open(self, size: int) -> None:
        self._close()
        number = len(self._rooms)
        wanted = max(chunk_capacity(number), size)
        if number < len(self._expected) and size <= self._expected[number]:
            wanted = self._expected[number]
        self._rooms.append(self._room(wanted))
        self._used = 0
        self._copier.open(self._rooms[-1].memory)

    def _close(self) -> None:
        if self._rooms:
            if self._used < len(self._rooms[-1].memory):
                self._rooms[-1].trim(self._used)
            self._copier.close()
