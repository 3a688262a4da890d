"""Stores that are wrong in one way each. ``FAULTS``: the check that finds it, and what that says."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from folder_store import FolderStore

import asyncflow_sdk as af
from asyncflow_sdk.errors import LeaseLost, StoreUnavailable
from asyncflow_sdk.interfaces import BlockMemory, StoreContext
from asyncflow_sdk.interfaces.store import PayloadStore, StoredBlock
from asyncflow_sdk.queue.stores.factory import local_store
from asyncflow_sdk.types import Column, ColumnSpec
from asyncflow_sdk.types.blocks import BlockSlices

FAULTS: dict[str, tuple[str, str]] = {}
ADAPTERS: list[af.AdapterSpec] = []
Columns = Mapping[str, Column]


def wrong(check: str, says: str, hosts: str = "one") -> Callable[[Any], Any]:
    """Register a factory of stores."""

    def register(factory: Any) -> Any:
        name = factory.__name__
        FAULTS[name] = (check, says)
        ADAPTERS.append(af.AdapterSpec(kind="store", name=name, factory=f"wrong_stores:{name}", can={"hosts": hosts}))
        return factory

    return register


class Local(PayloadStore):
    """What the store "local" does."""

    def __init__(self, context: StoreContext) -> None:
        self.run, self.right = context.run, local_store(context)
        self.inline, self.synced = self.right.inline, self.right.synced

    def write(self, columns: Columns, *, copy: bool, grow: bool = True) -> StoredBlock:
        return self.right.write(columns, copy=copy, grow=grow)

    def rewrite(self, stored: StoredBlock) -> StoredBlock | None:
        return self.right.rewrite(stored)

    def discard(self, stored: StoredBlock) -> None:
        self.right.discard(stored)

    def free(self, serials: Iterable[int]) -> None:
        self.right.free(serials)

    def read(self, slices: Sequence[BlockSlices], schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        return self.right.read(slices, schema)

    def close(self) -> None:
        self.right.close()


@wrong("values", "column 'fixed' of rows [0] has other bytes")
class FlipsABit(Local):
    def read(self, slices: Any, schema: Any) -> dict[str, Column]:
        columns = super().read(slices, schema)
        for name, column in columns.items():
            values = column.values.copy()
            values.view(np.uint8).reshape(-1)[-1:] ^= 1
            values.flags.writeable = False
            columns[name] = Column(column.spec, values, column.offsets)
        return columns


@wrong("parts", "are not those that were put and added")
class ReadsTheFirstRows(Local):
    def read(self, slices: Any, schema: Any) -> dict[str, Column]:
        first = [msgspec.structs.replace(each, entries=bytes(len(each.entries))) for each in slices]
        return super().read(first, schema)


@wrong("processes", "no block of another process")
class IsOfOneProcess(Local):
    def read(self, slices: Any, schema: Any) -> dict[str, Column]:
        if f"-{os.getpid()}-" not in self.run:
            raise RuntimeError("no block of another process")
        return super().read(slices, schema)


@wrong("ended", "are read as")
class ReadsWhatIsThere(Local):
    def read(self, slices: Any, schema: Any) -> dict[str, Column]:
        try:
            return super().read(slices, schema)
        except LeaseLost:
            zeros = {name: np.zeros((4, 50_000)) for each in slices for name in each.columns}
            return {name: Column(schema[name], values, None) for name, values in zeros.items()}


@wrong("copied", "the caller changed its columns")
class SendsLater(Local):
    def write(self, columns: Columns, *, copy: bool, grow: bool = True) -> StoredBlock:
        return super().write(columns, copy=False, grow=grow)


@wrong("memory", "are held after")
class KeepsDiscardedBlocks(Local):
    def discard(self, stored: StoredBlock) -> None:
        pass


@wrong("frees", "KeyError")
class KnowsItsBlocks(Local):
    def free(self, serials: Iterable[int]) -> None:
        for serial in serials:
            if serial < 10:
                raise KeyError(serial)
            super().free([serial])


@wrong("views", "have changed after their rows had ended")
class ReadsIntoOneBuffer(Local):
    buffer = np.zeros(1 << 18)

    def read(self, slices: Any, schema: Any) -> dict[str, Column]:
        columns = super().read(slices, schema)
        for name, column in columns.items():
            self.buffer[: column.values.size] = column.values.reshape(-1)
            mine = self.buffer[: column.values.size].reshape(column.values.shape)
            columns[name] = Column(column.spec, mine, column.offsets)
        return columns


@wrong("threads", "of another thread")
class IsOfOneThread(Local):
    writer = 0

    def write(self, columns: Columns, *, copy: bool, grow: bool = True) -> StoredBlock:
        self.writer = self.writer or threading.get_ident()
        if self.writer != threading.get_ident():
            raise RuntimeError("this is a store of another thread")
        return super().write(columns, copy=copy, grow=grow)


@wrong("event_loops", "cannot be called from a running event loop")
class HasALoopOfItsOwn(Local):
    def write(self, columns: Columns, *, copy: bool, grow: bool = True) -> StoredBlock:
        import asyncio

        async def later() -> None:
            pass

        call = later()
        try:
            asyncio.run(call)
        finally:
            call.close()
        return super().write(columns, copy=copy, grow=grow)


@wrong("closed", "left")
class LeavesAThread(Local):
    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        threading.Thread(target=threading.Event().wait, args=(30,), daemon=True).start()


class InAFolder(FolderStore):
    """A right store with homes. Its folder may be an option."""

    def __init__(self, context: StoreContext, folder: str) -> None:
        super().__init__(Path(folder))


@wrong("homes", "were sent to the server", hosts="many")
class TakesNoBlocks(InAFolder):
    def write(self, address: str, name: str, block: Any) -> None:
        raise StoreUnavailable("not today")


@wrong("given_up", "in another epoch", hosts="many")
class KnowsOneEpoch(InAFolder):
    def write(self, address: str, name: str, block: Any) -> None:
        if "/h1.1!" not in name:
            raise RuntimeError("a block in another epoch")
        super().write(address, name, block)


@wrong("ended_sessions", "no block", hosts="many")
class FreesAll(InAFolder):
    def open_memory(self, run: str, name: str, host: str) -> BlockMemory:
        memory = super().open_memory(run, name, host)
        right = memory.free_all
        memory.free_all = lambda prefixes: right([""])  # type: ignore[method-assign]
        return memory


@wrong("unit_killed", "no block", hosts="many")
class NoticesNoLoss(InAFolder):
    """Its blocks end with the process that opened the memory, and their identity does not."""

    def open_memory(self, run: str, name: str, host: str) -> BlockMemory:
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        return super().open_memory(run, name, host)

    def is_lost(self, address: str, identity: str) -> bool:
        return False
