"""Checks of calls: arguments in the client before a call is sent, payload in the server before it is executed.

The server's checks keep a faulty client from creating unreadable rows, or from naming memory of others. The payload's
bytes are checked when they are read.
"""

from __future__ import annotations

import functools
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, PayloadLost, SchemaError
from ..ledger import Ledger
from ..ledger import commands as cmd
from ..types import Column, ColumnSpec, check_column_name
from ..types.blocks import Block, BlockSlices
from ..types.columns import unpack
from .block_index import BlockIndex
from .stores.blocks import ALIGN, BLOCK, RUN, kind_of
from .stores.homes import SERVER_MEMORY, home_of, session_of
from .stores.reader import ColumnReader

_LARGEST = 1 << 63
_EXACT: dict[Any, tuple[type, ...]] = {
    int: (int,), float: (float, int), str: (str,), bool: (bool,), bytes: (bytes,), type(None): (type(None),),
}  # fmt: skip


def check_arguments(command: msgspec.Struct) -> None:
    """Raises TypeError if an argument of a command has the wrong type; SchemaError for NaN, for
    integers beyond 64 bits, and for text with invalid Unicode."""
    values_of, fields = _fields(type(command))
    for value, (name, allowed) in zip(values_of(command), fields, strict=True):
        kind = type(value)
        if kind in allowed:
            if kind is int and not -_LARGEST <= value < _LARGEST:
                raise SchemaError(f"{name} is beyond 64 bits: the largest number is 2**63 - 1")
            if kind is float and value != value:
                raise SchemaError(f"{name} is not a number")
            if kind is str and value and not value.isascii():
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
def _fields(kind: type[msgspec.Struct]) -> tuple[Callable[[Any], Any], tuple[tuple[str, tuple[type, ...]], ...]]:
    """Return a function for the values of a command's plain fields; and these fields with their allowed types."""
    found = []
    for field in msgspec.structs.fields(kind):
        is_union = typing.get_origin(field.type) in (typing.Union, types.UnionType)
        parts = typing.get_args(field.type) if is_union else (field.type,)
        if all(part in _EXACT for part in parts):
            found.append((field.name, tuple(kind for part in parts for kind in _EXACT[part])))
    names = [name for name, _ in found]
    if len(names) < 2:  # an attrgetter of one name gives no tuple
        return lambda command: tuple(getattr(command, name) for name in names), tuple(found)
    return operator.attrgetter(*names), tuple(found)


MAX_PUT_ROWS = 1 << 22
"""Most rows of one put. The ledger keeps about 100 bytes for each row, whatever its payload."""


def check_payload(ledger: Ledger, directory: str, session: int, command: cmd.AddRows | cmd.Complete) -> bytes:
    """Check the location of a call's payload. Raises SchemaError, PayloadLost. The result depends on files;
    to be recorded, it is b""."""
    block, columns = command.block, command.columns
    if (block is None) != (not columns):
        raise SchemaError("a call has columns without payload, or payload without columns")
    if type(command) is cmd.AddRows and command.groups * command.group_size > MAX_PUT_ROWS:
        raise SchemaError(
            f"{command.groups} groups of {command.group_size} rows exceed the largest put, {MAX_PUT_ROWS:,} rows;"
            " put fewer at a time"
        )
    if block is None:
        return b""
    names, nbytes = tuple(columns), block.nbytes
    if block.columns != names and sorted(block.columns) != sorted(names):
        raise SchemaError("the block's columns differ from the command's columns")
    if (
        not 0 < block.rows < 1 << 31
        or not 0 <= block.start < _LARGEST - nbytes
        or block.start % ALIGN
        or nbytes % ALIGN
        or not 0 < block.serial < 1 << 63
    ):
        raise SchemaError(f"the payload's location is invalid: {block}")
    row_bytes, extra = _least(names, tuple(columns.values()))
    if nbytes < (least := row_bytes * block.rows + extra):
        raise SchemaError(f"the payload has {nbytes} bytes, but its columns need at least {least}")
    where, size = home_of(block.segment), _LARGEST
    if session_of(block.segment) != session:
        size = -1
    elif where != SERVER_MEMORY:
        if not ledger.state.homes.is_live(*where):
            raise PayloadLost(
                f"epoch {where.epoch} of home {where.home} is lost, with segment {block.segment}; the call had no effect"
            )
    else:
        try:
            size = os.stat(f"{directory}/{block.segment}").st_size
        except FileNotFoundError:
            raise PayloadLost(
                f"segment {block.segment} is missing in {directory}: it was removed; the call had no effect"
            ) from None
        except (OSError, ValueError):  # unreadable
            size = -1
    if block.start + nbytes > size:
        raise SchemaError(f"this session has no such payload in segment {block.segment!r}")
    return b""


