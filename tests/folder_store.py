"""A BlockStore in a folder: a file for each block. Its faults are set by the test."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow_sdk.errors import LeaseLost, MemoryFull, StoreUnavailable
from asyncflow_sdk.interfaces import BlockMemory, BlockRead, BlockStore


class FolderStore(BlockStore):
    """``limit_bytes``: of all blocks. ``away``: it cannot be reached. ``hangs``: reads wait until it is cleared."""

    def __init__(self, folder: Path, limit_bytes: int = 1 << 40) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self.away = False
        self.hangs = threading.Event()
        self.hangs.set()
        self.bytes_read = 0
        self.fetch_s = 20.0

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file() and path.name != "marker")

    def write(self, address: str, name: str, block: Any) -> None:
        self._check()
        path = self.folder / name
        assert not path.exists(), "a name is never used again"
        if sum(each.stat().st_size for each in self.files()) + block.nbytes > self.limit_bytes:
            raise MemoryFull("the folder is full")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(block.tobytes())

    def read(self, address: str, reads: Sequence[BlockRead]) -> None:
        self._check()
        self.hangs.wait(60)
        for each in reads:
            try:
                found = np.fromfile(self.folder / each.name, np.uint8)
            except FileNotFoundError:
                raise LeaseLost(f"no block {each.name}") from None
            for start, stop in each.ranges:
                each.into[start:stop] = found[start:stop]
                self.bytes_read += stop - start

    def free(self, address: str, names: Sequence[str]) -> None:
        self._check()
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def is_lost(self, address: str, identity: str) -> bool:
        self._check()
        return not (self.folder / identity / "marker").exists()

    def open_memory(self, run: str, name: str, host: str) -> BlockMemory:
        return FolderMemory(self, run)

    def close(self) -> None:
        """Keep the folder."""

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailable("the folder is away")


class FolderMemory(BlockMemory):
    def __init__(self, store: FolderStore, run: str) -> None:
        self._store, self._run = store, run
        self._numbers = itertools.count(1)
        self._identity = ""
        self.address = "folder"

    def check(self) -> str:
        if not self._identity or self._store.is_lost(self.address, self._identity):
            self._identity = f"{self._run}-{next(self._numbers)}"
            (self._store.folder / self._identity).mkdir()
            (self._store.folder / self._identity / "marker").touch()
        return self._identity

    def free_all(self, prefixes: Sequence[str]) -> None:
        for path in self._store.files():
            if str(path.relative_to(self._store.folder)).startswith(tuple(prefixes)):
                path.unlink()

    def close(self, *, keep: bool) -> None:
        """Keep the folder."""
