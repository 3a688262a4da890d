"""Hosts on one machine: each has a storage unit in a process of its own, and a client sees only the memory of its host.

with Hosts(tmp_path) as hosts:
    a, b = hosts.unit("a"), hosts.unit("b")
    writer, reader = hosts.store("a"), hosts.store("b")
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from children import Child, hear, say

from asyncflow_sdk.interfaces.store import HomeCatalog, HomeOffer, StorageHome, StoreContext, StoredBlock
from asyncflow_sdk.queue.block_index import BlockIndex
from asyncflow_sdk.queue.stores.blocks import pack_columns
from asyncflow_sdk.queue.stores.hosts import HostsStore
from asyncflow_sdk.queue.stores.unit import StorageUnit
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

    def open(self, offer: HomeOffer) -> tuple[int, int]:
        return self.registry.open(offer)

    def homes(self) -> Sequence[StorageHome]:
        return [
            home if home.name == self.host else msgspec.structs.replace(home, directory=f"/elsewhere{home.directory}")
            for home in self.registry.homes()
        ]

    def needed(self, home: int, epoch: int) -> tuple[Set[str], Set[int]]:
        return self.registry.needed(home, epoch)


class _Asking(HomeCatalog):
    """In a unit's process: ask the test."""

    def open(self, offer: HomeOffer) -> tuple[int, int]:
        say(msgspec.to_builtins(offer))
        home, epoch = hear()
        return home, epoch

    def homes(self) -> Sequence[StorageHome]:
        raise NotImplementedError

    def needed(self, home: int, epoch: int) -> tuple[Set[str], Set[int]]:
        return set(), set(range(100))


def be_unit(name: str, base: str, key: dict[str, Any] | None) -> None:
    """A storage unit: "beat" is a sign of life, "close" removes its files."""
    run_key = None if key is None else msgspec.convert(key, RunKey)
    unit = StorageUnit(
        _Asking(), RUN, name=name, host="127.0.0.1", key=run_key, insecure=key is None, base=Path(base)
    )
    say("ready")
    while (word := hear()) == "beat":
        unit.beat()
        say("done")
    unit.close(keep=word == "keep")
    say("closed")


class Unit:
    """A unit in a process of its own."""

    def __init__(self, hosts: Hosts, name: str) -> None:
        self.hosts, self.name = hosts, name
        base = hosts.base / name
        base.mkdir(exist_ok=True)
        key = None if hosts.keys is None else msgspec.to_builtins(hosts.keys.run)
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

    def close(self, word: str = "close") -> None:
        self.process.say(word)
        assert self.process.hear() == "closed"


class Hosts:
    """Units and stores of one run. ``keys``: of the run; None: everything is insecure."""

    def __init__(self, base: Path, *, secure: bool = True) -> None:
        self.base, self.registry = base, Registry()
        self.keys: KeyPair | None = generate_keys() if secure else None
        self.index = BlockIndex()
        self._sessions = itertools.count(1)
        self._rows = itertools.count()
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
        assert stored.block is not None
        count = stored.block.rows
        if ids is None:
            self.index.put(next(self._rows), stored.block, "owner", 1)
            for _ in range(count - 1):
                next(self._rows)
        else:
            self.index.add(np.array(ids), stored.block, "owner", np.arange(count))
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
    if column.offsets is None:
        return [row.tobytes() for row in column.values]
    return [
        column.values[low:high].tobytes() for low, high in zip(column.offsets[:-1], column.offsets[1:], strict=True)
    ]
