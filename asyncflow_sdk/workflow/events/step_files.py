"""Step files: the rows of a trained step in one safetensors file, each column with its dtype and
offsets.

write_batch(path, batch, publish_lag=lags)                # atomic: complete or absent
for step, batch in read_steps("runs/first"): ...
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...memory import private_opener
from ...types import Batch, Column, ColumnSpec, Ragged, TokenAges, carrier, dtype_name
from ...types.dtypes import SAFETENSORS_CODES
from ...types.safetensors import plan, read_header

STEP_FILE = "[0-9]" * 6 + "*.safetensors"
COMPLETED_AT = "completed_at"


def step_path(directory: Path, step: int) -> Path:
    """Return the path of a step's file in a run directory."""
    return directory / "steps" / f"{step:06d}.safetensors"


def write_batch(path: Path, batch: Batch, **more: Any) -> None:
    """Write a batch atomically. ``more``: further arrays by name. Raises OSError."""
    arrays: dict[str, Any] = {"ids": batch.ids, "groups": batch.groups, **more}
    if batch.completed_at is not None:
        arrays[COMPLETED_AT] = batch.completed_at
    if batch.version_step_offsets:
        arrays["version_step_offsets"] = np.array(batch.version_step_offsets, np.int64)
    for name, column in batch.columns.items():
        arrays[f"{name}:{column.spec.kind}:{dtype_name(column.values.dtype)}"] = column.values
        if column.offsets is not None:
            arrays[f"{name}.offsets"] = column.offsets
    _write_arrays(path, arrays)


def read_batch(path: Path, only: tuple[str, ...] | None = None, rows: int | None = None) -> Batch:
    """Read a batch. ``only``: these columns, if present. ``rows``: the first so many, without reading
    the others. Raises OSError, ValueError, KeyError."""
    with _open_arrays(path) as stored:
        columns: dict[str, Column] = {}
        for key in stored:
            if ":" not in key:
                continue
            name, kind, dtype = key.rsplit(":", 2)
            if only is not None and name not in only:
                continue
            offsets = None
            if f"{name}.offsets" in stored:
                offsets = stored.first(f"{name}.offsets", None if rows is None else rows + 1)
            values = stored.first(key, rows if rows is None or offsets is None else int(offsets[-1]))
            if values.dtype != carrier(dtype):  # bfloat16 and others, stored as bytes
                values = values.view(carrier(dtype))[..., 0]
            spec = ColumnSpec(kind, dtype, values.shape[1:])  # type: ignore[arg-type]
            columns[name] = Column(spec, values, offsets)
        offsets_by_version = stored.get("version_step_offsets", ())
        return Batch(
            stored.first("ids", rows), stored.first("groups", rows), columns,
            completed_at=stored.first(COMPLETED_AT, rows) if COMPLETED_AT in stored else None,
            version_step_offsets=tuple((int(first), int(shift)) for first, shift in offsets_by_version),
        )  # fmt: skip


def read_steps(directory: str | Path) -> Iterator[tuple[int, Batch]]:
    """Yield (step, batch) of every recorded step of a run directory, in order. The number of a step
    is the version it trained."""
    for path in sorted(Path(directory, "steps").glob(STEP_FILE)):
        if path.stem.isdecimal():
            yield int(path.stem), read_batch(path)


def staleness_of(directory: str | Path) -> Ragged:
    """Return the staleness of every trained token: int64, one row a step."""
    late = [batch.ages(step).total for step, batch in read_steps(directory)]
    return Ragged.of(late, np.int64)


def ages_of(directory: str | Path) -> Iterator[tuple[int, TokenAges]]:
    """Yield (step, staleness of its tokens in flight and in the queue) of every recorded step."""
    for step, batch in read_steps(directory):
        yield step, batch.ages(step)


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write a file atomically. A dtype without a safetensors name is stored as bytes, with one more
    dimension."""
    plain = {name: _plain(array) for name, array in arrays.items()}
    layout = plan({name: (array.dtype.name, array.shape) for name, array in plain.items()}, metadata={})
    whole = path.with_name(f"{path.name}.part")
    with open(whole, "wb", opener=private_opener) as file:
        file.write(layout.header)
        for name in sorted(plain, key=layout.offsets.__getitem__):
            file.write(plain[name].reshape(-1).view(np.uint8).data)
    whole.replace(path)


class _Arrays(Mapping[str, np.ndarray[Any, Any]]):
    """The arrays of a file by name, each read on access. Raises ValueError for a torn file or a
    foreign format."""

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
        return self.first(name, None)

    def first(self, name: str, count: int | None) -> np.ndarray[Any, Any]:
        """Read the first ``count`` elements of an array's first dimension; None: all."""
        tensor = self._tensors[name]
        shape = tensor.shape if count is None else (min(count, tensor.shape[0]), *tensor.shape[1:])
        self._file.seek(tensor.start)
        dtype = carrier(tensor.dtype)
        raw = np.fromfile(self._file, np.uint8, math.prod(shape) * dtype.itemsize)
        return raw.view(dtype).reshape(shape)


@contextlib.contextmanager
def _open_arrays(path: Path) -> Iterator[_Arrays]:
    with path.open("rb") as file:
        yield _Arrays(file)


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = np.ascontiguousarray(array)
    known = array.dtype.isnative and array.dtype.name in SAFETENSORS_CODES
    return array if known else array[..., None].view(np.uint8)
