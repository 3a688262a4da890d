"""One body for every transport that is installed, and wrong ones that it must find."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncflow_sdk.errors import ConfigError, DigestMismatch, VersionGone
from asyncflow_sdk.interfaces import Fetched, Host, WeightReceiver, WeightSender, WeightTransport
from asyncflow_sdk.interfaces.weights import Room
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing import check_transport, checks_of, transport_harness
from asyncflow_sdk.testing.memory import MemoryReceiver, MemorySender, MemoryTransport
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.weights import make_transport

WRONG = {
    "every_bit": ["loses the last byte", "gives chunks that cannot be written"],
    "boundaries": ["loses the last byte", "does not trim"],
    "versions": ["keeps all", "grows", "fetches the newest"],
    "abandoned": ["never abandons"],
    "held_for_ever": ["uses what it gave again", "waits for receivers"],
    "written_into": ["shares memory"],
    "flipped": ["verifies nothing", "names nothing"],
    "undigested": ["needs digests"],
    "from_base": ["builds in the base"],
    "together": ["fetches for one at a time"],
    "interrupted": ["stays interrupted"],
    "closed": ["takes back on close", "forgets"],
    "adopted": ["forgets"],
    "strange_places": ["falls over", "believes sizes", "reads too deep"],
}
"""Faults, each under the check that must find it."""


class WrongSender(MemorySender):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.held = fault, 0
        if fault == "forgets":  # it says that it outlives its process
            self.outlives = True  # type: ignore[misc]

    def room(self, nbytes: int) -> Room:
        self.held += nbytes
        room = super().room(nbytes)
        if self.fault == "does not trim":
            room.trim = lambda nbytes: None  # type: ignore[method-assign]
        return room

    def send(self, manifest: Manifest) -> bytes:
        if self.fault == "waits for receivers" and manifest.version > 1:
            threading.Event().wait(5.0)
        where = super().send(manifest)
        WrongReceiver.newest = MemoryReceiver().find(manifest, where)
        return where

    def abandon(self) -> None:
        if self.fault != "never abandons":
            super().abandon()

    def keep(self, versions: Sequence[int]) -> None:
        if self.fault != "keeps all":
            super().keep(versions)

    @property
    def nbytes(self) -> int:
        return self.held if self.fault == "grows" else super().nbytes


class WrongReceiver(MemoryReceiver):
    turn, refused = threading.Lock(), threading.Event()
    shared: list[Any] = []  # noqa: RUF012 - of all receivers
    newest: list[Any] = []  # noqa: RUF012 - chunks of the version that was sent last

    def __init__(self, fault: str) -> None:
        self.fault, self.stopped, self.mine = fault, False, list[Any]()

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        if self.stopped:
            raise VersionGone(f"version {manifest.version} is wanted no more")
        if self.fault == "fetches for one at a time":
            if not self.turn.acquire(blocking=False):
                self.refused.set()
                raise VersionGone(f"version {manifest.version}: somebody else is fetching")
            self.refused.wait(20.0)
            self.turn.release()
        fetched = super().fetch(manifest, where, timeout_s=timeout_s)
        chunks, sizes = list(fetched.chunks), [len(chunk) for chunk in fetched.chunks]
        match self.fault:
            case "gives chunks that cannot be written":
                for chunk in chunks:
                    chunk.flags.writeable = False
            case "shares memory":
                chunks = self.find(manifest, where)
            case "takes back on close":
                self.mine = chunks
            case "uses what it gave again":
                if [len(chunk) for chunk in self.shared] != sizes:
                    WrongReceiver.shared = [chunk.copy() for chunk in chunks]
                chunks = _filled(self.shared, chunks)
            case "builds in the base" if base is not None and [len(chunk) for chunk in base.chunks] == sizes:
                chunks = _filled(list(base.chunks), chunks)
        return Fetched(manifest, chunks, moved=manifest.nbytes)

    def find(self, manifest: Manifest, where: bytes) -> list[Any]:
        match self.fault:
            case "fetches the newest":
                return self.newest
            case "falls over":
                _number, _version = msgspec.msgpack.decode(where)
            case "believes sizes":
                np.zeros(len(where) << 20, np.uint8)
            case "reads too deep" if where[:99] == b"\x91" * 99:
                msgspec.msgpack.decode(where)
            case "loses the last byte":
                chunks = [chunk.copy() for chunk in super().find(manifest, where)]
                for chunk in chunks:
                    chunk[-1:] = 0
                return chunks
        return super().find(manifest, where)

    def verify(self, manifest: Manifest, chunks: list[Any]) -> None:
        if self.fault in ("verifies nothing", "loses the last byte", "fetches the newest"):
            return
        if self.fault == "needs digests" and not manifest.digested:
            raise DigestMismatch(f"version {manifest.version} has no digests")
        try:
            super().verify(manifest, chunks)
        except DigestMismatch:
            if self.fault == "names nothing":
                raise DigestMismatch("something is wrong") from None
            raise

    def interrupt(self) -> None:
        self.stopped = self.fault == "stays interrupted"

    def close(self) -> None:
        for chunk in self.mine:
            chunk[:] = 0


def _filled(memory: list[Any], chunks: list[Any]) -> list[Any]:
    for old, new in zip(memory, chunks, strict=True):
        old[:] = new
    return memory


class WrongTransport(MemoryTransport):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def sender(self, host: Host) -> WeightSender:
        return WrongSender(self.fault)

    def receiver(self, host: Host) -> WeightReceiver:
        return WrongReceiver(self.fault)


NAMES = [adapter.spec.name for adapter in registry().adapters if adapter.spec.kind == "transport"]
NEEDS_CUDA = ("cuda-ipc",)
CHECKS = [check.name for check in checks_of("transport")]


def ends_of(name: str, folder: Path) -> tuple[Callable[[], WeightTransport], Callable[[], WeightTransport]]:
    options: dict[str, Any] = {"path": folder / "weights"} if name == "file" else {}
    return partial(make_transport, name, **options), partial(make_transport, name)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEEDS_CUDA])
def test_every_transport_keeps_the_contract(name: str, check: str, tmp_path: Path) -> None:
    check_transport(*ends_of(name, tmp_path), only=[check])


def test_what_is_installed_is_what_the_documents_name() -> None:
    assert {"shm", "file", "tcp", "dist", "cuda-ipc"} >= set(NAMES) >= {"shm", "file", "tcp"}


@pytest.mark.parametrize("name", [name for name in NAMES if name in NEEDS_CUDA])
def test_without_cuda_a_transport_of_gpus_names_another(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        check_transport(*ends_of(name, tmp_path))
        return
    sending, fetching = ends_of(name, tmp_path)
    for end in (lambda h: sending().sender(h), lambda h: fetching().receiver(h)):
        with pytest.raises(ConfigError, match=r"(?i)cuda.*(shm|tcp)"):
            end(Host(directory=tmp_path, name="1-0"))


def test_the_smallest_right_transport_passes() -> None:
    check_transport(MemoryTransport, MemoryTransport)


@pytest.mark.parametrize(("check", "fault"), [(check, fault) for check in WRONG for fault in WRONG[check]])
def test_a_wrong_transport_is_found(check: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_harness, "LIMIT_S", 2.0)
    with pytest.raises(AssertionError, match=f"^check '{check}': "):
        check_transport(lambda: WrongTransport(fault), lambda: WrongTransport(fault), only=[check])


def test_each_check_finds_a_wrong_transport() -> None:
    assert WRONG.keys() == {*CHECKS}


def test_a_check_that_is_not_there_is_refused() -> None:
    with pytest.raises(AssertionError, match="no check of transports is named nonsense"):
        check_transport(MemoryTransport, MemoryTransport, only=["nonsense"])
