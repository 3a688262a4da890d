"""Hosts on one machine: each has a storage unit in a process of its own, and a client sees only the memory of its host.

with Hosts(tmp_path) as hosts:            # stores without a server; Cluster: a run with a server, and its clients
    a, b = hosts.unit("a"), hosts.unit("b")
    writer, reader = hosts.store("a"), hosts.store("b")
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from children import Child, hear, say

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import TransferQueue
from asyncflow_sdk.interfaces.store import HomeCatalog, HomeOffer, StorageHome, StoreContext, StoredBlock
from asyncflow_sdk.queue import Connection, open_queue
from asyncflow_sdk.queue.block_index import BlockIndex
from asyncflow_sdk.queue.stores.blocks import pack_columns
from asyncflow_sdk.queue.stores.hosts import HostsStore
from asyncflow_sdk.queue.stores.unit import StorageUnit
from asyncflow_sdk.queue.unit_process import UnitCatalog
from asyncflow_sdk.queue.unit_start import UnitConfig
from asyncflow_sdk.types import Column
from asyncflow_sdk.types.blocks import BlockSlices
from asyncflow_sdk.wire import KeyPair, RunKey, generate_keys

RUN = "asyncflow-0-1-run"


class Registry(HomeCatalog):
    """The homes of a run in this process: the rules of the ledger in a few lines."""

    def __init__(self) -> None:
        self.by_number: dict[int, StorageHome] = {}
        self.identities: dict[int, str] = {}

    def open(self, offer: HomeOffer) -> tuple[int, int]:
        number = next((n for n, home in self.by_number.items() if home.name == offer.name), len(self.by_number) + 1)
        known = self.by_number.get(number)
        same = known is not None and not known.lost and self.identities[number] == offer.identity
        epoch = 1 if known is None else known.epoch if same else known.epoch + 1
        self.by_number[number] = StorageHome(
            home=number, epoch=epoch, name=offer.name, address=offer.address, key=offer.key,
            directory=offer.directory, owner=offer.owner,
        )  # fmt: skip
        self.identities[number] = offer.identity
        return number, epoch

    def lose(self, number: int, reason: str = "evicted") -> None:
        self.by_number[number] = msgspec.structs.replace(self.by_number[number], lost=reason)

    def homes(self) -> Sequence[StorageHome]:
        return list(self.by_number.values())

    def needed(self, home: int, epoch: int) -> tuple[Set[str], Set[int]]:
        return set(), set(range(100))


class HostView(HomeCatalog):
    """The homes as one host sees them: directories of other hosts are not there."""

    def __init__(self, registry: HomeCatalog, host: str) -> None:
        self.registry, self.host = registry, host

    def homes(self) -> Sequence[StorageHome]:
        return [
            home if home.name == self.host else msgspec.structs.replace(home, directory=f"/elsewhere{home.directory}")
            for home in self.registry.homes()
        ]

    def open(self, offer: HomeOffer) -> tuple[int, int]:
        return self.registry.open(offer)

    def needed(self, home: int, epoch: int) -> tuple[Set[str], Set[int]]:
        return self.registry.needed(home, epoch)


class _Asking(Registry):
    """In a unit's process: ask the test."""

    def open(self, offer: HomeOffer) -> tuple[int, int]:
        say(msgspec.to_builtins(offer))
        home, epoch = hear()
        return home, epoch


def be_unit(name: str, base: str, key: dict[str, Any] | None) -> None:
    """A storage unit: "beat" is a sign of life, "close" removes its files."""
    run_key = key and msgspec.convert(key, RunKey)
    unit = StorageUnit(_Asking(), RUN, name=name, host="127.0.0.1", key=run_key, insecure=not key, base=Path(base))
    say("ready")
    while hear() == "beat":
        unit.beat()
        say("done")
    unit.close(keep=False)
    say("closed")


class Unit:
    """A unit in a process of its own."""

    def __init__(self, hosts: Hosts, name: str) -> None:
        self.hosts, self.name = hosts, name
        base = hosts.base / name
        base.mkdir(exist_ok=True)
        key = hosts.keys and msgspec.to_builtins(hosts.keys.run)
        self.process = Child(be_unit, name, str(base), key)
        self.number, self.epoch = self._open()
        assert self.process.hear() == "ready"

    def _open(self) -> tuple[int, int]:
        self.offer = msgspec.convert(self.process.hear(), HomeOffer)
        where = self.hosts.registry.open(self.offer)
        self.process.say(where)
        return where

    @property
    def directory(self) -> Path:
        return Path(self.offer.directory)

    def beat(self) -> None:
        self.process.say("beat")
        self.number, self.epoch = self._open()
        assert self.process.hear() == "done"

    def close(self) -> None:
        assert self.process("close") == "closed"


class Hosts:
    """Units and stores of one run. ``keys``: of the run; None: everything is insecure."""

    def __init__(self, base: Path, *, secure: bool = True) -> None:
        self.base, self.registry = base, Registry()
        self.keys: KeyPair | None = generate_keys() if secure else None
        self.index = BlockIndex()
        self._sessions = itertools.count(1)
        self._rows = 0
        self._ends = contextlib.ExitStack()

    def unit(self, name: str) -> Unit:
        unit = Unit(self, name)
        self._ends.enter_context(unit.process)
        return unit

    def store(self, host: str, *, fetch_s: float = 20.0, **context: Any) -> HostsStore:
        """The store of a client on a host; "" has no memory of any home."""
        settings: dict[str, Any] = {
            "run": RUN, "session": next(self._sessions), "check_size": lambda nbytes: None,
            "homes": HostView(self.registry, host), "key": None if self.keys is None else self.keys.run, **context,
        }  # fmt: skip
        return self._ends.enter_context(contextlib.closing(HostsStore(StoreContext(**settings), fetch_s=fetch_s)))

    def put(self, store: HostsStore, columns: Mapping[str, Any], ids: Sequence[int] | None = None) -> StoredBlock:
        """Write columns, and place them as the server does: as new rows, or as columns of rows ``ids``."""
        stored = store.write(pack_columns(columns), copy=False)
        if ids is None:
            self.index.put(self._rows, stored.block, "owner", 1)
            self._rows += stored.block.rows
        else:
            self.index.add(np.array(ids), stored.block, "owner", np.arange(stored.block.rows))
        return stored

    def locate(self, ids: Sequence[int], *columns: str) -> tuple[BlockSlices, ...]:
        return self.index.locate(np.array(ids), columns)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()


def specs(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: column.spec for name, column in pack_columns(columns).items()}


def rows_of(column: Column) -> list[bytes]:
    """Each row's bytes."""
    rows = column.values if column.offsets is None else np.split(column.values, column.offsets[1:-1])
    return [row.tobytes() for row in rows]


# ---- with a server


def serve_home(address: str, key: str, name: str, base: str) -> None:
    """The storage unit of a host whose memory is ``base``."""
    stop = threading.Event()
    threading.Thread(target=lambda: (hear(), stop.set()), daemon=True).start()
    catalog = UnitCatalog(UnitConfig(address, key=RunKey.load(key)))
    connection = catalog.connection
    unit = StorageUnit(
        catalog, connection.run, name=name, host="127.0.0.1", key=connection.key, base=Path(base),
        synced=connection.store.synced,
    )  # fmt: skip
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
