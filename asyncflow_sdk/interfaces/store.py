"""PayloadStore: where one client writes and reads the columns of rows.

    stored = store.write({"response": column}, copy=False)      # producer; the call carries stored.block or stored.image
    columns = store.read(answer.slices, answer.schema)          # consumer, any process of the run
    store.free(serials)                                         # producer: the server lists them in a later answer

The server's ledger knows only the location of columns. A store holds bytes and never state: losing
one loses rows, and the server counts each. A *home* is a place that holds blocks: the memory of the
server (home 0), or that of a storage unit on another host. Its *epoch* is counted up each time that
its contents are given up.

Register a factory as an adapter of kind "store". It is called in each client, as ``factory(context,
**options)`` with a ``StoreContext``, and returns a PayloadStore; or a ``BlockStore``, an adapter of a
system that holds whole blocks of bytes by name. The SDK makes a PayloadStore of that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
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

    ``inline``: True if the server sends the columns of rows in its own memory beside its answers.
    ``synced``: True if payload is on disk before its call counts. ``may_wait``: True if ``read`` may
    wait for other hosts; event loops then read in a thread.
    """

    inline: bool = False
    synced: bool = False
    may_wait: bool = False

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
        for a damaged block, StoreUnavailable after a limited wait for another host: the rows are not
        lost."""

    def writable(self, slices: BlockSlices, name: str, schema: Mapping[str, ColumnSpec]) -> Array | None:
        """Return a column's values in memory that the caller may write to without changing the
        store; None if ``read`` gave a copy, or without such memory."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Stop writing and reading, also in other threads. Views and blocks stay valid.
        Idempotent."""


class HomeOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A home, as its unit describes it. ``store``: kind of store. ``name``: for people.
    ``identity``: of the contents; it changes when they are lost. ``address``, ``key``: of the unit's
    socket, and its public key ("": it has none). ``directory``, ``owner``: of the segments; a client
    that finds the same ``owner`` there sees the same memory."""

    store: str
    name: str
    identity: str
    address: str = ""
    key: str = ""
    directory: str = ""
    owner: str = ""


class StorageHome(msgspec.Struct, frozen=True, kw_only=True):
    """A home in its newest epoch. Fields as in ``HomeOffer``. ``lost``: why that epoch is lost; ""
    if it is not."""

    home: int
    epoch: int
    name: str
    address: str = ""
    key: str = ""
    directory: str = ""
    owner: str = ""
    lost: str = ""


class HomeCatalog(ABC):
    """The homes of a run. Thread-safe."""

    @abstractmethod
    def open(self, offer: HomeOffer) -> tuple[int, int]:
        """Serve a home from now on; return its number and epoch. Repeated as a sign of life. The
        same identity gets the same home, and the same epoch unless that is lost. Raises ConfigError
        if another unit serves a home of this name, ServerLost."""

    @abstractmethod
    def homes(self) -> Sequence[StorageHome]:
        """Return all homes but home 0, also lost ones. Raises ServerLost."""

    @abstractmethod
    def needed(self, home: int, epoch: int) -> tuple[Set[str], Set[int]]:
        """Return the segments of a home that rows need, and the numbers of the sessions that may write
        further ones. Raises ServerLost."""

    def needed_blocks(self, home: int, epoch: int) -> Mapping[str, Sequence[tuple[int, int, int]]]:
        """Return (start, serial, bytes) of the blocks in a home that rows or calls need, by
        segment. A unit of segments requests them. Raises ServerLost."""
        raise NotImplementedError

    def lose(self, home: int, epoch: int, serials: Iterable[int], reason: str) -> None:
        """Give up blocks that the home's unit cannot read any more. Raises ConfigError, ServerLost."""
        raise NotImplementedError


class BlockRead(msgspec.Struct, frozen=True):
    """A block to read. ``ranges``: (start, stop) of its bytes, in order. They are copied to the same
    positions of ``into``, a contiguous uint8 array of the block's size."""

    name: str
    ranges: Sequence[tuple[int, int]]
    into: Any


class BlockStore(ABC):
    """Blocks of bytes, held by name in the memory of another system. Thread-safe.

    Each host has its own memory, opened by its storage unit with ``open_memory``; ``address`` is that
    of its ``BlockMemory``. All blocks in it are lost together. A name is written once and never
    again. Calls may block for seconds. ``whole``: True if a range costs as much as its block.
    ``fetch_s``: longest wait for a read, after which its rows are given back.
    """

    whole: bool = False
    fetch_s: float = 30.0

    @abstractmethod
    def write(self, address: str, name: str, block: Any) -> None:
        """Write a contiguous uint8 array as a block. On return every reader can read it. Raises
        MemoryFull, StoreUnavailable; then nothing was written, or it is freed with all others."""

    @abstractmethod
    def read(self, address: str, reads: Sequence[BlockRead]) -> None:
        """Read ranges of blocks. Raises LeaseLost if a block is not there, freed or lost, and
        StoreUnavailable if that is not known now."""

    @abstractmethod
    def free(self, address: str, names: Sequence[str]) -> None:
        """Free blocks. Idempotent; ignores unknown names. Raises StoreUnavailable."""

    @abstractmethod
    def is_lost(self, address: str, identity: str) -> bool:
        """True if the memory's contents are not these any more. Raises StoreUnavailable if that is not
        known now."""

    @abstractmethod
    def open_memory(self, run: str, name: str, host: str) -> BlockMemory:
        """Open this host's memory, in the process of its storage unit. ``name``: of the home. ``host``:
        its IP address. The memory stays open after ``close``. Raises ConfigError, StoreUnavailable."""

    @abstractmethod
    def close(self) -> None:
        """Stop writing and reading. Blocks stay. Idempotent."""


class BlockMemory(ABC):
    """The memory of one host in a ``BlockStore``. One thread uses it.

    ``address``: valid after ``check``.
    """

    address: str = ""

    @abstractmethod
    def check(self) -> str:
        """Return the identity of the contents: text without "/", never used before for others. If the
        contents are lost, it is another one from now on, and the memory is usable again. Raises
        StoreUnavailable if their state is not known now."""

    @abstractmethod
    def free_all(self, prefixes: Sequence[str]) -> None:
        """Free all blocks with names that begin with one of these. Raises StoreUnavailable."""

    @abstractmethod
    def close(self, *, keep: bool) -> None:
        """Close the memory. ``keep``: leave the blocks to the next unit of this host, if they can
        outlive this process. Idempotent."""


@dataclass(frozen=True, kw_only=True)
class StoreContext:
    """The connection of a store. ``session``: its number, unique in the run; 0: the server. ``host``: the IP address
    at which others reach this host. ``rows``: the server's directory of segments; None if it is not
    visible here. ``synced``: payload has to be on disk before its call counts. ``check_size``:
    raises ProtocolError for a call of too many bytes. ``homes``: None if the run has only home 0.
    ``fetch``: sends a request of ``queue.stores.fetch`` to the server, as (request, timeout_s); returns its
    reply and payload. ``key``: the run's ``RunKey``, or None. ``start_unit``: starts a
    storage unit on this host and returns once it is one of ``homes``; None: nothing may be started.
    """

    run: str
    session: int
    host: str = "127.0.0.1"
    rows: Path | None = None
    synced: bool = False
    check_size: Callable[[int], None]
    homes: HomeCatalog | None = None
    fetch: Callable[[Any, float], tuple[Any, Any]] | None = None
    key: Any = None
    start_unit: Callable[[], None] | None = None
