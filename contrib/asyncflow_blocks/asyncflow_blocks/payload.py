"""BlockPayloadStore: the payload of a client in a ``BlockStore``, one named block for each put or
completion.

Blocks are written to the memory of this host's storage unit, else to that of another host. Without
any, columns go to the server's memory.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from asyncflow_sdk.errors import AsyncFlowError, ConfigError, MemoryFull, ProtocolError, StoreUnavailable
from asyncflow_sdk.interfaces import HomeCatalog, PayloadStore, StorageHome, StoreContext, StoredBlock
from asyncflow_sdk.memory import GrowthNeeded
from asyncflow_sdk.queue.stores.fetch import FetchPart, HomeFetcher, merge, split
from asyncflow_sdk.queue.stores.homes import SERVER_MEMORY, HomeId, KnownHomes, home_of, segment_prefix
from asyncflow_sdk.queue.stores.local import local_store
from asyncflow_sdk.types import Column, ColumnSpec
from asyncflow_sdk.types.blocks import Block, BlockSlices
from asyncflow_sdk.types.ragged import Array

from .fetcher import BlockFetcher, block_name
from .interface import BlockStore
from .sealed import SealedBlock
from .unit import BlockUnit

LOOK_AGAIN_S = 30.0
"""A client without a storage unit looks for one, or starts one, at this interval."""
_log = logging.getLogger(__name__)


class BlockPayloadStore(PayloadStore):
    """``kind``: name of the store's adapter. Raises ConfigError. See ``PayloadStore``."""

    may_wait = True

    def __init__(self, kind: str, blocks: BlockStore, context: StoreContext) -> None:
        if context.homes is None:
            raise ConfigError(f"the store {kind!r} needs a server that keeps a list of homes")
        if context.synced:
            raise ConfigError(f"the store {kind!r} has no payload on disk, so it cannot have durability='host'")
        self.kind, self.blocks = kind, blocks
        self.inline = context.rows is None
        self._context, self._server_memory = context, local_store(context)
        self._homes = KnownHomes(context.homes)
        self._server = HomeFetcher(self._homes, context.key, context.fetch, timeout_s=blocks.fetch_s)
        self._fetcher = BlockFetcher(blocks, self._homes, timeout_s=blocks.fetch_s)
        self._written = WrittenBlocks(blocks)
        self._own: StorageHome | None = None
        self._next_try_s = 0.0
        self._lock = threading.Lock()
        if context.start_unit is not None:  # now, and not in an event loop's first write
            self._find_home()

    @property
    def home(self) -> HomeId | None:
        """The home that is written to; None before the first write, and for the server's memory."""
        own = self._own
        return None if own is None else HomeId(own.home, own.epoch)

    # ---- writing

    def write(self, columns: Mapping[str, Column], *, copy: bool, grow: bool = True) -> StoredBlock:
        own = self._own or self._find_home()
        if own is not None:
            block = SealedBlock(columns, self._written.next_serial())
            try:
                return self._write(own, block, tuple(columns), grow)
            except StoreUnavailable as error:
                self._leave(own, error)
        return self._server_memory.write(columns, copy=copy, grow=grow)

    def rewrite(self, stored: StoredBlock) -> StoredBlock | None:
        """See ``PayloadStore.rewrite``. A lost home gets no more blocks."""
        if stored.block is None or home_of(stored.block.segment) == SERVER_MEMORY:
            return self._server_memory.rewrite(stored)
        where = home_of(stored.block.segment)
        self._homes.refresh()
        if self._homes.is_live(where):
            return None
        self.discard(stored)
        own = self._find_home(but=where)
        if own is not None:
            stored.space.renumber(self._written.next_serial())
            try:
                return self._write(own, stored.space, stored.block.columns, True)
            except StoreUnavailable as error:
                self._leave(own, error)
        return self._server_memory.copy_of(stored.block, stored.space)

    def discard(self, stored: StoredBlock) -> None:
        if stored.block is None or home_of(stored.block.segment) == SERVER_MEMORY:
            self._server_memory.discard(stored)
        else:
            self._written.free([stored.block.serial])

    def free(self, serials: Iterable[int]) -> None:
        serials = list(serials)
        self._written.free(serials)
        self._server_memory.free(serials)  # a serial is of one of them

    def _write(self, home: StorageHome, block: SealedBlock, columns: tuple[str, ...], grow: bool) -> StoredBlock:
        where = HomeId(home.home, home.epoch)
        segment = f"{segment_prefix(where, self._context.session)}0"
        try:
            serial = self._written.write(home, segment, block)
        except MemoryFull:
            if not grow:
                raise GrowthNeeded from None
            self._written.settle()
            serial = self._written.write(home, segment, block)
        return StoredBlock(Block(segment, 0, serial, block.rows, block.nbytes, columns), None, block)

    def _find_home(self, but: HomeId | None = None) -> StorageHome | None:
        """Choose the home to write to; None: the server's memory. ``but``: the home that is lost."""
        with self._lock:
            if self._own is not None and (self._own.home, self._own.epoch) != but:
                return self._own
            self._own = None
            if but is not None or time.monotonic() >= self._next_try_s:
                self._next_try_s = time.monotonic() + LOOK_AGAIN_S
                self._own = self._served_home(but)
            return self._own

    def _served_home(self, but: HomeId | None) -> StorageHome | None:
        self._homes.refresh()
        if self._context.start_unit is not None and not self._homes.is_here():
            try:
                self._context.start_unit()
            except AsyncFlowError as error:
                _log.warning("no storage unit can be started on this host: %s", error)
            self._homes.refresh()
        return next((home for home in self._homes.served() if (home.home, home.epoch) != but), None)

    def _leave(self, home: StorageHome, error: StoreUnavailable) -> None:
        with self._lock:
            if self._own == home:
                self._own, self._next_try_s = None, time.monotonic() + LOOK_AGAIN_S
                _log.warning(
                    "home %d (%s) takes no blocks: %s; columns go to the server", home.home, home.name, error
                )

    # ---- reading

    def read(self, slices: Sequence[BlockSlices], schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        columns: dict[str, Column] = {}
        for part in slices:
            types = {name: schema[name] for name in part.columns}
            homes = split(part, home_of)
            found = [(mine.rows, self._read_home(where, mine.slices, types)) for where, mine in homes.items()]
            for name in part.columns:
                columns[name] = merge([(rows, each[name]) for rows, each in found])
        return columns

    def _read_home(self, where: HomeId, slices: BlockSlices, schema: dict[str, ColumnSpec]) -> dict[str, Column]:
        if where != SERVER_MEMORY:
            return self._fetcher.fetch(where, slices, schema)
        if not self.inline:
            return self._server_memory.read([slices], schema)
        if self._context.fetch is None:
            raise ProtocolError("rows are in memory of the server that this client does not see")
        return self._server.fetch({where: [FetchPart(slices, schema)]})[where][0]

    def writable(self, slices: BlockSlices, name: str, schema: Mapping[str, ColumnSpec]) -> Array | None:
        if self.inline or any(home_of(segment) != SERVER_MEMORY for segment in slices.segments):
            return None
        return self._server_memory.writable(slices, name, schema)

    def open_unit(self, catalog: HomeCatalog, name: str, host: str) -> BlockUnit:
        memory = self.blocks.open_memory(self._context.run, name, host)
        return BlockUnit(catalog, memory, store=self.kind, name=name)

    def close(self) -> None:
        self._written.close()
        self._server.close()
        self._fetcher.close()
        self._server_memory.close()
        self.blocks.close()


class WrittenBlocks:
    """The blocks of one session that are not freed yet. Frees run in a thread: the store may be slow.
    Thread-safe."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._names: dict[int, tuple[str, str]] = {}
        self._serial = secrets.randbits(30) + 1 << 32  # as those of arenas: equal ones would free each other's blocks
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "asyncflow-frees")
        self._last: Future[None] | None = None
        self._closed = False

    def next_serial(self) -> int:
        """Return a serial never used before."""
        with self._lock:
            self._serial += 1
            return self._serial

    def write(self, home: StorageHome, segment: str, block: SealedBlock) -> int:
        """Write a block; return its serial. Raises MemoryFull, StoreUnavailable."""
        serial = block.serial
        name = block_name(home.directory, segment, serial)
        try:
            self._store.write(home.address, name, block.sealed)
        except StoreUnavailable:  # some of it may be there
            self._free(home.address, [name])
            raise
        with self._lock:
            self._names[serial] = home.address, name
        return serial

    def free(self, serials: Iterable[int]) -> None:
        """Free blocks soon. Ignores unknown serials."""
        with self._lock:
            found = [self._names.pop(serial) for serial in serials if serial in self._names]
        by_address: dict[str, list[str]] = {}
        for address, name in found:
            by_address.setdefault(address, []).append(name)
        for address, names in by_address.items():
            self._free(address, names)

    def settle(self) -> None:
        """Wait for the frees so far."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Free no more. Blocks stay; the unit frees those that no row needs. Idempotent."""
        with self._lock:
            self._closed = True
        self._thread.shutdown(wait=False)

    def _free(self, address: str, names: Sequence[str]) -> None:
        with self._lock:
            if not self._closed:
                self._last = self._thread.submit(self._free_now, address, names)

    def _free_now(self, address: str, names: Sequence[str]) -> None:
        try:
            self._store.free(address, names)
        except AsyncFlowError as error:  # its unit frees them when this session has ended
            _log.debug("blocks cannot be freed: %s", error)
