"""TransferQueue: rows stream from their producers to their consumers.

    queue.declare("reward", needs=["response"], gives=["reward"])
    queue.put({"prompt": prompts}, group_size=8, key="epoch-0")                  # one side

    for batch in queue.stream("reward", count=64):                               # the other side, with one request each
        batch.finish({"reward": score(batch["response"])})

Promises of every implementation:

- A row reaches each task at least once. Its effects happen once: a completion carries the lease's token, and after the
  lease's end it raises LeaseLost and changes nothing.
- Every row ends in exactly one terminal state: consumed, filtered, expired, failed or cancelled. ``audit`` adds up.
- A column is written once. Values read are bit for bit the values written.
- Every wait has a deadline. DeadlineExceeded names the missing thing and its provider.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt

from ..types.defaults import LEASE_S, MAX_ATTEMPTS, TIMEOUT_S
from ..types.reports import Audit, FailedGroup, StatusReport
from ..types.tasks import PolicySpec, SamplerSpec
from .leased import Consumer, LeasedBatch, StepConsumer

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class PutRows:
    """The rows of a put: ``first`` to ``first + count - 1``. ``again``: True if their key had been put
    before, and no row was added."""

    first: int
    count: int
    again: bool


class QueueOptions(TypedDict, total=False):
    """Keywords of ``configure``; None leaves a limit as it is. ``capacity_rows``, ``capacity_bytes``: most live rows,
    and most bytes of their payload. ``row_bytes``: reserve for a row with all its columns; 0, the default: the bytes
    of the largest row so far. ``steps``: the stream ends after so many. ``max_staleness``, ``staleness_policy``: see
    ``Staleness``; by a name installed at the server, alone or with options. ``keep_versions``, ``max_swapping``,
    ``quorum``: see ``Weights``. ``checkpoints``: keep rows of acknowledged steps until a checkpoint covers them.
    ``home_silence_s``: see ``Store``."""

    capacity_rows: int | None
    capacity_bytes: int | None
    row_bytes: int | None
    max_staleness: int | None
    steps: int | None
    keep_versions: int | None
    max_swapping: int | None
    quorum: int | None
    staleness_policy: str | Callable[..., Any] | tuple[Any, Mapping[str, Any]] | PolicySpec | None
    checkpoints: bool | None
    home_silence_s: float | None


class TransferQueue(abc.ABC):
    """The queue of a run, for threads; ``aio`` has the same methods as coroutines. Thread-safe: calls of different
    threads do not wait for each other. Every method raises WireError if the server cannot be reached."""

    @abc.abstractmethod
    def configure(self, **limits: Unpack[QueueOptions]) -> None:
        """Set limits, before tasks are declared. Those not given stay as they are. Raises ConfigError, PluginError."""

    @abc.abstractmethod
    def declare(
        self,
        name: str,
        *,
        needs: Sequence[str],
        gives: Sequence[str] = (),
        lease_s: float = LEASE_S,
        max_attempts: int = MAX_ATTEMPTS,
        admits: bool = False,
        batch_rows: int | None = None,
        partitions: Sequence[str] = ("",),
        sampler: str | tuple[str, Mapping[str, Any]] | SamplerSpec | None = None,
    ) -> None:
        """Declare a task: see TaskSpec. Declaring the same again does nothing. ``sampler``: the name of one installed
        at the server (``asyncflow plugins`` lists them), alone or with options: "whole_groups", ("shuffled", {"seed":
        1}). Raises SchemaError for an invalid column name; ConfigError for a task without a row to pass it (it gives
        a column it needs, tasks wait for each other, another task gives the same column, or it takes no partition);
        PluginError."""

    @abc.abstractmethod
    def put(
        self,
        columns: Mapping[str, Any],
        *,
        group_size: int = 1,
        key: str = "",
        partition: str = "",
        priority: int = 0,
        version: int | None = None,
        keep_version: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> PutRows:
        """Add ``group_size`` rows for each entry of ``columns``: the rows of a group share it. Wait while the queue
        is full.

        ``key``: idempotency key. A repeated put adds nothing, except groups failed since because their payload was
        lost: these are added again, whole. It must have the same values, number of entries, ``group_size`` and
        partition. ``partition``: only its tasks see the rows. ``priority``: every task takes higher ones first.

        ``version``: one version of the weights generates all these rows, the first one current from this number on.
        Replicas of the partition load it, and keep it until the rows are generated. The partition gets its next rows
        once these have ended, with a ``version``, too. Rows of a version rolled back or lost expire. After the
        trainer's last version: Ended. ``keep_version``: kept for a rollback until the partition's next rows are put.

        Raises SchemaError, ConfigError, Ended, MemoryFull, and DeadlineExceeded naming the cause of a full queue.
        """

    @abc.abstractmethod
    def get(
        self,
        task: str,
        count: int = 1,
        *,
        columns: Sequence[str] | None = None,
        at_least: int = 0,
        partition: str | None = None,
        timeout_s: float = TIMEOUT_S,
        group: str = "",
        rank: int = 0,
        world_size: int = 1,
        shards: int = 0,
        most: int = 0,
        ack: LeasedBatch | None = None,
    ) -> LeasedBatch:
        """Lease 1 to ``count`` ready rows of a task, whole groups if the task admits, or one whole step if it has
        batch_rows. ``partition``: of the rows; None: the task's partitions take turns. ``at_least``: wait for this
        many rows (0: one, or one a shard); only the rest at the end of the stream may be fewer. ``columns``: the
        needs to read; the others are neither mapped nor copied.

        ``ack``: a batch to acknowledge in the same request, with its ``finish`` or, without one, all its remaining
        rows. It takes effect before the wait for the lease. If it fails, its error (LeaseLost, SchemaError,
        WriteOnceError) is raised and nothing is leased.

        ``group``: the ``world_size`` ranks of a group lease together: the k-th get of each ``rank`` belongs to the
        k-th lease of the group, granted once all have asked. Its rows are dealt out in ``shards``; 0: one a rank;
        fewer: ``world_size // shards`` adjacent ranks get the same rows. Row counts of shards differ by at most 1,
        and a balanced sampler makes them about equally heavy; with whole groups it deals by weight alone. A shard may
        then be empty, also with ``at_least`` below the number of shards. If a rank dies before all have acknowledged
        a step, gives rows back or is too late, all ranks lose it, and the next get of each rank leases it again under
        a new token. Of rows outside steps, a rank gets a batch without rows if its rows ended before it read them. A
        lease of another session under this rank becomes void.

        ``most``: most rows of this replica at once, for a task with ``admits``. With it, the replica takes part in
        weight updates: the request waits while a version must be loaded first, and then returns as many rows as there
        is room for.

        Raises Ended if there will be no more rows, VersionNeeded if the replica must load newer weights first,
        DeadlineExceeded.
        """

    @abc.abstractmethod
    def stream(
        self,
        task: str,
        count: int = 1,
        *,
        columns: Sequence[str] | None = None,
        at_least: int = 0,
        partition: str | None = None,
        timeout_s: float = TIMEOUT_S,
        group: str = "",
        rank: int = 0,
        world_size: int = 1,
        shards: int = 0,
        ahead: bool = False,
    ) -> Consumer:
        """Iterate over the batches of a task until the stream ends. ``timeout_s``: limit of the wait for one batch.
        ``ahead``: lease the next batch during the work on this one; its lease time restarts when the loop gets it.
        Other arguments: see ``get``."""

    @abc.abstractmethod
    def steps(
        self,
        task: str,
        *,
        part_rows: int = 1,
        columns: Sequence[str] | None = None,
        timeout_s: float = TIMEOUT_S,
        group: str = "",
        rank: int = 0,
        world_size: int = 1,
    ) -> StepConsumer:
        """Iterate over the steps of a task with batch_rows until the stream ends, each delivered in parts; see
        ``LeasedStep``. One client, or one rank group, leases the open step at a time. ``part_rows``: least rows of a
        part, over all ranks; only the last part of a step may have fewer. A part contains whole groups.
        ``timeout_s``: limit of the wait for one part. ``group``, ``rank``, ``world_size``: as of ``get``; each part
        is dealt to all ranks together, and a rank may get none of its rows."""

    @abc.abstractmethod
    def loaded(self, version: int) -> None:
        """Report the ``version`` by which this session's replica generates from now on."""

    @abc.abstractmethod
    def wanted(self, *, timeout_s: float = TIMEOUT_S) -> int:
        """Return the number of rows missing from the remaining steps (without a last step: from the next few), also
        in place of filtered, failed and cancelled ones; wait while it is 0. Raises Ended once all steps are full,
        DeadlineExceeded."""

    @abc.abstractmethod
    def lost(self, *, timeout_s: float = TIMEOUT_S) -> npt.NDArray[np.int64]:
        """Wait until rows leased here have ended (too late, cancelled, failed with their group), so work on them may
        stop. Return their ids, each once, from the first call on. Raises DeadlineExceeded."""

    @abc.abstractmethod
    def end(self, *, cancel: bool = False, partition: str | None = None) -> None:
        """Refuse puts into one partition or any. ``cancel``: cancel its rows outside full steps."""

    @abc.abstractmethod
    def cancel(
        self,
        rows: npt.ArrayLike | None = None,
        *,
        key: str = "",
        partition: str | None = None,
        reason: str = "cancelled by request",
    ) -> int:
        """End live rows, selected by id, by the ``key`` of their put or by ``partition``, with their groups and
        leases. Rows in a full step belong to the trainer and stay. Return the number of ended rows. Raises
        SchemaError for an unknown id or key."""

    @abc.abstractmethod
    def failed(self, count: int = 100) -> tuple[FailedGroup, ...]:
        """Return the newest ``count`` of the last 1,000 groups failed for good (dead letters), oldest first."""

    @abc.abstractmethod
    def audit(self) -> Audit:
        """Return the balance: rows put = live + consumed + filtered + expired + failed + cancelled."""

    @abc.abstractmethod
    def status(self) -> StatusReport:
        """Return the rows by task and state, and the missing thing for each waiting request."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Deliver reported events now."""

    @property
    @abc.abstractmethod
    def aio(self) -> Any:
        """The same methods as coroutines, on the same session."""
