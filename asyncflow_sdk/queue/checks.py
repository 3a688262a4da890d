"""Checks: what a client says of its payload fits its command, before anything is done. The bytes are checked when read.

Without them a client that is broken could make rows that nobody can read, or name memory that is not its own.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np

from ..errors import PayloadLost, SchemaError
from ..ledger import Ledger
from ..ledger import commands as cmd
from ..ledger.commands import Ids
from ..types import ColumnSpec, carrier
from .blocks import ALIGN, Block

MAX_PUT_ROWS = 1 << 22
"""Rows of one put: the ledger keeps about a hundred bytes for each, however little was sent."""


def owns(session: int, segment: str) -> bool:
    """Whether a segment is one that a session writes rows into."""
    return segment.startswith(f"s{session}-") and "/" not in segment


def check_call(
    ledger: Ledger, directory: Path, session: int, command: cmd.AnyCommand, block: Block | None
) -> tuple[Ids | None, int]:
    """Raises SchemaError, PayloadLost. Returns the rows that a completion names, in the order of its block, and their step."""
    if not isinstance(command, (cmd.AddRows, cmd.Complete)):
        if block is not None:
            raise SchemaError("this command takes no payload")
        return None, -1
    if (block is None) != (not command.columns):
        raise SchemaError("columns and payload belong together")
    if block is not None:
        _check_block(block, command.columns)
        size = _size(f"{directory}/{block.segment}") if owns(session, block.segment) else 0
        if size is None:
            raise PayloadLost(
                f"segment {block.segment} is not in {directory}: somebody removed it; nothing of it was stored"
            )
        if block.start + block.nbytes > size:
            raise SchemaError(f"segment {block.segment!r} holds no such payload of this session")
    if isinstance(command, cmd.AddRows):
        if block is not None and block.rows != command.groups:
            raise SchemaError(f"{command.groups} groups are put with {block.rows} values")
        if command.groups * command.group_size > MAX_PUT_ROWS:
            raise SchemaError(
                f"{command.groups} groups of {command.group_size} rows are more than one put takes, {MAX_PUT_ROWS:,};"
                " put fewer at a time"
            )
        return None, -1
    return completed(ledger, command, block)


def completed(ledger: Ledger, command: cmd.AnyCommand, block: Block | None) -> tuple[Ids | None, int]:
    """The rows that a completion names, and their step."""
    if not isinstance(command, cmd.Complete):
        return None, -1
    lease = ledger.state.leases.by_token.get(command.token)
    if lease is None:
        return None, -1  # the ledger refuses it
    if lease.shards is not None and not 0 <= command.rank < lease.shards.size:
        return None, -1  # the ledger refuses it
    ids = lease.part(command.rank)
    if command.index is not None:
        at = np.frombuffer(command.index[: len(command.index) // 4 * 4], "<i4")
        if len(at) and not 0 <= at.min() <= at.max() < len(ids):
            return None, -1  # the ledger refuses it
        ids = ids[at]
    if block is not None and block.rows != len(ids):
        raise SchemaError(f"{len(ids)} rows are completed with {block.rows} values")
    return ids, lease.step


def _check_block(block: Block, columns: cmd.Columns) -> None:
    names = tuple(columns)
    if block.columns != names and sorted(block.columns) != sorted(names):
        raise SchemaError("the payload is not that of the columns named")
    if (
        not 0 < block.rows < 1 << 31
        or block.start < 0
        or block.start % ALIGN
        or block.nbytes % ALIGN
        or not 0 < block.serial < 1 << 63
    ):
        raise SchemaError(f"the payload lies nowhere: {block}")
    a_row, more = _least(names, tuple(columns.values()))
    least = a_row * block.rows + more
    if block.nbytes < least:
        raise SchemaError(f"the payload has {block.nbytes} bytes, and its columns at least {least}")


@functools.lru_cache(1024)
def _least(names: tuple[str, ...], specs: tuple[ColumnSpec, ...]) -> tuple[int, int]:
    """The least bytes that such columns take: for each row, and besides. Raises SchemaError for what cannot be."""
    a_row = more = 0
    for name, spec in zip(names, specs, strict=True):
        size = carrier(spec.dtype).itemsize
        for length in spec.shape:
            size *= length
        if min(spec.shape, default=0) < 0:
            raise SchemaError(f"column {name!r} has the shape {spec.shape}")
        a_row += size if spec.kind == "fixed" else 8
        more += 0 if spec.kind == "fixed" else 8
    return a_row, more


def _size(path: str) -> int | None:
    """None: the file is not there."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return -1
