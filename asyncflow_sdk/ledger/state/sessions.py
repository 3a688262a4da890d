"""Sessions: the clients of a ledger."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import commands as cmd
from ..commands import Ids, pack_ids
from .context import Context
from .rows import NONE


@dataclass
class ShardedLease:
    """The ranks of a group's lease. ``members``: session of each rank. ``bounds``: shard s has the rows bounds[s] to
    bounds[s + 1]. ``done``: ranks with a finished shard. ``finished``: bool mask of completed rows. ``seen``: bool
    mask of the shard's rows completed or returned, by rank. ``filtered``: positions to drop once every rank has
    acknowledged the step, by shard."""

    group: str
    members: list[int]
    bounds: list[int]
    done: set[int] = field(default_factory=set)
    finished: Any = None
    seen: dict[int, Any] = field(default_factory=dict)
    filtered: dict[int, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    def shard(self, rank: int) -> int:
        """Return the shard number of a rank."""
        return rank * (len(self.bounds) - 1) // self.size

    def extend(self, bounds: list[int]) -> None:
        """Add rows to each shard, as many as between these bounds."""
        self.bounds = [old + new for old, new in zip(self.bounds, bounds, strict=True)]

    def finish(self, rank: int, at: Ids, done: npt.NDArray[np.bool_]) -> None:
        """Note the completed ones among rows at some positions of a rank's shard."""
        self.finished[self.span(rank)][at] |= done

    def see(self, rank: int, at: Ids) -> bool:
        """Note rows completed or returned by a rank. True with the last row: its shard is done."""
        span = self.span(rank)
        seen = self.seen.setdefault(rank, np.zeros(span.stop - span.start, bool))
        seen[at] = True
        if whole := bool(seen.all()):
            self.done.add(rank)
        return whole

    def span(self, rank: int) -> slice:
        """Return the slice of a rank's rows."""
        shard = self.shard(rank)
        return slice(self.bounds[shard], self.bounds[shard + 1])


@dataclass
class DealtPart:
    """Rows of a step delivered together. Shard s has the rows from bounds[s] to bounds[s + 1]."""

    ids: Ids
    bounds: list[int]

    def without(self, ids: Ids) -> DealtPart:
        """Return the part without these rows."""
        kept = ~np.isin(self.ids, ids)
        return DealtPart(self.ids[kept], [int(kept[:bound].sum()) for bound in self.bounds])


@dataclass
class Grant:
    """A lease. ``left``: rows not completed yet. ``shards``: the ranks of a rank group, or None. ``offsets``: number
    of version offsets when granted. ``newest``: the newest version loaded since by its replica, or the version
    trained by its step. ``parts``: number of delivered parts of a step in parts; NONE for other leases. ``since``,
    ``expires``: ledger seconds."""

    token: int
    task: str
    session: int
    ids: Ids
    since: float
    expires: float
    left: int
    step: int = NONE
    shards: ShardedLease | None = None
    offsets: int = 1
    newest: int = NONE
    parts: int = NONE

    @property
    def sessions(self) -> list[int]:
        """The holders."""
        return [self.session] if self.shards is None else list(dict.fromkeys(self.shards.members))

    def part(self, rank: int) -> Ids:
        """Return the rows meant by positions in a command of this rank."""
        return self.ids if self.shards is None else self.ids[self.shards.span(rank)]

    def session_of(self, rank: int) -> int:
        """Return the session of a rank; NONE if there is no such rank."""
        if self.shards is None:
            return self.session
        return self.shards.members[rank] if 0 <= rank < self.shards.size else NONE

    def left_of(self, session: int) -> int:
        """Return the number of rows neither completed nor returned by a holder."""
        shards = self.shards
        if shards is None:
            return self.left
        ranks = [rank for rank, member in enumerate(shards.members) if member == session and rank not in shards.done]
        spans = [(rank, shards.span(rank)) for rank in ranks]
        return sum(span.stop - span.start - int(np.sum(shards.seen.get(rank, 0))) for rank, span in spans)

    def renew(self, expires: float) -> None:
        """Restart the time limit."""
        self.expires = expires

    def release(self, count: int) -> bool:
        """Count rows as no longer leased. True if none are left."""
        self.left -= count
        return self.over

    def load(self, version: int) -> None:
        """Note a version loaded by its replica."""
        self.newest = max(self.newest, version)

    def begin_parts(self) -> None:
        """Have the first part of its step."""
        self.parts = 1

    def extend(self, part: DealtPart) -> None:
        """Add a part of its step. The rows of a shard stay together, in order of delivery."""
        pieces = [self.ids, part.ids]
        if self.shards is not None:
            bounds = list(zip(self.shards.bounds, part.bounds, strict=True))
            pieces = [
                piece
                for (old, new), (old_end, new_end) in pairwise(bounds)
                for piece in (self.ids[old:old_end], part.ids[new:new_end])
            ]
            self.shards.extend(part.bounds)
        self.ids = np.concatenate(pieces)
        self.left += len(part.ids)
        self.parts += 1

    @property
    def over(self) -> bool:
        """True if no holder has any rows left; several ranks may have the same shard."""
        shards = self.shards
        if self.left or shards is None or self.step != NONE or len(shards.bounds) > shards.size:
            return not self.left
        return len(shards.done) == shards.size


