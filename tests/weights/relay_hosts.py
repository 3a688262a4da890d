"""A publisher on a host of its own, and replicas on other hosts, told apart by the identity that they give.

with RelayHosts(fanout=1) as hosts:
    sent = hosts.publish(1, nbytes)
    first, second = hosts.fetch(sent, "a"), hosts.fetch(sent, "b")      # begun in threads
    sent.check(first())
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from flaky_proxy import WHOLE, FlakyProxy
from transport_ends import address_of, numbers, tcp, with_service
from waiting import in_thread, until

from asyncflow_sdk.interfaces import Fetched, Host, WeightReceiver
from asyncflow_sdk.testing.transport_harness import Sent
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.weights import make_transport
from asyncflow_sdk.wire import Service, ServiceClient

LIMIT_S = 100.0
_names = itertools.count()


def replica(host: str) -> WeightReceiver:
    """A receiver on a host."""
    return make_transport("tcp").receiver(Host(directory=None, name=f"{host}-{next(_names)}", identity=host))


def fetch_and_stay(manifest: str, where: str, host: str) -> None:
    """Fetch a version in a process of a host, and stay."""
    known = msgspec.msgpack.decode(bytes.fromhex(manifest), type=Manifest)
    replica(host).fetch(known, bytes.fromhex(where), timeout_s=3600.0)


class RelayHosts(contextlib.ExitStack):
    """Whatever leaves the publisher goes through ``proxy``. ``options``: of its transport."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.ends = self.enter_context(tcp(**options))
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
            self.receivers[name] = replica(name[0])
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

    def join(self, sent: Sent, host: str, relay: bytes = b"nowhere") -> tuple[ServiceClient, bytes]:
        """Join as a host. Return the connection, and the address of the assigned relay."""
        client = ServiceClient(msgspec.msgpack.decode(sent.where)[0])
        call = msgspec.msgpack.encode(["join", sent.version, sent.manifest.root, host, relay, b""])
        return client, msgspec.msgpack.decode(client.call(call, LIMIT_S).body)[0]

    def last(self, sent: Sent) -> bytes:
        """The relay that the next host of a chain would fetch from."""
        client, source = self.join(sent, "probe")
        client.close()
        return source

    def await_relay(self, sent: Sent, other_than: bytes = b"") -> bytes:
        """Wait until a chain has another last relay, and return it."""
        until(lambda: self.last(sent) not in (b"", b"nowhere", other_than), "another host in the chain")
        return self.last(sent)


class FakeRelay:
    """A relay that gives ``answer`` to each request for buckets: body and frames, or None for no answer at all."""

    def __init__(self, answer: Callable[[], tuple[bytes, list[bytes]] | None]) -> None:
        self.asked, self._answer = 0, answer
        self.service = Service(Host(directory=None, name="fake"), self)
        self.where = self.service.where

    def request(self, peer: str, ticket: int, body: bytes, frames: Any) -> None:
        self.asked += 1
        answer = self._answer()
        if answer is not None:
            self.service.answer(ticket, *answer)

    def gone(self, peer: str) -> None: ...
