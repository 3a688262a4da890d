"""Stores with one fault each. ``FAULTS``: the check that finds it, its words, the replaced methods."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from faults import Fault, before, leave_thread, refuses, replace_methods
from folder_store import FolderStore

import asyncflow_sdk as af
from asyncflow_sdk.errors import LeaseLost, StoreUnavailable
from asyncflow_sdk.interfaces import BlockMemory, StoreContext
from asyncflow_sdk.interfaces.store import PayloadStore
from asyncflow_sdk.queue.stores.factory import local_store
from asyncflow_sdk.types import Column

ADAPTERS = [
    af.AdapterSpec(kind="store", name="wrong-local", factory="wrong_stores:wrong_local", can={"hosts": "one"}),
    af.AdapterSpec(kind="store", name="wrong-folder", factory="wrong_stores:wrong_folder", can={"hosts": "many"}),
]
BUFFER = np.zeros(1 << 18)


def wrong_local(context: StoreContext, fault: str) -> PayloadStore:
    store: Any = local_store(context)
    store.run = context.run
    replace_methods(store, LOCAL[fault][-1])
    return store


def wrong_folder(context: StoreContext, fault: str, folder: str) -> FolderStore:
    store = FolderStore(Path(folder))
    replace_methods(store, FOLDER[fault][-1])
    return store


def first_rows(slices: Any) -> Any:
    return msgspec.structs.replace(slices, entries=bytes(len(slices.entries)))


def flip_a_bit(self: Any, right: Any, *args: Any) -> dict[str, Column]:
    columns = right(*args)
    for name, column in columns.items():
        values = column.values.copy()
        values.view(np.uint8).reshape(-1)[-1:] ^= 1
        values.flags.writeable = False
        columns[name] = Column(column.spec, values, column.offsets)
    return columns


def read_into_one_buffer(self: Any, right: Any, *args: Any) -> dict[str, Column]:
    columns = right(*args)
    for name, column in columns.items():
        BUFFER[: column.values.size] = column.values.reshape(-1)
        mine = BUFFER[: column.values.size].reshape(column.values.shape)
        columns[name] = Column(column.spec, mine, column.offsets)
    return columns


def read_what_is_there(self: Any, right: Any, slices: Any, schema: Any) -> dict[str, Column]:
    try:
        return right(slices, schema)
    except LeaseLost:
        zeros = {name: np.zeros((4, 50_000)) for each in slices for name in each.columns}
        return {name: Column(schema[name], values, None) for name, values in zeros.items()}


def run_a_loop(*_: object) -> None:
    call = asyncio.sleep(0)
    try:
        asyncio.run(call)
    finally:
        call.close()


def free_known(self: Any, right: Any, serials: Any) -> None:
    for serial in serials:
        if serial < 10:
            raise KeyError(serial)
        right([serial])


def free_all(self: Any, right: Any, *args: Any) -> BlockMemory:
    memory = right(*args)
    free = memory.free_all
    memory.free_all = lambda prefixes: free([f"{memory.check()}/"])
    return memory


def lose_blocks(self: Any, right: Any, *args: Any) -> BlockMemory:
    """They end with the process that opened the memory, and their identity does not."""
    for path in self.files():
        path.unlink()
    return right(*args)


LOCAL: dict[str, tuple[str, str, Fault]] = {
    "flips a bit": ("values", "column 'fixed' of rows [0] has other bytes", {"read": flip_a_bit}),
    "reads the first rows": ("parts", "are not those that were put and added", {
        "read": lambda self, right, slices, schema: right([first_rows(each) for each in slices], schema)
    }),
    "is of one process": ("processes", "no block of another process", {"read": refuses(
        lambda self, *_: f"-{os.getpid()}-" not in self.run, RuntimeError, "no block of another process"
    )}),
    "reads what is there": ("ended", "are read as", {"read": read_what_is_there}),
    "sends later": ("copied", "the caller changed its columns", {
        "write": lambda self, right, columns, **more: right(columns, **{**more, "copy": False})
    }),
    "keeps discarded blocks": ("memory", "are held after", {"discard": lambda *_: None}),
    "knows its blocks": ("frees", "KeyError", {"free": free_known}),
    "reads into one buffer": ("views", "have changed after their rows had ended", {"read": read_into_one_buffer}),
    "is of one thread": ("threads", "of another thread", {"write": refuses(
        lambda self, *_: vars(self).setdefault("writer", threading.get_ident()) != threading.get_ident(),
        RuntimeError, "this is a store of another thread",
    )}),
    "has a loop of its own": ("event_loops", "be called from a running event loop", {"write": before(run_a_loop)}),
    "leaves a thread": ("closed", "left", {"close": before(lambda self: leave_thread(daemon=True))}),
}  # fmt: skip
FOLDER: dict[str, tuple[str, str, Fault]] = {
    "takes no blocks": ("homes", "were sent to the server", {"write": refuses(lambda *_: True, StoreUnavailable)}),
    "knows one epoch": ("given_up", "in another epoch", {"write": refuses(
        lambda self, address, name, block: "/h1.1!" not in name, RuntimeError, "a block in another epoch"
    )}),
    "frees all": ("ended_sessions", "no block", {"open_memory": free_all}),
    "notices no loss": ("unit_killed", "no block", {"open_memory": lose_blocks}),
}  # fmt: skip
FAULTS = LOCAL | FOLDER
