"""Reports of a queue about itself: the balance of its rows, dead letters, and the requests that wait.

queue.audit().balanced        # True: rows put = live rows + rows in each terminal state
queue.status().waiting        # {"train-0": "3 more rows of task reward"}
"""

from __future__ import annotations

import msgspec

TERMINAL = ("consumed", "filtered", "expired", "failed", "cancelled")
"""The terminal states of a row."""


class Reply(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Root of all replies of a queue."""


class Audit(Reply, frozen=True, tag="audit"):
    """The balance: rows put = live + all terminal states."""

    put: int
    live: int
    consumed: int
    filtered: int
    expired: int
    failed: int
    cancelled: int
    reasons: dict[str, int]

    @property
    def balanced(self) -> bool:
        return self.put == self.live + sum(self.terminal.values())

    @property
    def terminal(self) -> dict[str, int]:
        return {state: getattr(self, state) for state in TERMINAL}


class FailedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A dead letter: rows ``first`` to ``first + rows - 1`` failed because ``task`` lost them too often; ``task`` is "" where
    their payload was lost, and these are all rows lost at once that lie together in one put, of several groups perhaps.

    ``key``, ``place``: the put that made them, and which of its groups this is, or the first of these is (from 0); ``key`` is
    "" and ``place`` -1 for a put without one. ``reasons``: of the attempts, oldest first. ``time_s``: ledger seconds.
    """

    first: int
    rows: int
    task: str
    partition: str
    key: str
    place: int
    reasons: tuple[str, ...]
    time_s: float


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A client. ``rows``: leased to it, in ``leases``; the oldest of them, of ``task``, for ``held_s``. ``loaded``:
    the version its replica generates with. ``pid`` 0 and ``host`` "": not known. ``replica``: it takes versions;
    ``weights``: what it is doing about the newest, in words ("fetching 7", "staged 7", "waits to load 7", "loading 7",
    "failed 7: reason"), for ``weights_s``; "" when it is on it. ``prepares``: what it does before its first request for rows
    ("loading its model"), for ``prepares_s``; "" when it is prepared."""

    id: int
    name: str
    age_s: float
    loaded: int | None = None
    leases: int = 0
    rows: int = 0
    task: str = ""
    held_s: float = 0.0
    pid: int = 0
    host: str = ""
    replica: bool = False
    weights: str = ""
    weights_s: float = 0.0
    prepares: str = ""
    prepares_s: float = 0.0


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A lease: ``rows`` left of it, held for ``since_s``, and ``left_s`` until they go back."""

    token: int
    task: str
    session: int
    name: str
    rows: int
    since_s: float
    left_s: float


class ParkedStatus(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request that waits since ``since_s``, for at most ``left_s`` more. ``verb``: what was asked for;
    ``why``: what is missing, and who should bring it."""

    session: int
    name: str
    verb: str
    why: str
    since_s: float
    left_s: float


class VersionStatus(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A version that is kept, published ``age_s`` ago. ``source``: the number its bytes were published under. ``on``: replicas
    that have it loaded, ``staged``: that have it ready."""

    version: int
    source: int
    age_s: float
    nbytes: int
    root: str
    transport: str
    on: int = 0
    staged: int = 0


class StepAges(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How stale the rows of the step are that was given to training last, in versions, by the weights that began each:
    published while the row was generated (``in_flight``), and between that and its training (``in_queue``)."""

    step: int
    in_flight_mean: float
    in_queue_mean: float
    in_flight_max: int
    in_queue_max: int


class StatusReport(Reply, frozen=True, tag="status"):
    """A queue at ``time_s`` (its own clock, seconds).

    ``rows``: task → state → live rows. ``came`` and ``passed``: task → how often a row became ready for it and
    was completed, since the start; their differences between two reports are rates. ``waiting``: by the client's
    name, what its parked request waits for, in words. ``sessions`` and ``parked`` name at most 100 each, of
    ``session_count`` and ``parked_count``. ``step``: being filled, of ``batch_rows`` rows; -1 without steps.
    ``over``: the stream has ended. ``charged_bytes``, of ``capacity_bytes``: of live rows, with what is reserved
    for what they may still be given. What only a server knows, 0 or "" without one: ``payload_bytes`` of live rows,
    ``held_bytes`` of shared memory, ``written_bytes`` since the start, ``garbage`` messages, ``sdk``. ``versions``: those
    kept, oldest first; ``publisher``: who has the role, "" when nobody; ``announced``: the version being written for
    ``announced_s``, -1 for none; ``committed``: decided by quorum, -1 without one. ``held``: live rows that are trained and
    that no checkpoint covers; ``checkpoint``: the step that the newest one goes on with, -1 for none. ``staleness``: the
    policy's name, and its ``promise``; with ``max_staleness``, -1 without steps. ``ages``: of the step that is trained, None before one.
    """

    rows: dict[str, dict[str, int]]
    ended: dict[str, int]
    waiting: dict[str, str]
    step: int
    free_slots: int
    version: int
    live: int
    put: int = 0
    capacity_rows: int = 0
    came: dict[str, int] = msgspec.field(default_factory=dict)
    passed: dict[str, int] = msgspec.field(default_factory=dict)
    sessions: tuple[SessionStatus, ...] = ()
    session_count: int = 0
    parked: tuple[ParkedStatus, ...] = ()
    parked_count: int = 0
    oldest: LeaseStatus | None = None
    lease_count: int = 0
    batch_rows: int = 0
    steps: int | None = None
    version_age_s: float = -1.0
    over: bool = False
    time_s: float = 0.0
    payload_bytes: int = 0
    held_bytes: int = 0
    written_bytes: int = 0
    garbage: int = 0
    pid: int = 0
    host: str = ""
    sdk: str = ""
    capacity_bytes: int = 0
    charged_bytes: int = 0
    versions: tuple[VersionStatus, ...] = ()
    publisher: str = ""
    announced: int = -1
    announced_s: float = 0.0
    committed: int = -1
    held: int = 0
    checkpoint: int = -1
    staleness: str = ""
    max_staleness: int = -1
    promise: str = ""
    ages: StepAges | None = None
