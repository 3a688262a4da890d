"""The store that `asyncflow new-plugin` writes, with faults: a file for each block in a folder."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from asyncflow_sdk.errors import StoreUnavailable
from asyncflow_sdk.interfaces import BlockMemory, BlockRead

_MADE: dict[str, Any] = {"__name__": __name__}
exec(
    Template(resources.files("asyncflow_sdk.cli").joinpath("templates/store.py.tmpl").read_text()).substitute(
        cls="WrittenStore", name="written"
    ),
    _MADE,
)


class FolderStore(_MADE["WrittenStore"]):
    """``away``: it cannot be reached. ``hangs``: reads wait until it is set. ``limit_bytes``: of all blocks."""

    def __init__(self, folder: Path, **options: int) -> None:
        super().__init__(None, str(folder), **options)
        self.folder, self.away, self.bytes_read, self.fetch_s = folder, False, 0, 20.0
        self.hangs = threading.Event()
        self.hangs.set()

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file() and path.suffix != ".identity")

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailable("the folder is away")

    def write(self, address: str, name: str, block: Any) -> None:
        self._check()
        super().write(address, name, block)

    def read(self, address: str, reads: Sequence[BlockRead]) -> None:
        self._check()
        self.hangs.wait(60)
        super().read(address, reads)
        self.bytes_read += sum(stop - start for each in reads for start, stop in each.ranges)

    def is_lost(self, address: str, identity: str) -> bool:
        self._check()
        return super().is_lost(address, identity)

    def open_memory(self, *where: str) -> BlockMemory:
        memory = super().open_memory(*where)
        check = memory.check
        memory.check = lambda: (self._check(), check())[1]
        return memory
