"""Lineage: which versions the current one descends from, and the step that trains each.

A version is trained by the step of its number, until a rollback: it makes a new number from old bytes, and from then on
numbers are ``offset`` ahead of their steps. The versions between the old bytes' number and the new one are given up:
rows that they generated may not be trained.

    offset 0: versions 0 to 7    →  offset 2: version 8 (bytes of 5), 9, ...    given up: 6, 7

The offset changes too if a step is leased again after its version was published, and if a trainer resumes from a checkpoint. The
versions that it had published since are *lost*: rows that they generated stay, those of versions rolled back expire.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class VersionOffset:
    """Versions from ``first`` on are ``offset`` ahead of their steps. ``parent``: the version whose bytes ``first`` has, or that it
    follows; -1 for the first offset. ``resumed``: the step that was leased again after its version was current; -1 if none was.
    ``lost``: True if the versions given up were lost with their trainer, not rolled back."""

    first: int
    parent: int
    offset: int
    resumed: int = -1
    lost: bool = False

    @property
    def rolled_back(self) -> bool:
        """True if it begins with a rollback, which gives up one version at least."""
        return not self.lost and self.first - self.parent > 1


class Lineage:
    """Costs follow the number of rollbacks and of trainers that died, never that of versions."""

    def __init__(self) -> None:
        self.changes = [VersionOffset(-1, -1, 0)]

    @property
    def last(self) -> VersionOffset:
        return self.changes[-1]

    @property
    def offsets(self) -> tuple[tuple[int, int], ...]:
        """First version and offset of each change; empty while a version's number is its step."""
        offsets = tuple((change.first, change.offset) for change in self.changes)
        return offsets if len(offsets) > 1 else ()

    def step(self, version: int) -> int:
        """The step that trains a version."""
        return version - self._of(version).offset

    def version(self, step: int) -> int:
        """The version that a step leased now trains."""
        return step + self.last.offset

    def given_up(self, version: int) -> bool:
        """True if the current version does not descend from this one."""
        newest: int | None = None  # the newest ancestor of the current version among the changes still to look at
        for change in reversed(self.changes):
            if newest is not None and change.first > newest:
                continue  # it was given up as a whole
            if newest is not None and version > newest:
                return True
            if version >= change.first:
                return False
            newest = change.parent
        return False

    def rolled_back(self, version: int) -> bool:
        """True if this version was given up by a rollback: rows that it generated may not be trained."""
        gone = any(s.rolled_back and s.parent < version < s.first for s in self.changes)
        return gone and self.given_up(version)

    def follows(self, version: int, other: int) -> bool:
        """True if ``version`` may continue rows that ``other`` began, and they are no older for it."""
        if self.given_up(other) and not self.rolled_back(other):  # lost: its successor may be trained earlier
            return self.step(version) >= self.step(other)
        return version >= other

    def roll_back(self, first: int, parent: int, step: int, *, lost: bool = False) -> None:
        """Version ``first`` has the bytes of ``parent`` and is trained at ``step``."""
        self.changes.append(VersionOffset(first, parent, first - step, lost=lost))

    def resume(self, current: int, step: int) -> None:
        """``step`` trains ``current`` though its own version was published already. No version is given up."""
        self.changes.append(VersionOffset(current + 1, current, current - step, step))

    def place(self, version: int, step: int) -> None:
        """``version`` follows those before it and is trained at ``step``, whatever its number."""
        if self.step(version) != step:
            self.changes.append(VersionOffset(version, version - 1, version - step))

    def _of(self, version: int) -> VersionOffset:
        return next(change for change in reversed(self.changes) if version >= change.first)
