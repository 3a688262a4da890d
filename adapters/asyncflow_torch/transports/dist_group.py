"""A private group of torch.distributed: one publisher, its receivers, and broadcasts from the
publisher.

It is made from the process group's own class over a private store, not by ``init_process_group``:
the default group belongs to the training loop of this process, which may have a group or none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.interfaces.weights import Bytes
from asyncflow_sdk.types.manifest import Bucket

BACKENDS = ("gloo", "nccl")
LEAST_S = 0.001
"""A wait of no time is one without end for some of torch's."""
WINDOW = 4
"""Buckets on their way at a time through gloo, which copies none of them. NCCL has one, in device memory."""
_THREADS = 2
_CONNECT_FACTOR = 5
"""Gloo waits for the connections of a new group this many times as long as its timeout says."""

if not dist.is_available():  # a build of torch without it, as on some platforms
    raise ConfigError("this torch is built without torch.distributed; use the transport tcp instead")


class StoreProxy(dist.Store):  # type: ignore[misc]
    """A store in Python, with the addresses that members exchange to connect.

    ``put`` and ``look`` implement it; ``look`` waits until all keys are set, or raises at its
    deadline.
    """

    def __init__(self, put: Callable[[str, bytes], None], look: Callable[[list[str]], list[bytes]]) -> None:
        super().__init__()
        self._put, self._look = put, look
        self._seen: set[str] = set()

    def set(self, key: str, value: bytes) -> None:
        self._put(key, bytes(value))
        self._seen.add(key)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._look(list(keys))
        self._seen.update(keys)
        return values

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.multi_get(keys)

    def check(self, keys: list[str]) -> bool:
        return self._seen.issuperset(keys)


class BroadcastGroup:
    """Broadcasts from rank 0. ``limit_s()``: returns the current limit, in seconds, of the wait for
    each member, and of each bucket. It may be replaced for each round."""

    def __init__(
        self, backend: str, store: StoreProxy, rank: int, size: int, address: str, limit_s: Callable[[], float]
    ) -> None:
        self.rank = rank
        self._options = dist.BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0
        self.limit_s = limit_s
        self._options.asyncOp = True
        self._device: torch.device | None = None
        self._bucket: Any = None
        self._window = WINDOW
        if backend == "gloo":
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout, options._threads = self._limit(_CONNECT_FACTOR), _THREADS
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
        else:
            self._device, self._window = torch.device("cuda", torch.cuda.current_device()), 1
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._limit()
            with _waits_have_deadlines():
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)

    def stream(self, chunks: list[Any], buckets: Iterable[Bucket], arrived: Callable[[Bucket], None]) -> None:
        """Send or receive buckets of flat uint8 tensors in host memory, in order. ``arrived`` is
        called with each, in order."""
        under_way: deque[tuple[Bucket, Callable[[], None]]] = deque()
        try:
            for bucket in buckets:
                if len(under_way) == self._window:
                    arrived(_first(under_way))
                under_way.append((bucket, self._start(chunks[bucket.chunk][bucket.start : bucket.stop])))
            while under_way:
                arrived(_first(under_way))
        except BaseException:
            for (
                _,
                finish,
            ) in under_way:  # nothing may be under way when a group goes, nor when its memory is used again
                with contextlib.suppress(Exception):
                    finish()
            raise

    def word(self, word: int = 0) -> int:
        """Send a byte from rank 0 to all others, and return it."""
        byte = torch.tensor([word], dtype=torch.uint8)
        self._start(byte)()
        return int(byte[0])

    def close(self) -> None:
        """Cut the connections. No broadcast may be running."""
        if self._device is not None:
            self._group.abort()
        self._group = self._bucket = None

    def _limit(self, factor: int = 1) -> timedelta:
        """Return the timeout for torch: ``factor`` times the current limit."""
        return timedelta(seconds=max(self.limit_s() / factor, LEAST_S))

    def _start(self, memory: Any) -> Callable[[], None]:
        """Begin to broadcast ``memory``; return a function that waits for its end."""
        self._options.timeout = self._limit()
        if self._device is None:
            work = self._group.broadcast([memory], self._options)
            return lambda: _wait(work, memory)
        if self._bucket is None or len(self._bucket) < len(memory):
            self._bucket = torch.empty(len(memory), dtype=torch.uint8, device=self._device)
        part = self._bucket[: len(memory)]
        if self.rank == 0:
            part.copy_(memory)
        work = self._group.broadcast([part], self._options)

        def finish() -> None:
            work.wait()
            if self.rank:
                memory.copy_(part)
            else:
                torch.cuda.current_stream(self._device).synchronize()

        return finish


def _first(under_way: deque[tuple[Bucket, Callable[[], None]]]) -> Bucket:
    """Wait for the oldest broadcast."""
    bucket, finish = under_way.popleft()
    finish()
    return bucket


def _wait(work: Any, memory: Any) -> None:
    """Wait for a broadcast. ``memory`` lives until it is done, also after an error."""
    work.wait()
    del memory


def flat(array: Bytes) -> Any:
    """Return a tensor over the bytes of an array, which must outlive it. Read-only arrays are
    accepted without torch's warning: a broadcast only reads the root's memory."""
    if not len(array):
        return torch.empty(0, dtype=torch.uint8)
    raw = (ctypes.c_uint8 * len(array)).from_address(array.ctypes.data)
    return torch.from_numpy(np.ctypeslib.as_array(raw))


def missing(backend: str) -> str:
    """Return why this torch or this machine does not support a backend; "" if it does."""
    if backend == "gloo":
        return "" if dist.is_gloo_available() else "this torch is built without gloo"
    if not torch.cuda.is_available():
        return "there is no CUDA device that this torch can use"
    return "" if dist.is_nccl_available() else "this torch is built without NCCL"


@contextlib.contextmanager
def _waits_have_deadlines() -> Iterator[None]:
    """Make NCCL groups created inside raise at their deadline. By default they end the process,
    which would be the trainer."""
    wanted = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
