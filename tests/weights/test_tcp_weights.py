"""Weights over tcp: whole or as deltas, whichever is smaller; in bounded memory that is used again."""

import os
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tcp_ends import tcp

from asyncflow_sdk.errors import MemoryFull, VersionGone
from asyncflow_sdk.interfaces.weights import Fetched, Host
from asyncflow_sdk.testing.ends import BUCKET, Ends
from asyncflow_sdk.weights import delta, landing, tcp_messages, tcp_receiver, tcp_sender
from asyncflow_sdk.weights.tcp import TcpTransport

COUNT = 4 * BUCKET  # of bf16 numbers: 8 buckets


def weights(ends: Ends) -> dict[str, Any]:
    numbers = (ends.random.standard_normal(COUNT) * 0.02).astype(ml_dtypes.bfloat16)
    return {"w": numbers, "still": np.arange(2 * BUCKET, dtype=np.uint8)}


def step(ends: Ends, model: dict[str, Any], share: float = 0.0125) -> None:
    """As an update at a small learning rate changes it."""
    words = model["w"].view(np.uint16)
    words[ends.random.random(len(words)) < share] += 1


def two_versions(ends: Ends, share: float = 0.0125) -> tuple[Any, Any]:
    model = weights(ends)
    old = ends.publish(1, model)
    step(ends, model, share)
    new = ends.publish(2, model)
    ends.keep(1, 2)
    return old, new


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
        # and from a version with the same weights, nothing
        again = ends.publish(3, {"w": new.chunks[0].view(ml_dtypes.bfloat16)[:COUNT], "still": new.chunks[-1]})
        if again.manifest.tensors == new.manifest.tensors:
            third = ends.fetch(receiver, again, base=second)
            again.check(third)
            assert (third.encoding, third.moved) == ("delta", 0)


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
        assert receiver.again == 2  # type: ignore[attr-defined]
        assert fetched.moved < 2.2 * BUCKET


@pytest.mark.parametrize("how", ["of other words", "garbage"])
def test_a_delta_that_does_not_give_what_was_published_is_replaced_by_the_whole(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = delta.encode

    def wrong(new: Any, base: Any, width: int) -> bytes | None:
        other = new.copy()
        other[:10] ^= 1
        code = encode(other, base, width)
        return code if code is None or how == "of other words" else code[:7] + b"\xff" * len(code[7:])

    monkeypatch.setattr(tcp_sender.delta, "encode", wrong)
    with tcp() as ends:
        receiver = ends.receiver()
        old, new = two_versions(ends)
        fetched = ends.fetch(receiver, new, base=ends.fetch(receiver, old))
        new.check(fetched)
        assert receiver.again == 8  # type: ignore[attr-defined]
        assert fetched.moved > COUNT * 2


def test_a_delta_is_made_once_for_all_replicas_and_not_kept_beyond_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    encode = delta.encode
    monkeypatch.setattr(tcp_sender.delta, "encode", lambda *a: (made.append(1), encode(*a))[1])
    with tcp() as ends:
        old, new = two_versions(ends)
        for _ in range(3):
            receiver = ends.receiver()
            new.check(ends.fetch(receiver, new, base=ends.fetch(receiver, old)))
        assert len(made) == 8
        codes = ends.sender._codes  # type: ignore[attr-defined]
        assert codes.nbytes > 0
        # when the base is kept no longer
        ends.keep(2)
        # then
        assert codes.nbytes == 0
    with tcp(delta_bytes=2000) as ends:
        old, new = two_versions(ends)
        receiver = ends.receiver()
        new.check(ends.fetch(receiver, new, base=ends.fetch(receiver, old)))
        assert 0 < ends.sender._codes.nbytes <= 2000  # type: ignore[attr-defined]


def test_an_answer_that_would_be_too_large_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_sender, "ANSWER_BYTES", 100)
    monkeypatch.setattr(tcp_receiver, "AT_ONCE", tcp_messages.MOST_BUCKETS)
    with tcp() as ends:
        receiver = ends.receiver()
        old, new = two_versions(ends)
        base = ends.fetch(receiver, old)
        old.check(base)
        new.check(ends.fetch(receiver, new, base=base))


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


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_replica_that_outlives_its_trainers_keeps_no_connection_to_them() -> None:
    receiver = TcpTransport().receiver(Host(directory=None, name="replica"))
    files: list[int] = []
    with tcp() as ends:
        ends.sender.close()
        for version in range(1, 7):
            # when each rank has another trainer
            ranks = [
                TcpTransport().sender(Host(directory=None, name=f"{version}-{n}", rank=n, world_size=2))
                for n in (0, 1)
            ]
            places = []
            for ends.sender in ranks:
                places.append(ends.publish(version, {"w": np.arange(BUCKET, dtype=np.uint8)}))
            for _ in range(2):
                for sent in places:
                    sent.check(receiver.fetch(sent.manifest, sent.where, timeout_s=30.0))
                clients = list(receiver._clients.values())  # type: ignore[attr-defined]
                assert len(clients) == 2
            # then those it has are kept from fetch to fetch
            for sent in places:
                receiver.fetch(sent.manifest, sent.where, timeout_s=30.0)
            assert clients == list(receiver._clients.values())  # type: ignore[attr-defined]
            for sender in ranks:
                sender.close()
            files.append(descriptors())
        # then they come to be closed: ZeroMQ does it behind
        end = time.monotonic() + 30
        while descriptors() > files[0]:
            assert time.monotonic() < end, f"{descriptors()} of {files} are never closed"
            time.sleep(0.01)
    receiver.close()


