"""Batches and weights as files between the kit and the ranks of an engine: numpy arrays with a JSON
description."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...types import Batch, Column, ColumnSpec, Shard, carrier, dtype_name
from ...types.dtypes import from_torch, is_torch


@dataclass(frozen=True)
class WeightPiece:
    """A tensor of a rank; with ``start``, the part there of a tensor of shape ``whole``."""

    name: str
    array: npt.NDArray[Any]
    start: tuple[int, ...] | None
    whole: tuple[int, ...] | None


def write_batch(path: Path, batch: Batch) -> None:
    """Write a batch."""
    arrays: dict[str, Any] = {"ids": batch.ids, "groups": batch.groups}
    said: list[Any] = []
    for number, (name, column) in enumerate(batch.columns.items()):
        spec = column.spec
        said.append([name, spec.kind, spec.dtype, list(spec.shape), column.offsets is not None])
        arrays[f"{number}.values"] = column.values
        if column.offsets is not None:
            arrays[f"{number}.offsets"] = column.offsets
    np.savez(path, columns=np.array(json.dumps(said)), **arrays)


def read_batch(path: Path) -> Batch:
    """Read a batch."""
    with np.load(path, allow_pickle=False) as file:
        columns = {
            name: Column(
                ColumnSpec(kind, dtype, tuple(shape)), file[f"{number}.values"],
                file[f"{number}.offsets"] if ragged else None,
            )
            for number, (name, kind, dtype, shape, ragged) in enumerate(json.loads(file["columns"].item()))
        }  # fmt: skip
        return Batch(file["ids"], file["groups"], columns)


def write_pieces(path: Path, weights: Any) -> None:
    """Write the named_weights() of a rank."""
    arrays: dict[str, Any] = {}
    said: list[Any] = []
    for number, (name, given) in enumerate(weights):
        tensor, start, whole = (
            (given.tensor, given.start, given.whole) if isinstance(given, Shard) else (given, None, None)
        )
        array = np.asarray(from_torch(tensor.detach()) if is_torch(tensor) else tensor, order="C")
        said.append([name, dtype_name(array.dtype), list(array.shape), start, whole])
        arrays[str(number)] = array.reshape(-1).view(np.uint8)
    np.savez(path, pieces=np.array(json.dumps(said)), **arrays)


def read_pieces(path: Path) -> Iterator[WeightPiece]:
    """Read the named_weights() of a rank."""
    with np.load(path, allow_pickle=False) as file:
        for number, (name, dtype, shape, start, whole) in enumerate(json.loads(file["pieces"].item())):
            array = file[str(number)].view(carrier(dtype)).reshape(shape)
            yield WeightPiece(
                name, array, None if start is None else tuple(start), None if whole is None else tuple(whole)
            )
