"""What is said about a run: who takes part in it, its limits, its tasks, and its end."""

from __future__ import annotations

import msgspec

from ...types.tasks import PolicySpec, TaskSpec
from .roots import Command, Reply


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """What a task's sampler says of itself: see ``Sampler``. ``chooses``: whether it does so by itself."""

    measure: str = ""
    window: int = 1
    whole_groups: bool = False
    balanced: bool = False
    chooses: bool = False


class Join(Command, frozen=True, tag="join"):
    """Open the session: the first command of a client. ``name``: for people."""

    name: str
    pid: int = 0
    pid_key: str = ""
    """Host, pid namespace and start time of the process, so that its death can be seen; "" if it cannot."""


class Joined(Reply, frozen=True, tag="joined"):
    session: int


class Configure(Command, frozen=True, tag="configure"):
    """Set limits; None leaves one as it is. ``steps``: the last step is steps - 1; then the stream ends.

    ``capacity_bytes``: of payload. What work in progress may still write is reserved when a row is put:
    ``row_bytes``, or, where that is 0, what the largest row that has ended took. It gives way where the open step
    would otherwise never fill.

    ``keep_versions``: so many, the newest, can be fetched and rolled back to. ``max_swapping``: so many replicas load a
    version at once; 0 for all. ``quorum``: so many have to have a version staged before any loads it; 0 for none.

    ``checkpoints``: rows of acknowledged steps live on until ``Checkpoint`` covers them, so that ``Resume`` can have them
    trained again. They count against ``capacity_bytes``, but not against ``capacity_rows``.

    ``staleness``: the policy that says what ``max_staleness`` means; without it, "wait".
    """

    capacity_rows: int | None = None
    max_staleness: int | None = None
    steps: int | None = None
    capacity_bytes: int | None = None
    row_bytes: int | None = None
    keep_versions: int | None = None
    max_swapping: int | None = None
    quorum: int | None = None
    checkpoints: bool | None = None
    staleness: PolicySpec | None = None


class Declare(Command, frozen=True, tag="declare"):
    """Declare a task. Saying the same again does nothing.

    ``measures``: float64, of the live rows that have the column its sampler measures, in order; the server says so,
    never the client.
    """

    task: TaskSpec
    measures: bytes = b""


class End(Command, frozen=True, tag="end"):
    """No further put. ``cancel``: live rows that no full step holds are cancelled too.

    ``partition``: of this partition only; None ends the whole stream.
    """

    cancel: bool = False
    partition: str | None = None


class Dismiss(Command, frozen=True, tag="dismiss"):
    """The clients of a name ("": this one alone), or the one of a ``session`` (0: of none), are given nothing more: their requests for rows and versions are answered
    as at the end of the stream, now and from now on. What they hold they may finish; with ``ended``, the reason, their
    processes are known to have ended, and it goes back. Answered with ``Dismissed``."""

    name: str = ""
    ended: str = ""
    session: int = 0


class Dismissed(Reply, frozen=True, tag="dismissed"):
    """``count`` clients were meant."""

    count: int


class Prepare(Command, frozen=True, tag="prepare"):
    """Say what this client does before its first request for rows of ``task``, such as "loading its model": for those who wait
    for it. ``what`` "": it is prepared."""

    task: str
    what: str = ""


class Leave(Command, frozen=True, tag="leave"):
    """Close the session; its leases go back."""
