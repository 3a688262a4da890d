"""SharedStore: columns in shared memory. A write is the only copy between producer and consumer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from ...interfaces.store import PayloadStore, StoredBlock
from ...memory import HEADER_BYTES, Allocation, Arena, Mapper
from ...types import Column, ColumnSpec
from ...types.blocks import Block, BlockSlices
from ...types.ragged import Array
from . import blocks
from .reader import ColumnReader


class SharedStore(PayloadStore):
    """Writes segments of one session into ``directory``, under ``prefix``, and reads all segments
    there. See ``PayloadStore``."""

    def __init__(self, directory: Path, prefix: str, *, synced: bool = False) -> None:
        self.synced = synced
        self._arena = Arena(directory, prefix)
        self._mapper = Mapper(directory)
        self._reader = ColumnReader(self._mapper)

    def write(self, columns: Mapping[str, Column], *, copy: bool, grow: bool = True) -> StoredBlock:
        block, space = blocks.write(self._arena, columns, grow=grow)
        if self.synced:
            self._arena.sync(space)
        return StoredBlock(block, None, space)

    def rewrite(self, stored: StoredBlock) -> StoredBlock | None:
        """See ``PayloadStore.rewrite``. This process still maps the lost memory."""
        block, old = stored.block, stored.space
        assert block is not None
        if not self._arena.is_lost(old):
            return None  # the server cannot see this client's memory
        return self.copy_of(block, old)

    def copy_of(self, block: Block, old: Allocation) -> StoredBlock:
        """Write a block that any store of this process has written. Raises MemoryFull."""
        space = self._arena.allocate(old.nbytes)
        space.write(HEADER_BYTES, old.memory[HEADER_BYTES:])
        if self.synced:
            self._arena.sync(space)
        block = msgspec.structs.replace(block, segment=space.segment, start=space.start, serial=space.serial)
        return StoredBlock(block, None, space)

    def discard(self, stored: StoredBlock) -> None:
        self._arena.free([stored.space.serial])

    def free(self, serials: Iterable[int]) -> None:
        self._arena.free(serials)

    def read(self, slices: Sequence[BlockSlices], schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        columns: dict[str, Column] = {}
        for part in slices:
            columns.update(self._reader.read(part, schema))
        return columns

    def writable(self, slices: BlockSlices, name: str, schema: Mapping[str, ColumnSpec]) -> Array | None:
        return self._reader.writable(slices, name, schema)

    def close(self) -> None:
        self._arena.close(unlink=False)
        self._mapper.close()
