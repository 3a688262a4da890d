"""Both ends of the transports ``tcp`` and ``file``: places with changed fields, version directories, and
replicas on several hosts, told apart by the identity that they give.

with ManyHosts() as hosts:
    sent = hosts.publish(1, nbytes)
    first, second = hosts.fetch(sent, "a"), hosts.fetch(sent, "b")      # begun in threads
    sent.check(first())
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from children import hear, say
from flaky_proxy import WHOLE, FlakyProxy
from waiting import in_thread

from asyncflow_sdk.interfaces import Fetched, Host, WeightReceiver
from asyncflow_sdk.testing.transport_harness import Sent, TransportHarness
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.weights import make_transport

FIRST = "model-00001-of-00003.safetensors"
LIMIT_S = 100.0
_names = itertools.count()


def ends_of(transport: str, run: str = "", **options: Any) -> TransportHarness:
    """``options``: of the sending end."""
    return TransportHarness(lambda: make_transport(transport, **options), lambda: make_transport(transport), run=run)


def tcp(**options: Any) -> TransportHarness:
    return ends_of("tcp", **options)


def publishing(path: str | Path, run: str = "") -> TransportHarness:
    return ends_of("file", run, path=path)


def numbers(seed: int, nbytes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def tensors(seed: int = 0, count: int = 6) -> dict[str, Any]:
    """Of sizes that need padding in memory."""
    return {f"layer.{n}": numbers(100 * seed + n, 30_000 + 7 * n) for n in range(count)}


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if not each.name.startswith("."))


# ---- places of tcp


def with_service(where: bytes, **fields: Any) -> bytes:
    """The same version, with another ``address``, ``key`` or ``pid`` of its publisher's service."""
    value = msgspec.msgpack.decode(where)
    service = dict(zip(("address", "key", "pid", "pid_key"), msgspec.msgpack.decode(value[0]), strict=True))
    value[0] = msgspec.msgpack.encode(list((service | fields).values()))
    return msgspec.msgpack.encode(value)


def address_of(where: bytes) -> str:
    """Of the publisher's service."""
    return str(msgspec.msgpack.decode(msgspec.msgpack.decode(where)[0])[0])


# ---- hosts


def replica(host: str, run: str = "") -> WeightReceiver:
    name = f"{host}-{os.getpid()}-{next(_names)}"
    return make_transport("tcp").receiver(Host(directory=None, name=name, identity=host, run=run))


class ManyHosts(contextlib.ExitStack):
    """Whatever leaves the publisher goes through ``proxy``. ``options``: of its transport."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.ends = self.enter_context(tcp(**options))
        self.run = f"{os.getpid()}-{next(_names)}"
        self.proxy: FlakyProxy | None = None
        self.receivers: dict[str, WeightReceiver] = {}

    def publish(self, version: int, weights: int | Mapping[str, Any]) -> Sent:
        """Publish so many bytes, or these tensors."""
        tensors = {"w": numbers(version, weights)} if isinstance(weights, int) else weights
        sent = self.ends.publish(version, tensors)
        if self.proxy is None:
            port = int(address_of(sent.where).rpartition(":")[2])
            self.proxy = self.enter_context(FlakyProxy(port, pieces=WHOLE))
        return Sent(sent.manifest, sent.chunks, with_service(sent.where, address=self.proxy.address, pid=0))

    def receiver(self, name: str) -> WeightReceiver:
        """The replica of this name. Its host is the first letter."""
        if name not in self.receivers:
            self.receivers[name] = replica(name[0], self.run)
            self.callback(self.receivers[name].close)
        return self.receivers[name]

    def fetch(self, sent: Sent, name: str, base: Fetched | None = None) -> Callable[[], Fetched]:
        """Begin to fetch; the returned call waits for it, and raises its error."""
        receiver = self.receiver(name)
        waiting = in_thread(receiver.fetch, sent.manifest, sent.where, base=base, timeout_s=LIMIT_S)

        def join() -> Fetched:
            found = waiting()
            if isinstance(found, BaseException):
                raise found
            sent.check(found)
            return found

        return join


# ---- in processes of their own


def fetch_and_stay(manifest: str, where: str, host: str, run: str = "") -> None:
    """Fetch a version in a process of a host, and stay."""
    known = msgspec.msgpack.decode(bytes.fromhex(manifest), type=Manifest)
    replica(host, run).fetch(known, bytes.fromhex(where), timeout_s=3600.0)


def publish_and_stay(path: str) -> None:
    """Publish version 1 into a path, fork a child that says its number and does nothing; stay alive."""
    with publishing(path, "run") as ends:
        ends.publish(1, {"w": np.zeros(1000, np.uint8)})
        if not os.fork():
            say(os.getpid())  # it has let go of the path: that happens in the fork
            signal.pause()
        hear()
