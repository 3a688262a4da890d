"""Ends of the transport ``dist``: senders and receivers here and in other processes, and manifests that hold up a receiver."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from children import hear, say
from waiting import in_thread

from asyncflow_sdk.errors import AsyncFlowError
from asyncflow_sdk.interfaces import Fetched, Host
from asyncflow_sdk.types import Chunk, Manifest, TensorInfo
from asyncflow_sdk.types.manifest import digest
from asyncflow_sdk.weights import make_transport

MB = 1 << 20
LOOPBACK = "127.0.0.1"


class Sent(NamedTuple):
    manifest: Manifest
    where: bytes

    def check(self, fetched: Any) -> None:
        assert isinstance(fetched, Fetched), fetched
        for bucket in self.manifest.buckets():
            self.manifest.check(bucket, memoryview(fetched.chunks[bucket.chunk][bucket.start : bucket.stop]))

    def packed(self) -> list[str]:
        return [msgspec.json.encode(self.manifest).decode(), self.where.hex()]

    @classmethod
    def of(cls, packed: list[str]) -> Sent:
        return cls(msgspec.json.decode(packed[0], type=Manifest), bytes.fromhex(packed[1]))

    def watched(self, on_bucket: Callable[[], None]) -> Sent:
        """Its receiver calls ``on_bucket`` after each bucket that it verifies."""

        class Watched(Manifest, frozen=True, array_like=True):
            def check(self, bucket: Any, data: memoryview) -> None:
                Manifest.check(self, bucket, data)
                on_bucket()

        return self._replace(manifest=Watched(*msgspec.structs.astuple(self.manifest)))


def transport(**options: Any) -> Any:
    return make_transport("dist", **options)


def a_sender(address: str = LOOPBACK, **options: Any) -> Any:
    made = transport(**{"stall_s": 30.0, "gather_s": 0.1} | options)
    return contextlib.closing(made.sender(Host(directory=None, name="trainer", address=address)))


def a_receiver(name: str = "r", address: str = LOOPBACK) -> Any:
    return contextlib.closing(transport().receiver(Host(directory=None, name=name, address=address)))


def write(
    sender: Any, version: int, chunk: int = MB, count: int = 2, bucket: int = 1 << 16, flip: int = -1
) -> Manifest:
    """Fill rooms with random bytes. ``flip``: a byte of chunk 0 that changes after it was hashed."""
    infos = tuple(TensorInfo(f"w{number}", "uint8", (chunk,), number, 0) for number in range(count))
    chunks = []
    for number in range(count):
        memory = sender.room(chunk).memory
        memory[:] = np.random.default_rng([version, number]).integers(0, 256, chunk, np.uint8)
        chunks.append(Chunk(chunk, tuple(digest(memory[at : at + bucket].data) for at in range(0, chunk, bucket))))
        if flip >= 0 and not number:
            memory[flip] ^= 4
    return Manifest(version, infos, tuple(chunks), bucket)


def sent_by(sender: Any, version: int, **sizes: int) -> Sent:
    manifest = write(sender, version, **sizes)
    return Sent(manifest, sender.send(manifest))


def long_sent_by(sender: Any, version: int) -> Sent:
    """A version of more bytes than sockets hold, in buckets of which each is announced by the sender."""
    return sent_by(sender, version, chunk=4 * MB, count=8, bucket=64 * MB)


def fetching(receiver: Any, sent: Sent, timeout_s: float = 60.0) -> Callable[[], Any]:
    """Fetch in a thread. The returned call gives the result, or the error."""
    return in_thread(receiver.fetch, sent.manifest, sent.where, timeout_s=timeout_s)


class Gate:
    """``fetch`` stands still behind its first bucket until the gate is open."""

    def __init__(self, receiver: Any, sent: Sent, timeout_s: float = 60.0) -> None:
        self._reached, self._open = threading.Event(), threading.Event()
        self._fetch = fetching(receiver, sent.watched(self._stand), timeout_s)
        assert self._reached.wait(60), self._fetch()

    def _stand(self) -> None:
        self._reached.set()
        assert self._open.wait(60)

    def opened(self) -> Any:
        """Open it, and return the result of the fetch, or its error."""
        self._open.set()
        return self._fetch()


def own_sockets(state: str) -> set[tuple[str, str]]:
    """(local, remote) addresses of this process' TCP sockets in a state ("01": connected, "0A": listening), as hexadecimal words."""
    fds = Path("/proc/self/fd")
    own = {os.readlink(fds / fd) for fd in os.listdir(fds) if os.path.islink(fds / fd)}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    return {(line[1], line[2]) for line in lines if line[3] == state and f"socket:[{line[9]}]" in own}


def peak_bytes(forget: bool = False) -> int:
    """The most memory that this process had since it was last forgotten."""
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10


# ---- in processes of their own


def receive(name: str, address: str = LOOPBACK) -> None:
    """Fetch each version that the test sends, and say what became of it. ``order``: a version, whether to wait behind its first
    bucket until told, and the time limit."""
    with a_receiver(name, address) as receiver:
        say("ready")
        while (order := hear()) is not None:
            packed, waits, timeout_s = order
            left = ["in the middle"] if waits else []
            sent, before = Sent.of(packed), peak_bytes(forget=True)
            watched = sent.watched(lambda left=left: left and (say(left.pop()), hear()))  # type: ignore[misc]
            try:
                fetched = receiver.fetch(watched.manifest, sent.where, timeout_s=timeout_s)
            except AsyncFlowError as error:
                say({"error": type(error).__name__, "says": str(error)})
            else:
                sent.check(fetched)
                say({"grown": peak_bytes() - before, "listens": sorted(local for local, _ in own_sockets("0A"))})
                fetched.release()


def publish(long: bool, address: str = LOOPBACK) -> None:
    """Publish one version, and live until the test says otherwise."""
    with a_sender(address, insecure=address != LOOPBACK) as sender:
        say((long_sent_by if long else sent_by)(sender, 3).packed())
        hear()
