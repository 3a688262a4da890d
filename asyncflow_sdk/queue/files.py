"""Files: the segment files of a run's sessions, for the server: which are whose, and which may go.

Session 7 writes rows into ``s7-*`` and weights into ``w7-*``. While it lives it uses its segments again; when it
has ended, each is removed as soon as no live row lies in it, and no version that is still kept.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from ..errors import SchemaError
from ..types import ColumnSpec, carrier
from .blocks import Block, extent


class Files:
    """Not thread-safe: the server's thread owns it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._publishers: dict[int, int] = {}  # version → session
        self._ended: set[int] = set()  # sessions whose weights are still kept

    def check(self, session: int, block: Block | None, columns: dict[str, ColumnSpec]) -> None:
        """A block fits what is said of its columns and lies in a segment of its session. Raises SchemaError."""
        if (block is None) != (not columns):
            raise SchemaError("columns and payload belong together")
        if block is None:
            return
        if {placed.name for placed in block.columns} != set(columns) or block.rows < 0:
            raise SchemaError("the payload is not that of the columns named")
        for placed in block.columns:
            spec = columns[placed.name]
            size = carrier(spec.dtype).itemsize
            for length in spec.shape:
                size *= length
            if min(placed.values, placed.nbytes, size) < 0 or (placed.offsets < 0) != (spec.kind == "fixed"):
                raise SchemaError(f"column {placed.name!r} lies nowhere")
            if spec.kind == "fixed" and placed.nbytes != size * block.rows:
                raise SchemaError(f"column {placed.name!r} has {placed.nbytes} bytes, not {size * block.rows}")
        if not owns(session, block.segment) or "/" in block.segment or extent(block) > self._size(block.segment):
            raise SchemaError(f"segment {block.segment!r} holds no such payload of this session")

    def _size(self, segment: str) -> int:
        try:
            return os.stat(f"{self._directory}/{segment}").st_size
        except (OSError, ValueError):
            return -1

    def remove(self, segment: str) -> None:
        """The last row of a segment whose session has ended is through."""
        (self._directory / segment).unlink(missing_ok=True)

    def ended(self, session: int, needed: Collection[str]) -> None:
        """A session has ended: its segments go, but for those ``needed`` by rows or by a version."""
        for path in self._directory.glob(f"s{session}-*"):
            if path.name not in needed:
                path.unlink(missing_ok=True)
        self._ended.add(session)
        self._remove_weights()

    def published(self, version: int, session: int, kept: Collection[int]) -> None:
        """A version became current. ``kept``: the versions that still may be asked for."""
        self._publishers[version] = session
        self._publishers = {v: s for v, s in self._publishers.items() if v in kept}
        self._remove_weights()

    def _remove_weights(self) -> None:
        for session in self._ended - set(self._publishers.values()):
            self._ended.discard(session)
            for path in self._directory.glob(f"w{session}-*"):
                path.unlink(missing_ok=True)


def owns(session: int, segment: str) -> bool:
    return segment.startswith(f"s{session}-")
