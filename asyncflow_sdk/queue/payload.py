"""Payload of clients that do not share memory with the server: it travels as a block, laid out as in shared memory.

So the server receives a put into the memory where its rows stay, and a client reads what it leased as it would read a
block. The 16 bytes at the start of a block that are the arena's are zero on the way, and are not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import LeaseLost, SchemaError
from ..memory import HEADER_BYTES
from ..types import Column, ColumnSpec
from .blocks import ALIGN, arrange
from .reader import read_block

Bytes = npt.NDArray[np.uint8]
_MOST_ROWS = 1 << 31


@dataclass(frozen=True)
class BlockImage:
    """The bytes of a block of ``rows`` entries: contiguous buffers, one after another."""

    rows: int
    nbytes: int
    parts: list[Bytes]


def to_image(columns: Mapping[str, Column], *, copy: bool = False) -> BlockImage:
    """Columns as a block. It refers to their memory, unless ``copy``."""
    rows, nbytes, header, arrays = arrange(columns)
    parts = [np.frombuffer(bytes(HEADER_BYTES) + header, np.uint8), _PADDING[: -(len(header) + HEADER_BYTES) % ALIGN]]
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts += (flat.copy() if copy else flat, _PADDING[: -flat.nbytes % ALIGN])
    return BlockImage(rows, nbytes, [part for part in parts if part.nbytes])


def from_image(memory: Bytes, rows: int, specs: Mapping[str, ColumnSpec]) -> dict[str, Column]:
    """Columns over the memory of a block. Raises SchemaError unless it holds ``rows`` entries of exactly these columns."""
    if not specs or not 0 < rows < _MOST_ROWS:
        raise SchemaError(f"the payload is of {rows} rows and {len(specs)} columns; it must have some of both")
    try:
        columns = read_block(memory, rows, specs)
    except LeaseLost as error:
        raise SchemaError(str(error)) from None
    for name, column in columns.items():
        offsets = column.offsets
        if offsets is not None and (offsets[1:] < offsets[:-1]).any():
            raise SchemaError(f"column {name!r} has offsets that do not rise")
    return columns


_PADDING: Any = np.zeros(ALIGN, np.uint8)