def test_a_fetch_that_failed_leaves_its_memory_to_the_next() -> None:
    with tcp() as ends:
        receiver: Any = ends.receiver()
        manifest, memories = ends.write(1, weights(ends))
        memories[0][5] ^= 1
        where = ends.send(manifest)
        failed = []
        for _ in range(3):
            with pytest.raises(Exception, match="differs from what was published") as caught:
                receiver.fetch(manifest, where, timeout_s=30.0)
            failed.append(caught.value)  # with its traceback
        assert receiver.nbytes == manifest.nbytes


def test_a_host_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with tcp() as ends:
        receiver: Any = ends.receiver()
        old, new = two_versions(ends)
        base = ends.fetch(receiver, old)
        monkeypatch.setattr(landing, "free_memory", lambda: 1000)
        with pytest.raises(MemoryFull, match="no memory for .* more bytes to fetch weights into"):
            ends.fetch(receiver, new, base=base)
        monkeypatch.undo()
        new.check(ends.fetch(receiver, new, base=base))


def test_versions_may_go_while_they_are_fetched_and_the_sender_never_waits() -> None:
    with tcp() as ends:
        model = weights(ends)
        sent = [ends.publish(1, model)]
        ends.keep(1)
        stop = threading.Event()
        outcomes: list[str] = []

        def fetch() -> None:
            receiver = ends.receiver()
            base: Fetched | None = None
            while not stop.is_set():
                each = sent[-1]
                try:
                    fetched = receiver.fetch(each.manifest, each.where, base=base, timeout_s=30.0)
                    each.check(fetched)
                    outcomes.append(fetched.encoding)
                    if base is not None:
                        base.release()
                    base = fetched
                except VersionGone as error:
                    assert f"version {each.version}" in str(error)  # noqa: PT017
                    outcomes.append("gone")

        threads = [threading.Thread(target=fetch) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for version in range(2, 60):
                step(ends, model)
                sent.append(ends.publish(version, model))
                ends.keep(version)
                assert ends.sender.nbytes <= 6 * sent[-1].manifest.nbytes + (2 << 20)
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert {"full", "delta"} & set(outcomes)
        last = ends.receiver()
        sent[-1].check(ends.fetch(last, sent[-1]))


def test_an_element_is_as_wide_as_most_of_its_bucket() -> None:
    with tcp() as ends:
        tensors = {
            "a": np.zeros(BUCKET // 4, np.float32), "b": np.zeros(BUCKET // 8, ml_dtypes.bfloat16),
            "c": np.zeros(BUCKET * 3 // 4, np.int8), "d": np.zeros(BUCKET // 16, np.float64),
        }  # fmt: skip
        manifest, _ = ends.write(1, tensors)
        widths = tcp_sender._widths(manifest)
        assert [widths[0, number] for number in range(len(widths))][:3] == [4, 1, 8]
        ends.send(manifest)
