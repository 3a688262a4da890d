"""HostsStore: columns stay on the host that makes them. Clients of that host map its memory, others
fetch from its storage unit.

Writes go to the memory that this client sees: the server's on its host, else that of a unit, which
is started if there is none. A client that sees neither sends its columns to the server.

With ``replicas=2`` each block is sent to a second home before its call: to another host's unit, else
to the server. Readers choose a place that they see, and read the other one if that fails.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from ...errors import (
    AsyncFlowError,
    ConfigError,
    LeaseLost,
    ProtocolError,
    SchemaError,
    ServerLost,
    StoreUnavailable,
)
from ...interfaces.store import PayloadStore, StoreContext, StoredBlock
from ...memory import DISK, Mapper
from ...types import Column, ColumnSpec
from ...types.blocks import BlockSlices
from ...types.ragged import Array
from .fetch import FetchPart, SlicesOfHome, merge, split
from .home_fetcher import FETCH_S, HomeFetcher
from .homes import SERVER_MEMORY, HomeId, KnownHomes, home_of, segment_prefix
from .inline import InlineStore
from .reader import ColumnReader
from .replica_choice import choose, has_replicas
from .replicator import Replicator
from .shared import SharedStore

LOOK_AGAIN_S = 30.0
"""A client without visible memory looks for a storage unit, or starts one, at this interval."""
FIRST_S = 2.0
"""Longest wait for one place of blocks with two, before the other one is tried."""
_log = logging.getLogger(__name__)
Fetched: TypeAlias = Mapping[HomeId, Sequence[dict[str, Column]]]
Fetch: TypeAlias = Callable[[Mapping[HomeId, Sequence[FetchPart]]], Fetched]


class HostsStore(PayloadStore):
    """``fetch_s``: longest wait for rows of another host. ``replicas``: 1, or 2 for two places of each
    block. ``directory``: where units keep their files; default: shared memory, or a folder of the
    host's disk if the payload has to be there. Raises ConfigError. See ``PayloadStore``."""

    may_wait = True

    def __init__(
        self, context: StoreContext, *, fetch_s: float = FETCH_S, replicas: int = 1, directory: str = ""
    ) -> None:
        if context.homes is None:
            raise ConfigError("the store 'hosts' needs a server that keeps a list of homes")
        if replicas not in (1, 2):
            raise ConfigError(f"the store 'hosts' keeps 1 or 2 replicas of columns, not {replicas!r}")
        if directory and not Path(directory).is_absolute():
            raise ConfigError(f"the directory of the store 'hosts' is an absolute path, not {directory!r}")
        self.replicates, self._fetch_s = replicas == 2, fetch_s
        self.directory = Path(directory) if directory else DISK if context.synced else None
        self._context = context
        self.synced, self.inline = context.synced, context.rows is None
        self._homes = KnownHomes(context.homes)
        self._mapper = Mapper(self._directory_of)
        self._reader = ColumnReader(self._mapper)
        self._fetcher = HomeFetcher(self._homes, context.key, context.fetch, timeout_s=fetch_s)
        self._replicator = Replicator(self._homes, self._fetcher.clients, context.session, synced=context.synced)
        self._warned = False  # that blocks have one place only
        self._inline = InlineStore(context.check_size, synced=context.synced)
        self._stores: dict[HomeId, SharedStore] = {}  # the newest is written to; the others still have blocks
        self._own: HomeId | None = None
        self._next_try_s = 0.0  # without visible memory: when to look for it again
        self._lock = threading.Lock()
        if context.start_unit is not None:  # now, and not in an event loop's first write
            self._find_memory()

    @property
    def home(self) -> HomeId | None:
        """The home that is written to; None before the first write, and without visible memory."""
        return self._own

    # ---- writing

    def write(self, columns: Mapping[str, Column], *, copy: bool, grow: bool = True) -> StoredBlock:
        own = self._own
        store = self._find_memory() if own is None else self._stores[own]
        try:
            return store.write(columns, copy=copy, grow=grow)
        except ServerLost:
            if own is None or own == SERVER_MEMORY:
                raise  # a restarted server makes its directory again
        return self._find_memory(but=own).write(columns, copy=copy, grow=grow)

    def rewrite(self, stored: StoredBlock) -> StoredBlock | None:
        """See ``PayloadStore.rewrite``. A lost home gets no more blocks."""
        if stored.block is None:
            return self._inline.rewrite(stored)
        where = home_of(stored.block.segment)
        if where == SERVER_MEMORY:
            return self._stores[where].rewrite(stored)
        self._homes.refresh()
        if self._homes.is_live(where):
            return self._stores[where].rewrite(stored)
        store = self._find_memory(but=where)
        if isinstance(store, SharedStore):
            return store.copy_of(stored.block, stored.space)
        return self._inline.image_of(stored.block, stored.space)

    def replicate(self, stored: StoredBlock) -> StoredBlock:
        """See ``PayloadStore.replicate``. Without another unit, the server keeps the replica."""
        first = SERVER_MEMORY if stored.block is None else home_of(stored.block.segment)
        if stored.image is not None:
            memory = np.concatenate(stored.image.parts)
        else:
            memory = stored.space.memory
        stored = msgspec.structs.replace(stored, replica=None)  # it may be sent again
        place = self._replicator.keep(memory, first)
        if place is not None:
            self._warned = False
            return msgspec.structs.replace(stored, replica=place)
        if stored.block is not None and first != SERVER_MEMORY:
            with contextlib.suppress(ProtocolError):  # too large for one call
                image = self._inline.image_of(stored.block, stored.space).image
                return msgspec.structs.replace(stored, image=image)
        if not self._warned:
            self._warned = True
            _log.warning(
                "columns are written to %s only: no other host has a storage unit that keeps a replica now;"
                " replicated_bytes in the queue's status counts the bytes with one",
                "the server's memory" if first == SERVER_MEMORY else f"home {first.home}",
            )
        return stored

    def discard(self, stored: StoredBlock) -> None:
        if stored.replica is not None:
            self._replicator.free([stored.replica.serial])
        if stored.block is not None:
            self._stores[home_of(stored.block.segment)].discard(stored)

    def free(self, serials: Iterable[int]) -> None:
        serials = list(serials)
        for store in list(self._stores.values()):  # a serial is of one of them
            store.free(serials)
        if self.replicates:
            self._replicator.free(serials)

    def _find_memory(self, but: HomeId | None = None) -> SharedStore | InlineStore:
        """Choose the home to write to. ``but``: the home that is lost."""
        with self._lock:
            if self._own is not None and self._own != but:
                return self._stores[self._own]
            if but is not None:
                self._homes.forget_directory(but)
            self._own = None
            if but is None and time.monotonic() < self._next_try_s:
                return self._inline
            where, directory = self._visible_memory(but)
            if directory is None:
                self._next_try_s = time.monotonic() + LOOK_AGAIN_S
                return self._inline
            if where not in self._stores:
                prefix = segment_prefix(where, self._context.session)
                self._stores[where] = SharedStore(directory, prefix, synced=self.synced)
            self._own = where
            return self._stores[where]

    def _visible_memory(self, but: HomeId | None) -> tuple[HomeId, Path | None]:
        if self._context.rows is not None:
            return SERVER_MEMORY, self._context.rows
        for start in (None, self._context.start_unit):
            if start is not None:
                try:
                    start()
                except AsyncFlowError as error:
                    _log.warning("no storage unit can be started on this host: %s; columns go to the server", error)
                    break
            self._homes.refresh()
            for home in self._homes.visible():
                if (where := HomeId(home.home, home.epoch)) != but:
                    return where, Path(home.directory)
        return SERVER_MEMORY, None

    # ---- reading

    def read(self, slices: Sequence[BlockSlices], schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        if not any(map(has_replicas, slices)):
            return self._read(slices, schema, self._fetcher.fetch)
        failed = set[HomeId]()
        chosen, timeout_s = self._choose(slices, failed), min(FIRST_S, self._fetch_s)
        while True:
            known = len(failed)
            try:
                return self._read(chosen, schema, lambda wanted: self._fetch(wanted, timeout_s, failed))  # noqa: B023
            except (StoreUnavailable, LeaseLost, SchemaError) as error:
                if len(failed) == known:  # memory visible here
                    failed |= {home_of(segment) for part in chosen for segment in part.segments}
                again = self._choose(slices, failed)
                if again == chosen:
                    if timeout_s == self._fetch_s or not isinstance(error, StoreUnavailable):
                        raise
                    timeout_s = self._fetch_s
                chosen = again

    def _choose(self, slices: Sequence[BlockSlices], failed: Set[HomeId]) -> list[BlockSlices]:
        return [choose(part, lambda segment: self._cost(segment, failed)) for part in slices]

    def _cost(self, segment: str, failed: Set[HomeId]) -> int:
        """Return a lower number for the place that is read first."""
        where = home_of(segment)
        if where in failed:
            return 4
        if self._directory_of(segment) is not None:
            return 0
        if where == SERVER_MEMORY:
            return 2  # its link is used by all clients
        home = self._homes.find(where)
        here = home is not None and home.epoch == where.epoch and home.address and not home.lost
        return 1 if here and not self._homes.is_avoided(where) else 3

    def _fetch(self, wanted: Mapping[HomeId, Sequence[FetchPart]], timeout_s: float, failed: set[HomeId]) -> Fetched:
        """Fetch from each home. Add the homes that fail to ``failed``, and raise the first error."""
        found: dict[HomeId, Sequence[dict[str, Column]]] = {}
        errors: list[AsyncFlowError] = []
        for where, future in self._fetcher.begin(wanted, timeout_s).items():
            try:
                found[where] = future.result()
            except AsyncFlowError as error:
                failed.add(where)
                errors.append(error)
                if isinstance(error, StoreUnavailable):
                    self._homes.avoid(where)
        if errors:
            raise errors[0]
        return found

    def _read(
        self, slices: Sequence[BlockSlices], schema: Mapping[str, ColumnSpec], fetch: Fetch
    ) -> dict[str, Column]:
        columns: dict[str, Column] = {}
        split_parts: list[dict[HomeId | None, SlicesOfHome]] = []
        wanted: dict[HomeId, list[FetchPart]] = {}
        for part in slices:
            if all(self._directory_of(segment) is not None for segment in part.segments):
                columns.update(self._reader.read(part, schema))
                continue
            homes = split(part, self._remote_home)
            split_parts.append(homes)
            for where, mine in homes.items():
                if where is not None:
                    types = {name: schema[name] for name in part.columns}
                    wanted.setdefault(where, []).append(FetchPart(mine.slices, types))
        if not split_parts:
            return columns
        fetched = {where: iter(found) for where, found in fetch(wanted).items()}
        for homes in split_parts:
            found = [
                (mine.rows, self._reader.read(mine.slices, schema) if where is None else next(fetched[where]))
                for where, mine in homes.items()
            ]
            for name in found[0][1]:
                columns[name] = merge([(rows, part[name]) for rows, part in found], name)
        return columns

    def writable(self, slices: BlockSlices, name: str, schema: Mapping[str, ColumnSpec]) -> Array | None:
        slices = choose(slices, lambda segment: self._cost(segment, frozenset()))
        with contextlib.suppress(LeaseLost):
            if all(self._directory_of(segment) is not None for segment in slices.segments):
                return self._reader.writable(slices, name, schema)
        return None

    def close(self) -> None:
        self._fetcher.close()
        for store in list(self._stores.values()):
            store.close()
        self._mapper.close()

    def _directory_of(self, segment: str) -> Path | None:
        """Return the directory of a segment; None if it is not visible here."""
        where = home_of(segment)
        return self._context.rows if where == SERVER_MEMORY else self._homes.directory(where)

    def _remote_home(self, segment: str) -> HomeId | None:
        """Return the home of a segment; None for all homes with visible memory."""
        return None if self._directory_of(segment) is not None else home_of(segment)
