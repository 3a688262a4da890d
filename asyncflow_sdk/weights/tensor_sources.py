"""Copying a tensor of torch or numpy into a chunk, bit for bit or converted, and comparing it with what lies there.

A tensor that lies contiguous is copied in spans of its elements, so that what is copied already can be hashed
then, or while the next span is; any other at once. Chunks are numpy arrays, or torch tensors on a device.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import SchemaError
from ..types.dtypes import FLOATS, carrier, dtype_name, is_torch, storable

SPAN_BYTES = 256 << 10  # of comparisons: what both sides have of it stays in cache


class TensorSource(ABC):
    """A tensor to be copied. ``identity``: equal for tensors that are the same elements of the same memory, while ``held()``:
    whether somebody still has that memory. A tensor that is made where one lay that is gone is another one. ``here``: whether this
    thread copies it, and nobody else: no device, no threads of torch."""

    dtype: str
    shape: tuple[int, ...]
    size: int
    contiguous: bool
    here: bool
    identity: tuple[Any, ...]
    held: Callable[[], bool]

    @abstractmethod
    def copy(self, room: Any, dtype: str, first: int, last: int) -> None:
        """Elements ``first`` to ``last`` (all, unless contiguous) become the bytes of ``room``."""

    @abstractmethod
    def equals(self, room: Any, dtype: str) -> bool:
        """Whether the bytes in ``room`` are what ``copy`` would write."""


def source(tensor: Any) -> TensorSource:
    """Raises SchemaError for what has no plain values."""
    return TorchSource(tensor) if is_torch(tensor) else NumpySource(tensor)


class NumpySource(TensorSource):
    def __init__(self, array: Any) -> None:
        array = np.asarray(array)
        self.dtype = dtype_name(array.dtype)
        self.shape, self.size = array.shape, array.size
        self.contiguous, self.here = array.flags.c_contiguous, True
        self._array = array.reshape(-1) if self.contiguous else array
        where, self.held = _memory(array)
        self.identity = (*where, array.ctypes.data, array.shape, array.strides, array.dtype.str, self.dtype)

    def copy(self, room: Any, dtype: str, first: int, last: int) -> None:
        if not isinstance(room, np.ndarray):
            torch, span = sys.modules["torch"], np.empty(room.shape, np.uint8)
            self.copy(span, dtype, first, last)
            room.copy_(torch.from_numpy(span))
            return
        into = room.view(carrier(dtype))
        with np.errstate(all="ignore"):
            if self.contiguous:
                np.copyto(into, self._array[first:last], casting="unsafe")
            else:
                np.copyto(into.reshape(self.shape), self._array, casting="unsafe")

    def equals(self, room: Any, dtype: str) -> bool:
        there = room if isinstance(room, np.ndarray) else room.cpu().numpy()
        width = carrier(dtype).itemsize
        step = max(SPAN_BYTES // width, 1) if self.contiguous else max(self.size, 1)
        for first in range(0, self.size, step):
            last = min(first + step, self.size)
            span = np.empty((last - first) * width, np.uint8)
            self.copy(span, dtype, first, last)
            if not np.array_equal(span, there[first * width : last * width]):
                return False
        return True


class TorchSource(TensorSource):
    def __init__(self, tensor: Any) -> None:
        if hasattr(tensor, "full_tensor"):
            raise SchemaError(
                "it is a DTensor: yield Shard(t.to_local(), start, whole), where this rank's piece of it begins and the whole"
                " shape, or t.full_tensor()"
            )
        self.dtype = storable(tensor)
        plain = tensor.detach().resolve_conj().resolve_neg()
        self.shape, self.size = tuple(plain.shape), plain.numel()
        self.contiguous = plain.is_contiguous()
        self._tensor = plain.reshape(-1) if self.contiguous else plain
        self._bytes: np.ndarray[Any, Any] | None = None
        self.here = plain.device.type == "cpu" and sys.modules["torch"].get_num_threads() == 1
        where, self.held = _torch_memory(plain)
        writes = -1 if tensor.is_inference() else tensor._version  # filled anew in between, it is another tensor
        self.identity = (*where, writes, plain.data_ptr(), self.shape, plain.stride(), self.dtype)

    def copy(self, room: Any, dtype: str, first: int, last: int) -> None:
        torch = sys.modules["torch"]
        if self.here and self.contiguous and dtype == self.dtype and isinstance(room, np.ndarray):
            if self._bytes is None:
                self._bytes = self._tensor.view(torch.uint8).numpy()
            width = carrier(dtype).itemsize
            np.copyto(room, self._bytes[first * width : last * width])  # on one thread it is the faster one
            return
        into = torch.from_numpy(room) if isinstance(room, np.ndarray) else room
        if not self.contiguous:
            into.view(getattr(torch, dtype)).view(self.shape).copy_(self._tensor)
        elif dtype == self.dtype:  # as bytes: not every dtype can be copied as what it is
            into.copy_(self._tensor[first:last].view(torch.uint8))
        else:
            into.view(getattr(torch, dtype)).copy_(self._tensor[first:last])

    def equals(self, room: Any, dtype: str) -> bool:
        torch = sys.modules["torch"]
        there = torch.from_numpy(room) if isinstance(room, np.ndarray) else room
        flat, width = self._tensor.reshape(-1), carrier(dtype).itemsize
        step = max(SPAN_BYTES // width, 1)
        for first in range(0, self.size, step):
            last = min(first + step, self.size)
            span = flat[first:last].to(device=there.device, dtype=getattr(torch, dtype))
            if not torch.equal(span.view(torch.uint8), there[first * width : last * width]):
                return False
        return True


def _memory(array: Any) -> tuple[tuple[Any, ...], Callable[[], bool]]:
    """Whose memory an array shows, and whether it still has it."""
    owner = array
    while True:
        below = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
        if is_torch(below):
            return _torch_memory(below)
        if below is None or not isinstance(owner, (np.ndarray, memoryview)):
            break
        try:
            weakref.ref(below)
        except TypeError:
            break
        owner = below
    alive = weakref.ref(owner)
    return ("numpy", id(owner)), lambda: alive() is not None


def _torch_memory(tensor: Any) -> tuple[tuple[Any, ...], Callable[[], bool]]:
    """As ``_memory``. Views of a tensor share a storage; no other gets its number while it is referred to here, weakly."""
    storage = tensor.untyped_storage()
    alive = sys.modules["torch"].multiprocessing.reductions.StorageWeakRef(storage)
    return ("torch", str(tensor.device), storage._cdata), lambda: not alive.expired()


def check_conversion(name: str, dtype: str, wanted: str) -> None:
    """Raises SchemaError unless values of ``dtype`` may be published as ``wanted``: floating-point numbers, as such."""
    carrier(wanted)
    if dtype != wanted and not {dtype, wanted} <= set(FLOATS):
        raise SchemaError(
            f"{dtype} is not converted to {wanted}: only floating-point numbers are, into such; leave {name!r} out of"
            " the dtype policy"
        )
