"""Weights over tcp: whole or as deltas, whichever is smaller; in bounded memory that is used again."""

import contextlib
import os
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_ends import address_of, replica, tcp, with_service
from waiting import until

from asyncflow_sdk.errors import DeadlineExceeded, DigestMismatch, MemoryFull, VersionGone, WireError
from asyncflow_sdk.interfaces import Fetched, Host
from asyncflow_sdk.queue import Connection, QueueServer
from asyncflow_sdk.testing.transport_harness import BUCKET, TransportHarness
from asyncflow_sdk.types import Chunk, Manifest
from asyncflow_sdk.weights import host_of, make_transport

pytestmark = pytest.mark.fast
COUNT = 4 * BUCKET  # of bf16 numbers: 8 buckets


def weights(ends: TransportHarness) -> dict[str, Any]:
    numbers = (ends.random.standard_normal(COUNT) * 0.02).astype(ml_dtypes.bfloat16)
    return {"w": numbers, "still": np.arange(2 * BUCKET, dtype=np.uint8)}


def step(ends: TransportHarness, model: dict[str, Any], share: float = 0.0125) -> None:
    """As an update at a small learning rate changes it."""
    words = model["w"].view(np.uint16)
    words[ends.random.random(len(words)) < share] += 1


def two_versions(ends: TransportHarness) -> tuple[Any, Any]:
    model = weights(ends)
    old = ends.publish(1, model)
    step(ends, model)
    new = ends.publish(2, model)
    ends.keep(1, 2)
    return old, new


def test_a_replica_of_its_publishers_host_maps_a_version_and_fetches_what_it_cannot_see(tmp_path: Path) -> None:
    with tcp() as ends, contextlib.closing(replica("here")) as receiver:
        ends.sender.close()
        ends.sender = ends.transport.sender(Host(directory=None, name="trainer", identity="here"))
        for version in (1, 2):
            sent = ends.publish(version, weights(ends))
            ends.keep(version)
            fetched = receiver.fetch(sent.manifest, sent.where, timeout_s=60.0)
            sent.check(fetched)
            assert (fetched.encoding, fetched.moved, fetched.is_base) == ("mapped", 0, False)
        # when it is wanted no more, or too late
        receiver.interrupt()
        with pytest.raises(WireError, match="wanted no more"):
            receiver.fetch(sent.manifest, sent.where, timeout_s=60.0)
        with pytest.raises(DeadlineExceeded, match="not mapped and verified in time"):
            receiver.fetch(sent.manifest, sent.where, timeout_s=0.0)
        # when the memory is not in sight, its place is none, or is no memory of this user's runs
        value = msgspec.msgpack.decode(sent.where)
        own, segments = Path(value[4]), {place[0] for place in msgspec.msgpack.decode(value[5])}
        pipes = own.with_name(own.name + "x")
        for made, put in ((pipes, os.mkfifo), (tmp_path, lambda path: shutil.copy(own / path.name, path))):
            made.mkdir(exist_ok=True)
            for segment in segments:
                put(made / segment)
        for directory in ("/nowhere", "/\0", "x" * 9999, str(pipes), str(tmp_path)):
            value[4] = directory
            fetched = receiver.fetch(sent.manifest, msgspec.msgpack.encode(value), timeout_s=60.0)
            # then the service sends it
            sent.check(fetched)
            assert (fetched.encoding, fetched.moved) == ("full", sent.manifest.nbytes)
        shutil.rmtree(pipes)


def test_small_changes_come_as_deltas_and_what_is_the_same_does_not_come() -> None:
    with tcp() as ends:
        receiver = ends.receiver()
        old, new = two_versions(ends)
        first = ends.fetch(receiver, old)
        assert (first.encoding, first.moved) == ("full", old.manifest.nbytes)
        # when
        second = ends.fetch(receiver, new, base=first)
        # then
        new.check(second)
        assert second.encoding == "delta"
        assert 0 < second.moved < 0.02 * new.manifest.nbytes


@pytest.mark.parametrize(("share", "most"), [(0.0125, 0.01), (0.12, 0.065), (0.47, 0.17), (1.0, 0.2)])
def test_steps_to_the_next_number_are_small(share: float, most: float) -> None:
    with tcp() as ends:
        receiver, model = ends.receiver(), {"w": weights(ends)["w"]}
        base = ends.fetch(receiver, ends.publish(1, model))
        words = model["w"].view(np.uint16)
        moved = ends.random.random(COUNT) < share
        words[moved] += ends.random.choice(np.array([1, 65535], np.uint16), int(moved.sum()))
        new = ends.publish(2, model)
        ends.keep(1, 2)
        fetched = ends.fetch(receiver, new, base=base)
        new.check(fetched)
        assert fetched.moved <= most * new.manifest.nbytes


