"""Weights of a model folder: as a version for vLLM's workers to map, as the measure of later versions, and as the
rest of layers trained in part."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from asyncflow_http.model_folder import check_fit
from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_sdk.interfaces.weights import FilePlace
from asyncflow_sdk.types import carrier, to_torch
from asyncflow_sdk.types.dtypes import FLOATS
from asyncflow_sdk.workflow.model_folder import ModelFolder

_LAYER = re.compile(r".*?\.\d+(?=\.)")
"""Name of a numbered layer, with the outer number of several."""


class FolderWeights(WeightUpdate):
    """The weights of ``folder`` as ``version``. Files are read on access."""

    def __init__(self, folder: ModelFolder, version: int) -> None:
        self.version, self.tensors, self.root = version, folder.tensors, ""
        self._folder = folder

    def place(self, name: str) -> FilePlace | None:
        """Return the place of a tensor; None if it is not aligned to its dtype, which safetensors allows."""
        place = self._folder.places[name]
        if place.offset % carrier(self.tensors[name].dtype).itemsize:
            return None
        return place._replace(path=os.path.realpath(place.path))  # workers map no link

    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Yield (name, array)."""
        return ((name, self._folder.array(name)) for name in self.tensors)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, to_torch(array)) for name, array in self.arrays())

    def release(self) -> None:
        """Do nothing: no memory is held."""


class WholeLayers(FolderWeights):
    """``update``, and the tensors of ``folder`` that it names as untrained in layers with a trained one.

    vLLM fuses tensors of a layer, and loads a fused parameter into new memory: what a version lacks of it would be
    uninitialised. Layers without a trained tensor stay as they are.
    """

    def __init__(self, update: WeightUpdate, folder: ModelFolder) -> None:
        super().__init__(folder, update.version)
        trained, held = {*map(_layer, update.tensors)}, folder.tensors
        kept = {name: held[name] for name in update.untrained if name in held and _layer(name) in trained}
        self._update, self.tensors, self.root = update, {**update.tensors, **kept}, update.root

    def place(self, name: str) -> FilePlace | None:
        """Return the place of a tensor, in the version or in the folder."""
        return self._update.place(name) if name in self._update.tensors else super().place(name)

    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Yield (name, array)."""
        kept = self.tensors.keys() - self._update.tensors.keys()
        return itertools.chain(self._update.arrays(), ((name, self._folder.array(name)) for name in kept))


def _layer(name: str) -> str:
    """Return the name of the layer of a tensor; without a number, of the module above the tensor's own."""
    found = _LAYER.match(name)
    return name.rsplit(".", 2)[0] if found is None else found[0]


def check_update(update: WeightUpdate, folder: ModelFolder, dtype: str) -> dict[str, str]:
    """Compare a version with the model folder. ``dtype``: of the engine, accepted for
    floating-point tensors beside the folder's.

    vLLM accepts anything: of three projections that it fuses it would take one, and compute with uninitialised memory
    for the others. Returns second names of tied weights, each with the first. Raises WeightMismatch.
    """
    return check_fit(update, folder, lambda held: (dtype, held) if held in FLOATS else (held,))
