"""Versions of the weights on their way from host to host: each host fetches once, and passes on what it has verified."""

import msgspec
import numpy as np
import pytest
from children import Child
from transport_ends import RelayHosts, fetch_and_stay, numbers

from asyncflow_sdk.testing.transport_harness import BUCKET

NBYTES = 64 * BUCKET
SLACK = 1.15


@pytest.mark.parametrize("fanout", [1, 2])
def test_the_publisher_sends_few_copies_to_many_hosts_each_of_which_fetches_once(fanout: int) -> None:
    with RelayHosts(fanout=fanout) as hosts:
        bases = {}
        for version in (1, 2):
            # given six hosts, two of them with two replicas
            weights = numbers(1, NBYTES)
            if version == 2:
                weights[::1000] += 1
            sent = hosts.publish(version, {"w": weights})
            assert hosts.proxy is not None
            before = hosts.proxy.back
            # when all fetch at once
            names = ("a1", "b1", "c1", "d1", "e1", "f1", "a2", "b2")
            joins = {name: hosts.fetch(sent, name, bases.get(name)) for name in names}
            fetched = {name: join() for name, join in joins.items()}
            # then one replica of each host has fetched, from the second version on what differs
            for host in "abcdef":
                moved = sorted(each.moved for name, each in fetched.items() if name[0] == host)
                assert moved[-1] == NBYTES if version == 1 else 0 < moved[-1] < NBYTES / 20
                assert moved[:-1] in ([], [0])
            assert all(not each.notes for each in fetched.values())
            # and the publisher has sent as many copies as hosts fetch from one
            assert hosts.proxy.back - before < fanout * max(each.moved for each in fetched.values()) * SLACK + (
                64 << 10
            )
            bases = fetched
        # and what one replica writes is nobody else's
        fetched["a1"].chunks[0][:] = 0
        sent.check(fetched["a2"])


def test_a_version_is_passed_on_while_it_arrives() -> None:
    with RelayHosts(fanout=1) as hosts:
        sent = hosts.publish(1, NBYTES)
        hosts.observe(sent)
        assert hosts.proxy is not None
        # given a relay whose connections are held up in the middle
        hosts.proxy.most = NBYTES // 4
        first = hosts.fetch(sent, "a")
        assert hosts.proxy.held.wait(60)
        # when another host fetches, then it gets what has arrived
        relay = hosts.await_relay(sent)
        second = hosts.fetch(sent, "b")
        hosts.await_relay(sent, relay)
        # and the rest once it comes
        hosts.proxy.resume()
        first()
        assert second().moved == NBYTES


def test_a_host_that_dies_in_the_middle_is_routed_around() -> None:
    with RelayHosts(fanout=1) as hosts:
        sent = hosts.publish(1, NBYTES)
        hosts.observe(sent)
        assert hosts.proxy is not None
        hosts.proxy.most = NBYTES // 4
        manifest = msgspec.msgpack.encode(sent.manifest).hex()
        with Child(fetch_and_stay, manifest, sent.where.hex(), "a") as dying:
            # given a chain of three hosts, of which the first has a part of the version
            assert hosts.proxy.held.wait(60)
            relay = hosts.await_relay(sent)
            second = hosts.fetch(sent, "b")
            relay = hosts.await_relay(sent, relay)
            third = hosts.fetch(sent, "c")
            hosts.await_relay(sent, relay)
            # when it dies
            dying.kill()
        hosts.proxy.resume()
        # then the next host fetches the rest from the publisher, and says so; the one behind it notices nothing
        found = second()
        assert any("version 1 does not come from a relay at tcp://" in each for each in found.notes)
        assert third().notes == []


def test_another_replica_takes_over_from_a_relay_that_dies_on_its_host() -> None:
    with RelayHosts() as hosts:
        sent = hosts.publish(1, NBYTES)
        assert hosts.proxy is not None
        hosts.proxy.most = NBYTES // 4
        manifest = msgspec.msgpack.encode(sent.manifest).hex()
        with Child(fetch_and_stay, manifest, sent.where.hex(), "a") as dying:
            # given a replica that waits for the relay of its host
            assert hosts.proxy.held.wait(60)
            other = hosts.fetch(sent, "a")
            # when the relay dies
            dying.kill()
        hosts.proxy.resume()
        # then it fetches itself, and for the third one
        assert other().moved == NBYTES
        assert hosts.fetch(sent, "a3")().moved == 0


def test_versions_that_are_wanted_no_more_leave_no_memory_behind() -> None:
    with RelayHosts() as hosts:
        receiver, sizes, base = hosts.receiver("a"), list[int](), None
        for version in range(1, 8):
            sent = hosts.publish(version, {"w": np.full(NBYTES, version, np.uint8)})
            hosts.ends.keep(version)
            fetched = hosts.fetch(sent, "a", base)()
            if base is not None:
                base.release()
            base = fetched
            sizes.append(receiver.nbytes)  # type: ignore[attr-defined]
        assert sizes[-1] <= sizes[2] <= 4 * NBYTES
