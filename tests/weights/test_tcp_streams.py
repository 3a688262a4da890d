"""A version that is fetched while it is written: it is what was published, whatever became of what came early."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from flaky_proxy import NEVER, WHOLE, FlakyProxy
from transport_ends import bulk_of, numbers, tcp, with_bulk
from waiting import in_thread, until

from asyncflow_sdk.errors import AsyncFlowError, WireError
from asyncflow_sdk.interfaces import Fetched
from asyncflow_sdk.testing.transport_harness import BUCKET, Sent, TransportHarness
from asyncflow_sdk.weights.transports import streaming_fetch

MODEL = 12 * BUCKET  # 3 chunks
SLACK = BUCKET // 2
"""Heads of requests and answers."""


class Stream:
    """A publisher, and a replica that has fetched version 1 through a proxy for whole buckets."""

    def __init__(self, ends: TransportHarness, digests: bool = True) -> None:
        self.ends, self.digests = ends, digests
        first = ends.publish(1, weights(1), digests=digests)
        self.proxy = FlakyProxy(bulk_of(first.where), pieces=WHOLE)
        self.receiver: Any = ends.receiver()
        ends.keep(1)
        self.base = self.fetch(first)
        assert self.proxy.back < MODEL + SLACK

    def write(self, version: int, seed: int | None = None) -> Callable[[], Sent]:
        """Not sent yet."""
        manifest, memories = self.ends.write(version, weights(seed or version), digests=self.digests)
        return lambda: Sent(manifest, [each.copy() for each in memories], self.ends.send(manifest))

    def publish(self, version: int, seed: int | None = None) -> Sent:
        return self.write(version, seed)()

    def fetch(self, sent: Sent, **options: Any) -> Fetched:
        where = with_bulk(sent.where, port=self.proxy.port)
        fetched = self.ends.fetch(self.receiver, sent, where=where, **options)
        sent.check(fetched)
        return fetched

    def fetching(self, sent: Sent) -> Any:
        where = with_bulk(sent.where, port=self.proxy.port)
        return in_thread(self.receiver.fetch, sent.manifest, where, timeout_s=3600.0)

    def came(self, models: float) -> None:
        until(lambda: self.proxy.back >= models * MODEL, f"{models} models")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_fetch, "CHUNK_STALL_S", 60.0)


def weights(version: int) -> dict[str, Any]:
    return {f"w{number}": numbers(100 * version + number, MODEL // 3) for number in range(3)}


@contextlib.contextmanager
def streaming(digests: bool = True) -> Iterator[Stream]:
    with tcp(insecure=True, delta_bytes=0) as ends:
        stream = Stream(ends, digests)
        with stream.proxy:
            yield stream


@pytest.fixture
def stream() -> Iterator[Stream]:
    with streaming() as made:
        yield made


@pytest.mark.parametrize("digests", [True, False], ids=["verified", "bare"])
def test_chunks_are_here_before_there_is_a_version(digests: bool) -> None:
    with streaming(digests) as stream:
        for version in range(2, 5):
            send = stream.write(version)  # and nobody knows what it is
            stream.came(version)
            sent = send()
            stream.ends.keep(version)
            fetched = stream.fetch(sent)
            assert (fetched.encoding, fetched.moved) == ("full", sent.manifest.nbytes)
            assert stream.proxy.back < version * MODEL + SLACK  # then nothing is asked for again


def test_what_is_still_on_its_way_is_waited_for(stream: Stream) -> None:
    stream.proxy.most = 1.5 * MODEL
    sent = stream.publish(2)
    assert stream.proxy.held.wait(60)
    fetched = stream.fetching(sent)
    stream.proxy.resume()
    sent.check(fetched())
    assert stream.proxy.back < 2 * MODEL + SLACK


@pytest.mark.parametrize("digests", [True, False], ids=["verified", "bare"])
def test_a_stream_that_stalls_is_given_up_and_only_what_is_missing_is_fetched(
    digests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming_fetch, "CHUNK_STALL_S", 0.5)
    with streaming(digests) as stream:
        stream.proxy.most = 1.75 * MODEL
        sent = stream.publish(2)
        assert stream.proxy.held.wait(60)
        stream.proxy.most = NEVER  # connections from now on are not held up
        fetched = stream.fetch(sent, timeout_s=3600.0)
        assert fetched.moved == sent.manifest.nbytes
        assert stream.proxy.back < 2.75 * MODEL


def test_waiting_for_a_stream_ends_with_an_interrupt(stream: Stream) -> None:
    stream.proxy.most = 1.5 * MODEL
    sent = stream.publish(2)
    assert stream.proxy.held.wait(60)
    outcome = stream.fetching(sent)
    done: list[Any] = []
    threading.Thread(target=lambda: done.append(outcome()), daemon=True).start()
    until(lambda: (stream.receiver.interrupt(), done)[1], "the end of the fetch")
    assert isinstance(done[0], WireError), done
    assert "interrupted" in str(done[0])
    stream.proxy.resume()
    stream.fetch(sent)


@pytest.mark.parametrize("when", ["half", "sent"])
@pytest.mark.parametrize("digests", [True, False], ids=["verified", "bare"])
def test_after_a_version_that_was_given_up_the_next_is_streamed(when: str, digests: bool) -> None:
    with streaming(digests) as stream:
        send = stream.write(2, seed=7)
        if when == "sent":
            send()
        stream.came(2)
        stream.ends.trainer("abandon", stream.ends.sender.abandon)
        stream.fetch(stream.publish(2))  # the same number, other bytes
        assert stream.receiver.nbytes <= 3 * MODEL


@pytest.mark.parametrize("digests", [True, False], ids=["verified", "bare"])
def test_another_publisher_with_the_same_numbers(digests: bool) -> None:
    with streaming(digests) as stream:
        stream.publish(2, seed=7)
        stream.came(2)
        first, stream.ends.sender = stream.ends.sender, stream.ends.trainer("another", stream.ends.another_sender)
        try:
            stream.publish(1)
            sent = stream.publish(2)
            sent.check(stream.ends.fetch(stream.receiver, sent))
        finally:
            stream.ends.trainer("close", first.close)


def test_a_flipped_bit_costs_its_bucket_and_nothing_else(stream: Stream) -> None:
    send = stream.write(2)
    stream.came(2)
    stream.fetch(send())
    stream.proxy.spoil = lambda data: data[:-1] + bytes([data[-1] ^ 4]) if len(data) > 100 else data
    send = stream.write(3)
    stream.came(3)
    stream.fetch(send())
    assert stream.proxy.back < 3 * MODEL + 2 * BUCKET


def test_a_replica_that_reads_nothing_holds_up_nobody(stream: Stream) -> None:
    quick = stream.ends.receiver()
    stream.proxy.most = 1.25 * MODEL
    for version in range(2, 8):
        sent = stream.publish(version)
        stream.ends.keep(version)
        sent.check(stream.ends.fetch(quick, sent))
        assert stream.ends.sender.nbytes <= 4 * MODEL + (2 << 20)
    assert stream.proxy.held.wait(60)


def test_a_replica_holds_what_it_has_and_one_more(stream: Stream) -> None:
    for version in range(2, 8):
        sent = stream.publish(version)
        stream.came(version)
        assert stream.receiver.nbytes == 2 * MODEL
        stream.ends.keep(version)
        fetched = stream.fetch(sent, base=stream.base)
        stream.base.release()
        stream.base = fetched


def test_a_version_of_another_layout_comes_all_the_same(stream: Stream) -> None:
    for version in (2, 3):
        layout = {"w": numbers(version, MODEL), "v": numbers(1, 3 * BUCKET + 1)}
        sent = stream.ends.publish(version, layout)
        stream.fetch(sent)


@pytest.mark.parametrize(("share", "models"), [(0.01, 1), (1.0, 2)], ids=["sparse", "dense"])
def test_versions_are_streamed_where_deltas_are_not_smaller(share: float, models: int) -> None:
    with tcp(insecure=True) as ends:
        receiver, model = ends.receiver(), weights(1)
        first = ends.publish(1, model)
        with FlakyProxy(bulk_of(first.where), pieces=WHOLE) as proxy:

            def fetch(sent: Sent, base: Fetched | None) -> Fetched:
                fetched = ends.fetch(receiver, sent, where=with_bulk(sent.where, port=proxy.port), base=base)
                sent.check(fetched)
                return fetched

            base, version = fetch(first, None), 1

            def another_version() -> bool:
                """Publish one and fetch it: by its stream, unless that has not begun yet."""
                nonlocal base, version
                version += 1
                for array in model.values():
                    array[ends.random.random(len(array)) < share] += 1
                sent = ends.publish(version, model)
                ends.keep(version - 1, version)
                base = fetch(sent, base)
                return version > 2 and proxy.back >= models * MODEL

            until(another_version, "whole versions")
            assert (proxy.back > 1.5 * MODEL) == (models > 1)


def test_closing_ends_its_threads_at_either_end() -> None:
    for end in ("sender", "receiver"):
        before = set(threading.enumerate())
        with streaming() as stream:
            stream.write(2)
            stream.came(2)
            if end == "sender":
                stream.ends.trainer("close", stream.ends.sender.close)
            stream.receiver.close()
        until(lambda: set(threading.enumerate()) <= before, "the end of its threads")  # noqa: B023


HEADS = [
    b"\0", b"\xff" * 16, *(struct.pack("<qq", *head) for head in (
        (0, MODEL // 3), (1, 1 << 62), (2, 999), (2, -1), (2, -2), (9, MODEL // 3), (-1, -1),
    )),
]  # fmt: skip


@pytest.mark.parametrize("said", HEADS)
def test_garbage_from_a_publisher_harms_no_replica(said: bytes, stream: Stream) -> None:
    spoiled = threading.Event()
    stream.proxy.spoil = lambda data: (spoiled.set(), said)[1]
    sent = stream.publish(2)
    assert spoiled.wait(60)
    with contextlib.suppress(AsyncFlowError):
        stream.fetch(sent)
    stream.fetch(sent)


@pytest.mark.parametrize("number", [-2, 0, 1 << 62])
@pytest.mark.parametrize("attempt", [-(1 << 63), 0, 2, (1 << 63) - 1])
def test_garbage_from_a_replica_harms_nobody(stream: Stream, attempt: int, number: int) -> None:
    sent = stream.publish(2)
    token = msgspec.msgpack.decode(sent.where)[3][2]
    with socket.create_connection(("127.0.0.1", bulk_of(sent.where)), 60) as stranger:
        stranger.sendall(token + struct.pack("<q16sqq", -1, b"\xff" * 16, attempt, number) + b"\xff" * 7)
        stream.fetch(sent)
        stream.fetch(stream.publish(3))
