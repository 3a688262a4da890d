"""Versions of the weights: the current one, those that are kept, and the one that is announced."""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from .. import commands as cmd
from .lineage import Lineage
from .rows import NONE


@dataclass
class AnnouncedVersion:
    """A version that is being written. ``ranks``: publishers that announced it. ``parts``: published parts by rank."""

    version: int
    since: float
    ranks: set[int] = field(default_factory=set)
    parts: dict[int, cmd.VersionPart] = field(default_factory=dict)
    probe: bytes = b""


@dataclass
class KeptVersion:
    """A version that can be fetched. ``source``: the number its bytes were published under, by ``sessions``, one for each part."""

    version: int
    source: int
    parts: tuple[cmd.VersionPart, ...]
    sessions: tuple[int, ...]
    probe: bytes
    since: float

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def root(self) -> str:
        """One digest of all parts."""
        roots = [part.root for part in self.parts]
        return roots[0] if len(roots) == 1 else xxhash.xxh3_128_hexdigest("".join(roots).encode())


class Versions:
    """``current``: the number of the newest version; NONE before the first. ``since``: when it was published, ledger seconds.
    ``kept``: the newest versions, oldest first. ``committed``: the newest one that a quorum of replicas has staged; NONE without a
    quorum. ``unavailable``: why the current version cannot be fetched. ``to_restore``: the version of a rollback that the trainer has
    not loaded yet; ``restore_step``: the step of the checkpoint with its optimizer state. NONE if there is none."""

    def __init__(self) -> None:
        self.current = NONE
        self.since = 0.0
        self.kept: dict[int, KeptVersion] = {}
        self.lineage = Lineage()
        self.committed = NONE
        self.unavailable = ""
        self.to_restore = NONE
        self.restore_step = NONE

    @property
    def newest(self) -> KeptVersion | None:
        """The current version, if it can be fetched."""
        return self.kept.get(self.current)

    def sessions(self) -> set[int]:
        """Sessions that wrote versions that are kept, also those that are closed."""
        return {session for each in self.kept.values() for session in each.sessions}
