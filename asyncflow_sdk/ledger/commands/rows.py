"""What is said about rows: they are put, leased, completed or given back, cancelled, and wanted again.

Positions in a lease travel as packed little-endian int32.
"""

from __future__ import annotations

import msgspec

from .roots import Columns, Command, Reply


class Put(Command, frozen=True, tag="put"):
    """Add ``groups`` groups of ``group_size`` rows that have ``columns``. A known ``key`` adds nothing, but for groups that
    failed since because their payload was lost: these come again, whole. The same key with anything else is refused.

    ``partition``: only the tasks that take it see the rows. ``priority``: every task takes higher ones first.
    """

    groups: int
    group_size: int
    columns: Columns
    key: str = ""
    timeout_s: float = 0.0
    partition: str = ""
    nbytes: int = 0
    """Of the payload; the server says so, never the client."""
    priority: int = 0
    measures: dict[str, bytes] = msgspec.field(default_factory=dict)
    """Of columns that samplers measure, float64 for each group; the server says so, never the client."""
    lengths: bytes = b""
    """Of responses, in tokens, int32 for each group: for statistics alone."""
    digest: bytes = b""
    """Of a put with a key: 16 bytes for each of ``columns``, equal for equal content; none where that is not known."""


class PutDone(Reply, frozen=True, tag="put_done"):
    """Rows first to first + count - 1. ``again``: the key was known and nothing was added; they are those of the first put.
    ``groups``: which groups of the put they are (int64), where they are those that had been lost; else empty, for all."""

    first: int
    count: int
    again: bool
    groups: bytes = b""


class Lease(Command, frozen=True, tag="lease"):
    """Ask for up to ``count`` rows of a task (a task with batch_rows gives one whole step).

    ``partition``: of these rows only; None takes the task's partitions in turn. ``at_least``: wait for so many;
    only the rest at the end of the stream may be fewer. ``columns``: of the task's needs, those to be read; None for all.

    ``team``: the ``world_size`` ranks of a team lease together. Nothing is given before every rank has asked; then
    one lease of ``count`` rows is dealt out in ``shards`` (0: one a rank; else a divisor of ``world_size``, and
    ``world_size // shards`` ranks one after another get the same one). All ranks must ask alike.

    ``most``: of a task that admits, asked by a replica that hears of versions by itself (0: it does not). It is not told to load one
    first: it waits, and is given rows when it has. Up to ``count``, or to so many as it may hold in all, if that is more by then.
    """

    task: str
    count: int
    timeout_s: float = 0.0
    partition: str | None = None
    at_least: int = 0
    columns: tuple[str, ...] | None = None
    team: str = ""
    rank: int = 0
    world_size: int = 1
    shards: int = 0
    most: int = 0


class Leased(Reply, frozen=True, tag="leased"):
    """Rows that are this session's until completed. ``version``: of the replica (rollout) or being trained
    (train); ``step``: of a task with batch_rows, else -1. Of a team's lease ``ids`` are those of one ``shard``
    of ``shards``, given to ``rank``; ``imbalance``: how much heavier than the mean the heaviest shard is. ``completed_at``: of a step,
    the version that was current when each row was completed."""

    token: int
    task: str
    ids: bytes
    groups: bytes
    step: int = -1
    version: int = -1
    lease_s: float = 0.0
    partition: str = ""
    rank: int = 0
    world_size: int = 1
    shard: int = 0
    shards: int = 1
    imbalance: float = 0.0
    version_step_offsets: tuple[tuple[int, int], ...] = ()
    """Of a step: versions from the first number on are trained so many steps before their number; none: at their number."""
    completed_at: bytes = b""


class LoadFirst(Reply, frozen=True, tag="load_first"):
    """Nothing can be admitted with the loaded version; load ``version`` and ask again."""

    version: int


class Complete(Command, frozen=True, tag="complete"):
    """Write ``columns`` of leased rows and acknowledge them, all or nothing.

    ``index``: positions in the lease (int32), None for all. ``filtered``: positions in ``index`` to drop. Of a lease
    of a team: positions in the shard of ``rank``.
    """

    token: int
    columns: Columns
    index: bytes | None = None
    filtered: bytes | None = None
    nbytes: int = 0
    """Of the payload; the server says so, never the client."""
    measures: dict[str, bytes] = msgspec.field(default_factory=dict)
    """Of columns that samplers measure, float64 for each row; the server says so, never the client."""
    rank: int = 0
    lengths: bytes = b""
    """Of responses, in tokens, int32 for each row: for statistics alone."""


class Completed(Reply, frozen=True, tag="completed"):
    """``revoked``: ids that were no longer this lease's (their group had ended); nothing was written there.
    ``again``: those that another rank with the same shard had completed; nothing was written there either."""

    revoked: bytes
    again: bytes = b""


class GiveBack(Command, frozen=True, tag="give_back"):
    """Return leased rows. ``blame``: the attempt counts against the rows. ``unread``: their values cannot be read; the
    server looks whether their payload is lost."""

    token: int
    index: bytes | None = None
    reason: str = ""
    blame: bool = False
    rank: int = 0
    unread: bool = False


class Renew(Command, frozen=True, tag="renew"):
    """Start the time of a lease again."""

    token: int
    rank: int = 0


class AwaitLost(Command, frozen=True, tag="await_lost"):
    """Which rows that this session has leased have ended meanwhile, once there are any: work on them is for nothing. Answered
    with ``Lost``. Remembered from the first such request on; each row is told once."""

    timeout_s: float = 0.0


class Lost(Reply, frozen=True, tag="lost"):
    """``ids``: rows that ended while this session had leased them."""

    ids: bytes


class Cancel(Command, frozen=True, tag="cancel"):
    """End live rows, with their groups: those of ``ids``, of the put with ``key``, or of a ``partition``.

    Rows in a full step are their trainer's and stay. Leases on the others lose them.
    """

    ids: bytes = b""
    key: str = ""
    partition: str | None = None
    reason: str = "cancelled by request"


class Cancelled(Reply, frozen=True, tag="cancelled"):
    """``count`` rows ended."""

    count: int


class Wanted(Command, frozen=True, tag="wanted"):
    """How many rows the remaining steps still lack, once there are any; without a last step, the next few steps.

    Rows that are filtered, fail or are cancelled are wanted again: this is how a feeder refills them.
    """

    timeout_s: float = 0.0


class RowsWanted(Reply, frozen=True, tag="rows_wanted"):
    count: int


class GetPut(Command, frozen=True, tag="get_put"):
    """Ask for the newest put whose key begins with ``prefix``. Answered with ``LastPut``."""

    prefix: str


class LastPut(Reply, frozen=True, tag="last_put"):
    """``key`` is "" where none is known; else its put made rows ``first`` to ``first + count - 1``."""

    key: str = ""
    first: int = -1
    count: int = 0
