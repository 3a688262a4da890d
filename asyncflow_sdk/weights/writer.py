"""VersionWriter: copies the tensors of a version into chunks.

A chunk takes tensors until the next one does not fit; a larger tensor gets its own chunk. The layout depends only on
the order and sizes of the tensors. So equal weights have equal manifests, and successive versions of a model need
rooms of equal sizes. The first chunks are smaller than the rest, for small models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeAlias

import msgspec

from ..errors import MemoryFull, SchemaError, WeightMismatch
from ..interfaces.weights import Room
from ..types import Shard, TensorInfo
from ..types.dtypes import FLOATS, carrier
from ..types.manifest import BUCKET_BYTES, CHUNK_BYTES, FIRST_CHUNK_BYTES
from .chunk_copier import BucketDigests, ChunkCopier
from .tensor_sources import TensorSource, tensor_source

ALIGN = 64
DtypePolicy: TypeAlias = str | Callable[[str, str], str]
"""The dtype of published floating-point tensors (those of 8 bits and fewer are kept), or a function
from name and dtype to dtype."""
Rename: TypeAlias = Callable[[str], str]
WIDE = ("float16", "bfloat16", "float32", "float64")


def chunk_capacity(chunk: int) -> int:
    """Return the size of chunk number ``chunk`` in bytes, unless one tensor is larger."""
    return min(FIRST_CHUNK_BYTES << min(chunk, 16), CHUNK_BYTES)


def padded(nbytes: int) -> int:
    """Round a size up to the alignment of tensors."""
    return -(-nbytes // ALIGN) * ALIGN


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
        bucket_bytes: int = BUCKET_BYTES,
        dtype: DtypePolicy | None = None,
        rename: Rename | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self._version, self._room = version, room
        self._dtype, self._rename = dtype, rename
        self._copier = ChunkCopier(bucket_bytes, digests, helper)
        self._expected = sizes
        self._rooms: list[Room] = []
        self._used = 0  # of the last room, in bytes
        self.sizes: list[int] = []
        """The chunk sizes of a version like this one."""
        self._tensors: list[TensorInfo] = []
        self._names: dict[tuple[str, tuple[int, ...]], str] = {}  # published name and start → given name
        self._seen: dict[tuple[Any, ...], tuple[TensorInfo, Callable[[], bool]]] = {}

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return the tensors written so far."""
        return tuple(self._tensors)

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
        self._tensors.append(info)

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
        size = padded(info.nbytes)
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
