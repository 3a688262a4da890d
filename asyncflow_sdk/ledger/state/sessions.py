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
    """A session that takes versions of the weights. ``version``, ``doing``: what it does about a version: fetching, staged, waits,
    swapping or failed; "" once it generates with it. ``why``: the reason of a failure. ``staged``: the version it has ready to load.
    ``since``: ledger seconds."""

    version: int = NONE
    doing: str = ""
    since: float = 0.0
    why: str = ""
    staged: int = NONE

    def begin(self, version: int, doing: str, now: float, why: str = "") -> None:
        self.version, self.doing, self.since, self.why = version, doing, now, why


@dataclass
class Session:
    """One client.

    ``loaded``: the version its replica generates with; None before it has one. ``claimed``: that is a version 0 it brought
    itself, with which it has taken no prompts yet. ``leases``, ``parked``: its leases by token and its parked requests by
    ticket, in order. ``rank``: of the publisher; NONE if it is none. ``dismissed``: it is given nothing more. ``replica``: its
    state as a replica; None if it takes no versions. ``lost``: rows of its leases that ended, and that it was not told of; None
    if it never asked for them.
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


@dataclass
class Preparation:
    """Work of a client since ``since`` before its first request for rows of ``task``, in words ("loading its model")."""

    task: str
    what: str
    since: float


class Sessions:
    """Sessions by number. ``preparing``: by number, of those that say so."""

    def __init__(self) -> None:
        self.by_id: dict[int, Session] = {}
        self.preparing: dict[int, Preparation] = {}
        self._next = 1

    def open(self, name: str, now: float) -> Session:
        session = Session(self._next, name, since=now)
        self._next += 1
        self.by_id[session.id] = session
        return session

    def take_lost(self, session: Session) -> cmd.Lost | None:
        """The rows of a session's leases that ended since it last asked; None if there are none. They are remembered from the first call on."""
        if not session.lost:
            session.lost = session.lost or []
            return None
        ids, session.lost = np.unique(np.concatenate(session.lost)), []  # several tasks may have leased a row
        return cmd.Lost(ids=pack_ids(ids))

    def remove(self, session: int) -> None:
        self.preparing.pop(session, None)
        del self.by_id[session]

    def name(self, session: int) -> str:
        """The name of a session, also of one that is closed."""
        return self.by_id[session].name if session in self.by_id else f"session {session}"
