"""FetchedBlocks: the parts of blocks that some rows need, and their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from asyncflow_sdk.queue.stores.blocks import MOST_BYTES, RUN, TABLE, Ints, check_serials, damaged, kind_of, tables
from asyncflow_sdk.queue.stores.reader import copy_runs, one_run, plan_of, runs_of, take_words
from asyncflow_sdk.types import Column, ColumnSpec
from asyncflow_sdk.types.blocks import BlockSlices


class FetchedBlocks:
    """Blocks of slices in memory of this process, filled range by range. ``memory``: one uint8 array for
    each block, of its size."""

    def __init__(
        self, slices: BlockSlices, schema: Mapping[str, ColumnSpec], memory: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        self._slices, self._schema, self._memory = slices, schema, memory
        self._kinds = [kind_of(name, schema[name]) for name in slices.columns]
        self._blocks = np.frombuffer(slices.blocks, np.int64).reshape(-1, 6).copy()
        self._blocks[:, 0], self._blocks[:, 1] = np.arange(len(self._blocks)), 0
        self._fields = np.frombuffer(slices.fields, np.int32).astype(np.int64).reshape(-1, len(self._kinds))

    def header_bytes(self) -> int:
        """Return the bytes of a header with the table of the wanted columns."""
        return 8 * TABLE + 24 * (int(self._fields.max()) + 1)

    def columns(self) -> dict[str, Column]:
        """Return the columns: views of one run of entries, else copies. Raises LeaseLost, SchemaError."""
        self._check_serials()
        if len(self._slices.counts) == RUN.size:
            self._memory[0].flags.writeable = False
            plan = plan_of(self._slices.columns, self._fields[0].tolist(), self._schema)
            _, _, _, rows, nbytes, _ = self._blocks[0].tolist()
            (first,), (count,) = RUN.unpack(self._slices.entries), RUN.unpack(self._slices.counts)
            return one_run(self._memory[0], rows, nbytes, first, count, plan)
        return copy_runs(self._memory, runs_of(self._slices, self._blocks, self._table()), self._kinds, MOST_BYTES)

    def ranges(self, *, values: bool) -> list[list[tuple[int, int]]]:
        """Return for each block the (start, stop) of the bytes that its rows need, once its header is there:
        offsets and fixed columns; with ``values``, those of the ragged columns, once their offsets are
        there. Raises LeaseLost, SchemaError."""
        self._check_serials()
        runs = runs_of(self._slices, self._blocks, self._table())
        out: list[list[tuple[int, int]]] = [[] for _ in self._memory]
        for c, kind in enumerate(self._kinds):
            first, rows = runs.entry, runs.length
            if not kind.ragged:
                start, stop = runs.values[c] + first * kind.width, runs.values[c] + (first + rows) * kind.width
            elif not values:
                start, stop = runs.offsets[c] + 8 * first, runs.offsets[c] + 8 * (first + rows + 1)
            else:
                at = runs.offsets[c] // 8
                low = take_words(self._memory, np.int64, runs.segment, at + first)
                high = take_words(self._memory, np.int64, runs.segment, at + first + rows)
                most = runs.sizes[c] // kind.width if kind.width else MOST_BYTES
                if ((low < 0) | (high < low) | (high > most)).any():
                    raise damaged(kind.name)
                start, stop = runs.values[c] + low * kind.width, runs.values[c] + high * kind.width
            for number, *each in zip(runs.segment.tolist(), start.tolist(), stop.tolist(), strict=True):
                out[number].append((each[0], each[1]))
        return out

    def _check_serials(self) -> None:
        for memory, block in zip(self._memory, self._blocks, strict=True):
            check_serials(memory.view(np.int64), block[1:2], block[2:3])

    def _table(self) -> Ints:
        out = np.empty((len(self._memory), len(self._kinds), 3), np.int64)
        for number, memory in enumerate(self._memory):
            mine = slice(number, number + 1)
            fields = self._fields[mine] if len(self._fields) > 1 else self._fields
            out[mine] = tables(memory.view(np.int64), self._blocks[mine], fields, self._kinds)
        return out
