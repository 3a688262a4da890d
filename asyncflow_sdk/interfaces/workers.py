"""Producer and Consumer: the two sides of a TransferQueue, as the loops that workers run.

af.EngineProducer(run.queue, engine).work()                  # leases prompts, generates, completes each row when it is finished

for step in run.consumer("train", batch_size=256):           # one lease a turn
    engine.step(step.to_torch())
    step.ack()
"""

from __future__ import annotations

import abc
from collections.abc import Iterator

from .queue import LeasedBatch


class Producer(abc.ABC):
    """Generates responses for the rows of a task until the stream ends. Run it once.

    Each row is completed as soon as its response is finished: no row waits for its neighbours. The producer is a replica: it loads
    new weights at points that are safe for its engine, and every token is recorded with the version that generated it.
    """

    @abc.abstractmethod
    def work(self) -> None:
        """Declare the task and generate in this thread. Raises the same errors as ``run``."""

    @abc.abstractmethod
    async def run(self) -> None:
        """Generate on this event loop. Raises the engine's error, DeadlineExceeded with the reason, and ConfigError if this
        connection is the replica of another engine."""


class Consumer(abc.ABC):
    """Iterates over leased batches of a task until the stream ends. A batch must be acknowledged or completed before the next is asked
    for; else it is given back. One thread iterates.

    ``current``: the batch that the loop works on; None between two.
    """

    current: LeasedBatch | None

    @abc.abstractmethod
    def __iter__(self) -> Iterator[LeasedBatch]:
        """Lease one batch after another. ``batch.finish`` is sent with the request for the next batch, which raises its error; the loop
        may be entered again after that. Raises DeadlineExceeded that names what is missing."""
