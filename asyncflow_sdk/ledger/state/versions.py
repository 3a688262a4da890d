"""Versions of the weights: the current one, kept ones, and the announced one."""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from .. import commands as cmd
from .lineage import Lineage
from .rows import NONE


@dataclass
class AnnouncedVersion:
    """A version being written. ``ranks``: that announced it. ``parts``: published, by rank."""

    version: int
    since: float
    ranks: set[int] = field(default_factory=set)
    parts: dict[int, cmd.VersionPart] = field(default_factory=dict)
    probe: bytes = b""


@dataclass
class KeptVersion:
    """A version that can be fetched. ``source``: the number its bytes were published under.
    ``sessions``: the publisher of each part."""

    version: int
    source: int
    parts: tuple[cmd.VersionPart, ...]
    sessions: tuple[int, ...]
    probe: bytes
    since: float

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def root(self) -> str:
        """One digest of all parts."""
        roots = [part.root for part in self.parts]
        return roots[0] if len(roots) == 1 else xxhash.xxh3_128_hexdigest("".join(roots).encode())


class Versions:
    """``current``: the newest version; NONE before the first. ``since``: its publication, ledger seconds. ``kept``:
    the newest versions, oldest first. ``committed``: the newest version staged by a quorum; NONE without a quorum.
    ``unavailable``: why the current version cannot be fetched. ``own_zero``: True if version 0 is the engines' own
    weights, since rows were leased for them; False if it is the publisher's, since it was announced; None before.
    ``to_restore``: version of a rollback not yet loaded by the trainer; ``restore_step``: step of the checkpoint with
    its optimizer state; both NONE for none."""

    def __init__(self) -> None:
        self.current = NONE
        self.since = 0.0
        self.kept: dict[int, KeptVersion] = {}
        self.lineage = Lineage()
        self.committed = NONE
        self.unavailable = ""
        self.own_zero: bool | None = None
        self.to_restore = NONE
        self.restore_step = NONE

    @property
    def newest(self) -> KeptVersion | None:
        """The current version, if it can be fetched."""
        return self.kept.get(self.current)

    def name_zero(self, *, own: bool) -> None:
        """Decide for good whose version 0 is."""
        self.own_zero = own

    def sessions(self) -> set[int]:
        """Return the sessions that wrote kept versions, also closed ones."""
        return {session for each in self.kept.values() for session in each.sessions}
