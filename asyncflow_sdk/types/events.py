"""Events of a run, the source of live views, reports and trackers.

Times are seconds of CLOCK_MONOTONIC, which all processes of a host share."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    time_s: float
    worker: str = ""


class Begun(_Event, frozen=True, tag="begun"):
    """A driver started a run, or with ``again`` resumed one. Workers of earlier drivers have ended."""

    again: bool = False


class WorkerState(_Event, frozen=True, tag="worker"):
    """A worker changed state: starting, ready, restarting, stopped, failed. ``detail``: the reason."""

    state: str
    pid: int = 0
    detail: str = ""


class Span(_Event, frozen=True, tag="span"):
    """A worker was busy with ``kind`` (generate, train, wait, publish, load, …) from ``time_s`` for ``seconds``.
    ``cpu_s``: CPU seconds of the worker's process, if measured. ``version``: of the weights used (generate), trained
    (train), written (publish) or loaded (load); -1 for other kinds. A step in parts has a span of kind train for each
    part, and a last one without rows for its update; ``detail`` names them."""

    kind: str
    seconds: float
    rows: int = 0
    tokens: int = 0
    version: int = -1
    cpu_s: float = 0.0
    detail: str = ""


class StepTrained(_Event, frozen=True, tag="step"):
    """A step was trained. ``metrics``: means over its rows and the engine's measurements, by name."""

    step: int
    version: int
    metrics: dict[str, float]


class Evaluated(_Event, frozen=True, tag="evaluated"):
    """A version was evaluated on ``rows`` rows in ``seconds``. ``score``: their mean reward; ``best``: True
    if no earlier version has as high a score. ``pass_at``: pass@k by k."""

    version: int
    score: float
    rows: int
    best: bool = False
    pass_at: dict[str, float] = msgspec.field(default_factory=dict)
    seconds: float = 0.0


class Published(_Event, frozen=True, tag="published"):
    """A version became current. ``source``: after a rollback, the version number first published
    with these bytes; -1: this version. ``reason``: of a rollback."""

    version: int
    nbytes: int
    root: str
    source: int = -1
    reason: str = ""


class Restored(_Event, frozen=True, tag="restored"):
    """After a rollback, the trainer has loaded ``version``, published before as ``source``.
    ``optimizer``: origin of its state: "checkpoint of step N", "fresh", or "" if unknown."""

    version: int
    source: int = -1
    optimizer: str = ""


class WeightState(_Event, frozen=True, tag="weights"):
    """State of a version on a replica: fetching, staged, swapping, released (its load permission was withdrawn before
    the load), failed. ``detail``: the reason. If staged: ``moved`` bytes in ``seconds``, by ``encoding`` (mapped,
    full, delta); ``skipped``: versions skipped since the previous one."""

    version: int
    state: str
    detail: str = ""
    seconds: float = 0.0
    moved: int = 0
    encoding: str = ""
    skipped: int = 0


class Committed(_Event, frozen=True, tag="committed"):
    """A quorum of replicas has staged a version. The others get no rows until they load it."""

    version: int
    staged: int


class Loaded(_Event, frozen=True, tag="loaded"):
    """A replica committed a version. ``lag``: versions published after it."""

    version: int
    lag: int


class RowsEnded(_Event, frozen=True, tag="rows"):
    """``count`` rows of a ``partition`` reached terminal ``state``, for a ``reason``. For complete responses: rows by
    length bin (``lengths``), sum of lengths (``tokens``) and of squared lengths (``squares``). ``unfinished``: rows
    ended during generation, by bin of their length at average speed."""

    state: str
    count: int
    reason: str = ""
    partition: str = ""
    lengths: dict[int, int] = msgspec.field(default_factory=dict)
    tokens: int = 0
    squares: int = 0
    unfinished: dict[int, int] = msgspec.field(default_factory=dict)
    unfinished_tokens: int = 0
    unfinished_squares: int = 0


class LeaseReturned(_Event, frozen=True, tag="returned"):
    """Rows of a lease returned to ``task``. ``reason``: why."""

    task: str
    count: int
    reason: str


class HomeState(_Event, frozen=True, tag="home"):
    """A home of payload was opened by a storage unit, or is absent. ``detail``: the unit, or the reason."""

    home: int
    epoch: int
    name: str
    state: str
    detail: str = ""


class HomeLost(_Event, frozen=True, tag="home_lost"):
    """A home was given up for this epoch. ``rows_failed``: rows with needed columns in it, and their groups."""

    home: int
    epoch: int
    name: str
    reason: str
    rows_failed: int = 0


class Balanced(_Event, frozen=True, tag="balanced"):
    """A lease was split into ``shards`` for a group of ranks. The heaviest weighs 1 + ``imbalance`` times the mean,
    by the measure of the task's sampler (by rows without one). ``step``: -1 for tasks without steps."""

    task: str
    shards: int
    rows: int
    imbalance: float
    step: int = -1


class Status(_Event, frozen=True, tag="status"):
    """A sample of the queue: rows by task and state, and the missing thing for each waiting client."""

    rows: dict[str, dict[str, int]]
    ended: dict[str, int]
    waiting: dict[str, str]
    bytes: int = 0


class Chosen(_Event, frozen=True, tag="chosen"):
    """An automatic choice of the driver or a worker for ``what`` (transport, encoding, swap, …), with its reason."""

    what: str
    chosen: str
    reason: str


class Note(_Event, frozen=True, tag="note"):
    """A message for people. ``level``: info, warning or error. ``lasting``: True for a warning about the
    whole run. Its summary and ``asyncflow top`` show one for each beginning up to a colon."""

    text: str
    level: str = "info"
    lasting: bool = False


_WorkerEvent: TypeAlias = Begun | WorkerState | Span | StepTrained | Evaluated
_WeightEvent: TypeAlias = Published | Restored | WeightState | Committed | Loaded
_RowEvent: TypeAlias = RowsEnded | LeaseReturned | HomeState | HomeLost | Balanced | Status
Event: TypeAlias = _WorkerEvent | _WeightEvent | _RowEvent | Chosen | Note
