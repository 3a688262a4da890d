"""Commands to the ledger and its replies: the same types in memory, on the wire and in journals.

Row ids travel as packed little-endian int64, positions in a lease as packed little-endian int32. ``timeout_s``: the
limit of a command's wait, then DeadlineExceeded. ``lengths``: response lengths in tokens, for statistics only. The
server corrects ``nbytes`` and ``measures`` of a client. ``block``: the location of the columns' values; the ledger
passes it on, as ``Effects.placed``. ``reason``: a text for people. The reply follows its command, or is ``Done``."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ..interfaces.store import HomeOffer
from ..types import ColumnSpec
from ..types.blocks import Block
from ..types.defaults import LISTENER_S
from ..types.reports import Audit, FailedGroup, StatusReport
from ..types.reports import Reply as Reply
from ..types.tasks import PolicySpec, TaskSpec

Ids: TypeAlias = npt.NDArray[np.int64]
Columns: TypeAlias = dict[str, ColumnSpec]


def pack_ids(ids: npt.NDArray[Any]) -> bytes:
    """Return row ids as bytes."""
    return ids.astype("<i8", copy=False).tobytes()


def unpack_ids(data: bytes) -> Ids:
    """Return the row ids in packed bytes."""
    return np.frombuffer(data, "<i8")


class Command(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Root of all commands. Its tag is its name in journals, and stays when the class is renamed."""


class Done(Reply, frozen=True, tag="done"):
    """The command was carried out."""


# ---- sessions, limits, tasks and the end of a run


class SamplerTraits(msgspec.Struct, frozen=True, array_like=True):
    """Properties of a ``Sampler``. ``chooses``: True if it overrides ``choose``."""

    measure: str = ""
    window: int = 1
    whole_groups: bool = False
    balanced: bool = False
    chooses: bool = False


class OpenSession(Command, frozen=True, tag="join"):
    """Open the session, as the first command of a client. ``name``: a text for people."""

    name: str


class SessionOpened(Reply, frozen=True, tag="joined"):
    session: int


class Configure(Command, frozen=True, tag="configure"):
    """Set limits, see ``QueueOptions``; None keeps the present value. ``first_step``: the first to train; another run
    has trained those before. The byte limit yields if the open step could never fill otherwise. Rows kept for a
    checkpoint count against ``capacity_bytes`` alone. ``staleness``: the policy for ``max_staleness``."""

    capacity_rows: int | None = None
    max_staleness: int | None = None
    steps: int | None = None
    first_step: int | None = None
    capacity_bytes: int | None = None
    row_bytes: int | None = None
    keep_versions: int | None = None
    max_swapping: int | None = None
    quorum: int | None = None
    checkpoints: bool | None = None
    staleness: PolicySpec | None = None
    home_silence_s: float | None = None


class Declare(Command, frozen=True, tag="declare"):
    """Declare a task. Idempotent. ``measures``: the sampler's measure, float64 for each live row with its column."""

    task: TaskSpec
    measures: bytes = b""


class End(Command, frozen=True, tag="end"):
    """Accept no more puts in ``partition``; None: in any. ``cancel``: also cancel live rows outside full steps."""

    cancel: bool = False
    partition: str | None = None


class Dismiss(Command, frozen=True, tag="dismiss"):
    """Grant nothing more to the clients named ``name`` ("": the sender): their requests are answered as at the end of
    the stream. They may finish their rows. ``ended``: why, if their processes have ended: their rows go back."""

    name: str = ""
    ended: str = ""


class Dismissed(Reply, frozen=True, tag="dismissed"):
    """``count``: number of dismissed clients. ``lost``: number of groups in the leases lost by their end."""

    count: int
    lost: int = 0


class Prepare(Command, frozen=True, tag="prepare"):
    """Report the work of this client before it first asks for rows of ``task``, as "loading its model"; "": none."""

    task: str
    what: str = ""


class CloseSession(Command, frozen=True, tag="leave"):
    """Close the session. Its leases go back."""


class GetAudit(Command, frozen=True, tag="get_audit"):
    """Get the balance of rows. Answered with ``Audit``."""


class GetStatus(Command, frozen=True, tag="get_status"):
    """Get rows by task and state, and parked requests. Answered with ``StatusReport``."""


