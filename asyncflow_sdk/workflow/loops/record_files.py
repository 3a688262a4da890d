"""Files of a run's record: events as lines of JSON, and the rows of each trained step in one safetensors file, each
column with its dtype and offsets.

for event in read_events(directory / EVENTS): ...          # None: an unreadable line
write_batch(path, batch, publish_lag=lags)                 # atomic: complete or absent
for step, batch in read_steps("runs/first"): ...
sample_rows(step_path(directory, 17))     # [{"group": 3, "prompt": "2 + 2 =", "response": " 4", "reward": 1.0}, ...]
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...memory import private_opener
from ...types import Batch, Column, ColumnSpec, Ragged, TokenAges, carrier, dtype_name
from ...types.dtypes import SAFETENSORS_CODES
from ...types.events import Event, Note, StepTrained
from ...types.safetensors import plan, read_header

EVENTS = "events.jsonl"
LASTING = b'"lasting":true'  # part of the line of a lasting note
TRACED = b'{"event":"traced"'  # begin of lines about single rows, as older SDKs wrote them. Nothing reads them
STEP_FILE = "[0-9]" * 6 + "*.safetensors"
COMPLETED_AT = "completed_at"
SAMPLE_ROWS = 8
SAMPLE_CHARACTERS = 2_000
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def read_events(path: Path) -> Iterator[Event | None]:
    """Yield the recorded events; None for a line torn by a killed run, or of a newer SDK."""
    with path.open("rb") as lines:
        for line in lines:
            if line.strip() and not line.startswith(TRACED):
                yield decode_event(line)


def lasting_notes(path: Path, begin: int) -> tuple[list[str], int]:
    """Return the texts of lasting notes from byte ``begin`` of recorded events, and the end of the whole lines."""
    texts, end = [], begin
    with contextlib.suppress(OSError), path.open("rb") as lines:
        lines.seek(begin)
        for line in lines:
            end += len(line) if line.endswith(b"\n") else 0
            if LASTING in line and isinstance(event := decode_event(line), Note):
                texts.append(event.text)
    return texts, end


def decode_event(line: bytes) -> Event | None:
    """Return the event of a line; None if it cannot be read."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return _decoder.decode(line)
    try:  # a step with null metrics: JSON has no NaN
        fields = msgspec.json.decode(line)
        metrics = {k: math.nan if v is None else v for k, v in fields["metrics"].items()}
        return msgspec.convert({**fields, "metrics": metrics}, StepTrained)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        return None


# ---- steps


def step_path(directory: Path, step: int) -> Path:
    """Return the path of a step's file in a run directory."""
    return directory / "steps" / f"{step:06d}.safetensors"


def write_batch(path: Path, batch: Batch, **more: Any) -> None:
    """Write a batch atomically. ``more``: further arrays by name. A dtype without a safetensors name is stored as
    bytes, with one more dimension. Raises OSError."""
    arrays: dict[str, Any] = {"ids": batch.ids, "groups": batch.groups, **more}
    if batch.completed_at is not None:
        arrays[COMPLETED_AT] = batch.completed_at
    if batch.version_step_offsets:
        arrays["version_step_offsets"] = np.array(batch.version_step_offsets, np.int64)
    for name, column in batch.columns.items():
        arrays[f"{name}:{column.spec.kind}:{dtype_name(column.values.dtype)}"] = column.values
        if column.offsets is not None:
            arrays[f"{name}.offsets"] = column.offsets
    for name, array in arrays.items():
        arrays[name] = array = np.ascontiguousarray(array)
        if not (array.dtype.isnative and array.dtype.name in SAFETENSORS_CODES):
            arrays[name] = array[..., None].view(np.uint8)
    layout = plan({name: (array.dtype.name, array.shape) for name, array in arrays.items()}, metadata={})
    whole = path.with_name(f"{path.name}.part")
    with open(whole, "wb", opener=private_opener) as file:
        file.write(layout.header)
        for name in sorted(arrays, key=layout.offsets.__getitem__):
            file.write(arrays[name].reshape(-1).view(np.uint8).data)
    whole.replace(path)


def read_batch(path: Path, only: tuple[str, ...] | None = None, rows: int | None = None) -> Batch:
    """Read a batch. ``only``: these columns, if present. ``rows``: the first so many, without reading
    the others. Raises OSError, ValueError for a torn file or a foreign format, KeyError."""
    with path.open("rb") as file:
        tensors = read_header(file).tensors
        for name, tensor in tensors.items():
            if tensor.dtype not in SAFETENSORS_CODES:
                raise ValueError(f"array {name!r} is of dtype {tensor.dtype}")

        def _first(name: str, count: int | None) -> np.ndarray[Any, Any]:
            """Read the first ``count`` elements of an array's first dimension; None: all."""
            tensor = tensors[name]
            shape = tensor.shape if count is None else (min(count, tensor.shape[0]), *tensor.shape[1:])
            file.seek(tensor.start)
            dtype = carrier(tensor.dtype)
            return np.fromfile(file, np.uint8, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

        columns: dict[str, Column] = {}
        for key in tensors:
            name, kind, dtype = key.rsplit(":", 2) if ":" in key else ("", "", "")
            if not kind or (only is not None and name not in only):
                continue
            offsets, count = None, rows
            if f"{name}.offsets" in tensors:
                offsets = _first(f"{name}.offsets", None if rows is None else rows + 1)
                count = None if rows is None else int(offsets[-1])
            values = _first(key, count)
            if values.dtype != carrier(dtype):  # bfloat16 and others, stored as bytes
                values = values.view(carrier(dtype))[..., 0]
            spec = ColumnSpec(kind, dtype, values.shape[1:])  # type: ignore[arg-type]
            columns[name] = Column(spec, values, offsets)
        completed_at = _first(COMPLETED_AT, rows) if COMPLETED_AT in tensors else None
        shifts = _first("version_step_offsets", None).tolist() if "version_step_offsets" in tensors else ()
        ids, groups, shifts = _first("ids", rows), _first("groups", rows), tuple(map(tuple, shifts))
        return Batch(ids, groups, columns, completed_at=completed_at, version_step_offsets=shifts)


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


def sample_rows(path: Path) -> list[dict[str, str | float]]:
    """Return the first rows of a step file: texts, scalar columns, and token ids as a text. Columns
    of other shapes and floats of each token are left out. Raises OSError, ValueError, KeyError."""
    first = read_batch(path, rows=SAMPLE_ROWS)
    columns = {"group": first.groups.tolist(), **{name: found for name in first if (found := _shown(first, name))}}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _shown(batch: Batch, name: str) -> list[str] | list[float]:
    spec = batch.spec(name)
    if spec.kind == "text":
        return [_cut(text) for text in batch.texts(name)]
    if spec.kind == "fixed" and spec.measurable:
        return [float(value) for value in batch.array(name)]
    if spec.kind == "ragged" and not spec.shape and batch.ragged(name).values.dtype.kind in "iu":
        return [_cut(" ".join(map(str, row.tolist()))) for row in batch.ragged(name)]
    return []


def _cut(text: str) -> str:
    return text if len(text) <= SAMPLE_CHARACTERS else text[: SAMPLE_CHARACTERS - 1] + "…"
