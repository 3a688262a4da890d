"""The store that `asyncflow new-plugin` writes: a file for each block in a folder."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

_MADE: dict[str, Any] = {"__name__": __name__}
exec(
    Template(resources.files("asyncflow_sdk.cli").joinpath("templates/store.py.tmpl").read_text()).substitute(
        cls="WrittenStore", name="written"
    ),
    _MADE,
)


class FolderStore(_MADE["WrittenStore"]):
    def files(self) -> list[Path]:
        """Of all blocks."""
        return sorted(path for path in self._folder.rglob("*") if path.is_file() and path.suffix != ".identity")
