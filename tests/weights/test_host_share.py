"""Replicas of one host that is not the publisher's: one of them fetches a version, the others map it, and none gets a part."""

import os
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from children import Child
from transport_ends import ManyHosts, fetch_and_stay, numbers
from waiting import in_thread, until

from asyncflow_sdk.errors import DeadlineExceeded, WireError
from asyncflow_sdk.memory import meeting_directory
from asyncflow_sdk.testing.transport_harness import BUCKET
from asyncflow_sdk.weights.transports import host_share

NBYTES = 64 * BUCKET
SLACK = 1.15


def test_the_publisher_sends_each_host_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    met = list[Path]()

    def meet(name: str) -> tuple[Path, int]:
        path, owner = meeting_directory(name)
        met.append(path)
        return path, owner

    monkeypatch.setattr(host_share, "meeting_directory", meet)
    with ManyHosts() as hosts:
        bases = {}
        for version in (1, 2):
            # given three hosts, two of them with two replicas
            weights = numbers(1, NBYTES)
            if version == 2:
                weights[::1000] += 1
            sent = hosts.publish(version, {"w": weights})
            assert hosts.proxy is not None
            before = hosts.proxy.back
            # when all fetch at once
            names = ("a1", "b1", "c1", "a2", "b2")
            joins = {name: hosts.fetch(sent, name, bases.get(name)) for name in names}
            fetched = {name: join() for name, join in joins.items()}
            # then one replica of each host has fetched, from the second version on what differs
            for host in "abc":
                moved = sorted(each.moved for name, each in fetched.items() if name[0] == host)
                assert moved[-1] == NBYTES if version == 1 else 0 < moved[-1] < NBYTES / 20
                assert moved[:-1] in ([], [0])
            assert all(not each.notes for each in fetched.values())
            # and the publisher has sent a copy to each
            assert hosts.proxy.back - before < 3 * max(each.moved for each in fetched.values()) * SLACK + (64 << 10)
            bases = fetched
        # and what one replica writes is nobody else's
        fetched["a1"].chunks[0][:] = 0
        sent.check(fetched["a2"])
        directories = {Path(each.places[0].path).parent for each in fetched.values()} | set(met)
    # and nothing is left of them
    assert not [each for each in directories if each.exists()]


def test_a_replica_that_waits_takes_over_from_one_that_is_killed_in_the_middle() -> None:
    with ManyHosts() as hosts:
        sent = hosts.publish(1, NBYTES)
        assert hosts.proxy is not None
        hosts.proxy.most = NBYTES // 4
        manifest = msgspec.msgpack.encode(sent.manifest).hex()
        with Child(fetch_and_stay, manifest, sent.where.hex(), "a", hosts.run) as dying:
            # given a replica that waits for another process of its host, which has a part of the version
            assert hosts.proxy.held.wait(60)
            other = hosts.fetch(sent, "a")
            # when that process dies
            dying.kill()
        hosts.proxy.resume()
        # then the replica fetches the whole version, also for the third one
        assert other().moved == NBYTES
        assert hosts.fetch(sent, "a3")().moved == 0


def test_a_replica_does_not_wait_for_ever_for_one_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    with ManyHosts() as hosts:
        sent = hosts.publish(1, NBYTES)
        assert hosts.proxy is not None
        hosts.proxy.most = NBYTES // 4
        manifest = msgspec.msgpack.encode(sent.manifest).hex()
        with Child(fetch_and_stay, manifest, sent.where.hex(), "a", hosts.run) as still:
            assert hosts.proxy.held.wait(60)
            # given a process that holds the lock and does nothing
            still.stop()
            hosts.proxy.resume()
            # when replicas of its host fetch, then one ends at its deadline, one when it is told to
            with pytest.raises(DeadlineExceeded, match="another process of this host fetches it, and holds the lock"):
                hosts.receiver("a1").fetch(sent.manifest, sent.where, timeout_s=0.2)
            ended, receiver = threading.Event(), hosts.receiver("a2")

            def fetch_until_told() -> None:
                with pytest.raises(WireError, match="wanted no more"):
                    receiver.fetch(sent.manifest, sent.where, timeout_s=3600.0)
                ended.set()

            in_thread(fetch_until_told)
            until(lambda: receiver.interrupt() or ended.is_set(), "the end of a fetch")
            # and one fetches for itself after a while
            monkeypatch.setattr(host_share, "STALL_S", 0.5)
            alone = hosts.fetch(sent, "a3")()
            assert alone.moved == NBYTES
            assert "nothing has arrived for 0.5 s" in alone.notes[0]


def test_versions_that_are_wanted_no_more_leave_no_memory_behind() -> None:
    with ManyHosts() as hosts:
        sizes, bases = list[int](), dict.fromkeys(("a1", "a2"))
        for version in range(1, 8):
            sent = hosts.publish(version, {"w": np.full(NBYTES, version, np.uint8)})
            hosts.ends.keep(version)
            # when they take turns to fetch first
            for name in sorted(bases, reverse=version % 3 == 0):
                fetched = hosts.fetch(sent, name, bases[name])()
                if bases[name] is not None:
                    bases[name].release()
                bases[name] = fetched
            sizes.append(sum(hosts.receiver(name).nbytes for name in bases))  # type: ignore[attr-defined]
        assert max(sizes) <= 4 * NBYTES


def test_bytes_that_were_changed_in_the_memory_of_a_host_are_fetched_again() -> None:
    with ManyHosts() as hosts:
        sent = hosts.publish(1, NBYTES)
        place = hosts.fetch(sent, "a1")().places[0]
        # given shared memory with a wrong byte
        with open(place.path, "r+b") as file:
            file.seek(place.offset)
            file.write(bytes(8))
        # when
        fetched = hosts.fetch(sent, "a2")()
        # then
        assert fetched.moved == NBYTES
        assert "in the memory of this host is damaged" in fetched.notes[0]


def test_a_host_where_somebody_else_has_the_place_of_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    def occupied(name: str) -> tuple[Path, int]:
        place = Path("/dev/shm") / f"asyncflow-{os.getuid()}-{name}"
        place.touch()
        try:
            return meeting_directory(name)
        finally:
            place.unlink()

    monkeypatch.setattr(host_share, "meeting_directory", occupied)
    with ManyHosts() as hosts:
        sent = hosts.publish(1, NBYTES)
        # when, then each replica fetches for itself, and says so
        for name in ("a1", "a2"):
            fetched = hosts.fetch(sent, name)()
            assert fetched.moved == NBYTES
            assert "version 1 is not shared on this host" in fetched.notes[0]
