"""Events: everything a run says about itself. Drawing, reports and summaries only listen.

Times are seconds of CLOCK_MONOTONIC, one clock for all processes of a host.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    time_s: float
    worker: str = ""


class Begun(_Event, frozen=True, tag="begun"):
    """The process that drives a run began; ``again``: with one that others had begun. What those had started has ended."""

    again: bool = False


class WorkerState(_Event, frozen=True, tag="worker"):
    """A worker changed state: starting, ready, restarting, stopped, failed. ``detail``: why."""

    state: str
    pid: int = 0
    detail: str = ""


class Span(_Event, frozen=True, tag="span"):
    """A worker did ``kind`` from ``time_s`` for ``seconds``: generate, train, wait, publish, load, ....

    ``cpu_s``: CPU seconds of the worker's process in it, where measured. ``version``: of the weights
    used (generate), trained (train), written (publish) or loaded (load); -1 where it has none.
    """

    kind: str
    seconds: float
    rows: int = 0
    tokens: int = 0
    version: int = -1
    cpu_s: float = 0.0
    detail: str = ""


class StepTrained(_Event, frozen=True, tag="step"):
    """A step was trained: means over its rows, and whatever the engine measured."""

    step: int
    version: int
    metrics: dict[str, float]


class Published(_Event, frozen=True, tag="published"):
    """A version became current. ``source``: the number its bytes were published under, another one after a rollback;
    -1: this one. ``reason``: of a rollback."""

    version: int
    nbytes: int
    root: str
    source: int = -1
    reason: str = ""


class Restored(_Event, frozen=True, tag="restored"):
    """After a rollback the trainer has loaded ``version``, whose bytes were published as ``source``. ``optimizer``: where its
    state comes from: "checkpoint of step N", or "fresh"; "" where the trainer did not say."""

    version: int
    source: int = -1
    optimizer: str = ""


class WeightState(_Event, frozen=True, tag="weights"):
    """What a replica does about a version: fetching, staged, swapping, released (it may load it no longer, and did not), failed.
    ``detail``: why. Of one staged: ``moved`` bytes
    in ``seconds``, by ``encoding`` (mapped, full, delta); ``skipped``: versions passed over since the last one."""

    version: int
    state: str
    detail: str = ""
    seconds: float = 0.0
    moved: int = 0
    encoding: str = ""
    skipped: int = 0


class Committed(_Event, frozen=True, tag="committed"):
    """Enough replicas had a version staged: it is decided, and those that have not loaded it are granted nothing."""

    version: int
    staged: int


class Loaded(_Event, frozen=True, tag="loaded"):
    """A replica committed a version. ``lag``: versions published since."""

    version: int
    lag: int


class RowsEnded(_Event, frozen=True, tag="rows"):
    """``count`` rows reached terminal ``state``; ``reason`` where there is one to give.

    Of those whose response is whole: rows by bin of its length (``lengths``), and the sums of lengths and their squares.
    ``unfinished``: rows by bin that ended while they were generated, by the tokens they had by then if they were as fast as others.
    """

    state: str
    count: int
    reason: str = ""
    lengths: dict[int, int] = msgspec.field(default_factory=dict)
    tokens: int = 0
    squares: int = 0
    unfinished: dict[int, int] = msgspec.field(default_factory=dict)
    unfinished_tokens: int = 0
    unfinished_squares: int = 0


class LeaseReturned(_Event, frozen=True, tag="returned"):
    """Rows of a lease went back to ``task`` because ``reason``."""

    task: str
    count: int
    reason: str


class Balanced(_Event, frozen=True, tag="balanced"):
    """A lease of a team was dealt out to ``shards``: the heaviest is 1 + ``imbalance`` times as heavy as the mean,
    in the measure of the task's sampler (in rows without one). ``step``: -1 where there is none."""

    task: str
    shards: int
    rows: int
    imbalance: float
    step: int = -1


class Status(_Event, frozen=True, tag="status"):
    """A sample of the queue: rows by task and state, and who waits for what."""

    rows: dict[str, dict[str, int]]
    ended: dict[str, int]
    waiting: dict[str, str]
    bytes: int = 0


class Chosen(_Event, frozen=True, tag="chosen"):
    """What was chosen for ``what`` (transport, encoding, swap, ...), and why: by the driver, or by the worker whose engine was
    to be asked."""

    what: str
    chosen: str
    reason: str


class Note(_Event, frozen=True, tag="note"):
    """A message for people. ``level``: info, warning or error."""

    text: str
    level: str = "info"


Event: TypeAlias = (
    Begun
    | WorkerState
    | Span
    | StepTrained
    | Published
    | Restored
    | WeightState
    | Committed
    | Loaded
    | RowsEnded
    | LeaseReturned
    | Balanced
    | Status
    | Chosen
    | Note
)
