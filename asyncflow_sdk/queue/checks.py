"""Checks of calls: arguments in the client before a call is sent, payload in the server before it
is executed.

The server's checks keep a faulty client from creating unreadable rows, or from naming memory of
others. The payload's bytes are checked when they are read.
"""

from __future__ import annotations

import functools
import os
import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..errors import PayloadLost, SchemaError
from ..ledger import Ledger
from ..ledger import commands as cmd
from ..types import ColumnSpec, check_column_name
from ..types.blocks import Block
from .stores.blocks import ALIGN, kind_of
from .stores.homes import SERVER_MEMORY, home_of, segment_prefix

_LARGEST = 1 << 63
_EXACT: dict[Any, tuple[type, ...]] = {
    int: (int,), float: (float, int), str: (str,), bool: (bool,), bytes: (bytes,), type(None): (type(None),),
}  # fmt: skip


def check_arguments(command: msgspec.Struct) -> None:
    """Raises TypeError if an argument of a command has the wrong type; SchemaError for NaN, for
    integers beyond 64 bits, and for text with invalid Unicode."""
    for name, allowed in _fields(type(command)):
        value = getattr(command, name)
        kind = type(value)
        if kind in allowed:
            if kind is int and not -_LARGEST <= value < _LARGEST:
                raise SchemaError(f"{name} is beyond 64 bits: the largest number is 2**63 - 1")
            if kind is float and value != value:
                raise SchemaError(f"{name} is not a number")
            if kind is str and not value.isascii():
                _check_text(name, value)
        elif not (isinstance(value, np.generic) and type(value.item()) in allowed):
            words = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
            raise TypeError(f"{name} must be {words}, not {type(value).__name__}: {value!r:.100}")


def check_columns(what: str, names: Any) -> tuple[str, ...]:
    """Return column names as a tuple. Raises SchemaError for a single string or an invalid name."""
    found = _listed(what, names)
    for name in found:
        try:
            check_column_name(name)
        except SchemaError as error:
            raise SchemaError(f"{what}: {error}") from None
    return found


def check_names(what: str, names: Any, *, empty: bool = False) -> tuple[str, ...]:
    """Like ``check_columns``, for other names. ``empty``: allow ""."""
    found = _listed(what, names)
    for name in found:
        if name or not empty:
            check_name(what, name)
    return found


def _listed(what: str, names: Any) -> tuple[Any, ...]:
    if isinstance(names, str):
        raise SchemaError(f"{what} is a list of names; {names!r} is one text: write {re.split(', *', names)}")
    try:
        return tuple(names)
    except TypeError:
        raise SchemaError(f"{what} is a list of names, not {names!r:.100}") from None


def check_name(what: str, name: Any) -> None:
    """Raises SchemaError unless ``name`` is text of 1 to 1,000 characters."""
    if not isinstance(name, str) or not name or len(name) > 1000:
        raise SchemaError(f"{what}: a name is text of 1 to 1,000 characters, not {name!r:.100}")
    if not name.isascii():
        _check_text(what, name)


def _check_text(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SchemaError(f"{name}: text that is not valid Unicode: {error}") from None


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, tuple[type, ...]], ...]:
    """Return the plain fields of a command with their allowed types."""
    found = []
    for field in msgspec.structs.fields(kind):
        is_union = typing.get_origin(field.type) in (typing.Union, types.UnionType)
        parts = typing.get_args(field.type) if is_union else (field.type,)
        if all(part in _EXACT for part in parts):
            found.append((field.name, tuple(kind for part in parts for kind in _EXACT[part])))
    return tuple(found)


MAX_PUT_ROWS = 1 << 22
"""Most rows of one put. The ledger keeps about 100 bytes for each row, whatever its payload."""


def owns(session: int, segment: str) -> bool:
    """Return True if a session writes rows into this segment, in any home."""
    return segment.startswith(segment_prefix(home_of(segment), session)) and "/" not in segment


def check_call(ledger: Ledger, directory: Path, session: int, command: cmd.AnyCommand) -> None:
    """Check the location of a call's payload. Raises SchemaError, PayloadLost."""
    if not isinstance(command, (cmd.AddRows, cmd.Complete)):
        return
    block = command.block
    if (block is None) != (not command.columns):
        raise SchemaError("a call has columns without payload, or payload without columns")
    if isinstance(command, cmd.AddRows) and command.groups * command.group_size > MAX_PUT_ROWS:
        raise SchemaError(
            f"{command.groups} groups of {command.group_size} rows exceed the largest put, {MAX_PUT_ROWS:,} rows;"
            " put fewer at a time"
        )
    if block is None:
        return
    _check_block(block, command.columns)
    where, owned = home_of(block.segment), owns(session, block.segment)
    if owned and where != SERVER_MEMORY and not ledger.state.homes.is_live(*where):
        raise PayloadLost(
            f"epoch {where.epoch} of home {where.home} is lost, with segment {block.segment}; the call had no effect"
        )
    size = _size(f"{directory}/{block.segment}") if owned and where == SERVER_MEMORY else 0
    if size is None:
        raise PayloadLost(
            f"segment {block.segment} is missing in {directory}: it was removed; the call had no effect"
        )
    if not owned or (where == SERVER_MEMORY and block.start + block.nbytes > size):
        raise SchemaError(f"this session has no such payload in segment {block.segment!r}")


def _check_block(block: Block, columns: cmd.Columns) -> None:
    names = tuple(columns)
    if block.columns != names and sorted(block.columns) != sorted(names):
        raise SchemaError("the block's columns differ from the command's columns")
    if (
        not 0 < block.rows < 1 << 31
        or block.start < 0
        or block.start % ALIGN
        or block.nbytes % ALIGN
        or not 0 < block.serial < 1 << 63
    ):
        raise SchemaError(f"the payload's location is invalid: {block}")
    row_bytes, extra = _least(names, tuple(columns.values()))
    least = row_bytes * block.rows + extra
    if block.nbytes < least:
        raise SchemaError(f"the payload has {block.nbytes} bytes, but its columns need at least {least}")


@functools.lru_cache(1024)
def _least(names: tuple[str, ...], specs: tuple[ColumnSpec, ...]) -> tuple[int, int]:
    """Return the least bytes of columns: for each row, and in addition. Raises SchemaError."""
    row_bytes = extra = 0
    for name, spec in zip(names, specs, strict=True):
        kind = kind_of(name, spec)
        row_bytes += 8 if kind.ragged else kind.width
        extra += 8 if kind.ragged else 0
    return row_bytes, extra


def _size(path: str) -> int | None:
    """Return a file's size; None if it does not exist, -1 if it cannot be read."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return -1
