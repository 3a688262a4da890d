"""Measures: numbers that samplers choose by, read from payload once, when a column is written.

They are recorded, so a replay needs no payload.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, SchemaError
from ..ledger import Ledger
from ..ledger import commands as cmd
from ..types import Column, ColumnSpec
from ..types.blocks import Block, BlockSlices
from ..types.columns import unpack
from .block_index import BlockIndex
from .stores.blocks import BLOCK, RUN
from .stores.homes import SERVER_MEMORY, home_of
from .stores.reader import ColumnReader

CHUNK_ROWS = 4096  # rows read at a time


def measure(column: Column) -> npt.NDArray[np.float64]:
    """Return a number for each row: the length of a ragged value, or a scalar's value."""
    if column.offsets is not None:
        return np.diff(column.offsets).astype(np.float64)
    return np.asarray(unpack(column)).astype(np.float64)


def measures_of(columns: Mapping[str, Column]) -> dict[str, bytes]:
    """Return the measures of all columns that have one: float64 for each row."""
    return {name: measure(column).tobytes() for name, column in columns.items() if column.spec.measurable}


def _checked(sent: bytes, name: str, rows: int) -> bytes:
    """Return the measures sent for a column. Raises SchemaError."""
    if len(sent) != 8 * rows:
        raise SchemaError(f"column {name!r} lies on another host, and {rows} measures must be sent with it")
    return sent


class Measures:
    """Adds measures to commands. Not thread-safe: only the server's thread uses it."""

    def __init__(self, ledger: Ledger, index: BlockIndex, reader: ColumnReader) -> None:
        self._ledger, self._index, self._reader = ledger, index, reader

    def fill(self, command: cmd.AnyCommand) -> cmd.AnyCommand:
        """Return the command with its bytes and its measures. Those sent by a client are dropped, except of a
        block in another home: its writer has measured it. Raises SchemaError."""
        if isinstance(command, (cmd.AddRows, cmd.Complete)):
            known = self._ledger.state.rows.measures
            names = [n for n, s in command.columns.items() if n in known and s.measurable] if known else []
            block, measures = command.block, dict[str, bytes]()
            if block is not None and names:
                if home_of(block.segment) != SERVER_MEMORY:
                    measures = {name: _checked(command.measures.get(name, b""), name, block.rows) for name in names}
                else:
                    measures = {name: self._of_block(block, name, command.columns[name]) for name in names}
            return msgspec.structs.replace(command, measures=measures, nbytes=0 if block is None else block.nbytes)
        if isinstance(command, cmd.Declare):
            return self._measure_existing_rows(command)
        return command

    def _of_block(self, block: Block, name: str, spec: ColumnSpec) -> bytes:
        whole = BlockSlices(
            (name,),
            RUN.pack(block.columns.index(name)),
            (block.segment,),
            BLOCK.pack(0, block.start, block.serial, block.rows, block.nbytes, 1),
            RUN.pack(0),
            RUN.pack(block.rows),
        )
        return self._ledger.state.context.log.record_or_raise(lambda: self._read(whole, name, spec))

    def _read(self, slices: BlockSlices, name: str, spec: ColumnSpec) -> bytes:
        return measure(self._reader.read(slices, {name: spec})[name]).tobytes()

    def _measure_existing_rows(self, command: cmd.Declare) -> cmd.Declare:
        ledger, spec = self._ledger, command.task
        name = ledger.samplers.describe(spec).measure if spec.name not in ledger.state.tasks else ""
        known = ledger.state.columns.specs.get(name)
        if known is None or not known.measurable or name in ledger.state.rows.measures:
            return msgspec.structs.replace(command, measures=b"") if command.measures else command
        there = ledger.state.columns.having(name)
        if any(
            home_of(segment) != SERVER_MEMORY
            for part in (self._index.locate(there, (name,)) if len(there) else ())
            for segment in part.segments
        ):
            raise ConfigError(
                f"task {spec.name!r} chooses rows by column {name!r}, and some rows have it on other hosts: declare the"
                " task before rows are put"
            )

        def read() -> bytes:
            """Read the measures of all rows with the column."""
            parts = [there[start : start + CHUNK_ROWS] for start in range(0, len(there), CHUNK_ROWS)]
            return b"".join(self._read(self._index.locate(ids, (name,))[0], name, known) for ids in parts)

        return msgspec.structs.replace(command, measures=ledger.state.context.log.record_or_raise(read))
