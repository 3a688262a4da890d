"""HostsStore: columns stay on the host that makes them. Clients of that host map its memory, others
fetch from its storage unit.

Writes go to the memory that this client sees: the server's on its host, else that of a unit, which
is started if there is none. A client that sees neither sends its columns to the server.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...errors import AsyncFlowError, ConfigError, ServerLost
from ...interfaces.store import PayloadStore, StoreContext, StoredBlock
from ...memory import Mapper
from ...types import Column, ColumnSpec
from ...types.blocks import BlockSlices
from ...types.ragged import Array
from .fetch import FETCH_S, FetchPart, HomeFetcher, SlicesOfHome, merge, split
from .homes import SERVER_MEMORY, HomeId, KnownHomes, home_of, segment_prefix
from .local import InlineStore, SharedStore
from .reader import ColumnReader

LOOK_AGAIN_S = 30.0
"""A client without visible memory looks for a storage unit, or starts one, at this interval."""
_log = logging.getLogger(__name__)


class HostsStore(PayloadStore):
    """``fetch_s``: longest wait for rows of another host. ``home``: the home that is written to; None before the
    first write, and without visible memory. Raises ConfigError. See ``PayloadStore``."""

    may_wait = True

    def __init__(self, context: StoreContext, *, fetch_s: float = FETCH_S) -> None:
        if context.homes is None:
            raise ConfigError("the store 'hosts' needs a server that keeps a list of homes")
        if context.synced:
            raise ConfigError(
                "the store 'hosts' has columns in the memory of their hosts, so it cannot have durability='host'; take"
                " durability='process', or store='local'"
            )
        self._context = context
        self.inline = context.rows is None
        self._homes = KnownHomes(context.homes)
        self._mapper = Mapper(self._directory_of)
        self._reader = ColumnReader(self._mapper)
        self._fetcher = HomeFetcher(self._homes, context.key, context.fetch, timeout_s=fetch_s)
        self._inline = InlineStore(context.check_size)
        self._stores: dict[HomeId, SharedStore] = {}  # the newest is written to; the others still have blocks
        self.home: HomeId | None = None
        self._next_try_s = 0.0  # without visible memory: when to look for it again
        self._lock = threading.Lock()
        if context.start_unit is not None:  # now, and not in an event loop's first write
            self._find_memory()

    # ---- writing

    def write(self, columns: Mapping[str, Column], *, copy: bool, grow: bool = True) -> StoredBlock:
        own = self.home
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
            return stored
        where = home_of(stored.block.segment)
        if where != SERVER_MEMORY:
            self._homes.refresh()
            if not self._homes.is_live(where):
                return self._find_memory(but=where).copy_of(stored.block, stored.space)
        return self._stores[where].rewrite(stored)

    def discard(self, stored: StoredBlock) -> None:
        if stored.block is not None:
            self._stores[home_of(stored.block.segment)].discard(stored)

    def free(self, serials: Iterable[int]) -> None:
        serials = list(serials)
        for store in list(self._stores.values()):  # a serial is of one of them
            store.free(serials)

    def _find_memory(self, but: HomeId | None = None) -> SharedStore | InlineStore:
        """Choose the home to write to. ``but``: the home that is lost."""
        with self._lock:
            if self.home is not None and self.home != but:
                return self._stores[self.home]
            if but is not None:
                self._homes.forget_directory(but)
            self.home = None
            if but is None and time.monotonic() < self._next_try_s:
                return self._inline
            where, directory = self._visible_memory(but)
            if directory is None:
                self._next_try_s = time.monotonic() + LOOK_AGAIN_S
                return self._inline
            if where not in self._stores:
                self._stores[where] = SharedStore(directory, segment_prefix(where, self._context.session))
            self.home = where
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
        columns: dict[str, Column] = {}
        split_parts: list[dict[HomeId | None, SlicesOfHome]] = []
        wanted: dict[HomeId, list[FetchPart]] = {}
        for part in slices:
            if self._sees(part):
                columns |= self._reader.read(part, schema)
                continue
            homes = split(part, self._remote_home)
            split_parts.append(homes)
            for where, mine in homes.items():
                if where is not None:
                    types = {name: schema[name] for name in part.columns}
                    wanted.setdefault(where, []).append(FetchPart(mine.slices, types))
        if not split_parts:
            return columns
        fetched = {where: iter(found) for where, found in self._fetcher.fetch(wanted).items()}
        for homes in split_parts:
            found = [
                (mine.rows, self._reader.read(mine.slices, schema) if where is None else next(fetched[where]))
                for where, mine in homes.items()
            ]
            for name in found[0][1]:
                columns[name] = merge([(rows, part[name]) for rows, part in found])
        return columns

    def writable(self, slices: BlockSlices, name: str, schema: Mapping[str, ColumnSpec]) -> Array | None:
        return self._reader.writable(slices, name, schema) if self._sees(slices) else None

    def close(self) -> None:
        self._fetcher.close()
        for store in list(self._stores.values()):
            store.close()
        self._mapper.close()

    def _sees(self, slices: BlockSlices) -> bool:
        return all(self._directory_of(segment) is not None for segment in slices.segments)

    def _directory_of(self, segment: str) -> Path | None:
        """Return the directory of a segment; None if it is not visible here."""
        where = home_of(segment)
        return self._context.rows if where == SERVER_MEMORY else self._homes.directory(where)

    def _remote_home(self, segment: str) -> HomeId | None:
        return None if self._directory_of(segment) is not None else home_of(segment)
