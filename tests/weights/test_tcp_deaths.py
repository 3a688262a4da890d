"""Ends of the tcp transport that die in the middle, and connections that are cut again and again."""

import contextlib
import itertools
from typing import Any

import msgspec
import pytest
from children import Child
from flaky_proxy import FlakyProxy
from tcp_ends import fetch, in_thread, numbers, port_of, publish, tcp, through
from waiting import until

from asyncflow_sdk.errors import DeadlineExceeded, ServerLost
from asyncflow_sdk.interfaces.weights import Host
from asyncflow_sdk.testing.ends import Sent
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.weights.tcp import TcpTransport
from asyncflow_sdk.wire import client

NBYTES = 8 << 20


def heard(publisher: Child) -> tuple[Manifest, bytes]:
    manifest, where = publisher.hear()
    return msgspec.msgpack.decode(bytes.fromhex(manifest), type=Manifest), bytes.fromhex(where)


@contextlib.contextmanager
def proxy_to(where: bytes, **options: Any) -> Any:
    proxy = FlakyProxy(port_of(where), **options)
    try:
        yield proxy
    finally:
        proxy.resume()
        proxy.close()


class Halting(FlakyProxy):
    """Lets through what the first pieces carry, and then nothing more, without a word."""

    def __init__(self, port: int, pieces: int) -> None:
        super().__init__(port, pieces=(pieces, pieces))

    def _forward(self, source: Any, sink: Any, moving: Any, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                left[0] -= 1
                if left[0] <= 0:
                    self.cuts += 1
                    moving.clear()
                moving.wait()
                sink.sendall(data)


@pytest.mark.parametrize("seen", [True, False], ids=["its process is seen", "on another host"])
def test_a_publisher_that_is_killed_in_the_middle_of_a_fetch(seen: bool) -> None:
    receiver = TcpTransport().receiver(Host(directory=None, name="replica"))
    with Child(publish, "127.0.0.1", 2, NBYTES, {}) as publisher:
        first, place = heard(publisher)
        base = receiver.fetch(first, place, timeout_s=30.0)
        before = [chunk.copy() for chunk in base.chunks]
        manifest, where = heard(publisher)
        proxy = Halting(port_of(where), 20)
        try:
            place = through(where, proxy.address, **({} if seen else {"pid": 0}))
            late = in_thread(receiver.fetch, manifest, place, timeout_s=3600.0 if seen else 2.0)
            until(lambda: proxy.cuts, "the middle of the fetch")
            # when
            publisher.kill()
            # then, long before a deadline where its end is seen
            with pytest.raises(ServerLost if seen else DeadlineExceeded) as caught:
                late()
        finally:
            proxy.resume()
            proxy.close()
    assert f"version 2 from its publisher at {proxy.address}" in str(caught.value)
    assert ("is gone: its process" if seen else "of 128 buckets") in str(caught.value)
    # and the replica has what it had
    assert all((a == b).all() for a, b in zip(base.chunks, before, strict=True))
    receiver.close()


def test_a_replica_that_is_killed_in_the_middle_costs_its_publisher_nothing() -> None:
    with tcp() as ends:
        sent = ends.publish(1, {"w": numbers(0, NBYTES)}, bucket=4 << 20, chunk=4 << 20)
        ends.keep(1)
        proxy = Halting(port_of(sent.where), 20)
        versions = [[msgspec.msgpack.encode(sent.manifest).hex(), through(sent.where, proxy.address).hex()]]
        with Child(fetch, versions, 3600.0) as replica:
            assert replica.hear() == "ready"
            replica.say("fetch")
            until(lambda: proxy.cuts, "the middle of the fetch")
            # when
            replica.kill()
        proxy.resume()
        proxy.close()
        # then the next ones find room, and the memory of the one it fetched is used again
        until(lambda: not ends.sender._service._seen, "word of its end")  # type: ignore[attr-defined]
        versions = itertools.count(2)

        def published() -> Sent:
            version = next(versions)
            last = ends.publish(version, {"w": numbers(version, NBYTES)}, bucket=4 << 20, chunk=4 << 20)
            ends.keep(version - 1, version)
            return last

        published()
        until(lambda: published() and ends.sender.nbytes <= 3 * NBYTES + (2 << 20), "memory that is used again")
        last = published()
        last.check(ends.fetch(ends.receiver(), last))


def test_connections_that_are_cut_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RESEND_S", 0.05)
    with tcp() as ends:
        weights = {"w": numbers(0, 6 << 20)}
        receiver = ends.receiver()
        sent = [ends.publish(1, weights)]
        with proxy_to(sent[0].where, seed=3, pieces=(6, 40)) as proxy:
            base = ends.fetch(receiver, sent[0], where=through(sent[0].where, proxy.address), timeout_s=60.0)
            sent[0].check(base)
            weights["w"][::9000] ^= 1
            sent.append(ends.publish(2, weights))
            ends.keep(1, 2)
            fetched = ends.fetch(receiver, sent[1], where=through(sent[1].where, proxy.address), base=base)
        sent[1].check(fetched)
        assert fetched.encoding == "delta"
        assert proxy.cuts > 2
