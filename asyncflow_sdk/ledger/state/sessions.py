"""Sessions: the clients of a ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .. import commands as cmd
from ..commands import Ids, pack_ids
from .grants import Grant
from .rows import NONE


@dataclass
class ReplicaState:
    """``version``, ``doing``: the activity with a version: fetching, staged, waits, swapping or
    failed; "" once it generates with it. ``why``: the reason of a failure. ``staged``: the version
    ready to load. ``since``: ledger seconds. ``starved``: True if its last request for prompts found
    none for its loaded version, but some for a newer one. ``task``: its rollout's."""

    version: int = NONE
    doing: str = ""
    since: float = 0.0
    why: str = ""
    staged: int = NONE
    starved: bool = False
    task: str = ""

    def begin(self, version: int, doing: str, now: float, why: str = "") -> None:
        """Set the activity."""
        self.version, self.doing, self.since, self.why = version, doing, now, why


@dataclass
class Session:
    """One client.

    ``loaded``: the version its replica generates with; None before the first. ``claimed``: True if that is its own
    version 0, none is published, and it has taken no prompts with it. ``leases``: by token. ``parked``: tickets of
    its parked requests, in order. ``rank``: of the publisher, or NONE. ``dismissed``: True if it gets nothing more.
    ``replica``: None if it takes no versions. ``lost``: unreported ended rows of its leases; None if it never asked
    for them. ``home``: number of the home with this session as its unit; NONE if it is none.
    """

    id: int
    name: str
    loaded: int | None = None
    claimed: bool = False
    rank: int = NONE
    replica: ReplicaState | None = None
    since: float = 0.0
    dismissed: bool = False
    leases: dict[int, Grant] = field(default_factory=dict)
    parked: dict[int, None] = field(default_factory=dict)
    lost: list[Ids] | None = None
    home: int = NONE


@dataclass
class Preparation:
    """Work before the first request for rows of ``task``, for example "loading its model"."""

    task: str
    what: str
    since: float


class Sessions:
    """Sessions by number. ``preparing``: reported preparations, by session number."""

    def __init__(self) -> None:
        self.by_id: dict[int, Session] = {}
        self.preparing: dict[int, Preparation] = {}
        self._next = 1

    def open(self, name: str, now: float) -> Session:
        """Open a session."""
        session = Session(self._next, name, since=now)
        self._next += 1
        self.by_id[session.id] = session
        return session

    def take_lost(self, session: Session) -> cmd.Lost | None:
        """Return ended rows of a session's leases, or None; collected from its first call on."""
        if not session.lost:
            session.lost = session.lost or []
            return None
        ids, session.lost = np.unique(np.concatenate(session.lost)), []  # several tasks may have leased a row
        return cmd.Lost(ids=pack_ids(ids))

    def remove(self, session: int) -> None:
        """Forget a closed session."""
        self.preparing.pop(session, None)
        del self.by_id[session]

    def name(self, session: int) -> str:
        """Return the name of a session, "session N" for a closed one."""
        return self.by_id[session].name if session in self.by_id else f"session {session}"
