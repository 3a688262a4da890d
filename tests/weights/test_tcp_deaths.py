"""Ends of the tcp transport that die in the middle, and connections that are cut again and again."""

from typing import Any

import msgspec
import pytest
from children import Child, hear, say
from flaky_proxy import WHOLE, FlakyProxy
from transport_ends import address_of, fetch_and_stay, numbers, tcp, with_service
from waiting import in_thread, until

from asyncflow_sdk.errors import DeadlineExceeded, ServerLost
from asyncflow_sdk.interfaces import Host
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.weights import make_transport

NBYTES = 4 << 20


def port_of(where: bytes) -> int:
    return int(address_of(where).rpartition(":")[2])


def publish() -> None:
    """Publish two versions; stay until killed."""
    with tcp() as ends:
        for version in (1, 2):
            sent = ends.publish(version, {"w": numbers(version, NBYTES)})
            ends.keep(1, version)
            say([msgspec.msgpack.encode(sent.manifest).hex(), sent.where.hex()])
        hear()


@pytest.mark.parametrize("seen", [True, False], ids=["its process is seen", "on another host"])
def test_a_publisher_that_is_killed_in_the_middle_of_a_fetch(seen: bool) -> None:
    receiver = make_transport("tcp").receiver(Host(directory=None, name="replica"))
    with Child(publish) as publisher:
        versions: list[Any] = []
        for _ in range(2):
            manifest, where = map(bytes.fromhex, publisher.hear())
            versions.append((msgspec.msgpack.decode(manifest, type=Manifest), where))
        base = receiver.fetch(*versions[0], timeout_s=60.0)
        before = [chunk.copy() for chunk in base.chunks]
        manifest, where = versions[1]
        with FlakyProxy(port_of(where), pieces=WHOLE) as proxy:
            proxy.most = 1 << 20
            address = f"tcp://127.0.0.1:{proxy.port}"
            place = with_service(where, address=address, **({} if seen else {"pid": 0}))
            timeout_s = 3600.0 if seen else 2.0
            while not proxy.held.is_set():  # on a busy machine nothing may have come until then
                late = in_thread(receiver.fetch, manifest, place, timeout_s=timeout_s)
                assert proxy.held.wait(min(timeout_s, 60)) or late()
                timeout_s *= 10
            # when
            publisher.kill()
            # then, long before a deadline where its end is seen
            error = late()
    assert isinstance(error, ServerLost if seen else DeadlineExceeded), error
    assert f"version 2 from its publisher at {address}" in str(error)
    assert ("is gone: its process" if seen else "buckets are") in str(error)
    # and the replica has what it had
    assert all((a == b).all() for a, b in zip(base.chunks, before, strict=True))
    receiver.close()


def test_a_replica_that_is_killed_in_the_middle_costs_its_publisher_nothing() -> None:
    with tcp() as ends:
        sent = ends.publish(1, {"w": numbers(0, NBYTES)})
        ends.keep(1)
        with FlakyProxy(port_of(sent.where), pieces=WHOLE) as proxy:
            proxy.most = 1 << 20
            where = with_service(sent.where, address=f"tcp://127.0.0.1:{proxy.port}")
            with Child(fetch_and_stay, msgspec.msgpack.encode(sent.manifest).hex(), where.hex(), "a") as replica:
                assert proxy.held.wait(60)
                # when
                replica.kill()
        # then the next ones find room, and the memory of the one it fetched is used again
        last = 1

        def published() -> Any:
            nonlocal last
            last += 1
            made = ends.publish(last, {"w": numbers(last, NBYTES)})
            ends.keep(last - 1, last)
            return made

        published()
        until(lambda: published() and ends.sender.nbytes <= 3 * NBYTES + (2 << 20), "memory that is used again")
        newest = published()
        newest.check(ends.fetch(ends.receiver(), newest))


def test_connections_that_are_cut_again_and_again() -> None:
    with tcp() as ends:
        weights, receiver = {"w": numbers(0, NBYTES)}, ends.receiver()
        first = ends.publish(1, weights)
        proxy = FlakyProxy(port_of(first.where), seed=3, pieces=(40, 60))
        try:
            base = ends.fetch(receiver, first, where=with_service(first.where, address=proxy.address), timeout_s=60.0)
            first.check(base)
            weights["w"][::9000] ^= 1
            second = ends.publish(2, weights)
            ends.keep(1, 2)
            fetched = ends.fetch(receiver, second, where=with_service(second.where, address=proxy.address), base=base)
        finally:
            proxy.close()
        second.check(fetched)
        assert fetched.encoding == "delta"
        assert proxy.cuts > 0