def discard(index: dict[Any, dict[int, Any]], key: Any, number: int) -> None:
    """Remove an item of an index, and its key with the last one."""
    del index[key][number]
    if not index[key]:
        del index[key]


class Timers:
    """Expiry of the items in a dict, by their ``expires``. Adding and reading cost O(log n)."""

    def __init__(self, things: dict[int, Any]) -> None:
        self._things = things
        self._heap: list[tuple[float, int]] = []

    def add(self, key: int) -> None:
        """Add a new item, or one with a new time."""
        heapq.heappush(self._heap, (self._things[key].expires, key))
        if len(self._heap) > 64 + 4 * len(self._things):  # mostly stale entries
            self._heap = [(thing.expires, key) for key, thing in self._things.items()]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """Return the earliest expiry, past or future."""
        while self._heap:
            time, key = self._heap[0]
            thing = self._things.get(key)
            if thing is not None and thing.expires == time:
                return time
            heapq.heappop(self._heap)
        return None

    def due(self, now: float) -> list[Any]:
        """Return the expired items, earliest first."""
        out: dict[int, Any] = {}  # the same time may have been set twice
        while (time := self.next()) is not None and time <= now:
            key = heapq.heappop(self._heap)[1]
            out[key] = self._things[key]
        return list(out.values())


@dataclass(frozen=True)
class ReplicaState:
    """``version``, ``doing``: the activity with a version: fetching, staged, waits, swapping or failed; "" once it
    generates with it. ``why``: the reason of a failure. ``staged``: the version ready to load. ``since``: ledger
    seconds. ``starved``: True if its last request for prompts found none for its loaded version, but some for a newer
    one. ``task``: the rollout's task."""

    version: int = NONE
    doing: str = ""
    since: float = 0.0
    why: str = ""
    staged: int = NONE
    starved: bool = False
    task: str = ""


@dataclass
class Session:
    """One client. ``loaded``: the version its replica generates with; None before the first. ``claimed``: True if
    that is its own version 0, none is published, and it has taken no prompts with it. ``leases``: by token.
    ``parked``: tickets of its parked requests, in order. ``dismissed``: True if it gets nothing more. ``replica``:
    None if it takes no versions. ``lost``: unreported ended rows of its leases; None if it never asked for them."""

    id: int
    name: str
    loaded: int | None = None
    claimed: bool = False
    replica: ReplicaState | None = None
    since: float = 0.0
    dismissed: bool = False
    leases: dict[int, Grant] = field(default_factory=dict)
    parked: dict[int, None] = field(default_factory=dict)
    lost: list[Ids] | None = None

    def load(self, version: int | None, *, claimed: bool = False) -> None:
        """Generate with a version from now on; None: with none."""
        self.loaded, self.claimed = version, claimed

    def follow(self, **changes: Any) -> None:
        """Set fields of its replica's state; with the first ones it takes versions from now on."""
        self.replica = replace(self.replica or ReplicaState(), **changes)

    def retire(self) -> None:
        """Take no versions any more."""
        self.replica = None
        self.load(None)

    def dismiss(self) -> None:
        """Get nothing more."""
        self.dismissed = True

    def lose(self, ids: Ids) -> bool:
        """Note ended rows of its leases. True if it asked for them."""
        if self.lost is not None:
            self.lost.append(ids)
        return self.lost is not None

    def take_lost(self) -> cmd.Lost | None:
        """Return ended rows of its leases, or None; collected from its first call on."""
        if not self.lost:
            self.lost = self.lost or []
            return None
        ids, self.lost = np.unique(np.concatenate(self.lost)), []  # several tasks may have leased a row
        return cmd.Lost(ids=pack_ids(ids))


class Sessions:
    """Sessions by number. ``preparing``: work of sessions before their first request, with its begin."""

    def __init__(self) -> None:
        self.by_id: dict[int, Session] = {}
        self.preparing: dict[int, tuple[cmd.Prepare, float]] = {}
        self._next = 1

    def open(self, name: str, now: float) -> Session:
        """Open a session."""
        session = Session(self._next, name, since=now)
        self._next += 1
        self.by_id[session.id] = session
        return session

    def remove(self, session: int) -> None:
        """Forget a closed session."""
        self.preparing.pop(session, None)
        del self.by_id[session]

    def name(self, session: int) -> str:
        """Return the name of a session, "session N" for a closed one."""
        return self.by_id[session].name if session in self.by_id else f"session {session}"


