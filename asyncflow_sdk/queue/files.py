"""Files: the segment files of a run's sessions, for the server: which are whose, and which may go.

Session 7 writes rows into ``s7-*`` and weights into ``w7-*``. While it lives it uses its segments again; when it
has ended, each is removed as soon as no live row lies in it, and no version that is still kept.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


class Files:
    """Not thread-safe: the server's thread owns it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._publishers: dict[int, int] = {}  # version → session
        self._ended: set[int] = set()  # sessions whose weights are still kept

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
