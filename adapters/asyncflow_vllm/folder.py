"""Weights of a model folder: as a version for vLLM's workers to map, and as the measure of later
versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from asyncflow_http.model_folder import check_fit
from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_sdk.interfaces.weights import FilePlace
from asyncflow_sdk.types import carrier, to_torch
from asyncflow_sdk.types.dtypes import FLOATS
from asyncflow_sdk.workflow.model_folder import ModelFolder


class FolderWeights(WeightUpdate):
    """The weights of ``folder`` as ``version``. Files are read on access."""

    def __init__(self, folder: ModelFolder, version: int) -> None:
        self.version, self.tensors, self.root = version, folder.tensors, ""
        self._folder = folder

    def place(self, name: str) -> FilePlace | None:
        """Return the place of a tensor; None if it is not aligned to its dtype, which safetensors
        allows."""
        place = self._folder.places[name]
        return None if place.offset % carrier(self.tensors[name].dtype).itemsize else place

    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Yield (name, array)."""
        return ((name, self._folder.array(name)) for name in self.tensors)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, to_torch(array)) for name, array in self.arrays())

    def release(self) -> None:
        """Do nothing: no memory is held."""


def check_update(update: WeightUpdate, folder: ModelFolder, dtype: str) -> dict[str, str]:
    """Compare a version with the model folder. ``dtype``: of the engine, accepted for
    floating-point tensors beside the folder's.

    vLLM accepts anything: of three projections that it fuses it would take one, and compute with
    uninitialised memory for the others. Returns second names of tied weights, each with the first.
    Raises WeightMismatch.
    """
    return check_fit(update, folder, lambda held: (dtype, held) if held in FLOATS else (held,))
