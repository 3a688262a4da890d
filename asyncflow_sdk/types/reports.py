"""Reports of a queue: the balance of its rows, dead letters, waiting requests, and lengths.

queue.audit().balanced        # True: rows put = live rows + rows in each terminal state
queue.status().waiting        # {"train-0": "3 more rows of task reward"}"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

TERMINAL = ("consumed", "filtered", "expired", "failed", "cancelled")
"""The terminal states of a row."""


class Reply(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Root of all replies of a queue."""


class HomeStatus(msgspec.Struct, frozen=True, array_like=True, repr_omit_defaults=True):
    """A place of payload. Home 0 is the server's memory. ``state``: "served" by a storage unit at ``address``,
    "absent" for ``absent_s`` because its unit is gone, or "lost" for the reason ``detail``. ``rows_failed``: in all
    lost epochs. ``payload_bytes``: of live rows; known only to a server."""

    home: int
    epoch: int
    name: str
    state: str
    address: str = ""
    detail: str = ""
    absent_s: float = 0.0
    rows_failed: int = 0
    payload_bytes: int = 0


class Audit(Reply, frozen=True, tag="audit", repr_omit_defaults=True):
    """The balance: rows put = live + all terminal states. ``reasons``: rows by reason of their end. ``homes``: the
    places of payload, and what was lost with each; empty if there is only the server's memory."""

    put: int
    live: int
    consumed: int
    filtered: int
    expired: int
    failed: int
    cancelled: int
    reasons: dict[str, int]
    homes: tuple[HomeStatus, ...] = ()

    @property
    def balanced(self) -> bool:
        """True if no row is lost or counted twice."""
        return self.put == self.live + sum(self.terminal.values())

    @property
    def terminal(self) -> dict[str, int]:
        """Rows by terminal state."""
        return {state: getattr(self, state) for state in TERMINAL}


class FailedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A dead letter: rows ``first`` to ``first + rows - 1`` failed because ``task`` lost them too often. If their
    payload was lost, ``task`` is "", and they are all adjacent rows of one put lost at once, possibly of several
    groups. ``key``, ``place``: idempotency key of their put, and number of their first group in it (from 0); "" and
    -1 for a put without a key. ``reasons``: of the attempts, oldest first. ``time_s``: ledger seconds."""

    first: int
    rows: int
    task: str
    partition: str
    key: str
    place: int
    reasons: tuple[str, ...]
    time_s: float


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A client. ``rows``: leased to it, in ``leases`` leases; the oldest lease is of ``task``, held for ``held_s``.
    ``loaded``: version loaded by its replica. ``pid`` 0 and ``host`` "": unknown. ``replica``: True if it loads
    versions. ``weights``: its state for the newest version ("fetching 7", "staged 7", "waits to load 7", "loading 7",
    "failed 7: reason"), since ``weights_s``; "" once loaded. ``prepares``: its activity before the first request for
    rows ("loading its model"), since ``prepares_s``; "" once prepared."""

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
    """A lease: ``rows`` not completed, held for ``since_s``, returned to the task after another ``left_s``."""

    token: int
    task: str
    session: int
    name: str
    rows: int
    since_s: float
    left_s: float


class ParkedStatus(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request parked for ``since_s``, at most another ``left_s``. ``why``: the missing thing and its provider."""

    session: int
    name: str
    verb: str
    why: str
    since_s: float
    left_s: float


class VersionStatus(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A kept version, published ``age_s`` ago. ``source``: version number first published with its
    bytes. ``on``: replicas with it loaded. ``staged``: replicas with it staged."""

    version: int
    source: int
    age_s: float
    nbytes: int
    root: str
    transport: str
    on: int = 0
    staged: int = 0


class StepAges(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Staleness of the rows of the step leased last for training, in versions, counted from the weights at the row's
    start: versions published during generation (``in_flight``), and between that and training (``in_queue``)."""

    step: int
    in_flight_mean: float
    in_queue_mean: float
    in_flight_max: int
    in_queue_max: int


class StatusReport(Reply, frozen=True, tag="status"):
    """A queue at ``time_s`` (its own clock, seconds).

    ``rows``: task → state → live rows. ``arrived`` and ``completed``: task → rows that became ready for it and rows
    it completed, since the start; differences between two reports are rates. ``waiting``: client name → the missing
    thing for its parked request, as text. ``sessions`` and ``parked``: at most 100 each, of ``session_count`` and
    ``parked_count``. ``step``: being filled, of ``batch_rows`` rows; -1 without steps. ``over``: True once the
    stream has ended. ``charged_bytes``, of ``capacity_bytes``: of live rows, with the reserve for their missing
    columns. Known only to a server, else 0 or "": ``payload_bytes`` of live rows, ``held_bytes`` of shared memory,
    ``written_bytes`` since the start, ``garbage`` messages, ``sdk``. ``versions``: kept versions, oldest first.
    ``publisher``: the session in this role, or "". ``announced``: the version being written since ``announced_s``,
    or -1. ``committed``: decided by quorum, or -1. ``held``: trained live rows not covered by a checkpoint.
    ``checkpoint``: the next step after the newest checkpoint, or -1. ``staleness``: the policy's name, with its
    ``promise``. ``max_staleness``: -1 without steps. ``ages``: of the step in training, None before the first.
    ``in_parts``: step and delivered rows of each step leased in parts. ``homes``: as in ``Audit``."""

    rows: dict[str, dict[str, int]]
    ended: dict[str, int]
    waiting: dict[str, str]
    step: int
    free_slots: int
    version: int
    live: int
    put: int = 0
    capacity_rows: int = 0
    arrived: dict[str, int] = msgspec.field(default_factory=dict)
    completed: dict[str, int] = msgspec.field(default_factory=dict)
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
    in_parts: tuple[tuple[int, int], ...] = ()
    homes: tuple[HomeStatus, ...] = ()


BINS_PER_DOUBLING = 8
"""Bin b holds lengths from 2^(b/8) to below 2^((b+1)/8): lengths up to 12 alone, others within 9 %."""


def length_bins(lengths: npt.NDArray[np.int64]) -> dict[int, int]:
    """Count rows by bin of their length."""
    if not len(lengths):
        return {}
    counts = np.bincount((BINS_PER_DOUBLING * np.log2(np.maximum(lengths, 1)) + 1e-9).astype(np.int64))
    return {int(b): int(counts[b]) for b in np.flatnonzero(counts)}
