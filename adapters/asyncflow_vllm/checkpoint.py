"""Checkpoint: what tensors a model folder has, so that a version is compared with it before an engine is touched.

vLLM loads what it is given: of three projections that it fuses it takes one, and computes from what happens to lie where
the other two should be. So a version is refused here unless it is whole.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from asyncflow_sdk.errors import ConfigError, WeightMismatch
from asyncflow_sdk.interfaces import TensorType, WeightUpdate
from asyncflow_sdk.types.dtypes import FLOATS
from asyncflow_sdk.types.safetensors import read_header


class Checkpoint:
    """``folder``: a Hugging Face model folder with safetensors. ``dtype``: in which the engine computes, once it is known.
    Raises ConfigError."""

    dtype = ""

    def __init__(self, folder: str) -> None:
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            what = "has no *.safetensors" if Path(folder).is_dir() else "does not exist"
            raise ConfigError(f"model folder {folder!r} {what}; new weights are compared with what it has")
        self.tensors: dict[str, TensorType] = {}
        for file in files:
            try:
                with file.open("rb") as opened:
                    found = read_header(opened).tensors
            except (OSError, ValueError) as error:
                raise ConfigError(f"{file} cannot be read: {error}") from None
            self.tensors |= {name: TensorType(tensor.dtype, tensor.shape) for name, tensor in found.items()}

    def check(self, update: WeightUpdate) -> dict[str, str]:
        """Raises WeightMismatch, listing all, for tensors that are missing, too many, of another shape or dtype. Returns
        names that are second ones of a tied weight, each with the first."""
        problems, second = [], {}
        for name, given in update.tensors.items():
            wanted = self.tensors.get(name)
            if wanted is None:
                first = self._same(update, name)
                if first is None:
                    problems.append(f"{name}: the model has no such weight")
                else:
                    second[name] = first
            elif given.shape != wanted.shape or not self._takes(given.dtype, wanted.dtype):
                problems.append(
                    f"{name}: the version has {given.dtype}{list(given.shape)}, the model {self._held(wanted.dtype)}{list(wanted.shape)}"
                )
        problems += [f"{name}: missing from the version" for name in self.tensors.keys() - update.tensors.keys()]
        if problems:
            raise WeightMismatch(
                f"version {update.version} does not fit this model, nothing was loaded:\n  "
                + "\n  ".join(sorted(problems)[:20])
            )
        return second

    def _takes(self, given: str, wanted: str) -> bool:
        """A dtype is taken if it is the folder's, or the one in which the engine computes."""
        return given == wanted or (given == self.dtype and wanted in FLOATS)

    def _held(self, dtype: str) -> str:
        return self.dtype if dtype in FLOATS else dtype

    def _same(self, update: WeightUpdate, name: str) -> str | None:
        """Which tensor of the folder this one is equal to, byte for byte."""
        alike = [
            other for other, kind in update.tensors.items() if kind == update.tensors[name] and other in self.tensors
        ]
        return first_equal(update, name, alike)


def first_equal(update: WeightUpdate, name: str, others: list[str]) -> str | None:
    """The first of ``others`` that has the same bytes as tensor ``name``."""
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