class GetFailed(Command, frozen=True, tag="get_failed"):
    """Get the newest ``count`` failed groups."""

    count: int = 100


class Failed(Reply, frozen=True, tag="failed"):
    """``groups``: oldest first."""

    groups: tuple[FailedGroup, ...]


# ---- rows: put, leased, completed, given back, cancelled


class AddRows(Command, frozen=True, tag="put"):
    """Add ``groups`` groups of ``group_size`` rows, see ``TransferQueue.put``. ``version``, ``keep``: -1 for none.
    ``measures``: float64 for each group, by measured column. ``lengths``: int32 for each group. ``digest``: with a
    key, 16 bytes for each of ``columns``, equal for equal content, or b""."""

    groups: int
    group_size: int
    columns: Columns
    key: str = ""
    timeout_s: float = 0.0
    partition: str = ""
    nbytes: int = 0
    priority: int = 0
    measures: dict[str, bytes] = msgspec.field(default_factory=dict)
    lengths: bytes = b""
    digest: bytes = b""
    version: int = -1
    keep: int = -1
    block: Block | None = None


class PutDone(Reply, frozen=True, tag="put_done"):
    """Rows ``first`` to ``first + count - 1``. ``again``: the key was known, nothing was added, and these are the
    rows of the first put. ``groups``: numbers of the lost groups added again (int64); b"" for all."""

    first: int
    count: int
    again: bool
    groups: bytes = b""


class LeaseRows(Command, frozen=True, tag="lease"):
    """Lease up to ``count`` rows of a task, see ``TransferQueue.get``; a task with batch_rows grants one whole step.
    ``inline``: send the columns beside the answer, if all are in the server's memory. ``most`` 0: answer with
    ``LoadFirst`` if a version must be loaded first.

    ``parts``: lease one step in parts, also the open one: whole groups selected for it so far, at least ``at_least``
    rows or the rest of a full step. ``token``: the lease whose next part is wanted; 0 begins a step. The lease does
    not expire while all its holders wait for a part."""

    task: str
    count: int
    timeout_s: float = 0.0
    partition: str | None = None
    at_least: int = 0
    columns: tuple[str, ...] | None = None
    group: str = ""
    rank: int = 0
    world_size: int = 1
    shards: int = 0
    most: int = 0
    parts: bool = False
    token: int = 0
    inline: bool = False


class Leased(Reply, frozen=True, tag="leased"):
    """Rows leased to this session, see ``LeasedBatch``: ``ids`` are a shard of a rank group's lease. ``groups``: the
    first row of each row's group. Of a step only: ``completed_at``, the version current when each row was completed
    (int64), and ``version_step_offsets``, pairs of a first version and an offset: versions from it on are trained at
    the step of their number minus the offset; empty if always at their number."""

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
    completed_at: bytes = b""


class LeasedPart(Leased, frozen=True, tag="leased_part"):
    """Part number ``part`` of a step, from 0. ``last``: True for the last one. All have one token and version."""

    part: int = 0
    last: bool = False


class LoadFirst(Reply, frozen=True, tag="load_first"):
    """No row is admitted with the loaded version: load ``version`` and ask again."""

    version: int


class Complete(Command, frozen=True, tag="complete"):
    """Write ``columns`` of leased rows and acknowledge them, all or nothing. ``index``: positions in the lease, or in
    the shard of ``rank``; None for all. ``filtered``: positions in ``index`` to drop. ``measures``: float64 for each
    row, by measured column. ``lengths``: int32 for each row."""

    token: int
    columns: Columns
    index: bytes | None = None
    filtered: bytes | None = None
    nbytes: int = 0
    measures: dict[str, bytes] = msgspec.field(default_factory=dict)
    rank: int = 0
    lengths: bytes = b""
    block: Block | None = None


class Completed(Reply, frozen=True, tag="completed"):
    """Rows not written. ``revoked``: no longer leased. ``again``: completed by another rank with the same shard."""

    revoked: bytes
    again: bytes = b""


class GiveBack(Command, frozen=True, tag="give_back"):
    """Return leased rows. ``blame``: count it as an attempt of the rows. ``unread``: their values cannot be read; the
    server then checks if their payload is lost."""

    token: int
    index: bytes | None = None
    reason: str = ""
    blame: bool = False
    rank: int = 0
    unread: bool = False


