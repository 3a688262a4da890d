"""Stores of columns in the server's memory: SharedStore maps it, InlineStore sends columns beside calls;
and ``make_store``: the store of a connection, by its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...errors import AsyncFlowError, ConfigError, PluginError, ProtocolError
from ...interfaces.store import PayloadStore, StoreContext, StoredBlock
from ...memory import HEADER_BYTES, Allocation, Arena, Mapper
from ...plugins import registry
from ...types import Column, ColumnSpec
from ...types.blocks import Block, BlockImage, BlockSlices
from ...types.config import LOCAL
from ...types.ragged import Array
from . import blocks
from .homes import SERVER_MEMORY, segment_prefix
from .reader import ColumnReader


class SharedStore(PayloadStore):
    """Columns in shared memory: a write is the only copy between producer and consumer. Writes segments of
    one session into ``directory``, under ``prefix``, and reads all segments there. See ``PayloadStore``."""

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
        """See ``PayloadStore.rewrite``. This process still maps the lost memory. None also if the
        server cannot see this client's memory."""
        assert stored.block is not None
        return self.copy_of(stored.block, stored.space) if self._arena.is_lost(stored.space) else None

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
            columns |= self._reader.read(part, schema)
        return columns

    def writable(self, slices: BlockSlices, name: str, schema: Mapping[str, ColumnSpec]) -> Array | None:
        return self._reader.writable(slices, name, schema)

    def close(self) -> None:
        self._arena.close(unlink=False)
        self._mapper.close()


class InlineStore(PayloadStore):
    """Columns sent beside each call, as blocks; the server stores them in its own segments. For a client
    on another host, or in a container with its own /dev/shm. ``check_size``: raises ProtocolError for a
    call of too many bytes. See ``PayloadStore``."""

    inline = True

    def __init__(self, check_size: Callable[[int], None]) -> None:
        self._check_size = check_size

    def write(self, columns: Mapping[str, Column], *, copy: bool, grow: bool = True) -> StoredBlock:
        self._check_size(sum(column.values.nbytes for column in columns.values()))
        return StoredBlock(None, blocks.to_image(columns, copy=copy))

    def copy_of(self, block: Block, old: Allocation) -> StoredBlock:
        """Return a block that another store of this process has written as an image."""
        self._check_size(block.nbytes)
        parts = [np.zeros(HEADER_BYTES, np.uint8), old.memory[HEADER_BYTES:]]
        return StoredBlock(None, BlockImage(block.rows, block.nbytes, parts))

    def rewrite(self, stored: StoredBlock) -> StoredBlock | None:
        return stored

    def discard(self, stored: StoredBlock) -> None:
        """Do nothing: an unsent image is memory of this process."""

    def free(self, serials: Iterable[int]) -> None:
        """Do nothing: the server frees its blocks itself."""

    def read(self, slices: Sequence[BlockSlices], schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        """See ``PayloadStore.read``. Columns come beside the answers; none are anywhere else."""
        if slices:
            raise ProtocolError("the server answered with locations in memory that this client cannot see")
        return {}

    def close(self) -> None:
        """Do nothing: the columns read belong to their readers."""


def local_store(context: StoreContext) -> SharedStore | InlineStore:
    """Return the store of runs with one home, the server's memory: mapped on its host, and reached
    over its socket from others."""
    if context.rows is None:
        return InlineStore(context.check_size)
    return SharedStore(context.rows, segment_prefix(SERVER_MEMORY, context.session), synced=context.synced)


def make_store(name: str, options: Mapping[str, Any], context: StoreContext) -> PayloadStore:
    """Create the store of a connection, from the plugins. Raises PluginError, ConfigError."""
    if name == LOCAL:  # discovering plugins takes longer than connecting
        return local_store(context)
    factory = registry().get("store", name).load()
    try:
        made = factory(context, **options)
    except AsyncFlowError:
        raise
    except Exception as error:
        text = f"store {name!r} cannot be created with {dict(options)}: {type(error).__name__}: {error}"
        raise ConfigError(text) from error
    if not isinstance(made, PayloadStore):
        raise PluginError(f"store {name!r} is a {type(made).__name__}, not a {PayloadStore.__name__}")
    return made