@functools.lru_cache(1024)
def _least(names: tuple[str, ...], specs: tuple[ColumnSpec, ...]) -> tuple[int, int]:
    """Return the least bytes of columns: for each row, and in addition. Raises SchemaError."""
    row_bytes = extra = 0
    for name, spec in zip(names, specs, strict=True):
        kind = kind_of(name, spec)
        row_bytes += 8 if kind.ragged else kind.width
        extra += 8 if kind.ragged else 0
    return row_bytes, extra


# ---- measures: numbers that samplers choose by, read from payload once, when a column is written

CHUNK_ROWS = 4096  # rows read at a time


def measure(column: Column) -> npt.NDArray[np.float64]:
    """Return a number for each row: the length of a ragged value, or a scalar's value."""
    if column.offsets is not None:
        return np.diff(column.offsets).astype(np.float64)
    return np.asarray(unpack(column)).astype(np.float64)


def measures_of(columns: Mapping[str, Column]) -> dict[str, bytes]:
    """Return the measures of all columns that have one: float64 for each row."""
    return {name: measure(column).tobytes() for name, column in columns.items() if column.spec.measurable}


class Measures:
    """Adds measures to commands. Not thread-safe: only the server's thread uses it."""

    def __init__(self, ledger: Ledger, index: BlockIndex, reader: ColumnReader) -> None:
        self._ledger, self._index, self._reader = ledger, index, reader

    def fill(self, command: cmd.AnyCommand) -> cmd.AnyCommand:
        """Return the command with its bytes and its measures. Those sent by a client are dropped, except of a
        block in another home: its writer has measured it. Raises SchemaError."""
        if type(command) is cmd.AddRows or type(command) is cmd.Complete:
            known, block, measures = self._ledger.state.rows.measures, command.block, dict[str, bytes]()
            if known and block is not None:
                for name in [name for name, spec in command.columns.items() if name in known and spec.measurable]:
                    measures[name] = self._of_block(command, block, name)
            nbytes = 0 if block is None else block.nbytes
            if command.nbytes != nbytes or command.measures != measures:
                return msgspec.structs.replace(command, measures=measures, nbytes=nbytes)
        elif type(command) is cmd.Declare:
            return self._measure_existing_rows(command)
        return command

    def _of_block(self, command: cmd.AddRows | cmd.Complete, block: Block, name: str) -> bytes:
        if home_of(block.segment) != SERVER_MEMORY:
            sent = command.measures.get(name, b"")
            if len(sent) != 8 * block.rows:
                raise SchemaError(
                    f"column {name!r} lies on another host, and {block.rows} measures must be sent with it"
                )
            return sent
        place = BLOCK.pack(0, block.start, block.serial, block.rows, block.nbytes, 1)
        at = RUN.pack(block.columns.index(name))
        whole = BlockSlices((name,), at, (block.segment,), place, RUN.pack(0), RUN.pack(block.rows))
        return self._ledger.state.context.log.record_or_raise(lambda: self._read(whole, name, command.columns[name]))

    def _read(self, slices: BlockSlices, name: str, spec: ColumnSpec) -> bytes:
        return measure(self._reader.read(slices, {name: spec})[name]).tobytes()

    def _measure_existing_rows(self, command: cmd.Declare) -> cmd.Declare:
        ledger, spec = self._ledger, command.task
        name = ledger.samplers.describe(spec).measure if spec.name not in ledger.state.tasks else ""
        known = ledger.state.columns.specs.get(name)
        if known is None or not known.measurable or name in ledger.state.rows.measures:
            return msgspec.structs.replace(command, measures=b"") if command.measures else command
        there = ledger.state.columns.having(name)
        slices = self._index.locate(there, (name,))
        if any(home_of(segment) != SERVER_MEMORY for part in slices for segment in part.segments):
            raise ConfigError(
                f"task {spec.name!r} chooses rows by column {name!r}, and some rows have it on other hosts: declare the"
                " task before rows are put"
            )

        parts = [there[start : start + CHUNK_ROWS] for start in range(0, len(there), CHUNK_ROWS)]
        measures = ledger.state.context.log.record_or_raise(
            lambda: b"".join(self._read(self._index.locate(ids, (name,))[0], name, known) for ids in parts)
        )
        return msgspec.structs.replace(command, measures=measures)