@settings(max_examples=25)
@given(
    st.integers(1, 3000), st.floats(0, 1), st.sampled_from([np.int8, ml_dtypes.bfloat16, np.float32, np.float64]),
    st.integers(0, 1 << 30),
)  # fmt: skip
def test_any_change_comes_back_bit_by_bit(count: int, share: float, dtype: Any, seed: int) -> None:
    with tcp() as ends:
        random, receiver = np.random.default_rng(seed), ends.receiver()
        raw = random.integers(0, 256, count * np.dtype(dtype).itemsize, np.uint8)
        base = ends.fetch(receiver, ends.publish(1, {"w": raw.view(dtype)}, bucket=1000))
        changed = random.random(len(raw)) < share
        raw[changed] = random.integers(0, 256, int(changed.sum()), np.uint8)
        new = ends.publish(2, {"w": raw.view(dtype)}, bucket=1000)
        ends.keep(1, 2)
        new.check(ends.fetch(receiver, new, base=base))


def test_what_has_nothing_in_common_comes_whole() -> None:
    with tcp() as ends:
        receiver = ends.receiver()
        old = ends.publish(1, {"w": ends.random.integers(0, 256, 4 * BUCKET, np.uint8)})
        new = ends.publish(2, {"w": ends.random.integers(0, 256, 4 * BUCKET, np.uint8)})
        ends.keep(1, 2)
        fetched = ends.fetch(receiver, new, base=ends.fetch(receiver, old))
        new.check(fetched)
        assert (fetched.encoding, fetched.moved) == ("full", new.manifest.nbytes)


@pytest.mark.parametrize("why", ["gone", "another of its number", "no digests", "asked not to"])
def test_without_a_base_in_common_everything_comes(why: str) -> None:
    with tcp(**({"delta_bytes": 0} if why == "asked not to" else {})) as ends:
        receiver = ends.receiver()
        model = weights(ends)
        digests = why != "no digests"
        old = ends.publish(1, model, digests=digests)
        base = ends.fetch(receiver, old)
        if why == "another of its number":
            ends.trainer("abandon", ends.sender.abandon)
            ends.publish(1, {**model, "w": model["w"][::-1].copy()})
            ends.keep(1)
        step(ends, model)
        model["still"][:] += 1
        new = ends.publish(2, model, digests=digests)
        ends.keep(*([2] if why == "gone" else [1, 2]))
        # when
        fetched = ends.fetch(receiver, new, base=base)
        # then
        new.check(fetched)
        assert (fetched.encoding, fetched.moved) == ("full", new.manifest.nbytes)


def test_a_base_that_was_written_into_costs_its_buckets_and_nothing_else() -> None:
    with tcp() as ends:
        receiver = ends.receiver()
        old, new = two_versions(ends)
        base = ends.fetch(receiver, old)
        # given an engine that worked in place: in a bucket that changes, and in one that does not
        base.chunks[0][100] ^= 1
        base.chunks[-1][-100] ^= 1
        # when
        fetched = ends.fetch(receiver, new, base=base)
        # then each came once more, in full
        new.check(fetched)
        assert 2 * BUCKET < fetched.moved < 2.2 * BUCKET


def test_deltas_are_kept_for_other_replicas_within_their_memory() -> None:
    for most in (256 << 20, 2000):
        with tcp(delta_bytes=most) as ends:
            old, new = two_versions(ends)
            before = ends.sender.nbytes
            for _ in range(3):
                receiver = ends.receiver()
                new.check(ends.fetch(receiver, new, base=ends.fetch(receiver, old)))
            kept = ends.sender.nbytes - before
            assert 0 < kept <= min(most, 0.02 * new.manifest.nbytes)
            # when the base is kept no longer
            ends.keep(2)
            # then
            assert ends.sender.nbytes <= before


