"""What can be said to the ledger, and what it answers: the same types in memory, on the wire and in a log.

Row ids travel as packed little-endian int64 (``pack_ids``), positions in a lease as packed int32.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ..types import ColumnSpec

Ids: TypeAlias = npt.NDArray[np.int64]
Columns: TypeAlias = dict[str, ColumnSpec]


def pack_ids(ids: npt.NDArray[Any]) -> bytes:
    return ids.astype("<i8", copy=False).tobytes()


def unpack_ids(data: bytes) -> Ids:
    return np.frombuffer(data, "<i8")


class SamplerSpec(msgspec.Struct, frozen=True):
    """A sampler by the name it is registered with, and the options it is made of."""

    name: str
    options: dict[str, bool | int | float | str | None] = {}


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """What a task's sampler says of itself: see ``Sampler``. ``chooses``: whether it does so by itself."""

    measure: str = ""
    window: int = 1
    whole_groups: bool = False
    balanced: bool = False
    chooses: bool = False


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One use of rows.

    ``needs``: columns a row must have; ``gives``: columns it writes. ``lease_s``: ledger seconds until
    unfinished rows go back. ``max_attempts``: leases a row may lose before its group fails. ``admits``:
    the staleness rule decides when its groups are leased (rollout); groups that a step can take as they were
    put skip it. ``batch_rows``: rows of one step; whole groups are selected into steps, each leased whole
    (train). Without ``gives`` it is an end of the stream: a row is consumed when every task of its partition,
    one of them an end, has completed it. ``partitions``: those whose rows it takes; ``("*",)`` takes all.
    ``sampler``: chooses among ready rows; None takes the first.
    """

    name: str
    needs: tuple[str, ...]
    gives: tuple[str, ...] = ()
    lease_s: float = 600.0
    max_attempts: int = 3
    admits: bool = False
    batch_rows: int | None = None
    partitions: tuple[str, ...] = ("",)
    sampler: SamplerSpec | None = None

    def takes(self, partition: str) -> bool:
        return partition in self.partitions or "*" in self.partitions

    @property
    def grouped(self) -> bool:
        return self.admits or self.batch_rows is not None


class Command(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Root of all commands. ``timeout_s``, where there is one: how long to wait before saying why not."""


class Join(Command, frozen=True, tag="join"):
    """Open the session: the first command of a client. ``name``: for people."""

    name: str
    pid: int = 0
    pid_key: str = ""
    """Host, pid namespace and start time of the process, so that its death can be seen; "" if it cannot."""


class Configure(Command, frozen=True, tag="configure"):
    """Set limits; None leaves one as it is. ``steps``: the last step is steps - 1; then the stream ends.

    ``capacity_bytes``: of payload. What work in progress may still write is reserved when a row is put:
    ``row_bytes``, or, where that is 0, what the largest row that has ended took. It gives way where the open step
    would otherwise never fill.

    ``keep_versions``: so many, the newest, can be fetched and rolled back to. ``max_swapping``: so many replicas load a
    version at once; 0 for all. ``quorum``: so many have to have a version staged before any loads it; 0 for none.

    ``checkpoints``: rows of acknowledged steps live on until ``Checkpoint`` covers them, so that ``Resume`` can have them
    trained again. They count against ``capacity_bytes``, but not against ``capacity_rows``.
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


class Declare(Command, frozen=True, tag="declare"):
    """Declare a task. Saying the same again does nothing.

    ``measures``: float64, of the live rows that have the column its sampler measures, in order; the server says so,
    never the client.
    """

    task: TaskSpec
    measures: bytes = b""


class Put(Command, frozen=True, tag="put"):
    """Add ``groups`` groups of ``group_size`` rows that have ``columns``. A known ``key`` adds nothing.

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
    measures: dict[str, bytes] = {}
    """Of columns that samplers measure, float64 for each group; the server says so, never the client."""


