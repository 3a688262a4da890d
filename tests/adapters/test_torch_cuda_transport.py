"""The transport ``cuda-ipc`` where there is no CUDA: what it says, what it believes of handles, and all but CUDA itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from asyncflow_sdk.errors import ConfigError, ProtocolError, VersionGone
from asyncflow_sdk.interfaces import Host
from asyncflow_sdk.testing import check_transport, checks_of
from asyncflow_sdk.types import Chunk, Manifest
from asyncflow_torch.transports.cuda import CudaHandle, CudaTransport, DeviceMemory, handles_of

HERE = Host(directory=None, name="here")
GOOD = CudaHandle("GPU-1", bytes(64), 1 << 20, 512, b"/torch_123_456_7", 0, bytes(64), True)
MANIFEST = Manifest(4, (), (Chunk(1000), Chunk(0), Chunk(1 << 20)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_without_cuda_it_says_what_is_missing_and_what_to_use(end: str) -> None:
    with pytest.raises(ConfigError, match="cuda-ipc: torch .* finds no CUDA device.*shm on one host, tcp between"):
        getattr(CudaTransport(), end)(HERE)


def test_options_it_does_not_have_are_refused() -> None:
    with pytest.raises(TypeError):
        CudaTransport(backend="nccl")  # type: ignore[call-arg]


def test_handles_travel_as_they_are_one_for_each_chunk_that_has_bytes() -> None:
    other = msgspec.structs.replace(GOOD, event=b"", event_sync=False)
    assert handles_of(msgspec.msgpack.encode([GOOD, other]), MANIFEST) == [GOOD, other]


@pytest.mark.parametrize(
    "wrong",
    [
        {"nbytes": (1 << 20) - 1},  # smaller than its chunk
        {"nbytes": 1 << 60},
        {"nbytes": -1},
        {"offset": -1},
        {"offset": 1 << 50},
        {"counter_offset": -8},
        {"memory": b""},
        {"memory": bytes(1 << 16)},
        {"event": bytes(1 << 16)},
        {"counter": b""},
        {"counter": b"../../etc/passwd"},
        {"counter": b"/dev/shm/x"},
        {"counter": b"/torch_1\n"},
    ],
)
def test_handles_that_no_sender_makes_are_refused_before_they_are_opened(wrong: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode([GOOD, msgspec.structs.replace(GOOD, **wrong)])
    with pytest.raises(ProtocolError, match="version 4: its handles do not fit its 2 chunks"):
        handles_of(body, MANIFEST)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_handles_than_chunks_is_refused(count: int) -> None:
    with pytest.raises(ProtocolError, match="version 4"):
        handles_of(msgspec.msgpack.encode([GOOD] * count), MANIFEST)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x91\x90", msgspec.msgpack.encode([["GPU", "text"]]), b"\x91" * 3000]
)
def test_what_is_no_list_of_handles_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="version 4: its handles cannot be read"):
        handles_of(body, MANIFEST)


class HostMemory(DeviceMemory):
    """Memory of the host stands for that of a GPU, and a dictionary for CUDA, which opens what was shared."""

    def __init__(self) -> None:
        self.shared: dict[bytes, Any] = {}
        self.settled: Callable[[], None] = lambda: None

    def check(self) -> None:
        pass

    def current(self) -> Any:
        return torch.device("cpu")

    def settle(self, device: Any) -> None:
        self.settled()

    def share(self, whole: Any, device: Any) -> CudaHandle:
        name = str(len(self.shared)).encode()
        self.shared[name] = whole
        return CudaHandle("GPU-0", name, len(whole), 0, b"/torch_1_2_3", 0, b"", False)

    def opened(self, handle: CudaHandle) -> Any:
        return self.shared[handle.memory]


class WithoutDevice(CudaTransport):
    memory = HostMemory()


@pytest.mark.parametrize("check", [check.name for check in checks_of("transport")])
def test_but_for_cuda_itself_it_keeps_to_the_contract(check: str) -> None:
    check_transport(WithoutDevice, WithoutDevice, only=[check])


def test_a_version_that_goes_while_it_is_copied_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = WithoutDevice().sender(HERE), WithoutDevice().receiver(HERE)
    try:
        sender.room(1000).memory.zero_()
        manifest = Manifest(1, (), (Chunk(1000),))  # without digests: nothing else would tell
        where = sender.send(manifest)
        assert not receiver.fetch(manifest, where, timeout_s=30.0).chunks[0].any()

        def written_again() -> None:
            sender.keep([])
            sender.room(1000).memory.fill_(1)

        monkeypatch.setattr(WithoutDevice.memory, "settled", written_again)
        with pytest.raises(VersionGone, match="version 1 is no longer kept"):
            receiver.fetch(manifest, where, timeout_s=30.0)
    finally:
        receiver.close()
        sender.close()
