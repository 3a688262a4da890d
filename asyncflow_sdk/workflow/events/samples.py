"""Samples: the first rows of a recorded step, as plain values to show to a person.

sample_rows(step_path(directory, 17))     # [{"group": 3, "prompt": "2 + 2 =", "response": " 4", "reward": 1.0}, ...]
"""

from __future__ import annotations

from pathlib import Path

from ...types import Batch
from .step_files import read_batch

MOST_ROWS = 8
MOST_CHARACTERS = 2_000


def sample_rows(path: Path) -> list[dict[str, str | float]]:
    """Return the first rows of a step file: texts, scalar columns, and token ids as a text. Columns
    of other shapes and floats of each token are left out. Raises OSError, ValueError, KeyError."""
    first = read_batch(path, rows=MOST_ROWS)
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
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
