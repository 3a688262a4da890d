"""Weights of a model folder: as a version for vLLM's workers to map, and as the measure of later
versions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from asyncflow_http.model_folder import ModelFolder, check_version
from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_sdk.interfaces.weights import FilePlace
from asyncflow_sdk.types import carrier, to_torch
from asyncflow_sdk.types.dtypes import FLOATS


class FolderWeights(WeightUpdate):
    """The weights of ``folder`` as ``version``. Files are read on access."""

    def __init__(self, folder: ModelFolder, version: int) -> None:
        self.version, self.tensors, self.root = version, folder.tensors, ""
        self._places = folder.places

    def place(self, name: str) -> FilePlace | None:
        """Return the place of a tensor; None if it is not aligned to its dtype, which safetensors
        allows."""
        place = self._places[name]
        return None if place.offset % carrier(self.tensors[name].dtype).itemsize else place

    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Yield (name, array)."""
        for name, (dtype, shape) in self.tensors.items():
            path, offset = self._places[name]
            raw = np.fromfile(path, np.uint8, math.prod(shape) * carrier(dtype).itemsize, offset=offset)
            yield name, raw.view(carrier(dtype)).reshape(shape)

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
    second: dict[str, str] = {}

    def tied(name: str) -> bool:
        """Record a second name of a tensor in the folder."""
        kind = update.tensors.get(name)
        alike = [other for other, each in update.tensors.items() if each == kind and other in folder.tensors]
        first = first_equal(update, name, alike) if kind is not None else None
        if first is not None:
            second[name] = first
        return first is not None

    check_version(update, folder.tensors, lambda held: (dtype, held) if held in FLOATS else (held,), tied=tied)
    return second


def first_equal(update: WeightUpdate, name: str, others: Sequence[str]) -> str | None:
    """Return the first of ``others`` with the bytes of tensor ``name``."""
    place = update.place(name)
    if place is not None:
        for other in others:
            if update.place(other) == place:
                return other
    if not others:
        return None
    arrays = {each: array for each, array in update.arrays() if each == name or each in others}
    raw = {each: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for each, array in arrays.items()}
    return next((other for other in others if np.array_equal(raw[other], raw[name])), None)
