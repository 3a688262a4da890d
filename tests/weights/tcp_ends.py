"""Ends of the tcp transport for tests: what goes between them can be put behind a proxy, or in another process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import waiting
from children import hear, say

from asyncflow_sdk.errors import AsyncFlowError
from asyncflow_sdk.interfaces.weights import Fetched, Host
from asyncflow_sdk.testing.ends import Ends, Sent
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.weights.service import Where
from asyncflow_sdk.weights.tcp import TcpTransport
from asyncflow_sdk.weights.tcp_messages import TcpWhere


@contextlib.contextmanager
def tcp(**options: Any) -> Iterator[Ends]:
    with Ends(lambda: TcpTransport(**options), TcpTransport) as ends:
        ends.random = np.random.default_rng(0)
        yield ends


def service_of(where: bytes) -> Where:
    return msgspec.msgpack.decode(msgspec.msgpack.decode(where, type=TcpWhere).service, type=Where)


def port_of(where: bytes) -> int:
    return int(service_of(where).address.rpartition(":")[2])


def through(where: bytes, address: str, **changes: Any) -> bytes:
    """The same version, reached at another address."""
    place = msgspec.msgpack.decode(where, type=TcpWhere)
    service = msgspec.structs.replace(service_of(where), address=address, **changes)
    return msgspec.msgpack.encode(TcpWhere(msgspec.msgpack.encode(service), place.version, place.rank))


def numbers(seed: int, nbytes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def in_thread(function: Any, *arguments: Any, **options: Any) -> Any:
    """Start it; the returned call gives what it returned, or raises what it raised."""
    ended = waiting.in_thread(function, *arguments, **options)

    def join() -> Any:
        came = ended()
        if isinstance(came, BaseException):
            raise came
        return came

    return join


# ---- processes


def publish(address: str, versions: int, nbytes: int, options: Mapping[str, Any]) -> None:
    """Publish versions of ``nbytes``, which differ a little from one another; stay until killed."""
    sender = TcpTransport(**options).sender(Host(directory=None, name="trainer", address=address))
    with Ends(TcpTransport, TcpTransport) as ends:
        ends.sender.close()
        ends.sender = sender
        weights = {"w": numbers(0, nbytes)}
        for version in range(1, versions + 1):
            weights["w"][:: 997 * version] += np.uint8(1)
            sent = ends.publish(version, weights)
            ends.keep(*range(1, version + 1))
            say([msgspec.msgpack.encode(sent.manifest).hex(), sent.where.hex()])
        hear()


def publish_half(nbytes: int) -> None:
    """Publish a version; when told so, write another; stay until killed."""
    with tcp(delta_bytes=0) as ends:
        for version in (1, 2):
            weights = {f"w{number}": numbers(number + 9 * version, nbytes // 3) for number in range(3)}
            manifest, _ = ends.write(version, weights)
            if version == 1:
                say([msgspec.msgpack.encode(manifest).hex(), ends.send(manifest).hex()])
                ends.keep(1)
            else:
                say("half")
            hear()


def fetch(versions: list[list[str]], timeout_s: float) -> None:
    """Fetch versions one after another, each from the one before; say of each how it came, or why it did not."""
    receiver = TcpTransport().receiver(Host(directory=None, name="replica"))
    base: Fetched | None = None
    say("ready")
    for manifest, where in versions:
        hear()
        try:
            decoded = msgspec.msgpack.decode(bytes.fromhex(manifest), type=Manifest)
            fetched = receiver.fetch(decoded, bytes.fromhex(where), base=base, timeout_s=timeout_s)
            total = sum(int(chunk.sum(dtype=np.int64)) for chunk in fetched.chunks)
            say([fetched.encoding, fetched.moved, total])
            base = fetched
        except AsyncFlowError as error:
            say([type(error).__name__, str(error), 0])
    hear()


__all__ = ["Ends", "Sent"]
