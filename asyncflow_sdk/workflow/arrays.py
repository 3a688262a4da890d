"""Arrays of numpy in one safetensors file.

write_arrays(path, {"ids": ids, "reward": reward})        # whole or not there
with reading(path) as arrays: arrays["ids"]               # read when asked for
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..memory import private_opener
from ..types import carrier
from ..types.dtypes import SAFETENSORS_CODES
from ..types.safetensors import plan, read_header


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write a file that is whole or not there. A dtype that safetensors has no name for is stored as bytes, with one more dimension."""
    plain = {name: _plain(array) for name, array in arrays.items()}
    layout = plan({name: (array.dtype.name, array.shape) for name, array in plain.items()}, metadata={})
    whole = path.with_name(f"{path.name}.part")
    with open(whole, "wb", opener=private_opener) as file:
        file.write(layout.header)
        for name in sorted(plain, key=layout.offsets.__getitem__):
            file.write(plain[name].reshape(-1).view(np.uint8).data)
    whole.replace(path)


class Arrays(Mapping[str, np.ndarray[Any, Any]]):
    """The arrays of a file by name. Raises ValueError for a file that is torn, or of another format."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._tensors = read_header(file).tensors
        for name, tensor in self._tensors.items():
            if tensor.dtype not in SAFETENSORS_CODES:
                raise ValueError(f"array {name!r} is of dtype {tensor.dtype}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        tensor = self._tensors[name]
        self._file.seek(tensor.start)
        raw = np.fromfile(self._file, np.uint8, tensor.stop - tensor.start)
        return raw.view(carrier(tensor.dtype)).reshape(tensor.shape)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Arrays]:
    """Open a file. Arrays are read when they are asked for, inside the block."""
    with path.open("rb") as file:
        yield Arrays(file)


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = np.ascontiguousarray(array)
    known = array.dtype.isnative and array.dtype.name in SAFETENSORS_CODES
    return array if known else array[..., None].view(np.uint8)