class Lease(Command, frozen=True, tag="lease"):
    """Ask for up to ``count`` rows of a task (a task with batch_rows gives one whole step).

    ``partition``: of these rows only; None takes the task's partitions in turn. ``at_least``: wait for so many;
    only the rest at the end of the stream may be fewer. ``columns``: of the task's needs, those to be read; None for all.

    ``team``: the ``world_size`` ranks of a team lease together. Nothing is given before every rank has asked; then
    one lease of ``count`` rows is dealt out in ``shards`` (0: one a rank; else a divisor of ``world_size``, and
    ``world_size // shards`` ranks one after another get the same one). All ranks must ask alike.
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
    measures: dict[str, bytes] = {}
    """Of columns that samplers measure, float64 for each row; the server says so, never the client."""
    rank: int = 0


class GiveBack(Command, frozen=True, tag="give_back"):
    """Return leased rows. ``blame``: the attempt counts against the rows."""

    token: int
    index: bytes | None = None
    reason: str = ""
    blame: bool = False
    rank: int = 0


class Renew(Command, frozen=True, tag="renew"):
    """Start the time of a lease again."""

    token: int
    rank: int = 0


class OpenPublisher(Command, frozen=True, tag="open_publisher"):
    """Become rank ``rank`` of the ``world_size`` that publish this run's versions: there is one publisher at a time. Answered
    with ``Publisher``. Refused while another live session has the role; the role ends with its session, or ``ClosePublisher``.
    """

    rank: int = 0
    world_size: int = 1


class ClosePublisher(Command, frozen=True, tag="close_publisher"):
    """Give the role up. What is current stays current."""


class Announce(Command, frozen=True, tag="announce"):
    """This publisher begins to write a version. Refused unless its number is above every one that was current. Answered with
    ``Published``; of a version that several ranks write, not before the one this rank published last is there from all of
    them. What this rank has announced and not published is withdrawn by a higher number. A number that was withdrawn may be
    announced again."""

    version: int
    timeout_s: float = 0.0


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one rank published of a version: a manifest, and how receivers find its bytes. ``outlives``: they can be fetched
    also once the publisher's process has died."""

    manifest: bytes
    transport: str
    where: bytes
    root: str = ""
    nbytes: int = 0
    outlives: bool = True


class Publish(Command, frozen=True, tag="publish"):
    """This rank's part of an announced version is there. Once every rank's is, the version is current. Answered with
    ``Published``. ``probe``: encoded ``Probe``, of rank 0; b"" where nothing is to be probed."""

    version: int
    part: Part
    probe: bytes = b""


class Withdraw(Command, frozen=True, tag="withdraw"):
    """An announced version will not come. ``reason``: for people."""

    version: int
    reason: str = ""


class Rollback(Command, frozen=True, tag="rollback"):
    """Make the bytes of a kept version current again, under a new number. Answered with ``RolledBack``. Rows generated by
    versions that are given up by it expire, unless a full step holds them already."""

    version: int
    reason: str = ""


class AwaitVersion(Command, frozen=True, tag="await_version"):
    """The newest version, once it is newer than ``after``. This session counts as a replica from then on."""

    after: int
    timeout_s: float = 0.0


class Staged(Command, frozen=True, tag="staged"):
    """This session's replica has ``version`` verified on its host, ready to be loaded. ``skipped``: versions that were current
    since the last one it staged, and that it never fetched. ``moved``, ``encoding``, ``seconds``: of the transfer."""

    version: int
    skipped: int = 0
    moved: int = 0
    encoding: str = ""
    seconds: float = 0.0


class Swap(Command, frozen=True, tag="swap"):
    """May this replica load ``version``, which it has staged, now? Answered with ``Permitted`` when it may: at most ``max_swapping``
    replicas swap at once, and with a quorum none does before enough have staged it. ``VersionGone`` when a newer
    version has taken its place meanwhile. The permission ends with ``Loaded``, ``NotLoaded``, ``Retire`` or the session."""

    version: int
    timeout_s: float = 0.0


class Loaded(Command, frozen=True, tag="loaded"):
    """This session's replica generates with ``version`` from now on."""

    version: int


class NotLoaded(Command, frozen=True, tag="not_loaded"):
    """Fetching, or loading, ``version`` failed; this replica is on the version it had. ``reason``: for people."""

    version: int
    reason: str


