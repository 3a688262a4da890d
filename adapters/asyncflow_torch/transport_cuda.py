"""Weights between processes of one host by CUDA IPC: they stay on the GPU, and each receiver copies
them.

    publisher = run.weight_publisher("cuda-ipc")

The sender holds all kept versions and the one being written in device memory: (keep + 1) × model,
which is 2 × with keep=1. A receiver holds its own copy, and one bucket in host memory for digests.
Handles are made anew for each receiver, since torch counts openings; events order the copies as in
torch.multiprocessing. The memory of a version may be overwritten during a receiver's copy: the
receiver asks afterwards.

Written after torch.multiprocessing and not run on a GPU: without CUDA both ends refuse.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import torch

from asyncflow_sdk.errors import AsyncFlowError, ConfigError, MemoryFull, ProtocolError, VersionGone, WireError
from asyncflow_sdk.interfaces import Fetched, Host, Room, WeightReceiver, WeightSender, WeightTransport
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.weights.service import Service, ServiceClient

_COUNTER = re.compile(rb"/?[\w.-]{1,200}")  # a name of torch's shared memory for counters, no path
_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class HandleRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request for handles of a version; ``copied``: asks only whether the version was kept to the
    end of the copy."""

    version: int
    root: str
    copied: bool = False


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """A storage of ``nbytes`` on the GPU with this uuid, as described by ``_share_cuda_``."""

    gpu: str
    memory: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool

    def fits(self, chunk_bytes: int) -> bool:
        """True if it can hold ``chunk_bytes`` and its counter is a plain name."""
        sizes = 0 < len(self.memory) <= 4096 and len(self.event) <= 4096
        return (
            sizes
            and chunk_bytes <= self.nbytes < 1 << 48
            and 0 <= self.offset < 1 << 48
            and 0 <= self.counter_offset < 1 << 48
            and _COUNTER.fullmatch(self.counter) is not None
        )


class DeviceMemory:
    """Used calls of CUDA: the current device, and memory of it opened by other processes."""

    def check(self) -> None:
        """Raise ConfigError if this process has no CUDA device."""
        if not torch.cuda.is_available():
            raise ConfigError(
                f"cuda-ipc: torch {torch.__version__} finds no CUDA device in this process; use shm on one host, tcp between"
                " hosts"
            )

    def current(self) -> Any:
        """Return the current device."""
        return torch.device("cuda", torch.cuda.current_device())

    def settle(self, device: Any) -> None:
        """Wait for all work of a device."""
        torch.cuda.synchronize(device)

    def share(self, whole: Any, device: Any) -> Handle:
        """Return a handle of a tensor."""
        _, *shared = whole.untyped_storage()._share_cuda_()
        return Handle(str(torch.cuda.get_device_properties(device).uuid), *shared)

    def opened(self, handle: Handle) -> Any:
        """Return a tensor over a storage of another process. Raises ConfigError if its GPU is not
        visible."""
        visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        if handle.gpu not in visible:
            raise ConfigError(
                f"cuda-ipc: the publisher's GPU {handle.gpu} is not visible to this process (CUDA_VISIBLE_DEVICES, or another"
                " host); use shm on one host, tcp between hosts"
            )
        storage = torch.UntypedStorage._new_shared_cuda(visible[handle.gpu], *msgspec.structs.astuple(handle)[1:])
        device = torch.device("cuda", visible[handle.gpu])
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class CudaRoom(Room):
    def __init__(self, whole: Any, nbytes: int) -> None:
        self.whole, self.memory = whole, whole[:nbytes]

    def trim(self, nbytes: int) -> None:
        """Shorten the memory."""
        self.memory = self.whole[:nbytes]


class CudaTransport(WeightTransport):
    """Both ends of the transport ``cuda-ipc``. ``memory``: of the devices; a test without a GPU
    replaces it."""

    memory: ClassVar[DeviceMemory] = DeviceMemory()

    def check(self) -> None:
        """Raise ConfigError without CUDA."""
        self.memory.check()

    def sender(self, host: Host) -> CudaSender:
        """Return the publisher's end."""
        self.memory.check()
        return CudaSender(host, self.memory)

    def receiver(self, host: Host) -> CudaReceiver:
        """Return a receiver's end."""
        self.memory.check()
        return CudaReceiver(self.memory)


