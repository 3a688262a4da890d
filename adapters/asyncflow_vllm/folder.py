"""FolderWeights: what is in a model folder, as a version that other processes map where it lies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_sdk.interfaces.weights import FilePlace
from asyncflow_sdk.types import carrier, to_torch
from asyncflow_sdk.types.safetensors import read_header

from .checkpoint import Checkpoint


class FolderWeights(WeightUpdate):
    """The weights in ``folder``, which count as ``version``. Nothing is read before it is asked for."""

    def __init__(self, folder: str, checkpoint: Checkpoint, version: int) -> None:
        self.version, self.tensors, self.root = version, checkpoint.tensors, ""
        self._places: dict[str, FilePlace] = {}
        for file in sorted(Path(folder).resolve().glob("*.safetensors")):
            try:
                with file.open("rb") as opened:
                    found = read_header(opened).tensors
            except (OSError, ValueError) as error:
                raise ConfigError(f"{file} cannot be read: {error}") from None
            self._places |= {name: FilePlace(str(file), found[name].start) for name in found if name in self.tensors}

    def place(self, name: str) -> FilePlace | None:
        """None for one that lies across the grain of its dtype, which safetensors allows."""
        place = self._places[name]
        return None if place.offset % carrier(self.tensors[name].dtype).itemsize else place

    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        for name, (dtype, shape) in self.tensors.items():
            path, offset = self._places[name]
            size = int(np.prod(shape, dtype=np.int64)) * carrier(dtype).itemsize
            raw = np.fromfile(path, np.uint8, size, offset=offset)
            yield name, raw.view(carrier(dtype)).reshape(shape)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, to_torch(array)) for name, array in self.arrays())

    def release(self) -> None:
        pass
