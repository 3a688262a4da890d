"""BlockFetcher: columns of rows in a ``BlockStore``. It reads the bytes that the rows need, and checks
their digests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import numpy as np

from asyncflow_sdk.errors import DigestMismatch, LeaseLost, StoreUnavailable, WireError
from asyncflow_sdk.interfaces import StorageHome
from asyncflow_sdk.queue.stores.blocks import MOST_BYTES, damaged
from asyncflow_sdk.queue.stores.homes import HomeId, KnownHomes
from asyncflow_sdk.types import Column, ColumnSpec
from asyncflow_sdk.types.blocks import BlockSlices

from .fetched_blocks import FetchedBlocks
from .interface import BlockRead, BlockStore
from .sealed import PieceReader, Range

WHOLE_BYTES = 256 << 10
"""A block up to this size is read at once. Of a larger one, first its header is read, and then its rows."""
THREADS = 4
"""Reads of one home at a time. One that hangs occupies its thread until the store returns."""
Columns = dict[str, Column]


class BlockFetcher:
    """``timeout_s``: longest wait for one read. Thread-safe."""

    def __init__(self, store: BlockStore, homes: KnownHomes, *, timeout_s: float) -> None:
        self._store, self._homes, self._timeout_s = store, homes, timeout_s
        self._threads: dict[HomeId, ThreadPoolExecutor] = {}
        self._closed = False
        self._lock = threading.Lock()

    def fetch(self, where: HomeId, slices: BlockSlices, schema: Mapping[str, ColumnSpec]) -> Columns:
        """Return the columns of slices in one home. Raises LeaseLost, SchemaError, StoreUnavailable."""
        home = self._find(where)
        with self._lock:
            if self._closed:
                raise LeaseLost("the connection that reads these rows is closed")
            if where not in self._threads:
                self._threads[where] = ThreadPoolExecutor(THREADS, f"asyncflow-home-{where.home}")
            reading = self._threads[where].submit(self._read, home, slices, schema)
        try:
            return reading.result(self._timeout_s)
        except (FutureTimeout, StoreUnavailable) as error:
            reading.cancel()
            with contextlib.suppress(WireError):
                self._homes.refresh()
            self._find(where)  # raises LeaseLost if the home is given up meanwhile
            reason = f"no answer in {self._timeout_s:g} s" if isinstance(error, FutureTimeout) else error
            raise StoreUnavailable(f"home {where.home} ({home.name}): {reason}") from None

    def close(self) -> None:
        """End all reads. Idempotent."""
        with self._lock:
            self._closed = True
            pools, self._threads = list(self._threads.values()), {}
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)

    def _find(self, where: HomeId) -> StorageHome:
        try:
            home = self._homes.in_epoch(where)
        except WireError as error:
            raise StoreUnavailable(f"home {where.home}: the run's server does not answer: {error}") from None
        if home is None:
            raise StoreUnavailable(f"home {where.home} is unknown to this run's server")
        if not home.address:
            raise StoreUnavailable(f"home {where.home} ({home.name}) has no storage unit now")
        return home

    def _read(self, home: StorageHome, slices: BlockSlices, schema: Mapping[str, ColumnSpec]) -> Columns:
        try:
            try:
                return _Read(self._store, home, slices, schema).columns()
            except DigestMismatch:
                return _Read(self._store, home, slices, schema).columns()
        except DigestMismatch as error:
            raise StoreUnavailable(f"{error}, twice") from None
        except LeaseLost:
            if self._store.is_lost(home.address, home.directory):
                raise StoreUnavailable("its contents are lost, and its storage unit has not noticed yet") from None
            raise


class _Read:
    """One attempt to read slices."""

    def __init__(
        self, store: BlockStore, home: StorageHome, slices: BlockSlices, schema: Mapping[str, ColumnSpec]
    ) -> None:
        self._store, self._home = store, home
        numbers, _, serials, _, sizes, _ = np.frombuffer(slices.blocks, np.int64).reshape(-1, 6).T.tolist()
        self._names = [
            block_name(home.directory, slices.segments[number], serial)
            for number, serial in zip(numbers, serials, strict=True)
        ]
        if not all(0 < nbytes < MOST_BYTES and nbytes % 8 == 0 for nbytes in sizes):
            raise damaged(slices.columns[0])
        self._blocks = [PieceReader(nbytes) for nbytes in sizes]
        self._found = FetchedBlocks(slices, schema, [block.sealed[: block.nbytes] for block in self._blocks])

    def columns(self) -> Columns:
        """Raises DigestMismatch, LeaseLost, SchemaError, StoreUnavailable."""
        header = self._found.header_bytes()
        whole = [self._store.whole or block.nbytes <= WHOLE_BYTES for block in self._blocks]
        self._get(
            [
                [(0, block.nbytes if all_of_it else min(header, block.nbytes))]
                for block, all_of_it in zip(self._blocks, whole, strict=True)
            ]
        )
        if not all(whole):
            self._get(self._found.ranges(values=False))
            self._get(self._found.ranges(values=True))
        return self._found.columns()

    def _get(self, ranges: Sequence[Sequence[Range]]) -> None:
        missing = [block.missing(each) for block, each in zip(self._blocks, ranges, strict=True)]
        reads = [
            BlockRead(name, each, block.sealed)
            for name, each, block in zip(self._names, missing, self._blocks, strict=True)
            if each
        ]
        if reads:
            self._store.read(self._home.address, reads)
        for block, each in zip(self._blocks, missing, strict=True):
            block.check(each)


def block_name(identity: str, segment: str, serial: int) -> str:
    """Return the name of a block in its store. A session writes each serial once, so no name is used
    again."""
    return f"{identity}/{segment}/{serial}"
