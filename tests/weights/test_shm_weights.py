"""Weights through shared memory: receivers map them, and no receiver holds up the sender."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_disk import on_disk

from asyncflow_sdk.errors import DigestMismatch, MemoryFull, VersionGone
from asyncflow_sdk.interfaces import Host
from asyncflow_sdk.memory import PrivateMaps, SharedDirectory
from asyncflow_sdk.testing.transport_harness import Sent, TransportHarness
from asyncflow_sdk.weights import make_transport
from asyncflow_sdk.weights.transports.shm import VersionMemory

pytestmark = pytest.mark.fast
SLACK = 1 << 20


def shm() -> TransportHarness:
    return TransportHarness(lambda: make_transport("shm"), lambda: make_transport("shm"))


@pytest.fixture
def ends() -> Iterator[TransportHarness]:
    with shm() as ends:
        yield ends


def full(value: int, nbytes: int = 1 << 20) -> dict[str, Any]:
    return {"w": np.full(nbytes, value, np.uint8)}


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=20), bucket=st.sampled_from([64, 128, 192, 1000, 4096])
)
@example(sizes=[1, 0, 0, 0, 0, 1], bucket=128)
def test_buckets_of_any_size_cover_every_byte(sizes: list[int], bucket: int) -> None:
    weights = {f"t{i}": np.random.default_rng(i).integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)}
    with shm() as ends:
        receiver, sent = ends.receiver(), ends.publish(1, weights, bucket=bucket)
        sent.check(ends.fetch(receiver, sent))
        assert sent.manifest.root == ends.publish(2, weights, bucket=bucket).manifest.root
        # and whatever single byte of a tensor is flipped, it is found, with bucket and tensor named
        for version, info in enumerate([t for t in sent.manifest.tensors if t.nbytes][:3], 3):
            manifest, memories = ends.write(version, weights, bucket=bucket)
            memories[info.chunk][info.offset + info.nbytes - 1] ^= 0x10
            damaged = Sent(manifest, [], ends.send(manifest))
            with pytest.raises(DigestMismatch, match=rf"version {version}: bucket \d+ .*holds .*{info.name}"):
                ends.fetch(receiver, damaged)


def test_a_receiver_maps_each_block_once(ends: TransportHarness) -> None:
    receiver, addresses = ends.receiver(), set()
    for version in range(12):
        sent = ends.publish(version, full(version))
        fetched = ends.fetch(receiver, sent)
        # when its version is kept no longer, and nobody has written into it
        ends.keep(version)
        sent.check(fetched)
        addresses.add(fetched.chunks[0].__array_interface__["data"][0])
        fetched.release()
        del fetched
    # then its mapping is that of a version to come
    assert len(addresses) <= 3


def test_what_an_engine_wrote_does_not_come_back_with_the_mapping(ends: TransportHarness) -> None:
    receiver = ends.receiver()
    for version in range(4):
        sent = ends.publish(version, full(version))
        fetched = ends.fetch(receiver, sent)
        sent.check(fetched)
        fetched.chunks[0][:] = 99
        fetched.release()
        ends.keep()


def test_without_digests_no_mapping_is_used_again(ends: TransportHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, sent = ends.receiver(), ends.publish(1, full(1), digests=False)
    held = [ends.fetch(receiver, sent)]
    held[0].chunks[0][:] = 99
    plain = PrivateMaps.take

    def take(*given: Any) -> Any:
        while held:  # when the written one ends at the worst time
            held.pop().release()
        return plain(*given)

    monkeypatch.setattr(PrivateMaps, "take", take)
    sent.check(ends.fetch(receiver, sent))
    assert not held


def test_models_that_change_their_size_leave_nothing_behind(ends: TransportHarness) -> None:
    for version in range(20):
        ends.publish(version, full(version, (1 << 20) + version * 10_000))
        ends.keep(version - 1, version)
    assert ends.sender.nbytes <= 4 * (1 << 20) + 4 * SLACK


def test_a_version_for_which_there_is_no_room_keeps_what_there_was(
    ends: TransportHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    sent = ends.publish(1, full(1))
    ends.keep(1)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    for version in range(2, 6):
        with pytest.raises(MemoryFull, match="no room for"):
            ends.write(version, full(version, 8 << 20), chunk=1 << 20)
        ends.sender.abandon()
    sent.check(ends.fetch(ends.receiver(), sent))


def test_memory_for_the_next_version_is_there_before_it_comes(ends: TransportHarness) -> None:
    # given
    model = {f"w{i}": np.zeros(n, np.uint8) for i, n in enumerate((1 << 20, 3, 5 << 17))}
    sizes = [chunk.nbytes for chunk in ends.publish(1, model).manifest.chunks]
    ends.keep(1)
    # when it is left at some step, and begun again
    next(ends.sender.prepare(sizes))
    assert len(list(ends.sender.prepare(sizes))) == len(sizes) - 1
    held = ends.sender.nbytes
    # then the next version takes nothing more
    ends.publish(2, model)
    assert ends.sender.nbytes == held
    assert list(ends.sender.prepare([])) == []


def test_a_publisher_makes_its_own_memory_again_if_it_is_removed() -> None:
    with contextlib.closing(VersionMemory.private("test")) as memory:
        for version in (1, 2):
            memory.room(1000).memory[:] = version
            memory.seal(version)
            memory.keep([version])
            assert memory.chunks(version)[0].tolist() == [version] * 1000
            shutil.rmtree(memory.directory)


def test_a_successor_keeps_what_is_kept_and_removes_the_rest() -> None:
    memory = SharedDirectory()

    def sender(name: str, rank: int = 0) -> Any:
        return make_transport("shm").sender(Host(directory=memory.path, name=name, rank=rank, world_size=2))

    with shm() as ends:
        # given senders of two ranks, one of which is replaced
        ends.sender.close()
        dead, other, new = sender("1-0"), sender("2-0", rank=1), sender("3-0")
        receiver = make_transport("shm").receiver(Host(directory=memory.path, name="4-0"))

        def publish(end: Any, version: int) -> Sent:
            ends.sender = end
            return ends.publish(version, full(version))

        versions, theirs = [publish(dead, version) for version in range(4)], publish(other, 3)
        reading = ends.fetch(receiver, versions[0])
        # when
        new.adopt([(each.manifest, each.where) for each in versions[2:]])
        mine = publish(new, 4)
        # then
        for sent in (*versions[2:], theirs, mine):
            sent.check(ends.fetch(receiver, sent))
        fresh = make_transport("shm").receiver(Host(directory=memory.path, name="5-0"))
        for sent in versions[:2]:
            with pytest.raises(VersionGone):
                ends.fetch(fresh, sent)
        versions[0].check(reading)
        assert new.nbytes == on_disk(memory.path) - other.nbytes
        # and what is kept no longer goes
        new.keep([4])
        fresh.close()
        fresh = make_transport("shm").receiver(Host(directory=memory.path, name="6-0"))
        for sent in versions:
            with pytest.raises(VersionGone):
                ends.fetch(fresh, sent)
        assert new.nbytes == on_disk(memory.path) - other.nbytes
        theirs.check(ends.fetch(receiver, theirs))
        for each in (receiver, fresh, dead, other, new):
            each.close()
    memory.close()
