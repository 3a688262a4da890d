"""A run with a server here, and hosts: each has a storage unit in a process of its own, and clients that see the
memory of their host only."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

from children import Child, hear, say
from hosts import HostView

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import TransferQueue
from asyncflow_sdk.interfaces.store import HomeCatalog, StorageHome
from asyncflow_sdk.queue import Connection, open_queue
from asyncflow_sdk.queue.stores.hosts import HostsStore
from asyncflow_sdk.queue.stores.unit import StorageUnit
from asyncflow_sdk.queue.unit_process import UnitCatalog
from asyncflow_sdk.queue.unit_start import UnitConfig
from asyncflow_sdk.wire import RunKey


def serve_home(address: str, key: str, name: str, base: str) -> None:
    """The storage unit of a host whose memory is ``base``."""
    stop = threading.Event()
    threading.Thread(target=lambda: (hear(), stop.set()), daemon=True).start()
    catalog = UnitCatalog(UnitConfig(address, key=RunKey.load(key)))
    connection = catalog.connection
    unit = StorageUnit(
        catalog,
        connection.run,
        name=name,
        host="127.0.0.1",
        key=connection.key,
        base=Path(base),
        synced=connection.store.synced,
    )
    say("serves")
    unit.serve(lambda: catalog.connection.wire.server_closed, stop, beat_s=0.05)
    unit.close(keep=True)


class HostClient(Connection):
    """A client on one of the hosts. It does not see the server's memory."""

    def __init__(self, run: af.Run, host: str) -> None:
        self.host = host
        super().__init__(run.address, f"client on {host}", shared_memory=False)

    def homes(self) -> HomeCatalog:
        return HostView(super().homes(), self.host)


class Cluster:
    """``run``: served here. Hosts come up with ``unit``."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.ends = contextlib.ExitStack()
        self.units: dict[str, Child] = {}
        self.serve(**options)

    def serve(self, store: str | af.Store = "hosts", **options: Any) -> None:
        self.run = af.serve(self.folder / "run", address="tcp://127.0.0.1:0", store=store, **options)
        self.ends.callback(self.run.close)

    def unit(self, host: str) -> None:
        base = self.folder / host
        base.mkdir(exist_ok=True)
        key = str(self.folder / "run" / "run.key")
        self.units[host] = self.ends.enter_context(Child(serve_home, self.run.address, key, host, str(base)))
        assert self.units[host].hear() == "serves"

    def client(self, host: str) -> TransferQueue:
        return open_queue(self.ends.enter_context(contextlib.closing(HostClient(self.run, host))))

    def home(self, host: str) -> StorageHome:
        return next(home for home in self.run.homes() if home.name == host)

    def files(self, host: str) -> list[str]:
        return sorted(path.name for path in (self.folder / host).glob("*/h*!s*"))


def own_home(queue: TransferQueue) -> tuple[int, int] | None:
    store = queue.connection.store  # type: ignore[attr-defined]
    assert isinstance(store, HostsStore)
    return store.home
