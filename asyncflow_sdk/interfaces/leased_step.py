"""LeasedStep: one step, delivered in parts while the rest of it is still being generated.

for step in queue.steps("train", part_rows=32):
    engine.begin_step(step.index)
    for part in step.parts():                   # waits for the next part, until the step is full
        engine.accumulate(part)
    result = engine.end_step()
    step.ack(filtered=result.filtered)          # once, for the whole step
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import Batch


class StepPart(Batch):
    """Whole groups of a step, delivered together. In a rank group: this rank's share of them, perhaps
    without any row.

    ``index``: number of the step. ``version``: the one it trains. ``part``: number of the part, from
    0. ``last``: True if the step has no further part.
    """

    index: int = -1
    version: int = -1
    part: int = 0
    last: bool = False

    def _place(self, lease: Any, completed_at: npt.NDArray[np.int64]) -> None:
        self.index, self.version, self.part, self.last = lease.step, lease.version, lease.part, lease.last
        self.version_step_offsets, self.completed_at = lease.version_step_offsets, completed_at


class LeasedStep(AbstractContextManager["LeasedStep"], abc.ABC):
    """A step leased to this client, delivered in parts, until it acknowledges the step, gives it back,
    or the lease ends. The end of its ``with`` block gives it back; an exception there counts as an
    attempt. One thread at a time.

    If the lease ends (this client or another rank died or was too late, or the step was given back),
    the step is leased again under a new token: the same parts come first, with the same rows, and
    the same shards for as many ranks. If a delivered row ends before the step is full (a rollback,
    lost payload, a cancelled or failed group), the lease is void: ``parts``, ``renew`` and ``ack``
    raise LeaseLost with the reason, and what was computed from the step must be discarded.

    ``token``: fencing token. ``index``: number of the step. ``version``: the one it trains.
    ``lease_s``: seconds until the lease ends, unless renewed; each request for a part renews it.
    ``rank`` of ``world_size``: of the rank group.
    """

    token: int
    task: str
    index: int
    version: int
    lease_s: float
    rank: int
    world_size: int

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """The number of rows delivered here so far."""

    @property
    @abc.abstractmethod
    def complete(self) -> bool:
        """True once the last part is delivered."""

    @property
    @abc.abstractmethod
    def held(self) -> bool:
        """True until the step is acknowledged, given back, or known to be lost."""

    @abc.abstractmethod
    def parts(self) -> Iterator[StepPart]:
        """Iterate over the parts, each once, in order; wait for each. Raises LeaseLost if the lease has
        ended, with the reason, and DeadlineExceeded, which lists the unfinished groups of the step
        and their holders; then the next call continues with the same part."""

    @abc.abstractmethod
    def renew(self, *, after_s: float = 0.0) -> None:
        """Restart the lease's time, for all ranks that share it; see ``LeasedBatch.renew``. Raises
        LeaseLost."""

    @abc.abstractmethod
    def ack(self, *, filtered: npt.ArrayLike | None = None) -> None:
        """Acknowledge the whole step: it is trained. A step shared by ranks is acknowledged once every
        rank has called this. ``filtered``: bool (``rows``,), in order of delivery, True for rows
        without a gradient. Raises SchemaError before the last part is delivered, and LeaseLost."""

    @abc.abstractmethod
    def give_back(self, *, reason: str = "", blame: bool = False) -> None:
        """Return the step to the task, for all ranks that share it. ``blame``: the attempt counts.
        Raises LeaseLost."""


class StepConsumer(AbstractContextManager["StepConsumer"], abc.ABC):
    """Iterates over the steps of a task until the stream ends, in one thread; after an error it can be
    iterated over again.

    A turn of the loop that does not acknowledge its step gives it back, and the attempt counts.
    Leaving the loop gives it back. As a context manager, the consumer counts an exception in the
    loop as an attempt.
    """

    @property
    @abc.abstractmethod
    def current(self) -> LeasedStep | None:
        """The step of this turn of the loop; None before the first and after the last."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[LeasedStep]:
        """Lease one step after another, each once its first part is ready. Raises the errors of
        ``TransferQueue.get``, except Ended."""
