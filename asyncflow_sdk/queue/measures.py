"""Measures: the numbers that samplers choose by, read from payload once, when a column is written.

What is read is noted, so that a replay needs no payload.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from ..ledger import Ledger
from ..ledger import commands as cmd
from ..ledger.commands import Ids
from ..types import Column, ColumnSpec
from ..types.columns import unpack
from .blocks import Block, Located
from .places import Places
from .reader import Reader

ROWS = 4096  # read at a time, where rows were put before anybody measured them


def measure(column: Column) -> npt.NDArray[np.float64]:
    """A number a row: the length of what varies in length, the value of what is one number."""
    if column.offsets is not None:
        return np.diff(column.offsets).astype(np.float64)
    return np.asarray(unpack(column)).astype(np.float64)


class Measures:
    """Fills in what a command brings for samplers. Not thread-safe: the server's thread owns it."""

    def __init__(self, ledger: Ledger, places: Places, reader: Reader) -> None:
        self._ledger, self._places, self._reader = ledger, places, reader

    def fill(self, command: cmd.AnyCommand, block: Block | None) -> cmd.AnyCommand:
        """The command with its measures. Never takes them from a client."""
        if isinstance(command, (cmd.AddRows, cmd.Complete)):
            known = self._ledger.state.rows.measures
            names = [n for n, s in command.columns.items() if n in known and s.measurable] if known else []
            if block is not None and names:
                measures = {name: self._of_block(block, name, command.columns[name]) for name in names}
                return msgspec.structs.replace(command, measures=measures)
            return msgspec.structs.replace(command, measures={}) if command.measures else command
        if isinstance(command, cmd.Declare):
            return self._declared(command)
        return command

    def _of_block(self, block: Block, name: str, spec: ColumnSpec) -> bytes:
        whole = Located(
            (name,),
            np.int32(block.columns.index(name)).tobytes(),
            (block.segment,),
            np.array([0, block.start, block.serial, block.rows, block.nbytes, 1], np.int64).tobytes(),
            np.int32(0).tobytes(),
            np.int32(block.rows).tobytes(),
        )
        return self._ledger.state.context.log.record_or_raise(lambda: self._read(whole, name, spec))

    def _read(self, located: Located, name: str, spec: ColumnSpec) -> bytes:
        return measure(self._reader.read(located, {name: spec})[name]).tobytes()

    def _of_rows(self, ids: Ids, name: str, spec: ColumnSpec) -> bytes:
        (located,) = self._places.locate(ids, (name,))
        return self._read(located, name, spec)

    def _declared(self, command: cmd.Declare) -> cmd.Declare:
        """A sampler that comes after rows: what they have is read now."""
        ledger, spec = self._ledger, command.task
        name = ledger.samplers.describe(spec).measure if spec.name not in ledger.state.tasks else ""
        known = ledger.state.columns.specs.get(name)
        if known is None or not known.measurable or name in ledger.state.rows.measures:
            return msgspec.structs.replace(command, measures=b"") if command.measures else command
        there = ledger.state.columns.having(name)

        def read() -> bytes:
            parts = [there[start : start + ROWS] for start in range(0, len(there), ROWS)]
            return b"".join(self._of_rows(ids, name, known) for ids in parts)

        return msgspec.structs.replace(command, measures=ledger.state.context.log.record_or_raise(read))
