"""What all commands and replies begin from, and how row ids travel: packed little-endian int64."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ...types import ColumnSpec
from ...types.reports import Reply as Reply

Ids: TypeAlias = npt.NDArray[np.int64]
Columns: TypeAlias = dict[str, ColumnSpec]


def pack_ids(ids: npt.NDArray[Any]) -> bytes:
    return ids.astype("<i8", copy=False).tobytes()


def unpack_ids(data: bytes) -> Ids:
    return np.frombuffer(data, "<i8")


class Command(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Root of all commands. ``timeout_s``, where there is one: how long to wait before saying why not."""


class Done(Reply, frozen=True, tag="done"):
    """It is so."""