class Renew(Command, frozen=True, tag="renew"):
    """Restart the time limit of a lease."""

    token: int
    rank: int = 0


class AwaitLost(Command, frozen=True, tag="await_lost"):
    """Wait for rows leased by this session to end, from the first such request on. Each is reported once."""

    timeout_s: float = 0.0


class Lost(Reply, frozen=True, tag="lost"):
    """``ids``: rows ended during their lease to this session."""

    ids: bytes


class Cancel(Command, frozen=True, tag="cancel"):
    """Cancel live rows outside full steps and their groups: by ``ids``, ``key`` of their put or ``partition``."""

    ids: bytes = b""
    key: str = ""
    partition: str | None = None
    reason: str = "cancelled by request"


class Cancelled(Reply, frozen=True, tag="cancelled"):
    """``count``: number of ended rows."""

    count: int


class AwaitRowsWanted(Command, frozen=True, tag="wanted"):
    """Wait until the remaining steps lack rows, and get their number; without a last step, of the next few steps.
    ``prefix``: a feeder of partition "" asks, with keys of this prefix and a number: it repeats its puts with lost
    groups. ``more`` False: it has no other rows, and waits until none of a step can be lost any more."""

    timeout_s: float = 0.0
    prefix: str = ""
    more: bool = True


class RowsWanted(Reply, frozen=True, tag="rows_wanted"):
    """``lost``: the feeder's keys of puts with lost groups, with the number of groups of each put."""

    count: int
    lost: dict[str, int] = msgspec.field(default_factory=dict)


class GetPut(Command, frozen=True, tag="get_put"):
    """Get the newest put with a key of ``prefix`` and a number. Answered with ``LastPut``."""

    prefix: str


class LastPut(Reply, frozen=True, tag="last_put"):
    """The put of rows ``first`` to ``first + count - 1``. ``key`` "": none is known."""

    key: str = ""
    first: int = -1
    count: int = 0


# ---- homes of payload


class OpenHome(Command, frozen=True, tag="open_home"):
    """Serve a home of payload, as its unit from now on. A home with the same identity is the same one, in the same
    epoch, even if its unit has died; it keeps its first name. A home of this name with another identity loses its
    contents, and begins a new epoch; refused while another unit serves it. A lost epoch never returns."""

    offer: HomeOffer


class HomeOpened(Reply, frozen=True, tag="home_opened"):
    """Blocks of this home are in ``epoch``. Remove files of any other epoch: they are lost."""

    home: int
    epoch: int


class EvictHome(Command, frozen=True, tag="evict_home"):
    """Give up a home at once, with its payload. Refused unless ``epoch`` is live."""

    home: int
    epoch: int
    reason: str = ""


class GetHomes(Command, frozen=True, tag="get_homes"):
    """Get all homes but the server's own. Answered with ``HomeList``."""


