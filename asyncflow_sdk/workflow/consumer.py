"""CheckingConsumer: the consumer of a user's own loop. It raises the failure of a worker."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

from ..errors import DeadlineExceeded
from ..interfaces import Consumer, LeasedBatch
from ..queue import QueueClient

LOOK_S = 5.0
"""Interval of checks (seconds): a failure that does not end the stream wakes no request."""


class CheckingConsumer(Consumer):
    """Iterates over the batches of a task. Calls ``check`` at the end of the stream and, if
    ``often``, before each wait and every ``LOOK_S`` seconds of it. ``options``: of
    ``TransferQueue.stream``."""

    def __init__(
        self, queue: QueueClient, task: str, count: int, timeout_s: float, check: Callable[[], None], *, often: bool,
        **options: Any,
    ) -> None:  # fmt: skip
        self._check, self._often = check, often
        self._waits = max(1, math.ceil(timeout_s / LOOK_S)) if often else 1
        self._batches = queue.stream(task, count, timeout_s=timeout_s / self._waits, **options)

    @property
    def current(self) -> LeasedBatch | None:
        """Return the batch in progress."""
        return self._batches.current

    def __iter__(self) -> Generator[LeasedBatch, None, None]:
        batches = iter(self._batches)
        try:
            while True:
                began = time.monotonic()
                for left in reversed(range(self._waits)):
                    if self._often:
                        self._check()
                    try:
                        batch = next(batches, None)
                        break
                    except DeadlineExceeded as error:
                        if not left:
                            why = str(error).partition(": ")[2]
                            raise DeadlineExceeded(f"after {time.monotonic() - began:.1f} s: {why}") from None
                        batches = iter(self._batches)
                if batch is None:
                    self._check()
                    return
                yield batch
        finally:
            batches.close()

    def __enter__(self) -> CheckingConsumer:
        self._batches.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._batches.__exit__(kind, error, trace)