PLACES = {
    cmd.AddRows: "put", cmd.AwaitVersion: "version", cmd.AwaitRowsWanted: "wanted", cmd.Announce: "announce", cmd.Swap: "swap",
    cmd.AwaitLost: "lost", cmd.AwaitPins: "pins",
}  # fmt: skip


@dataclass
class ParkedRequest:
    """``since``, ``expires``: ledger seconds. ``first``: the reply to the command before it in its call."""

    ticket: int
    session: int
    command: Any
    since: float
    expires: float
    first: cmd.Reply | None = None

    @property
    def place(self) -> str:
        """The place where it waits."""
        return place_of(self.command)

    @property
    def group(self) -> tuple[str, str] | None:
        """Task and rank group of a rank's request for rows; None for other requests."""
        command = self.command
        ranked = isinstance(command, cmd.LeaseRows) and command.world_size > 1
        return (command.task, command.group) if ranked else None


def place_of(command: cmd.Command) -> str:
    """Return the place where a command waits."""
    if isinstance(command, cmd.LeaseRows):
        return f"task {command.task}"
    if isinstance(command, cmd.AllGather):
        return f"barrier {command.group}"
    return PLACES[type(command)]


class ParkedRequests:
    """``by_ticket``: all requests. At each place the oldest comes first."""

    def __init__(self, context: Context, sessions: Sessions) -> None:
        self._context, self._sessions = context, sessions
        self.by_ticket: dict[int, ParkedRequest] = {}
        self._by_place: dict[str, dict[int, ParkedRequest]] = {}
        self._by_rank: dict[tuple[str, str], dict[int, dict[int, ParkedRequest]]] = {}  # by task and rank group
        self.deadlines = Timers(self.by_ticket)

    def at(self, place: str, sessions: set[int] | None = None) -> list[ParkedRequest]:
        """Return the requests at a place, oldest first; of some sessions, one session after another."""
        here = self._by_place.get(place, {})
        if sessions is None:
            return list(here.values())
        live = [self._sessions.by_id[each] for each in sorted(sessions) if each in self._sessions.by_id]
        return [here[ticket] for session in live for ticket in session.parked if ticket in here]

    @property
    def feeders(self) -> list[cmd.AwaitRowsWanted]:
        """The requests of feeders: they put lost rows again."""
        return [request.command for request in self.at("wanted") if request.command.prefix]

    @property
    def feeder_is_done(self) -> bool:
        """True if a feeder has no more rows, and waits until none of a step can be lost."""
        return not all(command.more for command in self.feeders)

    def first(self, place: str) -> ParkedRequest | None:
        """Return the oldest request at a place."""
        here = self._by_place.get(place)
        return next(iter(here.values())) if here else None

    def of_group(self, command: cmd.LeaseRows) -> dict[int, dict[int, ParkedRequest]]:
        """Return lease requests of the rank group of ``command`` by rank, each rank's oldest first."""
        return self._by_rank.get((command.task, command.group), {})

    def alike(self, command: cmd.LeaseRows) -> dict[int, ParkedRequest]:
        """Return the oldest request of each rank for the same lease as ``command``."""
        asking: dict[int, ParkedRequest] = {}
        for rank, asked in self.of_group(command).items():
            for request in asked.values():
                if request.command.token == command.token:
                    asking.setdefault(rank, request)
        return asking

    def add(self, request: ParkedRequest) -> None:
        """Park a request."""
        self._by_place.setdefault(request.place, {})[request.ticket] = request
        self.by_ticket[request.ticket] = request
        self._sessions.by_id[request.session].parked.setdefault(request.ticket)
        self.deadlines.add(request.ticket)
        if request.group is not None:
            ranks = self._by_rank.setdefault(request.group, {})
            ranks.setdefault(request.command.rank, {})[request.ticket] = request

    def remove(self, request: ParkedRequest) -> None:
        """Remove a request, and retry the next put in line."""
        del self._by_place[request.place][request.ticket], self.by_ticket[request.ticket]
        del self._sessions.by_id[request.session].parked[request.ticket]
        if request.group is not None:
            ranks = self._by_rank[request.group]
            discard(ranks, request.command.rank, request.ticket)
            if not ranks:
                del self._by_rank[request.group]
        self._context.effects.over.setdefault(request.ticket, request)
        self._context.wake("put")  # the next in line may go

    def wake_all(self) -> None:
        """Retry every parked request."""
        self._context.wake_all(self._by_place)
