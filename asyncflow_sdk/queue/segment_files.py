"""The segment files of a run's sessions, for the server: which are whose, and which may go.

Session 7 writes rows into ``s7-*`` and, as rank 0 of a publisher, weights into ``w0.7-*``. While it lives it uses its segments again; when it
has ended, each is removed as soon as no live row lies in it, and no version that is still kept; but only once
``carry_out`` is called, when what that rests on is kept.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


class SegmentFiles:
    """Not thread-safe: the server's thread owns it."""

    TRANSIENT = frozenset({"_rows", "_weights", "_doomed", "replaying"})

    def __init__(self, rows: Path, weights: Path) -> None:
        self._rows, self._weights = rows, weights
        self._doomed: list[Path] = []
        self.replaying = False
        self._publishers: set[int] = set()  # sessions whose weights are still kept, or may come to be
        self._ended: set[int] = set()  # those of them that have ended

    def remove(self, segment: str) -> None:
        """The last row of a segment whose session has ended is through."""
        if not self.replaying:
            self._doomed.append(self._rows / segment)

    def ended(self, session: int, needed: Collection[str], publishers: Collection[int]) -> None:
        """A session has ended: its segments go, but for those ``needed`` by rows, or by a version of ``publishers``."""
        if not self.replaying:
            self._doomed += [path for path in self._rows.glob(f"s{session}-*") if path.name not in needed]
        self._ended.add(session)
        self.keep_weights(publishers)

    def keep_weights(self, publishers: Collection[int]) -> None:
        """Versions that still may be asked for are of these sessions."""
        self._publishers = set(publishers)
        self._remove_weights()

    def _remove_weights(self) -> None:
        for session in self._ended - self._publishers:
            self._ended.discard(session)
            if not self.replaying:
                self._doomed += self._weights.glob(f"w[0-9]*.{session}-*")

    def reconcile(self, sessions: Collection[int], needed: Collection[str]) -> None:
        """After a crash: what nobody will remove any more goes, whose session is none of these."""
        for path in self._rows.glob("s[0-9]*-*"):
            if int(path.name[1:].split("-")[0]) not in sessions and path.name not in needed:
                self._doomed.append(path)
        publishers = {*sessions, *self._publishers}
        for path in self._weights.glob("w[0-9]*.[0-9]*-*"):  # w, rank, session, ...
            if int(path.name.split(".")[1].split("-")[0]) not in publishers:
                self._doomed.append(path)

    def carry_out(self) -> None:
        """Remove what may go."""
        doomed, self._doomed = self._doomed, []
        for path in doomed:
            path.unlink(missing_ok=True)
