"""Consumer: the steps of a training task, one lease after another.

for step in run.consumer("train", batch_size=256):
    engine.step(step.to_torch())
    weights.publish(step.version + 1, engine.named_weights())
    step.ack()
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from ..errors import Ended
from ..queue import LeasedBatch, TransferQueue
from ..types import events as ev


class Consumer:
    """Iterates over leased batches until the stream ends. Each must be acknowledged (or completed) before the
    next is asked for; one that is not is given back. ``timeout_s``: the longest it waits for one batch before
    DeadlineExceeded says what is missing."""

    def __init__(self, queue: TransferQueue, task: str, *, count: int = 1, timeout_s: float = 3600.0) -> None:
        self._queue, self._task, self._count, self._timeout_s = queue, task, count, timeout_s

    def __iter__(self) -> Iterator[LeasedBatch]:
        connection = self._queue._port.connection
        while True:
            began = time.monotonic()
            try:
                batch = self._get()
            except Ended:
                return
            waited = time.monotonic() - began
            if waited > 0.001:
                connection.report(ev.Span(time_s=began, worker=connection.name, kind="wait", seconds=waited))
            with batch:
                yield batch

    def _get(self) -> LeasedBatch:
        return self._queue.get(self._task, self._count, timeout_s=self._timeout_s)