class Retire(Command, frozen=True, tag="retire"):
    """This session is no replica any more: what it has staged and loaded, its permission and its part in the quorum end. Its
    leases stay. Its requests for versions that wait are refused; a later one makes it a replica again."""


class Wanted(Command, frozen=True, tag="wanted"):
    """How many rows the remaining steps still lack, once there are any; without a last step, the next few steps.

    Rows that are filtered, fail or are cancelled are wanted again: this is how a feeder refills them.
    """

    timeout_s: float = 0.0


class Checkpoint(Command, frozen=True, tag="checkpoint"):
    """The training engine's state before ``step`` is kept for good. Steps before ``covers`` will never be trained again: their
    rows end, and their memory is free. Every step before ``step`` has been acknowledged."""

    step: int
    covers: int


class Resume(Command, frozen=True, tag="resume"):
    """A trainer goes on with ``step``: it has loaded the state of that checkpoint, or, for step 0, it begins anew. Answered with
    ``Resumed``. Every step from there on that was filled will be leased (again), whole, in order, with the same rows; who holds
    one loses it. ``version``: that ``step`` was to train when the checkpoint was made; -1 where none was known. Versions
    published since are lost; what they generated keeps its place."""

    step: int
    version: int = -1


class GetCut(Command, frozen=True, tag="get_cut"):
    """Ask where training is. Answered with ``Cut``."""


class GetPut(Command, frozen=True, tag="get_put"):
    """Ask for the newest put whose key begins with ``prefix``. Answered with ``LastPut``."""

    prefix: str


class End(Command, frozen=True, tag="end"):
    """No further put. ``cancel``: live rows that no full step holds are cancelled too.

    ``partition``: of this partition only; None ends the whole stream.
    """

    cancel: bool = False
    partition: str | None = None


class Cancel(Command, frozen=True, tag="cancel"):
    """End live rows, with their groups: those of ``ids``, of the put with ``key``, or of a ``partition``.

    Rows in a full step are their trainer's and stay. Leases on the others lose them.
    """

    ids: bytes = b""
    key: str = ""
    partition: str | None = None
    reason: str = "cancelled by request"


class Dismiss(Command, frozen=True, tag="dismiss"):
    """Session ``session`` (0: this one) is given nothing more: its requests for rows and versions are answered as at the
    end of the stream, now and from now on. What it holds it may finish. One that is gone is no error."""

    session: int = 0


class Leave(Command, frozen=True, tag="leave"):
    """Close the session; its leases go back."""


class GetAudit(Command, frozen=True, tag="get_audit"):
    """Ask for the balance."""


class GetFailed(Command, frozen=True, tag="get_failed"):
    """Ask for the groups that failed for good and why, the newest ``count``."""

    count: int = 100


class GetStatus(Command, frozen=True, tag="get_status"):
    """Ask for rows by task and state, and for who waits for what."""


AnyCommand: TypeAlias = (
    Join | Configure | Declare | Put | Lease | Complete | GiveBack | Renew | OpenPublisher | ClosePublisher | Announce
    | Publish | Withdraw | Rollback | AwaitVersion | Staged | Swap | Loaded | NotLoaded | Retire | Wanted | End | Cancel
    | Dismiss | Leave | GetAudit | GetFailed | GetStatus | Checkpoint | Resume | GetCut | GetPut
)  # fmt: skip


