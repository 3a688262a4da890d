"""Weights between processes of one host by CUDA IPC: versions stay on the GPU, and receivers copy
them.

    publisher = run.weight_publisher("cuda-ipc")

The sender holds all kept versions and the one being written in device memory: (keep + 1) × model,
which is 2 × with keep=1. A receiver holds its own copy, and one bucket in host memory for digests.
Handles are made for each receiver, because torch counts openings of a handle; events order the
copies as in torch.multiprocessing. The memory of a version may be rewritten during a receiver's
copy, so the receiver checks afterwards that the version is still there.

This is written after torch.multiprocessing and has not been run on a GPU: without CUDA both ends
refuse.
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
from asyncflow_sdk.weights.transports import Service, ServiceClient

_COUNTER = re.compile(rb"/?[\w.-]{1,200}")  # the name of torch's shared memory with its counters, and no path
_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class HandleRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request for the handles of a version. ``copied``: the copy is done; was the version there
    until now?"""

    version: int
    root: str
    copied: bool = False


class CudaHandle(msgspec.Struct, frozen=True, array_like=True):
    """A storage of ``nbytes`` on the GPU with this uuid: the fields of ``_share_cuda_``."""

    gpu: str
    memory: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool

    def fits(self, chunk_bytes: int) -> bool:
        """True if the storage can hold a chunk of ``chunk_bytes``, and its fields are valid."""
        sizes = 0 < len(self.memory) <= 4096 and len(self.event) <= 4096
        return (
            sizes
            and chunk_bytes <= self.nbytes < 1 << 48
            and 0 <= self.offset < 1 << 48
            and 0 <= self.counter_offset < 1 << 48
            and _COUNTER.fullmatch(self.counter) is not None
        )


class DeviceMemory:
    """The uses of CUDA: the current device, and its memory shared with other processes."""

    def check(self) -> None:
        """Raise ConfigError if this process has no CUDA device."""
        if not torch.cuda.is_available():
            raise ConfigError(
                f"cuda-ipc: torch {torch.__version__} finds no CUDA device in this process; use shm on one host,"
                " tcp between hosts"
            )

    def current(self) -> Any:
        return torch.device("cuda", torch.cuda.current_device())

    def settle(self, device: Any) -> None:
        """Wait for all operations begun on a device."""
        torch.cuda.synchronize(device)

    def share(self, whole: Any, device: Any) -> CudaHandle:
        _, *shared = whole.untyped_storage()._share_cuda_()
        return CudaHandle(str(torch.cuda.get_device_properties(device).uuid), *shared)

    def opened(self, handle: CudaHandle) -> Any:
        """Return a tensor over a storage of another process. Raises ConfigError if its GPU is not
        visible."""
        visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        if handle.gpu not in visible:
            raise ConfigError(
                f"cuda-ipc: the publisher's GPU {handle.gpu} is not visible to this process (CUDA_VISIBLE_DEVICES,"
                " or another host); use shm on one host, tcp between hosts"
            )
        storage = torch.UntypedStorage._new_shared_cuda(visible[handle.gpu], *msgspec.structs.astuple(handle)[1:])
        device = torch.device("cuda", visible[handle.gpu])
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class CudaRoom(Room):
    def __init__(self, whole: Any, nbytes: int) -> None:
        self.whole, self.memory = whole, whole[:nbytes]

    def trim(self, nbytes: int) -> None:
        self.memory = self.whole[:nbytes]


class CudaTransport(WeightTransport):
    """Both ends, named ``cuda-ipc``. ``memory``: replaced by tests without a GPU."""

    memory: ClassVar[DeviceMemory] = DeviceMemory()

    def check(self) -> None:
        self.memory.check()

    def sender(self, host: Host) -> CudaSender:
        self.memory.check()
        return CudaSender(host, self.memory)

    def receiver(self, host: Host) -> CudaReceiver:
        self.memory.check()
        return CudaReceiver(self.memory, host)


class CudaSender(WeightSender):
    """Holds versions on the GPU that is current at its creation, and answers receivers with
    handles."""

    def __init__(self, host: Host, memory: DeviceMemory) -> None:
        self._memory, self._device = memory, memory.current()
        self._writing: list[CudaRoom] = []
        self._versions: dict[int, tuple[Manifest, list[CudaRoom]]] = {}
        self._sent: int | None = None
        self._free: list[Any] = []
        self._lock = threading.Lock()
        self._service = Service(host.address, self, member=host.member)

    @property
    def nbytes(self) -> int:
        """No host memory."""
        return 0

    def room(self, nbytes: int) -> CudaRoom:
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
        self._memory.settle(self._device)  # rooms were written on the trainer's stream, handles are made on another
        with self._lock:
            self._versions[manifest.version] = manifest, self._writing
            self._writing, self._sent = [], manifest.version
            self._free.clear()  # sizes that this version had no use for
        return self._service.where

    def abandon(self) -> None:
        with self._lock:
            rooms, self._writing = self._writing, []
            if not rooms and self._sent is not None:
                rooms = self._versions.pop(self._sent)[1]
            self._sent = None
            self._free += [room.whole for room in rooms]

    def keep(self, versions: Sequence[int]) -> None:
        with self._lock:
            self._sent = None
            for version in self._versions.keys() - set(versions):
                self._free += [room.whole for room in self._versions.pop(version)[1]]

    def close(self) -> None:
        self._service.close()
        with self._lock:
            self._versions.clear()
            self._writing.clear()
            self._free.clear()

    # ---- called by the service

    def request(self, peer: str, ticket: int, body: bytes) -> None:
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
        pass


class CudaReceiver(WeightReceiver):
    """Copies versions of a sender on this host to the GPU that is current during the fetch."""

    def __init__(self, memory: DeviceMemory, host: Host) -> None:
        self._memory, self._host = memory, host
        self._client: ServiceClient | None = None
        self._where = b""

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        until, what = time.monotonic() + timeout_s, f"version {manifest.version} by cuda-ipc"
        if self._client is None or where != self._where:
            client = ServiceClient(where, self._host.own_key)
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
        if self._client is not None:
            self._client.interrupt()

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def handles_of(body: bytes, manifest: Manifest) -> list[CudaHandle]:
    """Return one handle for each chunk that is not empty. Raises ProtocolError for invalid handles."""
    try:
        handles = msgspec.msgpack.decode(body, type=list[CudaHandle])
    except _BAD as error:
        raise ProtocolError(f"version {manifest.version}: its handles cannot be read: {error}") from None
    sizes = [chunk.nbytes for chunk in manifest.chunks if chunk.nbytes]
    if len(handles) != len(sizes) or not all(h.fits(n) for h, n in zip(handles, sizes, strict=True)):
        raise ProtocolError(f"version {manifest.version}: its handles do not fit its {len(sizes)} chunks")
    return handles
