"""TensorSource: a tensor of torch or numpy, to be copied into a chunk bit for bit or converted.

A contiguous tensor is copied in spans of its elements, so that copied spans can be hashed
meanwhile; any other at once. Chunks are numpy arrays, or torch tensors on a device.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import SchemaError
from ..types.dtypes import carrier, dtype_name, is_torch, storable

_INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80 << 16, "float64": 0x7FF0 << 48}
"""Bits of infinity: a NaN has larger ones beside its sign."""
SPAN_BYTES = 256 << 10  # compared at a time: both sides stay in the cache


class TensorSource(ABC):
    """A tensor to be copied. ``identity``: equal for the same elements of the same memory, while ``held()`` is True:
    its owner still exists. A new tensor at the address of a freed one has another identity. ``local``: True if the
    calling thread alone copies it: no device, and no threads of torch."""

    dtype: str
    shape: tuple[int, ...]
    size: int
    contiguous: bool
    local: bool
    identity: tuple[Any, ...]
    held: Callable[[], bool]

    @abstractmethod
    def copy(self, memory: Any, dtype: str, first: int, last: int) -> None:
        """Copy elements ``first`` to ``last`` (all, unless contiguous) to ``memory``."""

    def equals(self, memory: Any, dtype: str) -> bool:
        """True if ``memory`` holds the bytes that ``copy`` would write."""
        width = carrier(dtype).itemsize
        step = max(SPAN_BYTES // width, 1) if self.contiguous else max(self.size, 1)
        for first in range(0, self.size, step):
            last = min(first + step, self.size)
            there = memory[first * width : last * width]
            span = np.empty_like(there) if isinstance(there, np.ndarray) else there.new_empty(there.shape)
            self.copy(span, dtype, first, last)
            if not same_bytes(span, there):
                return False
        return True


def tensor_source(tensor: Any) -> TensorSource:
    """Return the source of a tensor. Raises SchemaError for values that are no plain numbers."""
    return TorchSource(tensor) if is_torch(tensor) else NumpySource(tensor)


def same_bytes(one: Any, other: Any) -> bool:
    """True if two arrays, or two tensors of one device, have the same bytes."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
    torch = sys.modules["torch"]
    return bool(torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)))


def has_nan(memory: Any, dtype: str) -> bool:
    """True if elements of a floating-point dtype of at least 16 bits have a NaN among them."""
    if dtype not in _INFINITY or not len(memory):
        return False
    if not isinstance(memory, np.ndarray):
        return bool(memory.view(getattr(sys.modules["torch"], dtype)).isnan().any())
    infinity, width = _INFINITY[dtype], carrier(dtype).itemsize
    largest, negative = memory.view(f"i{width}").max(), memory.view(f"u{width}").max()  # without a copy
    return int(largest) > infinity or int(negative) > infinity + (1 << 8 * width - 1)


class NumpySource(TensorSource):
    """A numpy array, or a value that becomes one."""

    def __init__(self, array: Any) -> None:
        array = np.asarray(array)
        self.dtype = dtype_name(array.dtype)
        self.shape, self.size = array.shape, array.size
        self.contiguous, self.local = array.flags.c_contiguous, True
        self._array = array.reshape(-1) if self.contiguous else array
        where, self.held = _numpy_identity(array)
        self.identity = (*where, array.ctypes.data, array.shape, array.strides, array.dtype.str, self.dtype)

    def copy(self, memory: Any, dtype: str, first: int, last: int) -> None:
        """See ``TensorSource.copy``."""
        if not isinstance(memory, np.ndarray):
            torch, span = sys.modules["torch"], np.empty(memory.shape, np.uint8)
            self.copy(span, dtype, first, last)
            memory.copy_(torch.from_numpy(span))
            return
        into = memory.view(carrier(dtype))
        with np.errstate(all="ignore"):
            if self.contiguous:
                np.copyto(into, self._array[first:last], casting="unsafe")
            else:
                np.copyto(into.reshape(self.shape), self._array, casting="unsafe")


class TorchSource(TensorSource):
    """A torch tensor on any device."""

    def __init__(self, tensor: Any) -> None:
        if hasattr(tensor, "full_tensor"):
            raise SchemaError(
                "it is a DTensor: yield Shard(t.to_local(), start, whole), where this rank's piece of it begins"
                " and the whole shape, or t.full_tensor()"
            )
        self.dtype = storable(tensor)
        plain = tensor.detach().resolve_conj().resolve_neg()
        self.shape, self.size = tuple(plain.shape), plain.numel()
        self.contiguous = plain.is_contiguous()
        self._tensor = plain.reshape(-1) if self.contiguous else plain
        self._bytes: np.ndarray[Any, Any] | None = None
        self.local = plain.device.type == "cpu" and sys.modules["torch"].get_num_threads() == 1
        where, self.held = _torch_identity(plain)
        writes = -1 if tensor.is_inference() else tensor._version  # a refilled buffer is another tensor
        self.identity = (*where, writes, plain.data_ptr(), self.shape, plain.stride(), self.dtype)

    def copy(self, memory: Any, dtype: str, first: int, last: int) -> None:
        """See ``TensorSource.copy``."""
        torch = sys.modules["torch"]
        if self.local and self.contiguous and dtype == self.dtype and isinstance(memory, np.ndarray):
            if self._bytes is None:
                self._bytes = self._tensor.view(torch.uint8).numpy()
            width = carrier(dtype).itemsize
            np.copyto(memory, self._bytes[first * width : last * width])  # faster than torch on one thread
            return
        into = torch.from_numpy(memory) if isinstance(memory, np.ndarray) else memory
        if not self.contiguous:
            into.view(getattr(torch, dtype)).view(self.shape).copy_(self._tensor)
        elif dtype == self.dtype:  # as bytes: not every dtype can be copied as such
            into.copy_(self._tensor[first:last].view(torch.uint8))
        else:
            into.view(getattr(torch, dtype)).copy_(self._tensor[first:last])


def _numpy_identity(array: Any) -> tuple[tuple[Any, ...], Callable[[], bool]]:
    """Return the identity of an array's memory, and a test that it still exists."""
    owner: Any = array
    while isinstance(owner, (np.ndarray, memoryview)):
        below = owner.obj if isinstance(owner, memoryview) else owner.base
        if is_torch(below):
            return _torch_identity(below)
        if below is None or not type(below).__weakrefoffset__:
            break
        owner = below
    alive = weakref.ref(owner)
    return ("numpy", id(owner)), lambda: alive() is not None


def _torch_identity(tensor: Any) -> tuple[tuple[Any, ...], Callable[[], bool]]:
    """Return the same for a tensor. Views share a storage; while its weak reference exists, no
    other storage gets its address."""
    storage = tensor.untyped_storage()
    alive = sys.modules["torch"].multiprocessing.reductions.StorageWeakRef(storage)
    return ("torch", str(tensor.device), storage._cdata), lambda: not alive.expired()
