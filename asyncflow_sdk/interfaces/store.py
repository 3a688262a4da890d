"""PayloadStore: where the columns of rows are written and read. The server's ledger knows only
their location.

    stored = store.write({"response": column}, copy=False)      # producer; the call carries stored.block or stored.image
    columns = store.read(answer.slices, answer.schema)          # consumer, any process of the run
    store.free(serials)                                         # producer: the server lists them in a later answer

A store holds bytes and never state: losing one loses rows, and the server counts each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ..types import Column, ColumnSpec
from ..types.blocks import Block, BlockImage, BlockSlices
from ..types.ragged import Array


class StoredBlock(msgspec.Struct, frozen=True):
    """Written columns whose call is not sent yet: ``block``, their location, or ``image``, the bytes
    to send beside the call. ``space``: the store's own handle of a block."""

    block: Block | None = None
    image: BlockImage | None = None
    space: Any = None


class PayloadStore(ABC):
    """The payload of one connection. Thread-safe; unusable in a child made by fork().

    ``inline``: True if the server sends the columns of leased rows beside its answers. ``synced``:
    True if payload is on disk before its call counts.
    """

    inline: bool = False
    synced: bool = False

    @abstractmethod
    def write(self, columns: Mapping[str, Column], *, copy: bool, grow: bool = True) -> StoredBlock:
        """Write packed columns of equal length. On return the block is complete, and on disk if
        ``synced``. ``copy``: the caller may change the columns before the call is sent. ``grow``
        False: raise GrowthNeeded if freed blocks could make room. Raises MemoryFull, ServerLost if
        the memory is gone, ProtocolError if the call would be too large."""

    @abstractmethod
    def rewrite(self, stored: StoredBlock) -> StoredBlock | None:
        """Return the same columns, stored again, for a call that failed with PayloadLost. None if
        the block is still there: a repeated call would fail again. Raises MemoryFull."""

    @abstractmethod
    def discard(self, stored: StoredBlock) -> None:
        """Free a block whose call was never sent. Idempotent."""

    @abstractmethod
    def free(self, serials: Iterable[int]) -> None:
        """Free blocks of this store that no row needs any more. Views of them stay valid.
        Idempotent; ignores unknown serials, also of blocks that were lost."""

    @abstractmethod
    def read(self, slices: Sequence[BlockSlices], schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        """Return the columns of leased rows, by name: views of memory visible here, else copies.
        Values never change while they are referenced. Raises LeaseLost for ended rows, SchemaError
        for a damaged block."""

    def writable(self, slices: BlockSlices, name: str, schema: Mapping[str, ColumnSpec]) -> Array | None:
        """Return a column's values in memory that the caller may write to without changing the
        store; None if ``read`` gave a copy, or without such memory."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Stop writing and reading. Views and blocks stay valid. Idempotent."""
