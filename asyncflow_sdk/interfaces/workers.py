"""Producer and Consumer: the loops of workers at the two sides of a TransferQueue.

af.EngineProducer(run.queue, engine).work()                  # leases prompts, generates, completes each row when it is finished

for step in run.consumer("train", batch_size=256):           # one lease a turn
    engine.step(step.to_torch())
    step.ack()
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from contextlib import AbstractContextManager

from .leased_batch import LeasedBatch


class Producer(abc.ABC):
    """Generates responses for the rows of a task until the stream ends. Run it once.

    Each row is completed as soon as its response is finished: no row waits for its neighbours. The
    producer is a replica: it loads new weights at points safe for its engine, and records the
    version of every token.
    """

    @abc.abstractmethod
    def work(self) -> None:
        """Declare the task and generate in this thread. Raises the same errors as ``run``."""

    @abc.abstractmethod
    async def run(self) -> None:
        """Generate on this event loop. Raises the engine's error, DeadlineExceeded with the
        reason, and ConfigError if this connection is the replica of another engine."""


class Consumer(AbstractContextManager["Consumer"], abc.ABC):
    """Iterates over leased batches of a task until the stream ends, in one thread; after an error
    it can be iterated over again.

    The request for the next batch also sends the ``finish`` of the last one, and raises the
    server's error about it. It gives an unfinished batch back, and the attempt counts. Leaving the
    loop sends an unsent ``finish``, or gives the rows back. As a context manager, the consumer
    counts an exception in the loop as an attempt.
    """

    @property
    @abc.abstractmethod
    def current(self) -> LeasedBatch | None:
        """The batch of this turn of the loop; None before the first and after the last."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[LeasedBatch]:
        """Lease one batch after another. Raises the errors of ``TransferQueue.get``, except Ended."""