class Reply(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Root of all replies."""


class Done(Reply, frozen=True, tag="done"):
    """It is so."""


class Joined(Reply, frozen=True, tag="joined"):
    session: int


class PutDone(Reply, frozen=True, tag="put_done"):
    """Rows first to first + count - 1. ``again``: the key was known and nothing was added."""

    first: int
    count: int
    again: bool


class Leased(Reply, frozen=True, tag="leased"):
    """Rows that are this session's until completed. ``version``: of the replica (rollout) or being trained
    (train); ``step``: of a task with batch_rows, else -1. Of a team's lease ``ids`` are those of one ``shard``
    of ``shards``, given to ``rank``; ``imbalance``: how much heavier than the mean the heaviest shard is."""

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


class LoadFirst(Reply, frozen=True, tag="load_first"):
    """Nothing can be admitted with the loaded version; load ``version`` and ask again."""

    version: int


class Completed(Reply, frozen=True, tag="completed"):
    """``revoked``: ids that were no longer this lease's (their group had ended); nothing was written there.
    ``again``: those that another rank with the same shard had completed; nothing was written there either."""

    revoked: bytes
    again: bytes = b""


class Cancelled(Reply, frozen=True, tag="cancelled"):
    """``count`` rows ended."""

    count: int


class FailedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A dead letter: rows ``first`` to ``first + rows - 1`` failed because ``task`` lost them too often.

    ``key``, ``place``: the put that made the group, and which of its groups this is (from 0); ``key`` is "" for
    a put without one. ``reasons``: of the attempts, oldest first. ``time_s``: ledger seconds.
    """

    first: int
    rows: int
    task: str
    partition: str
    key: str
    place: int
    reasons: tuple[str, ...]
    time_s: float


class Failed(Reply, frozen=True, tag="failed"):
    """Oldest first. ``forgotten``: how many older ones are no longer kept."""

    groups: tuple[FailedGroup, ...]
    forgotten: int


class Publisher(Reply, frozen=True, tag="publisher"):
    """``version``: the current one, -1 before the first. ``kept``: this rank's parts of the versions that are kept, by the
    number they were published under, oldest first."""

    version: int
    kept: tuple[tuple[int, Part], ...] = ()


class Published(Reply, frozen=True, tag="published"):
    """``keep``: the versions whose bytes must stay, by the number they were published under; others are free. ``lost``: why the
    version that this rank published its part of last never became current; "" if it did. Told once, to an ``Announce``."""

    keep: tuple[int, ...]
    lost: str = ""


class RolledBack(Reply, frozen=True, tag="rolled_back"):
    """``version``: the new number, current now. ``expired``: rows that ended with what was given up."""

    version: int
    expired: int


class Permitted(Reply, frozen=True, tag="permitted"):
    """``version`` may be loaded."""

    version: int


class Version(Reply, frozen=True, tag="version"):
    """``parts``: by rank. ``source``: the number their bytes were published under, another one after a rollback."""

    version: int
    parts: tuple[Part, ...]
    source: int
    probe: bytes = b""


class Resumed(Reply, frozen=True, tag="resumed"):
    """``step`` is the next to be leased, and trains ``version``. ``publish``: whether the trainer's weights are to be published
    under that number first. ``again``: how many rows of acknowledged steps will be trained once more."""

    step: int
    version: int
    publish: bool
    again: int


class Cut(Reply, frozen=True, tag="cut"):
    """``step``: the first that is not acknowledged, which trains ``version`` (-1 before the first is published). ``covered``:
    steps before it are final. ``put``: rows put so far. ``checkpoints``: whether rows live on until one covers them."""

    step: int
    version: int
    covered: int
    put: int
    checkpoints: bool


class LastPut(Reply, frozen=True, tag="last_put"):
    """``key`` is "" where none is known; else its put made rows ``first`` to ``first + count - 1``."""

    key: str = ""
    first: int = -1
    count: int = 0


class RowsWanted(Reply, frozen=True, tag="rows_wanted"):
    count: int


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


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A client. ``rows``: leased to it, in ``leases``; the oldest of them, of ``task``, for ``held_s``. ``loaded``:
    the version its replica generates with. ``pid`` 0 and ``host`` "": not known. ``replica``: it takes versions;
    ``weights``: what it is doing about the newest, in words ("fetching 7", "staged 7", "waits to load 7", "loading 7",
    "failed 7: reason"), for ``weights_s``; "" when it is on it."""

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
    that no checkpoint covers; ``checkpoint``: the step that the newest one goes on with, -1 for none.
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
    came: dict[str, int] = {}
    passed: dict[str, int] = {}
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


TERMINAL = ("consumed", "filtered", "expired", "failed", "cancelled")
AnyReply: TypeAlias = (
    Done | Joined | PutDone | Leased | LoadFirst | Completed | Cancelled | Failed | Publisher | Published | RolledBack
    | Permitted | Version | RowsWanted | Audit | StatusReport | Resumed | Cut | LastPut
)  # fmt: skip
