"""BroadcastGroup: a private group of torch.distributed: one publisher, its receivers, and broadcasts from
the first to the others.

It is made by the class of the process group over a store of this package, never by
``init_process_group``, which belongs to the training loop of this process.
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
WINDOW = 4
"""Concurrent buckets with gloo, which copies none. NCCL has one, in device memory."""
_THREADS = 2

if not dist.is_available():  # a build of torch without it
    raise ConfigError("this torch is built without torch.distributed; use the transport tcp instead")


class Exchange(dist.Store):  # type: ignore[misc]
    """A torch store in Python, for the addresses of members. ``put`` and ``look`` carry it;
    ``look`` waits for all keys, or raises at its deadline."""

    def __init__(self, put: Callable[[str, bytes], None], look: Callable[[list[str]], list[bytes]]) -> None:
        super().__init__()
        self._put, self._look = put, look
        self._seen: set[str] = set()

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._put(key, bytes(value))
        self._seen.add(key)

    def get(self, key: str) -> bytes:
        """Return a value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return values, waiting for them."""
        values = self._look(list(keys))
        self._seen.update(keys)
        return values

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        self.multi_get(keys)

    def check(self, keys: list[str]) -> bool:
        """True if all keys are known here."""
        return self._seen.issuperset(keys)


class BroadcastGroup:
    """Broadcasts from rank 0. The constructor waits for all members, at most ``stall_s`` for each.
    ``limit_s``: returns the time limit of a bucket, ``stall_s`` unless set."""

    def __init__(self, backend: str, store: Exchange, rank: int, size: int, address: str, stall_s: float) -> None:
        self.rank = rank
        self._options = dist.BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0
        self.limit_s: Callable[[], float] = lambda: stall_s
        self._options.asyncOp = True
        self._device: torch.device | None = None
        self._bucket: Any = None
        self._window = WINDOW
        if backend == "gloo":
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout, options._threads = timedelta(seconds=stall_s), _THREADS
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
        else:
            self._device, self._window = torch.device("cuda", torch.cuda.current_device()), 1
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=stall_s)
            with _waits_have_deadlines():
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)

    def stream(self, chunks: list[Any], buckets: Iterable[Bucket], arrived: Callable[[Bucket], None]) -> None:
        """Send or receive buckets of flat uint8 tensors in host memory, in order; call ``arrived``
        with each."""
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
            ) in under_way:  # no broadcast may run when its group or memory is freed
                with contextlib.suppress(Exception):
                    finish()
            raise

    def word(self, word: int = 0) -> int:
        """Broadcast one byte from rank 0 and return it."""
        byte = torch.tensor([word], dtype=torch.uint8)
        self._start(byte)()
        return int(byte[0])

    def close(self) -> None:
        """Cut the connections. No broadcast may be running."""
        if self._device is not None:
            self._group.abort()
        self._group = self._bucket = None

    def _start(self, memory: Any) -> Callable[[], None]:
        """Start a broadcast of ``memory``; return a function to wait for its end."""
        self._options.timeout = timedelta(seconds=self.limit_s())
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
    """Wait, and keep ``memory`` alive until the end of the work."""
    work.wait()
    del memory


def flat(array: Bytes) -> Any:
    """Return a tensor over the bytes of an array, which must outlive it. Also of a read-only array,
    without torch's warning: the root of a broadcast only reads."""
    if not len(array):
        return torch.empty(0, dtype=torch.uint8)
    raw = (ctypes.c_uint8 * len(array)).from_address(array.ctypes.data)
    return torch.from_numpy(np.ctypeslib.as_array(raw))


def missing(backend: str) -> str:
    """Return why this torch and this machine cannot use a backend, "" if they can."""
    if backend == "gloo":
        return "" if dist.is_gloo_available() else "this torch is built without gloo"
    if not torch.cuda.is_available():
        return "there is no CUDA device that this torch can use"
    return "" if dist.is_nccl_available() else "this torch is built without NCCL"


@contextlib.contextmanager
def _waits_have_deadlines() -> Iterator[None]:
    """Make NCCL groups created within the block raise at their deadline. By default they would end
    the process, here the trainer's."""
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
