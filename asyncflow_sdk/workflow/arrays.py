"""Arrays of numpy in one file, in the format of safetensors: quick to write, and anybody's to read.

write_arrays(path, {"ids": ids, "reward": reward})        # whole or not there
with reading(path) as arrays: arrays["ids"]               # read when asked for
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from ..memory import private_opener

_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64",
}  # fmt: skip
_DTYPES = {name: np.dtype(dtype) for dtype, name in _NAMES.items()}
_KNOWN = {dtype: name for name, dtype in _DTYPES.items()}  # a dtype's own name takes longer to make than an entry
_LENGTH = struct.Struct("<Q")


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, _Entry]).decode


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """A file that is whole or not there. A dtype that safetensors has no name for goes as bytes, in one more dimension."""
    plain = {name: _plain(array) for name, array in arrays.items()}
    header: dict[str, _Entry] = {}
    end = 0
    widest_first = sorted(
        plain, key=lambda name: -plain[name].itemsize
    )  # so that each lies at a multiple of its size
    for name in widest_first:
        start, end = end, end + plain[name].nbytes
        header[name] = _Entry(_KNOWN[plain[name].dtype], plain[name].shape, (start, end))
    text = _encode(header)
    text += b" " * (-len(text) % 8)
    whole = path.with_name(f"{path.name}.part")
    with open(whole, "wb", opener=private_opener) as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for name in widest_first:
            if plain[name].size:  # memory of no bytes has no view of bytes
                file.write(plain[name].data.cast("B"))
    whole.replace(path)


class Arrays(Mapping[str, np.ndarray[Any, Any]]):
    """What a file holds, by name. Raises ValueError for one that is torn or no such file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, size = file, os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH.size), "little")
        self._begin = _LENGTH.size + length
        if self._begin > size:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        self._entries = _decode(file.read(length))  # raises ValueError
        for name, entry in self._entries.items():
            start, end = entry.data_offsets
            known = _DTYPES.get(entry.dtype)
            sound = known is not None and min(entry.shape, default=0) >= 0 <= start
            if not sound or known is None or end - start != math.prod(entry.shape) * known.itemsize:
                raise ValueError(f"array {name!r} of {entry.dtype}{list(entry.shape)} at bytes {start} to {end}")
            if self._begin + end > size:
                raise ValueError(f"array {name!r} ends at byte {self._begin + end} of {size}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        entry = self._entries[name]
        self._file.seek(self._begin + entry.data_offsets[0])
        array = np.fromfile(self._file, _DTYPES[entry.dtype], math.prod(entry.shape))
        return array.reshape(entry.shape)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Arrays]:
    """Arrays are read when they are asked for, in here."""
    with path.open("rb") as file:
        yield Arrays(file)


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = np.ascontiguousarray(array)
    return array if array.dtype in _KNOWN else array[..., None].view(np.uint8)
