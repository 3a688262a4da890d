"""Measures: numbers that samplers choose by, read from payload once, when a column is written.

They are recorded, so a replay needs no payload.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from ..ledger import Ledger
from ..ledger import commands as cmd
from ..types import Column, ColumnSpec
from ..types.blocks import Block, BlockSlices
from ..types.columns import unpack
from .block_index import BlockIndex
from .blocks import BLOCK, RUN
from .reader import ColumnReader

CHUNK_ROWS = 4096  # rows read at a time


def measure(column: Column) -> npt.NDArray[np.float64]:
    """Return a number for each row: the length of a ragged value, or a scalar's value."""
    if column.offsets is not None:
        return np.diff(column.offsets).astype(np.float64)
    return np.asarray(unpack(column)).astype(np.float64)


class Measures:
    """Adds measures to commands. Not thread-safe: only the server's thread uses it."""

    def __init__(self, ledger: Ledger, index: BlockIndex, reader: ColumnReader) -> None:
        self._ledger, self._index, self._reader = ledger, index, reader

    def fill(self, command: cmd.AnyCommand, block: Block | None) -> cmd.AnyCommand:
        """Return the command with its measures. Measures sent by a client are dropped."""
        if isinstance(command, (cmd.AddRows, cmd.Complete)):
            known = self._ledger.state.rows.measures
            names = [n for n, s in command.columns.items() if n in known and s.measurable] if known else []
            if block is not None and names:
                measures = {name: self._of_block(block, name, command.columns[name]) for name in names}
                return msgspec.structs.replace(command, measures=measures)
            return msgspec.structs.replace(command, measures={}) if command.measures else command
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

        def read() -> bytes:
            """Read the measures of all rows with the column."""
            parts = [there[start : start + CHUNK_ROWS] for start in range(0, len(there), CHUNK_ROWS)]
            return b"".join(self._read(self._index.locate(ids, (name,))[0], name, known) for ids in parts)

        return msgspec.structs.replace(command, measures=ledger.state.context.log.record_or_raise(read))
