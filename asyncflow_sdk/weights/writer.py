"""Writing a version: tensors, as they come, into chunks.

A chunk takes tensors until the next one does not fit; one that is larger than a chunk gets a chunk of its own. Where
tensors lie follows from their order and sizes alone, so equal weights have equal manifests, and a version like the one
before asks for rooms of just the sizes that one had. The first chunks are smaller than the rest: a small model
needs no large one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeAlias

import msgspec

from ..errors import MemoryFull, SchemaError, WeightMismatch
from ..interfaces.weights import Room
from ..types import Shard, TensorInfo
from ..types.manifest import BUCKET_BYTES, CHUNK_BYTES
from .chunk_copier import ChunkCopier
from .hashing import BucketDigests
from .tensor_sources import TensorSource, check_conversion, source

ALIGN = 64
DtypePolicy: TypeAlias = str | Callable[[str, str], str]
"""A dtype in which floating-point tensors are published (those of 8 bits and fewer stay as they are), or a function from
name and dtype to dtype."""
Rename: TypeAlias = Callable[[str], str]


def capacity(chunk: int) -> int:
    """Bytes of chunk number ``chunk``, unless a tensor is larger."""
    return min(BUCKET_BYTES << min(chunk, 16), CHUNK_BYTES)


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class VersionWriter:
    """Writes one version. ``room`` gives memory for the next chunk, ``hashing`` is told each bucket, in order, once its bytes are
    there, if there is one. ``helper``: has a thread that may copy, too. ``sizes``: of the chunks that are expected."""

    def __init__(
        self,
        version: int,
        room: Callable[[int], Room],
        hashing: BucketDigests | None,
        *,
        helper: Executor | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: DtypePolicy | None = None,
        rename: Rename | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self._version, self._room = version, room
        self._dtype, self._rename = dtype, rename
        self._filling = ChunkCopier(bucket_bytes, hashing, helper, lambda chunk: self._rooms[chunk].full())
        self._expected = sizes
        self._rooms: list[Room] = []
        self._used = 0  # bytes of the last room
        self._layout = ChunkSizes()
        self._tensors: list[TensorInfo] = []
        self._names: dict[tuple[str, tuple[int, ...]], str] = {}  # published name and start → name given
        self._seen: dict[tuple[Any, ...], tuple[TensorInfo, Callable[[], bool]]] = {}

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(self._tensors)

    @property
    def sizes(self) -> list[int]:
        """Of the chunks of a version like this one."""
        return self._layout.sizes

    def write(self, weights: Iterable[tuple[str, Any]], *, lasting: bool = False) -> list[int]:
        """Copy all of them; each is let go before the next is asked for, unless all are there, and stay as they are, while this
        goes on (``lasting``). Returns the size of each chunk. Raises WeightMismatch, SchemaError, MemoryFull, and what ``weights`` raises."""
        try:
            for name, tensor in weights:
                self._add(name, tensor)
                if not lasting:
                    self._filling.flush()
                del tensor
            self._close()
            self._filling.flush()
        except BaseException:
            self._filling.stop()
            raise
        return [len(room.memory) for room in self._rooms]

    def _add(self, name: str, tensor: Any) -> None:
        shard = tensor if isinstance(tensor, Shard) else None
        public = self._public(name, shard)
        try:
            if shard is not None and (problem := shard.problem()):
                raise SchemaError(problem)
            given = source(tensor if shard is None else shard.tensor)
            dtype = self._target(name, given.dtype)
        except SchemaError as error:
            raise SchemaError(f"version {self._version}: tensor {name!r}: {error}") from None
        start, whole = ((), ()) if shard is None else (tuple(shard.start), tuple(shard.whole))
        info = TensorInfo(public, dtype, given.shape, max(len(self._rooms) - 1, 0), self._used, start, whole)
        if info.nbytes:
            try:
                info = self._tied(info, given) or self._written(info, given)
            except MemoryFull as error:
                raise MemoryFull(f"version {self._version}: tensor {name!r}: {error}") from None
        self._tensors.append(info)

    def _public(self, name: str, shard: Shard | None) -> str:
        """Under which name it is published."""
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

    def _target(self, name: str, dtype: str) -> str:
        if self._dtype is None:
            return dtype
        if isinstance(self._dtype, str):
            return self._dtype if dtype in WIDE else dtype
        wanted = self._dtype(name, dtype)
        check_conversion(name, dtype, wanted)
        return wanted

    def _tied(self, info: TensorInfo, given: TensorSource) -> TensorInfo | None:
        """The place of the same memory under another name, if the tensor seen there is not gone, and what was written is what it
        still holds: a buffer that is filled anew for each tensor is the same memory too."""
        there, held = self._seen.get((*given.identity, info.dtype), (None, None))
        if there is None or held is None or not held():
            return None
        self._filling.flush()
        room = self._rooms[there.chunk].memory[there.offset : there.offset + there.nbytes]
        if not given.equals(room, info.dtype):
            return None
        return msgspec.structs.replace(info, chunk=there.chunk, offset=there.offset)

    def _written(self, info: TensorInfo, given: TensorSource) -> TensorInfo:
        size = padded(info.nbytes)
        self._layout.add(size)
        if not self._rooms or self._used + size > len(self._rooms[-1].memory):
            self._open(size)
        info = msgspec.structs.replace(info, chunk=len(self._rooms) - 1, offset=self._used)
        self._used += size
        self._filling.add(
            given, info.dtype, info.offset, self._used
        )  # what lies between tensors is part of the digest
        self._seen[(*given.identity, info.dtype)] = info, given.held
        return info

    # ---- chunks

    def _open(self, size: int) -> None:
        self._close()
        number = len(self._rooms)
        wanted = max(capacity(number), size)
        if number < len(self._expected) and size <= self._expected[number]:
            wanted = self._expected[number]
        self._rooms.append(self._room(wanted))
        self._used = 0
        self._filling.open(self._rooms[-1].memory)

    def _close(self) -> None:
        if self._rooms:
            if self._used < len(self._rooms[-1].memory):
                self._rooms[-1].trim(self._used)
            self._filling.close()


class ChunkSizes:
    """Sizes of chunks, from those of tensors in their order."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def add(self, size: int) -> None:
        if self.sizes and self.sizes[-1] + size <= capacity(len(self.sizes) - 1):
            self.sizes[-1] += size
        else:
            self.sizes.append(size)


WIDE = ("float16", "bfloat16", "float32", "float64")
