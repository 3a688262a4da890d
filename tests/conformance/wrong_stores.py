"""Stores with one fault each. ``FAULTS``: the check that finds it, its words, the replaced methods."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from faults import Fault, before, leave_thread, refuses, with_fault
from folder_store import FolderStore, payload_store

import asyncflow_sdk as af
from asyncflow_sdk.errors import LeaseLost, StoreUnavailable
from asyncflow_sdk.interfaces import StoreContext
from asyncflow_sdk.interfaces.store import PayloadStore
from asyncflow_sdk.queue.stores.local import local_store
from asyncflow_sdk.types import Column

ADAPTERS = [
    af.AdapterSpec(kind="store", name="wrong-local", factory="wrong_stores:wrong_local", can={"hosts": "one"}),
    af.AdapterSpec(kind="store", name="wrong-folder", factory="wrong_stores:wrong_folder", can={"hosts": "many"}),
]
BUFFER = np.zeros(1 << 18)


def wrong_local(context: StoreContext, fault: str) -> PayloadStore:
    store: Any = local_store(context)
    store.run = context.run
    return with_fault(store, LOCAL[fault][-1])  # type: ignore[no-any-return]


def wrong_folder(context: StoreContext, fault: str, folder: str) -> PayloadStore:
    return payload_store("wrong-folder", with_fault(FolderStore(folder), FOLDER[fault][-1]), context)


def reads(change: Callable[[Any], Any]) -> Fault:
    """Other values of each column."""
    return {"read": lambda self, right, *args: {
        name: Column(column.spec, change(column.values), column.offsets) for name, column in right(*args).items()
    }}  # fmt: skip


def flip_a_bit(values: Any) -> Any:
    flipped = values.copy()
    flipped.view(np.uint8).reshape(-1)[-1:] ^= 1
    return flipped


def into_one_buffer(values: Any) -> Any:
    mine = BUFFER[: values.size].reshape(values.shape)
    mine[:] = values
    return mine


def read_what_is_there(self: Any, right: Any, slices: Any, schema: Any) -> dict[str, Column]:
    try:
        return right(slices, schema)
    except LeaseLost:
        zeros = {name: np.zeros((4, 50_000)) for each in slices for name in each.columns}
        return {name: Column(schema[name], values, None) for name, values in zeros.items()}


LOCAL: dict[str, tuple[str, str, Fault]] = {
    "flips a bit": ("values", "column 'fixed' of rows [0] has other bytes", reads(flip_a_bit)),
    "reads the first rows": ("parts", "are not those that were put and added", {
        "read": lambda self, right, slices, schema: right([
            msgspec.structs.replace(each, entries=bytes(len(each.entries))) for each in slices
        ], schema)
    }),
    "is of one process": ("processes", "no block of another process", {"read": refuses(
        lambda self, *_: f"-{os.getpid()}-" not in self.run, RuntimeError, "no block of another process"
    )}),
    "reads what is there": ("ended", "are read as", {"read": read_what_is_there}),
    "sends later": ("copied", "the caller changed its columns", {
        "write": lambda self, right, columns, **more: right(columns, **{**more, "copy": False})
    }),
    "keeps discarded blocks": ("memory", "are held after", {"discard": lambda *_: None}),
    "knows its blocks": ("frees", "KeyError", {"free": refuses(lambda self, serials: min(serials) < 10, KeyError)}),
    "reads into one buffer": ("views", "have changed after their rows had ended", reads(into_one_buffer)),
    "is of one thread": ("threads", "of another thread", {"write": refuses(
        lambda self, *_: vars(self).setdefault("writer", threading.get_ident()) != threading.get_ident(),
        RuntimeError, "this is a store of another thread",
    )}),
    "has a loop of its own": ("event_loops", "be called from a running event loop", {
        "write": before(lambda *_: asyncio.run(asyncio.sleep(0)))
    }),
    "leaves a thread": ("closed", "left", {"close": before(lambda self: leave_thread(daemon=True))}),
}  # fmt: skip
FOLDER: dict[str, tuple[str, str, Fault]] = {
    "takes no blocks": ("homes", "were sent to the server", {"write": refuses(lambda *_: True, StoreUnavailable)}),
    "knows one epoch": ("given_up", "in another epoch", {"write": refuses(
        lambda self, address, name, block: "/h1.1!" not in name, RuntimeError, "a block in another epoch"
    )}),
    "frees all": ("ended_sessions", "no block", {"open_memory": lambda self, right, *where: with_fault(right(*where), {
        "free_all": lambda memory, right, prefixes: right([f"{memory.check()}/"])
    })}),
    "notices no loss": ("unit_killed", "no block", {  # blocks end with who opened the memory, and their identity does not
        "open_memory": before(lambda self, *_: [file.unlink() for file in self.files()])
    }),
}  # fmt: skip
FAULTS = LOCAL | FOLDER
