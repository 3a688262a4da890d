"""TransferQueue: rows stream from their producers to their consumers.

    queue.declare("reward", needs=["response"], gives=["reward"])
    queue.put({"prompt": prompts}, group_size=8, key="epoch-0")                  # one side

    with queue.get("reward", count=64, timeout_s=30) as batch:                   # the other side; an exception gives the rows back
        batch.complete({"reward": score(batch["response"])})

    for batch in queue.stream("reward", count=64):                               # or one after another, with one request each
        batch.finish({"reward": score(batch["response"])})

Promises of every implementation:

- A row reaches each task at least once. Its effects happen once: a completion carries the lease's token, and one of a lease that has
  ended raises LeaseLost and changes nothing.
- Every row ends in exactly one terminal state: consumed, filtered, expired, failed or cancelled. ``audit`` adds up at any time.
- A column is written once. Values read are bit for bit the values written.
- Every call that waits has a deadline. DeadlineExceeded names what is missing and who should provide it.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..types.defaults import LEASE_S, TIMEOUT_S
from ..types.reports import Audit, FailedGroup, StatusReport
from ..types.tasks import PolicySpec, SamplerSpec
from .leased_batch import LeasedBatch
from .workers import Consumer


@dataclass(frozen=True)
class PutRows:
    """The rows of a put: ``first`` to ``first + count - 1``. ``again``: True if they were there by their key, and none was added."""

    first: int
    count: int
    again: bool


class TransferQueue(abc.ABC):
    """The queue of a run, for threads; ``aio`` has the same methods as coroutines. Thread-safe: calls of different threads do not wait
    for each other. Every method raises WireError if the server cannot be reached."""

    @abc.abstractmethod
    def configure(
        self,
        *,
        capacity_rows: int | None = None,
        capacity_bytes: int | None = None,
        row_bytes: int | None = None,
        max_staleness: int | None = None,
        steps: int | None = None,
        keep_versions: int | None = None,
        max_swapping: int | None = None,
        quorum: int | None = None,
        staleness_policy: str | tuple[str, Mapping[str, Any]] | PolicySpec | None = None,
        checkpoints: bool | None = None,
    ) -> None:
        """Set the queue's limits, before its tasks are declared. None leaves a limit as it is.

        ``capacity_rows``: most rows alive at once. ``capacity_bytes``: most payload. ``row_bytes``: bytes reserved for a row and all
        that is written to it later (0, the default: the bytes of the largest row so far). ``steps``: the number of steps; then the
        stream ends. ``staleness_policy``: the meaning of ``max_staleness``, by name or by name and options: "wait" (the default),
        "drop", "count", or another that is installed where the queue is served. ``keep_versions``: versions that can be fetched and
        rolled back to. ``max_swapping``: replicas that load a version at once (0: all). ``quorum``: replicas that must have it
        staged before any loads it (0: none). ``checkpoints``: keep rows of acknowledged steps until a checkpoint covers them.
        Raises ConfigError, PluginError.
        """

    @abc.abstractmethod
    def declare(
        self,
        name: str,
        *,
        needs: Sequence[str],
        gives: Sequence[str] = (),
        lease_s: float = LEASE_S,
        max_attempts: int = 3,
        admits: bool = False,
        batch_rows: int | None = None,
        partitions: Sequence[str] = ("",),
        sampler: str | tuple[str, Mapping[str, Any]] | SamplerSpec | None = None,
    ) -> None:
        """Declare a task: see TaskSpec. Declaring the same again does nothing.

        ``sampler``: the name of one, or name and options: ("shuffled", {"seed": 1}), ("length_bucketed", {"column":
        "response_ids"}), "whole_groups", ...; ``asyncflow plugins`` lists those installed where the queue is served.
        Raises SchemaError for a name that no column can have; ConfigError for a task that no row could ever get through
        (it gives what it needs, it waits for a task that waits for it, another task gives the same column, or it takes
        no partition); PluginError.
        """

    @abc.abstractmethod
    def put(
        self,
        columns: Mapping[str, Any],
        *,
        group_size: int = 1,
        key: str = "",
        partition: str = "",
        priority: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> PutRows:
        """Add ``group_size`` rows for each entry of ``columns``: the rows of a group share it.

        The same ``key`` adds nothing the second time, but for groups that failed since because their payload was lost:
        these are added again, whole. It is refused with other values, another number of entries, ``group_size`` or
        partition. ``partition``: only the tasks that take it see the rows.
        ``priority``: every task takes rows of a higher one first. A full queue makes it wait. Raises SchemaError,
        ConfigError, Ended, MemoryFull, and DeadlineExceeded that names who keeps the queue full.
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
        """Lease up to ``count`` ready rows of a task, at least one; of a task with batch_rows, one whole step;
        of a task that admits, whole groups. The rows are of one ``partition``; without a name the partitions of
        the task take turns. ``at_least``: wait until so many are ready; only the rest at the end of the stream
        may be fewer. ``columns``: the columns to read, of the task's needs; the others are neither mapped nor copied.

        ``ack``: a batch to acknowledge in the same request, with its ``finish`` or, without one, all its rows
        that are left. It has its effect before the lease is waited for. If it fails, its
        error (LeaseLost, SchemaError, WriteOnceError) is raised and nothing was leased.

        ``group``: the ``world_size`` ranks of a group lease together: the k-th get of each ``rank`` belongs to the k-th
        lease of the group, granted when all have asked. Its ``count`` rows (or its step) are dealt out in ``shards`` (0:
        one a rank; fewer: ``world_size // shards`` ranks one after another get the very same rows). The row counts of shards
        differ by 1 at most, and a balanced sampler makes them about equally heavy. A sampler that keeps groups whole deals by weight
        alone, and a shard may be empty. A step is acknowledged when every rank has acknowledged it. When a rank dies before, gives
        rows back or is too late, all lose it, and the next get of every rank is that step again, under a new token. A lease that
        another session holds under this rank is void.

        ``most``: of a task that admits, the rows that this replica may hold in all. A replica that gives it takes part in the weight
        updates: the request waits while a version has to be loaded first, and then returns as many rows as it has room for.

        Raises Ended when there will never be another row, VersionNeeded when the replica must load newer
        weights first, DeadlineExceeded that names what is missing and who should provide it.
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
        """Iterate over the batches of a task until the stream ends. ``timeout_s``: the longest wait for one batch. ``ahead``: lease the
        next batch while this one is worked on; its lease starts again when the loop gets it. The other arguments: see ``get``."""

    @abc.abstractmethod
    def loaded(self, version: int) -> None:
        """Report that this session's replica generates with ``version`` from now on."""

    @abc.abstractmethod
    def wanted(self, *, timeout_s: float = TIMEOUT_S) -> int:
        """Return how many rows the remaining steps lack (without a last step: the next few); wait until there are any.
        Rows that were filtered, failed or were cancelled are wanted again. Raises Ended, DeadlineExceeded."""

    @abc.abstractmethod
    def lost(self, *, timeout_s: float = TIMEOUT_S) -> npt.NDArray[np.int64]:
        """Wait until rows that were leased here have ended (too late, cancelled, failed with their group): work on them
        may stop. Rows are remembered from the first call on. Returns their ids, each once. Raises DeadlineExceeded."""

    @abc.abstractmethod
    def end(self, *, cancel: bool = False, partition: str | None = None) -> None:
        """Accept no further put, into one partition or any. ``cancel``: cancel its rows that no full step holds."""

    @abc.abstractmethod
    def cancel(
        self,
        rows: npt.ArrayLike | None = None,
        *,
        key: str = "",
        partition: str | None = None,
        reason: str = "cancelled by request",
    ) -> int:
        """End live rows with their groups: those with these ids, of the put with a ``key``, or of a ``partition``.

        Their leases are lost; rows in a full step are their trainer's and stay. Returns how many rows ended.
        Raises SchemaError for an id or key that was never put.
        """

    @abc.abstractmethod
    def failed(self, count: int = 100) -> tuple[FailedGroup, ...]:
        """Return the newest ``count`` groups that failed for good (dead letters), oldest first: their rows and put,
        and the reason of each attempt. Rows whose payload was lost are among them. The queue keeps the last 1,000."""

    @abc.abstractmethod
    def audit(self) -> Audit:
        """Return the balance: rows put = live + consumed + filtered + expired + failed + cancelled."""

    @abc.abstractmethod
    def status(self) -> StatusReport:
        """Return the rows by task and state, and what each waiting request waits for."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Deliver reported events now."""

    @property
    @abc.abstractmethod
    def aio(self) -> Any:
        """The same methods as coroutines, on the same session."""