def test_a_replica_holds_the_version_it_has_and_the_one_it_fetches() -> None:
    with tcp() as ends:
        receiver: Any = ends.receiver()
        model = weights(ends)
        base: Fetched | None = None
        places: set[int] = set()
        for version in range(1, 12):
            step(ends, model)
            sent = ends.publish(version, model)
            ends.keep(version - 1, version)
            fetched = ends.fetch(receiver, sent, base=base if version % 3 else None)
            sent.check(fetched)
            places.update(chunk.__array_interface__["data"][0] for chunk in fetched.chunks)
            if base is not None:
                base.release()
            base = fetched
            assert receiver.nbytes <= 2 * sent.manifest.nbytes
        # then the same memory was used again and again
        assert len(places) == 2 * len(sent.manifest.chunks)
        # and of a model of another size only what is needed is kept
        small = ends.publish(20, {"w": np.zeros(BUCKET, np.uint8)})
        kept = ends.fetch(receiver, small)
        assert receiver.nbytes <= sent.manifest.nbytes + small.manifest.nbytes
        assert base is not None
        base.release()
        del base, fetched
        receiver.close()
        assert receiver.nbytes == small.manifest.nbytes
        small.check(kept)


def connected_to(ports: set[int]) -> bool:
    """Whether a connection of this host leads to one of these ports, or is held open by this end only."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return any(int(row[2].rpartition(":")[2], 16) in ports and row[3] in ("01", "08") for row in rows)


def test_a_replica_that_outlives_its_trainers_keeps_no_connection_to_them() -> None:
    with tcp() as ends:
        receiver = ends.receiver()
        ends.sender.close()
        old: set[int] = set()
        for version in range(1, 5):
            # when another trainer takes the place of the one before
            ends.sender = ends.another_sender()
            sent = ends.publish(version, {"w": np.arange(BUCKET, dtype=np.uint8)})
            sent.check(ends.fetch(receiver, sent, where=with_service(sent.where)))
            # then no connection to that is kept
            until(lambda: not connected_to(old), "the end of connections")
            port = int(address_of(sent.where).rpartition(":")[2])
            assert connected_to({port})
            old.add(port)
            ends.trainer("close", ends.sender.close)


def test_a_fetch_that_failed_leaves_its_memory_to_the_next() -> None:
    with tcp() as ends:
        receiver: Any = ends.receiver()
        manifest, memories = ends.write(1, weights(ends))
        memories[0][5] ^= 1
        where = ends.send(manifest)
        failed = []
        for _ in range(3):
            with pytest.raises(DigestMismatch, match="differs from the published bytes") as caught:
                receiver.fetch(manifest, where, timeout_s=30.0)
            failed.append(caught.value)  # with its traceback
        assert receiver.nbytes == manifest.nbytes


def test_a_version_for_which_a_host_has_no_memory_is_refused() -> None:
    with tcp() as ends:
        receiver = ends.receiver()
        sent = ends.publish(1, weights(ends))
        huge = Manifest(1, (), (Chunk(1 << 50),), 1 << 16)
        with pytest.raises(MemoryFull, match="no memory for .* more bytes of fetched weights"):
            receiver.fetch(huge, sent.where, timeout_s=30.0)
        sent.check(ends.fetch(receiver, sent))


def test_versions_may_go_while_they_are_fetched_and_the_sender_never_waits() -> None:
    with tcp() as ends:
        model = weights(ends)
        sent = [ends.publish(1, model)]
        ends.keep(1)
        stop, problems = threading.Event(), list[BaseException]()

        def fetch() -> None:
            receiver, base = make_transport("tcp").receiver(Host(directory=None, name="other")), None
            try:
                while not stop.is_set():
                    each = sent[-1]
                    try:
                        fetched = receiver.fetch(each.manifest, each.where, base=base, timeout_s=60.0)
                        each.check(fetched)
                        base = fetched
                    except VersionGone as error:
                        assert f"version {each.version}" in str(error)  # noqa: PT017
            except BaseException as error:
                problems.append(error)
            finally:
                receiver.close()

        threads = [threading.Thread(target=fetch) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for version in range(2, 30):
                step(ends, model)
                sent.append(ends.publish(version, model))
                ends.keep(version)
                assert ends.sender.nbytes <= 6 * sent[-1].manifest.nbytes + (2 << 20)
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        assert problems == []
        sent[-1].check(ends.fetch(ends.receiver(), sent[-1]))


def test_an_end_is_reached_where_the_run_is_served_to_others() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nobody's address: the way there is the way out of this host
            outward = probe.getsockname()[0]
        except OSError:
            outward = "127.0.0.1"
    for served, wanted in (([], "127.0.0.1"), (["tcp://127.0.0.1:0"], "127.0.0.1"), (["tcp://0.0.0.0:0"], outward)):
        server = QueueServer(served, insecure=bool(served))
        connection = Connection(server.here, "trainer")
        assert host_of(connection, "x").address == wanted
        connection.close()
        server.close()
