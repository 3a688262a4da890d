"""A run with a server here, and hosts: each has a storage unit in a process of its own, and clients that see the
memory of their host only."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from children import Child, hear, say

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import TransferQueue
from asyncflow_sdk.interfaces.store import HomeCatalog, StorageHome, StoreContext, StoredBlock
from asyncflow_sdk.memory import HomeDirectory
from asyncflow_sdk.queue import Connection, open_queue
from asyncflow_sdk.queue.block_index import BlockIndex
from asyncflow_sdk.queue.protocol import LedgerCatalog
from asyncflow_sdk.queue.stores import unit as unit_module
from asyncflow_sdk.queue.stores.blocks import pack_columns
from asyncflow_sdk.queue.stores.hosts import HostsStore
from asyncflow_sdk.queue.stores.unit import StorageUnit, UnitConfig
from asyncflow_sdk.queue.unit_process import UnitCatalog
from asyncflow_sdk.types import Column
from asyncflow_sdk.types.blocks import BlockSlices
from asyncflow_sdk.wire import RunKey


def serve_home(address: str, key: str, name: str, base: str) -> None:
    """The storage unit of a host whose memory is ``base``. Told anything, it ends and removes its files."""
    stop = threading.Event()
    threading.Thread(target=lambda: (hear(), stop.set()), daemon=True).start()
    catalog = UnitCatalog(UnitConfig(address, key=RunKey.load(key) if key else None, insecure=not key))
    connection = catalog.connection
    unit_module.HomeDirectory = functools.partial(HomeDirectory, base=Path(base))
    member = catalog.member if key else None
    unit = StorageUnit(catalog, connection.run, name=name, host="127.0.0.1", member=member)
    say("serves")
    unit.serve(lambda: catalog.connection.wire.server_closed, stop, beat_s=0.05)
    unit.close(keep=not stop.is_set())


class HostView(LedgerCatalog):
    """The homes as one host sees them: directories of other hosts are not there."""

    def __init__(self, client: Connection, host: str) -> None:
        super().__init__(client.ask)
        self.host = host

    def homes(self) -> Sequence[StorageHome]:
        return [
            home if home.name == self.host else msgspec.structs.replace(home, directory=f"/elsewhere{home.directory}")
            for home in super().homes()
        ]


class HostClient(Connection):
    """A client on one of the hosts; "" is none. Only those on the server's host see its memory."""

    def __init__(self, run: af.Run, host: str, **options: Any) -> None:
        self.host = host
        super().__init__(run.address, f"client on {host}", **options)

    def homes(self) -> HomeCatalog:
        return HostView(self, self.host)


class Cluster:
    """``run``: served here. Hosts come up with ``unit``. ``index``: of rows written into a `store`."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.insecure = folder, options.get("insecure", False)
        self.ends = contextlib.ExitStack()
        self.units: dict[str, Child] = {}
        self.index, self._rows = BlockIndex(), 0
        self.serve(**options)

    def serve(self, store: str | af.Store = "hosts", **options: Any) -> None:
        self.run = af.serve(self.folder / "run", address="tcp://127.0.0.1:0", store=store, **options)
        self.ends.callback(self.run.close)

    def unit(self, host: str) -> StorageHome:
        base = self.folder / host
        base.mkdir(exist_ok=True)
        key = "" if self.insecure else str(self.folder / "run" / "run.key")
        self.units[host] = self.ends.enter_context(Child(serve_home, self.run.address, key, host, str(base)))
        assert self.units[host].hear() == "serves"
        return self.home(host)

    def connection(self, host: str) -> HostClient:
        made = HostClient(self.run, host, shared_memory=False, insecure=self.insecure)
        return self.ends.enter_context(contextlib.closing(made))

    def client(self, host: str) -> TransferQueue:
        return open_queue(self.connection(host))

    def home(self, host: str) -> StorageHome:
        return next(home for home in self.run.homes() if home.name == host)

    def files(self, host: str) -> list[str]:
        return sorted(path.name for path in (self.folder / host).glob("*/h*!s*"))

    # ---- the store alone

    def store(self, host: str, *, fetch_s: float = 20.0, **context: Any) -> HostsStore:
        """The store of another client on a host."""
        client = self.connection(host)
        known = {"run": client.run, "session": client.session, "homes": client.homes(), "key": client.key}
        made = StoreContext(**{**known, "check_size": lambda nbytes: None, **context})
        return self.ends.enter_context(contextlib.closing(HostsStore(made, fetch_s=fetch_s)))

    def put(self, store: HostsStore, columns: Mapping[str, Any], ids: Sequence[int] | None = None) -> StoredBlock:
        """Write columns, and place them as the server does: as new rows, or as columns of rows ``ids``."""
        stored = store.write(pack_columns(columns), copy=False)
        if ids is None:
            ids = range(self._rows, self._rows + stored.block.rows)
            self._rows += stored.block.rows
        self.index.add(np.array(ids), stored.block, np.arange(stored.block.rows))
        return stored

    def locate(self, ids: Sequence[int], *columns: str) -> tuple[BlockSlices, ...]:
        return self.index.locate(np.array(ids), columns)


def specs(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: column.spec for name, column in pack_columns(columns).items()}


def rows_of(column: Column) -> list[bytes]:
    rows = column.values if column.offsets is None else np.split(column.values, column.offsets[1:-1])
    return [row.tobytes() for row in rows]
