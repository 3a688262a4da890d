"""The store that `asyncflow new-plugin` writes: a file for each block in a folder."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from asyncflow_sdk.interfaces import PayloadStore, StoreContext

sys.path.insert(0, str(Path(__file__).parents[1] / "contrib/asyncflow_blocks"))
_MADE: dict[str, Any] = {"__name__": __name__}
exec(
    Template(resources.files("asyncflow_sdk.cli").joinpath("templates/store.py.tmpl").read_text()).substitute(
        cls="WrittenStore", name="written"
    ),
    _MADE,
)


class FolderStore(_MADE["_Blocks"]):
    def files(self) -> list[Path]:
        """Of all blocks."""
        return sorted(path for path in self._folder.rglob("*") if path.is_file() and path.suffix != ".identity")


def payload_store(kind: str, blocks: FolderStore, context: StoreContext) -> PayloadStore:
    return _MADE["BlockPayloadStore"](kind, blocks, context)  # type: ignore[no-any-return]
