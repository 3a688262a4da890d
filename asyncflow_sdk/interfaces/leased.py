"""Rows leased from a TransferQueue, as batches or as steps in parts, and the loops at its two sides.

with queue.get("reward", count=64, timeout_s=30) as batch:      # an exception gives the rows back
    batch.complete({"reward": score(batch["response"])})

for step in queue.steps("train", part_rows=32):
    engine.begin_step(step.index)
    for part in step.parts():                                   # waits for the next part, until the step is full
        engine.accumulate(part)
    result = engine.end_step()
    step.ack(filtered=result.filtered)                          # once, for the whole step

af.EngineProducer(run.queue, engine).work()                     # leases prompts, completes each row once finished
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import Batch


class LeasedBatch(Batch, AbstractContextManager["LeasedBatch"], abc.ABC):
    """Rows leased to this client until it completes them, gives them back, or the lease ends. The end of its ``with``
    block gives the remaining rows back; an exception there counts as an attempt. One thread at a time.

    ``token``: fencing token of the lease. ``index``: number of the step, or -1. ``version``: loaded by the replica
    (rollout) or being trained (train), or -1. ``lease_s``: seconds until the lease ends, unless renewed. For a lease
    shared by ranks: ``rank`` of ``world_size``, the number of its ``shard``, and ``imbalance``: the heaviest shard
    weighs 1 + ``imbalance`` times the mean. ``left``: number of rows neither completed nor given back. ``finished``:
    True if ``finish`` was called and its result is not sent yet.
    """

    token: int
    task: str
    index: int
    version: int
    partition: str
    lease_s: float
    rank: int
    world_size: int
    shard: int
    imbalance: float
    left: int
    finished: bool

    @abc.abstractmethod
    def complete(
        self,
        columns: Mapping[str, Any] | None = None,
        *,
        index: npt.ArrayLike | None = None,
        filtered: npt.ArrayLike | None = None,
    ) -> npt.NDArray[np.int64]:
        """Write columns and acknowledge the rows, all or nothing. Returns the ids of rows already ended with their
        group: nothing was written for them. Raises LeaseLost, SchemaError, WriteOnceError, without any effect.
        ``index``: positions, or a bool mask, of the rows to complete now (default: all); ``columns`` have one entry
        for each. ``filtered``: bool, one for each, True for rows to drop."""

    @abc.abstractmethod
    def finish(
        self,
        columns: Mapping[str, Any] | None = None,
        *,
        index: npt.ArrayLike | None = None,
        filtered: npt.ArrayLike | None = None,
    ) -> None:
        """Like ``complete``, with the next request, which raises the server's errors: ``get(..., ack=batch)``, the
        next one of its ``stream``, or the end of its ``with`` block. Call it once, as the last completion of a batch.
        Copies the values; raises SchemaError at once for invalid ones."""

    @abc.abstractmethod
    def give_back(self, *, index: npt.ArrayLike | None = None, reason: str = "", blame: bool = False) -> None:
        """Return rows to the task. ``blame``: the attempt counts; after too many the group fails."""

    @abc.abstractmethod
    def renew(self, *, after_s: float = 0.0) -> None:
        """Restart the lease's time, for all ranks sharing it. Raises LeaseLost if it has ended. ``after_s``: do
        nothing within this time of the last start here. Long work calls ``batch.renew(after_s=batch.lease_s / 3)``
        wherever it progresses; if it hangs, others get the rows."""

    @abc.abstractmethod
    def ack(self, *, filtered: npt.ArrayLike | None = None) -> None:
        """Acknowledge all rows without writing: the step is trained. A step shared by ranks is acknowledged once
        every rank has called this. ``filtered``: bool (rows,), True for rows without a gradient. Raises LeaseLost."""


class StepPart(Batch):
    """Whole groups of a step, delivered together. In a rank group: this rank's share of them, perhaps without any
    row. ``index``: number of the step. ``version``: the one it trains. ``part``: number of the part, from 0.
    ``last``: True if the step has no further part."""

    index: int = -1
    version: int = -1
    part: int = 0
    last: bool = False

    def _place(self, lease: Any, completed_at: npt.NDArray[np.int64]) -> None:
        self.index, self.version, self.part, self.last = lease.step, lease.version, lease.part, lease.last
        self.version_step_offsets, self.completed_at = lease.version_step_offsets, completed_at


class LeasedStep(AbstractContextManager["LeasedStep"], abc.ABC):
    """A step leased to this client, delivered in parts while the rest of it is still being generated, until the
    client acknowledges the step, gives it back, or the lease ends. ``with`` and attributes as of ``LeasedBatch``;
    each request for a part renews the lease. One thread at a time. ``rows``: number of rows delivered here so far.
    ``complete``: True once the last part is delivered.

    If the lease ends (this client or another rank died or was too late, or the step was given back), the step is
    leased again under a new token: the same parts come first, with the same rows, and the same shards for as many
    ranks. If a delivered row ends before the step is full (a rollback, lost payload, a cancelled or failed group),
    the lease is void: ``parts``, ``renew`` and ``ack`` raise LeaseLost with the reason, and everything computed from
    the step must be discarded.
    """

    token: int
    task: str
    index: int
    version: int
    lease_s: float
    rank: int
    world_size: int
    rows: int
    complete: bool

    @property
    @abc.abstractmethod
    def held(self) -> bool:
        """True until the step is acknowledged, given back, or known to be lost."""

    @abc.abstractmethod
    def parts(self) -> Iterator[StepPart]:
        """Iterate over the parts, each once, in order; wait for each. Raises LeaseLost with the reason, and
        DeadlineExceeded listing the unfinished groups of the step and their holders; then the next call continues
        with the same part."""

    @abc.abstractmethod
    def renew(self, *, after_s: float = 0.0) -> None:
        """See ``LeasedBatch.renew``."""

    @abc.abstractmethod
    def ack(self, *, filtered: npt.ArrayLike | None = None) -> None:
        """Acknowledge the whole step, as ``LeasedBatch.ack`` does. ``filtered``: bool (``rows``,), in order of
        delivery. Raises SchemaError before the last part is delivered, and LeaseLost."""

    @abc.abstractmethod
    def give_back(self, *, reason: str = "", blame: bool = False) -> None:
        """Return the step to the task, for all ranks sharing it. ``blame``: the attempt counts. Raises LeaseLost."""


class Consumer(AbstractContextManager["Consumer"], abc.ABC):
    """Iterates over leased batches of a task until the stream ends, in one thread; after an error it can be iterated
    over again. The request for the next batch also sends the ``finish`` of the last one, and raises the server's
    error about it. It gives an unfinished batch back, and the attempt counts. Leaving the loop sends an unsent
    ``finish``, or gives the rows back. As a context manager, the consumer counts an exception in the loop as an
    attempt."""

    @property
    @abc.abstractmethod
    def current(self) -> LeasedBatch | None:
        """The batch of this turn of the loop; None before the first and after the last."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[LeasedBatch]:
        """Lease one batch after another. Raises the errors of ``TransferQueue.get``, except Ended."""


class StepConsumer(AbstractContextManager["StepConsumer"], abc.ABC):
    """As ``Consumer``, over steps. A turn of the loop without an acknowledgement gives its step back, and the attempt
    counts. Leaving the loop gives it back."""

    @property
    @abc.abstractmethod
    def current(self) -> LeasedStep | None:
        """The step of this turn of the loop; None before the first and after the last."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[LeasedStep]:
        """Lease one step after another, each once its first part is ready. Raises as ``Consumer`` does."""


class Producer(abc.ABC):
    """Generates responses for the rows of a task until the stream ends. Run it once. Each row is completed as soon as
    its response is finished: no row waits for its neighbours. The producer is a replica: it loads new weights at
    points safe for its engine, and records the version of every token."""

    @abc.abstractmethod
    def work(self) -> None:
        """Declare the task and generate in this thread. Raises the same errors as ``run``."""

    @abc.abstractmethod
    async def run(self) -> None:
        """Generate on this event loop. Raises the engine's error, DeadlineExceeded with the reason, and ConfigError
        if this connection is the replica of another engine."""
