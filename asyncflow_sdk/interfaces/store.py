"""PayloadStore: where one client writes and reads the columns of rows.

    stored = store.write({"response": column}, copy=False)      # producer; the call carries stored.block or stored.image
    columns = store.read(answer.slices, answer.schema)          # consumer, any process of the run
    store.free(serials)                                         # producer: the server lists them in a later answer

The server's ledger knows only the location of columns. A store holds bytes and never state: losing one loses rows, and
the server counts each. A *home* holds blocks: the memory of the server (home 0), or of a storage unit on another host.
Its *epoch* is counted up each time its contents are given up.

Register a factory as an adapter of kind "store". It is called in each client, as ``factory(context, **options)`` with a
``StoreContext``, and returns a PayloadStore. ``contrib/asyncflow_blocks`` makes one of a system of blocks by name.
"""

from __future__ import annotations

import threading
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
    """Columns written for a call not sent yet: ``block``, their location, or ``image``, the bytes to send beside the
    call. ``space``: the store's own handle of a block."""

    block: Block | None = None
    image: BlockImage | None = None
    space: Any = None


class PayloadStore(ABC):
    """The payload of one connection. Thread-safe; unusable in a child made by fork(). ``inline``: True if the server
    sends the columns of rows in its own memory beside its answers. ``synced``: True if payload is on disk before its
    call counts. ``may_wait``: True if ``read`` may wait for other hosts; event loops then read in a thread."""

    inline: bool = False
    synced: bool = False
    may_wait: bool = False

    @abstractmethod
    def write(self, columns: Mapping[str, Column], *, copy: bool, grow: bool = True) -> StoredBlock:
        """Write packed columns of equal length. On return the block is complete, and on disk if ``synced``. ``copy``:
        the caller may change the columns before the call is sent. ``grow`` False: raise GrowthNeeded if freed blocks
        could make room. Raises MemoryFull, ServerLost if the memory is gone, ProtocolError for too large a call."""

    @abstractmethod
    def rewrite(self, stored: StoredBlock) -> StoredBlock | None:
        """Return the same columns, stored again, after a PayloadLost of their call. None if the block is still there: a
        repeated call would fail again. Raises MemoryFull."""

    @abstractmethod
    def discard(self, stored: StoredBlock) -> None:
        """Free a block of a call never sent. Idempotent."""

    @abstractmethod
    def free(self, serials: Iterable[int]) -> None:
        """Free blocks of this store needed by no row any more. Views of them stay valid. Idempotent; ignores unknown
        serials, also of lost blocks."""

    @abstractmethod
    def read(self, slices: Sequence[BlockSlices], schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        """Return the columns of leased rows, by name: views of memory visible here, else copies. Values never change
        while they are referenced. Raises LeaseLost for ended rows, SchemaError for a damaged block, StoreUnavailable
        after a limited wait for another host: the rows are not lost."""

    def open_unit(self, catalog: HomeCatalog, name: str, host: str) -> HomeUnit | None:
        """Open the storage unit of this host. ``name``: of the home. ``host``: its IP address. None: the
        store's homes are directories of segments, or it has none. Raises ConfigError, StoreUnavailable."""
        return None

    def writable(self, slices: BlockSlices, name: str, schema: Mapping[str, ColumnSpec]) -> Array | None:
        """Return a column's values in memory of the caller's own, to write to without changing the store; None if
        ``read`` gave a copy, or without such memory."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Stop writing and reading, also in other threads. Views and blocks stay valid. Idempotent."""


class HomeOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A home, as its unit describes it. ``store``: kind of store. ``name``: for people. ``identity``: of the contents; it
    changes when they are lost. ``address``, ``key``: of the unit's socket, and its public key ("": it has none).
    ``directory``, ``owner``: of the segments; a client with the same ``owner`` there sees the same memory."""

    store: str
    name: str
    identity: str
    address: str = ""
    key: str = ""
    directory: str = ""
    owner: str = ""


class StorageHome(HomeOffer, frozen=True, kw_only=True):
    """A home in its newest epoch, with "" as its ``identity``. ``lost``: why the epoch is lost; "" if it is not."""

    home: int
    epoch: int
    lost: str = ""


class HomeCatalog(ABC):
    """The homes of a run. Thread-safe."""

    @abstractmethod
    def open(self, offer: HomeOffer) -> tuple[int, int]:
        """Serve a home from now on; return its number and epoch. Repeated as a sign of life. The same identity gets the
        same home, and the same epoch unless it is lost. Raises ConfigError if another unit serves a home of this name,
        ServerLost."""

    @abstractmethod
    def homes(self) -> Sequence[StorageHome]:
        """Return all homes but home 0, also lost ones. Raises ServerLost."""

    @abstractmethod
    def needed(self, home: int, epoch: int) -> tuple[Set[str], Set[int]]:
        """Return the segments of a home needed by rows, and the numbers of the sessions still able to write further ones.
        Raises ServerLost."""


class HomeUnit(ABC):
    """The storage unit of a home, in a process of its own. ``offer``: the home. ``where``: its number and epoch."""

    offer: HomeOffer
    where: tuple[int, int]

    @abstractmethod
    def serve(self, ended: Callable[[], bool], stop: threading.Event, *, beat_s: float = 5.0) -> bool:
        """Serve, with a sign of life each ``beat_s``, until the run has ended, its server was silent for
        long, or ``stop`` is set. Return True if the payload is needed no more. Raises ConfigError if
        another unit has taken its place."""

    @abstractmethod
    def close(self, *, keep: bool) -> None:
        """Stop serving. ``keep``: leave the payload to the next unit. Idempotent."""


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