class HomeInfo(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A home. ``unit``: the session of its unit; -1 while it is lost, or absent since ``absent_since`` until
    ``expires`` (ledger seconds). ``lost``: why its newest epoch is lost; "" if it is not. ``rows_failed``: number of
    rows lost with all its epochs."""

    number: int
    epoch: int
    offer: HomeOffer
    unit: int = -1
    absent_since: float = 0.0
    expires: float = 0.0
    lost: str = ""
    rows_failed: int = 0


class HomeList(Reply, frozen=True, tag="homes"):
    """``homes``: by number."""

    homes: tuple[HomeInfo, ...]


# ---- training: checkpoints, and barriers between ranks


class AddCheckpoint(Command, frozen=True, tag="checkpoint"):
    """Record a checkpoint of the trainer's state before ``step``, with weights of ``version`` or -1; earlier steps
    are acknowledged. Steps before ``covers`` are final: their rows end, and older checkpoints are no longer kept.
    ``timeout_s``: limit of the server's wait for listeners that still read rows of these steps."""

    step: int
    covers: int
    version: int = -1
    timeout_s: float = LISTENER_S


class Resume(Command, frozen=True, tag="resume"):
    """Continue training with ``step``, after loading its checkpoint, of ``version`` (-1: unknown); 0 starts anew. All
    full steps from there on are leased again, whole, in order, with the same rows; present holders lose theirs.
    Versions published since are lost; rows generated by them stay."""

    step: int
    version: int = -1


class Resumed(Reply, frozen=True, tag="resumed"):
    """``step``: the next one leased; it trains ``version``, which the trainer must first publish if ``publish``.
    ``again``: number of acknowledged rows to be trained again."""

    step: int
    version: int
    publish: bool
    again: int


class GetTrainingPosition(Command, frozen=True, tag="get_cut"):
    """Get the position of training. Answered with ``TrainingPosition``."""


class TrainingPosition(Reply, frozen=True, tag="cut"):
    """``step``: the first unacknowledged one; it trains ``version`` (-1 before the first is published). ``covered``:
    earlier steps are final. ``put``: rows put so far. ``restore``: as ``RestoreTarget.version``."""

    step: int
    version: int
    covered: int
    put: int
    checkpoints: bool
    restore: int = -1


class AllGather(Command, frozen=True, tag="all_gather"):
    """Exchange payloads of all ranks at the barrier ``what``. A rank's newest session replaces older ones."""

    group: str
    what: str
    rank: int
    world_size: int
    payload: bytes = b""
    timeout_s: float = 0.0


class AllGathered(Reply, frozen=True, tag="all_gathered"):
    """``payloads``: by rank."""

    payloads: tuple[bytes, ...]


# ---- versions of the weights: published by ranks, loaded by replicas


class VersionPart(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of a version: a manifest, and the address of its bytes (``where``) for ``transport``.
    ``outlives``: the bytes can be fetched after the publisher's process has died."""

    manifest: bytes
    transport: str
    where: bytes
    root: str = ""
    nbytes: int = 0
    outlives: bool = True


class OpenPublisher(Command, frozen=True, tag="open_publisher"):
    """Become rank ``rank`` of the run's only publisher, until the session ends or ``ClosePublisher``. Refused while
    another live session has the rank. ``no_rollback``: why the trainer cannot load the bytes of a version, so
    rollbacks are refused until another publisher opens; "" to allow them."""

    rank: int = 0
    world_size: int = 1
    no_rollback: str = ""


class Publisher(Reply, frozen=True, tag="publisher"):
    """``version``: the current one; -1 before the first. ``kept``: this rank's parts of kept versions, with the
    number each was published under, oldest first."""

    version: int
    kept: tuple[tuple[int, VersionPart], ...] = ()


class ClosePublisher(Command, frozen=True, tag="close_publisher"):
    """Give the publisher's role up. The current version stays current."""


class Announce(Command, frozen=True, tag="announce"):
    """Announce that this rank begins to write a version, once all ranks have published the version before. The number
    must be above every version ever current. A higher number withdraws an announced version. A withdrawn
    number may be announced again. Refused after a rollback until ``ReportRestored``."""

    version: int
    timeout_s: float = 0.0


class Publish(Command, frozen=True, tag="publish"):
    """Publish this rank's part of the announced version; the last one makes it current. ``probe``: of rank 0 only."""

    version: int
    part: VersionPart
    probe: bytes = b""


class PublishReply(Reply, frozen=True, tag="published"):
    """``keep``: versions whose bytes must be kept, by the number they were published under. ``lost``: to an
    ``Announce``, once, why this rank's last published version was discarded; "" if it was not."""

    keep: tuple[int, ...]
    lost: str = ""


class Withdraw(Command, frozen=True, tag="withdraw"):
    """Discard an announced version."""

    version: int
    reason: str = ""


class Rollback(Command, frozen=True, tag="rollback"):
    """Make the bytes of a kept version current again, under a new number. Rows generated by newer versions expire,
    unless a full step holds them."""

    version: int
    reason: str = ""


class RollbackDone(Reply, frozen=True, tag="rolled_back"):
    """``version``: the new number, now current. ``expired``: number of expired rows. ``checkpoint``: step of the
    checkpoint with this version's weights and optimizer state; -1 for none."""

    version: int
    expired: int
    checkpoint: int = -1


class GetRestoreTarget(Command, frozen=True, tag="get_restoration"):
    """Get the version to load after a rollback, or the kept ``version``. Answered with ``RestoreTarget``."""

    version: int = -1


class RestoreTarget(Reply, frozen=True, tag="restoration"):
    """``version``: load it, then send ``ReportRestored``; -1 if no rollback is pending. ``source``: the number its
    bytes were published under. ``parts``: by rank; empty if they cannot be fetched, for the reason ``why``.
    ``checkpoint``: as in ``RollbackDone``."""

    version: int = -1
    source: int = -1
    parts: tuple[VersionPart, ...] = ()
    checkpoint: int = -1
    why: str = ""


class ReportRestored(Command, frozen=True, tag="restored"):
    """Report that all ranks have loaded ``version``, the current one, after a rollback: the next may be announced.
    Idempotent. ``optimizer``: the origin of its state, for people."""

    version: int
    optimizer: str = ""


class AwaitPins(Command, frozen=True, tag="await_pins"):
    """Bind all pins to the current version, the trainer's last. Answered once none is left, or at a rollback."""

    timeout_s: float = 0.0


class AwaitVersion(Command, frozen=True, tag="await_version"):
    """Wait for a version above ``after``, as a replica from now on, for rows of ``task`` ("": unknown)."""

    after: int
    timeout_s: float = 0.0
    task: str = ""


class Version(Reply, frozen=True, tag="version"):
    """``parts``: by rank. ``source``: the number their bytes were published under; another one after a rollback."""

    version: int
    parts: tuple[VersionPart, ...]
    source: int
    probe: bytes = b""


class ReportStaged(Command, frozen=True, tag="staged"):
    """Report that this replica has verified ``version`` on its host and can load it. ``skipped``: number of versions
    since its last staged one that it never fetched. ``moved`` (bytes), ``encoding``, ``seconds``: the transfer."""

    version: int
    skipped: int = 0
    moved: int = 0
    encoding: str = ""
    seconds: float = 0.0


class Swap(Command, frozen=True, tag="swap"):
    """Ask for permission to load a staged version, see ``Replicas``. Raises VersionGone once a newer version has
    replaced it. The permission ends with ``ReportLoaded``, ``ReportLoadFailed``, ``Retire`` or the session."""

    version: int
    timeout_s: float = 0.0


class Permitted(Reply, frozen=True, tag="permitted"):
    """``version`` may be loaded."""

    version: int


class ReportLoaded(Command, frozen=True, tag="loaded"):
    """Report that this replica generates with ``version`` from now on. ``own``: True if these are the engine's
    initial weights, version 0 until one is published; without effect afterwards."""

    version: int
    own: bool = False


class ReportLoadFailed(Command, frozen=True, tag="not_loaded"):
    """Report that this replica could not fetch or load ``version`` and keeps the one it had."""

    version: int
    reason: str


class Retire(Command, frozen=True, tag="retire"):
    """Stop being a replica: staged and loaded versions, the permission and the share in the quorum end; leases stay.
    Parked requests for versions are refused. A later one makes it a replica."""


AnyCommand: TypeAlias = (
    OpenSession | Configure | Declare | AddRows | LeaseRows | Complete | GiveBack | Renew | AwaitLost
    | OpenPublisher | ClosePublisher | Announce | Publish | Withdraw | Rollback | GetRestoreTarget | ReportRestored
    | AwaitVersion | AwaitPins | ReportStaged | Swap | ReportLoaded | ReportLoadFailed | Retire | AwaitRowsWanted
    | End | Cancel | Dismiss | Prepare | CloseSession | GetAudit | GetFailed | GetStatus | AddCheckpoint | Resume
    | GetTrainingPosition | AllGather | GetPut | OpenHome | EvictHome | GetHomes
)  # fmt: skip
AnyReply: TypeAlias = (
    Done | SessionOpened | PutDone | Leased | LeasedPart | LoadFirst | Completed | Lost | Cancelled | Dismissed
    | Failed | Publisher | PublishReply | RollbackDone | RestoreTarget | Permitted | Version | RowsWanted | Audit
    | StatusReport | Resumed | TrainingPosition | AllGathered | LastPut | HomeOpened | HomeList
)  # fmt: skip
