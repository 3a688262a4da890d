"""A version that is fetched while it is written: it is what was published, whatever became of what came ahead."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from children import Child
from tcp_ends import in_thread, numbers, publish_half, tcp
from waiting import until

from asyncflow_sdk.errors import DeadlineExceeded, WireError
from asyncflow_sdk.interfaces.weights import Fetched, Host
from asyncflow_sdk.testing.ends import BUCKET, Ends, Sent
from asyncflow_sdk.types import Chunk, Manifest
from asyncflow_sdk.weights import ahead, bulk
from asyncflow_sdk.weights.ahead import Ahead
from asyncflow_sdk.weights.bulk import BulkWhere
from asyncflow_sdk.weights.landing import Landing
from asyncflow_sdk.weights.tcp import TcpTransport
from asyncflow_sdk.weights.tcp_messages import TcpWhere
from asyncflow_sdk.weights.unfinished import GONE

MODEL = 12 * BUCKET  # 3 chunks


@pytest.fixture
def ends() -> Iterator[Ends]:
    with tcp(delta_bytes=0) as ends:
        yield ends


def weights(version: int) -> dict[str, Any]:
    return {f"w{number}": numbers(100 * version + number, MODEL // 3) for number in range(3)}


def asked(ends: Ends) -> list[int]:
    """How many buckets are asked for once there is a version, in a list of one."""
    count, find = [0], ends.sender._bulk._find  # type: ignore[attr-defined]

    def counting(version: int, root: str, first: int, buckets: int) -> Any:
        count[0] += buckets
        return find(version, root, first, buckets)

    ends.sender._bulk._find = counting  # type: ignore[attr-defined]
    return count


def following(receiver: Any) -> Ahead:
    (found,) = receiver._ahead.values()
    return found


def came(receiver: Any, chunks: int = 3) -> None:
    until(lambda: (got := following(receiver)._came) is not None and len(got.found) >= 4 * chunks, f"{chunks} chunks")


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "asyncflow-ahead"]


def given_a_follower(ends: Ends, digests: bool = True) -> tuple[Any, Fetched]:
    receiver = ends.receiver()
    sent = ends.publish(1, weights(1), digests=digests)
    ends.keep(1)
    return receiver, ends.fetch(receiver, sent)


@pytest.mark.parametrize("digests", [True, False], ids=["verified", "bare"])
def test_chunks_are_here_before_there_is_a_version(ends: Ends, digests: bool) -> None:
    receiver, base = given_a_follower(ends, digests)
    for version in range(2, 6):
        # when it is written, and nobody knows what it is
        manifest, memories = ends.write(version, weights(version), digests=digests)
        came(receiver)
        sent = Sent(manifest, [each.copy() for each in memories], ends.send(manifest))
        ends.keep(version)
        # then nothing is asked for
        count = asked(ends)
        fetched = ends.fetch(receiver, sent, base=base)
        sent.check(fetched)
        assert (count, fetched.encoding, fetched.moved) == ([0], "full", manifest.nbytes)
        base = fetched


def test_what_is_still_on_its_way_is_waited_for(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, _ = given_a_follower(ends)
    monkeypatch.setattr(ahead, "STALL_S", 60.0)
    gate = threading.Event()
    monkeypatch.setattr(ends.sender._bulk, "_follow", gated(ends, gate, after=1))  # type: ignore[attr-defined]
    sent = ends.publish(2, weights(2))
    came(receiver, 1)
    count = asked(ends)
    fetched = in_thread(receiver.fetch, sent.manifest, sent.where, timeout_s=30.0)
    until(lambda: receiver._fetch is not None and receiver._fetch.ahead._taken, "the wait")
    gate.set()
    sent.check(fetched())
    assert count == [0]


def gated(ends: Ends, gate: threading.Event, after: int) -> Any:
    """Gives chunks from number ``after`` on once the gate is open."""
    follow = ends.sender._next  # type: ignore[attr-defined]

    def waiting(connection: socket.socket, attempt: int, number: int) -> Any:
        if number >= after:
            gate.wait(30)
        return follow(connection, attempt, number)

    return waiting


@pytest.mark.parametrize("digests", [True, False], ids=["verified", "bare"])
def test_what_does_not_come_on_is_fetched(ends: Ends, digests: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "STALL_S", 0.05)
    receiver, _ = given_a_follower(ends, digests)
    gate = threading.Event()
    monkeypatch.setattr(ends.sender._bulk, "_follow", gated(ends, gate, after=2))  # type: ignore[attr-defined]
    sent = ends.publish(2, weights(2), digests=digests)
    came(receiver, 2)
    count = asked(ends)
    fetched = ends.fetch(receiver, sent, timeout_s=3600.0)
    gate.set()
    sent.check(fetched)
    assert count == [4]
    assert fetched.moved == sent.manifest.nbytes


def test_waiting_ends_at_the_deadline_and_with_an_interrupt(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "STALL_S", 60.0)
    receiver, _ = given_a_follower(ends)
    gate = threading.Event()
    monkeypatch.setattr(ends.sender._bulk, "_follow", gated(ends, gate, after=2))  # type: ignore[attr-defined]
    sent = ends.publish(2, weights(2))
    came(receiver, 2)
    with contextlib.suppress(DeadlineExceeded):  # what is missing may come in the last moment
        ends.fetch(receiver, sent, timeout_s=0.2)
    sent.check(ends.fetch(receiver, sent))
    sent = ends.publish(3, weights(3))
    came(receiver, 2)
    late = in_thread(receiver.fetch, sent.manifest, sent.where, timeout_s=3600.0)
    until(lambda: receiver._fetch is not None and receiver._fetch.ahead._taken, "the wait")
    receiver.interrupt()
    with pytest.raises(WireError, match="interrupted"):
        late()
    gate.set()
    sent.check(ends.fetch(receiver, sent))


@pytest.mark.parametrize("when", ["half", "sent"])
@pytest.mark.parametrize("digests", [True, False], ids=["verified", "bare"])
def test_after_one_that_was_given_up_the_next_is_followed(ends: Ends, when: str, digests: bool) -> None:
    receiver, _ = given_a_follower(ends, digests)
    if when == "half":
        ends.write(2, weights(7), digests=digests)
        came(receiver, 2)
    else:
        ends.publish(2, weights(7), digests=digests)
        until(following(receiver)._whole.is_set, "the whole of it")
    ends.trainer("abandon", ends.sender.abandon)
    count = asked(ends)
    sent = ends.publish(2, weights(2), digests=digests)  # the same number, other bytes
    if when == "half":
        until(lambda: following(receiver)._attempt == 3, "the next attempt")
        came(receiver)
    sent.check(ends.fetch(receiver, sent))
    assert count == [0 if when == "half" else 12]
    assert receiver.nbytes <= 3 * MODEL


@pytest.mark.parametrize("digests", [True, False], ids=["verified", "bare"])
def test_another_publisher_with_the_same_numbers(ends: Ends, digests: bool) -> None:
    receiver, _ = given_a_follower(ends, digests)
    ends.publish(2, weights(7), digests=digests)
    came(receiver)
    other = ends.trainer("another sender", ends.another_sender)
    first, ends.sender = ends.sender, other
    try:
        ends.publish(1, weights(1), digests=digests)
        sent = ends.publish(2, weights(2), digests=digests)
        sent.check(ends.fetch(receiver, sent))
    finally:
        ends.trainer("close", first.close)


def test_a_flipped_bit_costs_its_bucket_and_nothing_else(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, _ = given_a_follower(ends)
    follow = ends.sender._next  # type: ignore[attr-defined]

    def flipped(*arguments: Any) -> Any:
        attempt, chunk = follow(*arguments)
        if not isinstance(chunk, int):
            chunk = np.array(chunk)
            chunk[BUCKET + 7] ^= 4
        return attempt, chunk

    monkeypatch.setattr(ends.sender._bulk, "_follow", flipped)  # type: ignore[attr-defined]
    sent = ends.publish(2, weights(2))
    came(receiver)
    count = asked(ends)
    sent.check(ends.fetch(receiver, sent))
    assert count == [3]


def test_two_receivers_and_one_that_reads_nothing_hold_up_nobody(ends: Ends) -> None:
    one, base = given_a_follower(ends)
    two = ends.receiver()
    first = ends.publish(2, weights(2))
    ends.keep(2)
    first.check(ends.fetch(two, first))
    first.check(ends.fetch(one, first, base=base))
    place = msgspec.msgpack.decode(first.where, type=TcpWhere)
    assert place.bulk is not None
    with bulk._open(place.bulk, 10) as silent:
        silent.sendall(place.bulk.token + bulk._REQUEST.pack(-1, bytes(16), place.attempt, 0))
        for version in range(3, 9):
            sent = ends.publish(version, weights(version))
            ends.keep(version)
            for receiver in (one, two):
                sent.check(ends.fetch(receiver, sent))
            assert ends.sender.nbytes <= 4 * MODEL + (2 << 20)


def test_a_replica_holds_what_it_has_and_one_more(ends: Ends) -> None:
    receiver, base = given_a_follower(ends)
    for version in range(2, 12):
        sent = ends.publish(version, weights(version))
        came(receiver)
        assert receiver.nbytes == 2 * MODEL
        ends.keep(version)
        fetched = ends.fetch(receiver, sent, base=base)
        base.release()
        base = fetched
    # also where another version is fetched than came
    until(lambda: following(receiver)._attempt == 0, "the next one to be followed")
    skipped = ends.publish(12, weights(12))
    came(receiver)
    sent = ends.publish(13, weights(13))
    fetched = ends.fetch(receiver, sent, base=base)
    sent.check(fetched)
    assert skipped.version == 12
    assert receiver.nbytes <= 2 * MODEL


def test_another_layout_is_not_followed(ends: Ends) -> None:
    receiver, _ = given_a_follower(ends)
    behind = following(receiver)
    sent = ends.publish(2, {"w": numbers(0, MODEL), "v": numbers(1, 3 * BUCKET + 1)})
    until(behind._ended.is_set, "its end")
    assert behind._came is None
    sent.check(ends.fetch(receiver, sent))
    # but the one after it is
    sent = ends.publish(3, {"w": numbers(2, MODEL), "v": numbers(3, 3 * BUCKET + 1)})
    came(receiver, 2)
    sent.check(ends.fetch(receiver, sent))


@pytest.mark.parametrize(("share", "followed"), [(0.01, False), (1.0, True)], ids=["sparse", "dense"])
def test_versions_are_followed_where_deltas_are_not_smaller(share: float, followed: bool) -> None:
    with tcp() as ends:
        receiver: Any = ends.receiver()
        model = weights(1)
        base = ends.fetch(receiver, ends.publish(1, model))
        assert not receiver._ahead  # a delta may be all that is needed
        for array in model.values():
            array[ends.random.random(len(array)) < share] += 1
        sent = ends.publish(2, model)
        ends.keep(1, 2)
        sent.check(ends.fetch(receiver, sent, base=base))
        assert bool(receiver._ahead) == followed


def test_closing_ends_its_thread_at_either_end(ends: Ends) -> None:
    receiver, _ = given_a_follower(ends)
    ends.publish(2, weights(2))
    came(receiver)
    assert threads()
    ends.trainer("close", ends.sender.close)
    until(lambda: not threads(), "its end")
    assert receiver.nbytes <= 2 * MODEL
    assert following(receiver)._came is None
    receiver.close()
    with tcp(delta_bytes=0) as others:
        receiver, _ = given_a_follower(others)
        assert threads()
        receiver.close()
        until(lambda: not threads(), "its end")


def test_a_publisher_that_is_killed_in_the_middle() -> None:
    receiver: Any = TcpTransport().receiver(Host(directory=None, name="replica"))
    with Child(publish_half, MODEL) as publisher:
        manifest, where = publisher.hear()
        first = msgspec.msgpack.decode(bytes.fromhex(manifest), type=Manifest)
        fetched = receiver.fetch(first, bytes.fromhex(where), timeout_s=30.0)
        publisher.say("go on")
        assert publisher.hear() == "half"
        came(receiver, 1)
        # when
        publisher.kill()
    # then what came is given back, and another publisher's version comes
    until(lambda: not threads(), "its end")
    assert following(receiver)._came is None
    before = [chunk.copy() for chunk in fetched.chunks]
    with tcp(delta_bytes=0) as ends:
        sent = ends.publish(2, weights(2))
        sent.check(receiver.fetch(sent.manifest, sent.where, timeout_s=30.0))
    assert all((a == b).all() for a, b in zip(before, fetched.chunks, strict=True))
    receiver.close()


BEGUN = struct.pack("<qq", 9, 1000)
HEADS = [
    b"", b"\0", b"\xff" * 16, struct.pack("<qq", 0, 1000), struct.pack("<qq", 1, 1 << 62), struct.pack("<qq", 9, 999),
    struct.pack("<qq", 9, -1), struct.pack("<qq", 9, GONE), BEGUN, BEGUN + BEGUN + bytes(500),
    BEGUN + struct.pack("<qq", 9, 1), BEGUN + struct.pack("<qq", 8, 1000), BEGUN + struct.pack("<qq", 9, GONE) * 3,
    BEGUN * 2 + bytes(1000) + BEGUN, BEGUN * 2 + bytes(1000) + struct.pack("<qq", 9, -1) + b"and more",
    BEGUN * 2 + bytes(1000) + struct.pack("<qq", 9, GONE) + BEGUN,
]  # fmt: skip


@pytest.mark.parametrize("said", HEADS)
def test_garbage_from_a_publisher_leaves_nothing(said: bytes) -> None:
    landing = Landing()
    with listening(said) as where:
        found = Ahead(landing, TcpWhere(b"", 1, bulk=where, attempt=1), Manifest(1, (), (Chunk(1000, (b"x" * 16,)),)))
        until(found._ended.is_set, "its end")
    assert found._came is None
    assert landing.nbytes == (1000 if said.startswith(BEGUN) else 0)


@contextlib.contextmanager
def listening(said: bytes) -> Iterator[BulkWhere]:
    """A server that says so, whatever it is asked, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield BulkWhere("127.0.0.1", listener.getsockname()[1], bytes(32))
        thread.join(30)


@pytest.mark.parametrize("number", [-2, -1, 0, 2, 1 << 62])
@pytest.mark.parametrize("attempt", [-(1 << 63), -1, 0, 1, 2, (1 << 63) - 1])
def test_garbage_from_who_follows_harms_nobody(ends: Ends, attempt: int, number: int) -> None:
    receiver, _ = given_a_follower(ends)
    place = ends.sender._bulk.where  # type: ignore[attr-defined]
    with bulk._open(place, 10) as stranger:
        request = bulk._REQUEST.pack(-1, b"\xff" * 16, attempt, number)
        stranger.sendall(place.token + request + b"\xff" * 7)
        sent = ends.publish(2, weights(2))
        sent.check(ends.fetch(receiver, sent))
    until(lambda: len(ends.sender._bulk._connections) <= 2, "the end of its connection")  # type: ignore[attr-defined]
