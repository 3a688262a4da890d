"""StreamDataLoader: read a task of a queue as a training loop reads a data loader.

    loader = af.StreamDataLoader(run.queue, "train", columns=["response_ids", "advantage"], count=32)
    for batch in loader:                    # a dict of tensors, or the result of ``collate``; ends with the stream
        loss = step(batch["response_ids"], batch["advantage"])

Asking for the next batch acknowledges the last one. Leaving the loop gives it back. torch accepts
it as an iterable dataset: ``DataLoader(loader, batch_size=None)``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from ..errors import AsyncFlowError, ConfigError, WireError
from ..interfaces import LeasedBatch
from ..types.defaults import NEXT_S
from .client import QueueClient

T = TypeVar("T")


class StreamDataLoader(Generic[T]):
    """Iterates over batches of ``count`` rows of ``task`` until the stream ends. Each ``iter`` continues at the
    stream's position; there is no length. A task with batch_rows gives one whole step each.

    ``columns``: columns to read, among the task's needs (None: all); others are not mapped or copied. ``collate``:
    turns a batch into the yielded value, in the loop's thread (default: ``Batch.to_torch()``, unpinned). ``rank`` of
    ``world_size``: each rank of ``group`` (default: the task's name) iterates over its own loader, and the k-th
    batches of all ranks are the shards, of ``count`` rows each, of one lease. ``shards``: as of ``get``, fewer if
    several ranks need the same rows. ``prefetch`` 1: lease the next batch while this one is in use; its lease time
    (``lease_s`` of the task) starts again when it is yielded. ``at_least``, and the options ``partition``, ``group``
    and ``timeout_s`` (the longest wait for a batch): as of ``get``.

    Raises the errors of ``get``: DeadlineExceeded, and LeaseLost if the previous batch took longer than its lease.
    One thread iterates at a time. Use it only in the process that made it, not in worker processes of a DataLoader.
    """

    def __init__(
        self,
        queue: QueueClient,
        task: str,
        columns: Sequence[str] | None = None,
        count: int = 1,
        *,
        rank: int = 0,
        world_size: int = 1,
        shards: int = 0,
        collate: Callable[[LeasedBatch], T] | None = None,
        prefetch: int = 0,
        at_least: int = 0,
        **options: Any,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of {world_size}: ranks are 0 to world_size - 1")
        if prefetch not in (0, 1):
            raise ConfigError(f"prefetch is 0, or 1 for one batch ahead; not {prefetch}")
        self._queue = queue
        self._collate: Callable[[LeasedBatch], Any] = collate or LeasedBatch.to_torch
        parts = (shards or world_size) if world_size > 1 else 1
        self._batches = queue.stream(
            task, count * parts, columns=columns, at_least=at_least * parts, ahead=bool(prefetch), rank=rank,
            world_size=world_size, shards=shards, **{"group": task, "timeout_s": NEXT_S, **options},
        )  # fmt: skip
        if (data := sys.modules.get("torch.utils.data")) is not None:
            data.IterableDataset.register(StreamDataLoader)

    @property
    def lease(self) -> LeasedBatch | None:
        """The current batch, to complete, renew or give back parts of it directly; None outside the loop."""
        return self._batches.current

    def __iter__(self) -> Iterator[T]:
        try:
            self._queue.connection.wire.check()
        except WireError:
            raise
        except AsyncFlowError:
            raise AsyncFlowError(
                "a StreamDataLoader cannot be used after fork(), for example in a worker process of a DataLoader:"
                " use num_workers=0 (prefetch=1 overlaps), or make queue and loader in the child"
            ) from None
        return self._each()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a StreamDataLoader cannot be sent to another process: use num_workers=0 (prefetch=1 overlaps), or make"
            " it there with af.connect(address)"
        )

    def ack(self) -> None:
        """Acknowledge the current batch now, before the next is requested. Raises LeaseLost."""
        if self.lease is not None and self.lease.left:
            self.lease.ack()

    def _each(self) -> Iterator[T]:
        with (
            self._batches,
            contextlib.closing(iter(self._batches)) as batches,
        ):  # an exception of ``collate`` is an attempt
            for batch in batches:
                made = self._collate(batch)
                yield made
                del made  # free the memory of a batch that the consumer dropped
                if batch.left and not batch.finished:
                    batch.finish()
