"""Both ends of the transports ``tcp`` and ``file``: places with changed fields, and what lies in version directories."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from children import hear, say

from asyncflow_sdk.testing.transport_harness import TransportHarness
from asyncflow_sdk.weights import make_transport

FIRST = "model-00001-of-00003.safetensors"


def ends_of(transport: str, run: str = "", **options: Any) -> TransportHarness:
    """``run``: its name; one of its own without it. ``options``: of the sending end."""
    ends = TransportHarness(lambda: make_transport(transport, **options), lambda: make_transport(transport), run=run)
    ends.random = np.random.default_rng(0)
    return ends


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


def bulk_of(where: bytes) -> Any:
    """Where whole buckets are read: a socket file, or a port of an insecure publisher."""
    host, port, _ = msgspec.msgpack.decode(where)[3]
    return host if host.startswith("/") else port


def with_bulk(where: bytes, **fields: Any) -> bytes:
    """The same version, with another ``host``, ``port`` or ``token`` where whole buckets are read."""
    value = msgspec.msgpack.decode(where)
    value[3] = [fields.get(name, old) for name, old in zip(("host", "port", "token"), value[3], strict=True)]
    return msgspec.msgpack.encode(value)


def with_service(where: bytes, **fields: Any) -> bytes:
    """The same version, with another ``address``, ``key`` or ``pid`` of its publisher's service, which is asked for all of it."""
    value = msgspec.msgpack.decode(where)
    service = dict(zip(("address", "key", "pid", "pid_key"), msgspec.msgpack.decode(value[0]), strict=True))
    value[0], value[3] = msgspec.msgpack.encode(list((service | fields).values())), None
    return msgspec.msgpack.encode(value)


def address_of(where: bytes) -> str:
    """Of the publisher's service."""
    return str(msgspec.msgpack.decode(msgspec.msgpack.decode(where)[0])[0])


# ---- in a process of its own


def publish_and_stay(path: str) -> None:
    """Publish version 1 into a path, fork a child that says its number and does nothing; stay alive."""
    with publishing(path, "run") as ends:
        ends.publish(1, {"w": np.zeros(1000, np.uint8)})
        if not os.fork():
            say(os.getpid())  # it has let go of the path: that happens in the fork
            signal.pause()
        hear()
