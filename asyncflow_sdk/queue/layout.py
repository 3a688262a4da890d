"""Layout: what the headers of blocks say of their columns, checked against what they lie in and against the schema.

Shared memory can be written by anyone of this user: a header that is damaged gives SchemaError, never an array over
what does not belong to its block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import LeaseLost, SchemaError
from ..memory import HEADER_BYTES
from ..types import ColumnSpec, carrier

ROWS, COLUMNS, NBYTES, TABLE = range(HEADER_BYTES // 8, HEADER_BYTES // 8 + 4)
"""BlockIndex in a header, in words of 8 bytes; the table has three for each column."""
MOST_BYTES = 1 << 48
Ints = npt.NDArray[np.int64]


class Kind(NamedTuple):
    """A column as its bytes: ``width`` is that of a row (fixed) or of an element (ragged)."""

    name: str
    spec: ColumnSpec
    dtype: np.dtype[Any]
    width: int
    ragged: bool


@functools.lru_cache(4096)
def kind_of(name: str, spec: ColumnSpec) -> Kind:
    """What a column should be. Raises SchemaError for a shape or dtype that cannot be."""
    dtype = carrier(spec.dtype)
    width = dtype.itemsize
    for length in spec.shape:
        width *= length
    if min(spec.shape, default=0) < 0 or width > MOST_BYTES:
        raise SchemaError(f"column {name!r} cannot have the shape {spec.shape}")
    return Kind(name, spec, dtype, width, spec.kind != "fixed")


def _wrong(wanted: list[Kind], table: Ints, rows: Ints, nbytes: Ints, body: Ints) -> npt.NDArray[np.bool_]:
    """Which columns of which blocks do not lie in their block: (n, columns). No sum can overflow: what is compared
    first bounds what is added later."""
    values, size, offsets = table[:, :, 0], table[:, :, 1], table[:, :, 2]
    ragged = np.array([kind.ragged for kind in wanted])
    width = np.array([kind.width for kind in wanted])
    rows, nbytes, body = rows[:, None], nbytes[:, None], body[:, None]
    bad = (values < body) | (values > nbytes) | (values & 63 != 0) | (size < 0) | (size > nbytes - values)
    fixed = (size != rows * width) | (offsets != -1)
    packed = (offsets < body) | (offsets > nbytes) | (offsets & 63 != 0) | (8 * (rows + 1) > nbytes - offsets)
    found: npt.NDArray[np.bool_] = bad | np.where(ragged, packed, fixed)
    return found


def damaged(name: str) -> SchemaError:
    return SchemaError(
        f"column {name!r}: its block in shared memory is damaged: it does not hold what its header says. Something"
        " else wrote there; these rows cannot be read"
    )


def tables(words: Ints, blocks: Ints, fields: Ints, wanted: list[Kind]) -> Ints:
    """Where the columns of the n blocks of a BlockSlices lie in ``words``, a whole segment: int64 (n, columns, 3), each (values, nbytes,
    offsets); of ``fields`` (n or 1, columns). Raises SchemaError, LeaseLost."""
    _, starts, serials, rows, nbytes, _ = blocks.T
    first = starts // 8
    if (starts % 64).any() or first.min() < 0 or (first + TABLE > len(words)).any():
        raise damaged(wanted[0].name)
    check_serials(words, starts, serials)
    head = words.take(first[:, None] + np.arange(ROWS, TABLE))
    columns = head[:, 1]
    bad = (head[:, 0] != rows) | (head[:, 2] != nbytes) | (columns <= 0) | (columns > nbytes // 24)
    body = 8 * TABLE + 24 * np.where(bad, 0, columns)
    bad |= (body > nbytes) | (nbytes > 8 * len(words) - starts)
    if bad.any() or fields.min() < 0 or (fields >= columns[:, None]).any():
        raise damaged(wanted[0].name)
    table: Ints = words.take((first[:, None] + TABLE + 3 * fields)[:, :, None] + np.arange(3))
    found = _wrong(wanted, table, rows, nbytes, body).any(axis=0)
    if found.any():
        raise damaged(wanted[int(found.argmax())].name)
    return table


def check_serials(words: Ints, starts: Ints, serials: Ints) -> None:
    """Raises LeaseLost unless every block is still there."""
    if (words.take(starts // 8 + 1) != serials).any():
        raise LeaseLost("the rows ended and their memory was used again while this reader was away")
