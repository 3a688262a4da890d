"""What the ledger knows of versions: those announced, those kept, and what a replica does about one."""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from . import commands as cmd
from .rows import NONE


@dataclass
class Replica:
    """What a session that takes versions does about ``version``: fetching, staged, waits, swapping, failed; "" when it is on
    it. ``why``: it failed. ``staged``: the version it has ready to be loaded."""

    version: int = NONE
    doing: str = ""
    since: float = 0.0
    why: str = ""
    staged: int = NONE


@dataclass
class Announced:
    """A version that is being written. ``ranks``: those that said so, ``parts``: what each has published of it."""

    version: int
    since: float
    ranks: set[int] = field(default_factory=set)
    parts: dict[int, cmd.Part] = field(default_factory=dict)
    probe: bytes = b""


@dataclass
class Kept:
    """A version that can be fetched. ``source``: the number its bytes were published under, by ``sessions``, one a part."""

    version: int
    source: int
    parts: tuple[cmd.Part, ...]
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