class CudaSender(WeightSender):
    """Holds versions on the GPU current at its construction, and answers receivers with handles."""

    def __init__(self, host: Host, memory: DeviceMemory) -> None:
        self._memory, self._device = memory, memory.current()
        self._writing: list[CudaRoom] = []
        self._versions: dict[int, tuple[Manifest, list[CudaRoom]]] = {}
        self._sent: int | None = None
        self._free: list[Any] = []
        self._lock = threading.Lock()
        self._service = Service(host, self)

    @property
    def nbytes(self) -> int:
        """0: no host memory is used."""
        return 0

    def room(self, nbytes: int) -> CudaRoom:
        """Return device memory for a chunk. Raises MemoryFull."""
        with self._lock:
            self._sent = None
            fits = next((i for i, memory in enumerate(self._free) if len(memory) == nbytes), None)
            try:
                whole = (
                    torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                    if fits is None
                    else self._free.pop(fits)
                )
            except torch.cuda.OutOfMemoryError as error:
                raise MemoryFull(f"no room for a chunk of {nbytes} bytes on GPU {self._device}: {error}") from None
            self._writing.append(CudaRoom(whole, nbytes))
            return self._writing[-1]

    def send(self, manifest: Manifest) -> bytes:
        """Offer the written version; return its address."""
        self._memory.settle(self._device)  # rooms are written on the trainer's stream, handles made on another
        with self._lock:
            self._versions[manifest.version] = manifest, self._writing
            self._writing, self._sent = [], manifest.version
            self._free.clear()  # of sizes unused by this version
        return self._service.where

    def abandon(self) -> None:
        """Free the version being written."""
        with self._lock:
            rooms, self._writing = self._writing, []
            if not rooms and self._sent is not None:
                rooms = self._versions.pop(self._sent)[1]
            self._sent = None
            self._free += [room.whole for room in rooms]

    def keep(self, versions: Sequence[int]) -> None:
        """Free all other versions."""
        with self._lock:
            self._sent = None
            for version in self._versions.keys() - set(versions):
                self._free += [room.whole for room in self._versions.pop(version)[1]]

    def close(self) -> None:
        """Free all memory."""
        self._service.close()
        with self._lock:
            self._versions.clear()
            self._writing.clear()
            self._free.clear()

    # ---- called by the service

    def request(self, peer: str, ticket: int, body: bytes, frames: Sequence[Any]) -> None:
        """Answer with handles. Raises VersionGone, ProtocolError."""
        ask = msgspec.msgpack.decode(body, type=HandleRequest)
        with self._lock:
            if ask.version not in self._versions:
                raise VersionGone(f"version {ask.version} is no longer kept; take the newest")
            manifest, rooms = self._versions[ask.version]
            if manifest.root != ask.root:
                raise ProtocolError(
                    f"version {ask.version}: a receiver has another manifest of it than its publisher"
                )
            handles = (
                []
                if ask.copied
                else [self._memory.share(room.whole, self._device) for room in rooms if len(room.whole)]
            )
        self._service.answer(ticket, msgspec.msgpack.encode(handles))

    def gone(self, peer: str) -> None:
        """Do nothing."""
        pass


class CudaReceiver(WeightReceiver):
    """Copies versions of a sender on this host to the GPU current at the fetch."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._client: ServiceClient | None = None
        self._where = b""

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        """Copy and verify a version."""
        until, what = time.monotonic() + timeout_s, f"version {manifest.version} by cuda-ipc"
        if self._client is None or where != self._where:
            client = ServiceClient(where)
            self.close()
            self._client, self._where = client, where
        ask = HandleRequest(manifest.version, manifest.root)
        handles = handles_of(self._client.call(msgspec.msgpack.encode(ask), timeout_s, what).body, manifest)
        chunks, device = [], self._memory.current()
        try:
            for chunk in manifest.chunks:
                own = torch.empty(chunk.nbytes, dtype=torch.uint8, device=device)
                if chunk.nbytes:
                    own.copy_(self._memory.opened(handles.pop(0))[: chunk.nbytes])
                chunks.append(own)
            self._memory.settle(device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryFull(f"{what}: {error}") from None
        except AsyncFlowError:
            raise
        except RuntimeError as error:
            raise WireError(f"{what}: its handles cannot be opened here: {error}") from None
        copied = msgspec.structs.replace(ask, copied=True)
        self._client.call(msgspec.msgpack.encode(copied), until - time.monotonic(), what)
        for bucket in manifest.buckets():
            part = chunks[bucket.chunk][bucket.start : bucket.stop].cpu()
            manifest.check(bucket, memoryview(part.numpy()))
        return Fetched(manifest, chunks, manifest.nbytes, "full")

    def interrupt(self) -> None:
        """Interrupt the running fetch."""
        if self._client is not None:
            self._client.interrupt()

    def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


def handles_of(body: bytes, manifest: Manifest) -> list[Handle]:
    """Decode one handle for each non-empty chunk. Raises ProtocolError."""
    try:
        handles = msgspec.msgpack.decode(body, type=list[Handle])
    except _BAD as error:
        raise ProtocolError(f"version {manifest.version}: its handles cannot be read: {error}") from None
    sizes = [chunk.nbytes for chunk in manifest.chunks if chunk.nbytes]
    if len(handles) != len(sizes) or not all(h.fits(n) for h, n in zip(handles, sizes, strict=True)):
        raise ProtocolError(f"version {manifest.version}: its handles do not fit its {len(sizes)} chunks")
    return handles
