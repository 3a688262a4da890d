"""The transport ``dist``: rounds and groups of real processes, which die, stop, come late and ask for more."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from children import Child
from dist_children import content, counts, forget_peak, listening, peak_bytes, publish, receive, train, write
from two_hosts import HERE as HERE_IP
from two_hosts import THERE as THERE_IP
from two_hosts import two_hosts

from asyncflow_sdk.errors import (
    AsyncFlowError,
    ConfigError,
    DeadlineExceeded,
    ProtocolError,
    ServerLost,
    VersionGone,
    WireError,
)
from asyncflow_sdk.interfaces import Host
from asyncflow_sdk.types import Chunk, Manifest
from asyncflow_sdk.weights.service import Where as Reached
from asyncflow_torch import dist_board, dist_receiver, dist_words
from asyncflow_torch.recycled import Recycled
from asyncflow_torch.transport_dist import DistSender, DistTransport

HERE = Host(directory=None, name="trainer")
MB = 1 << 20


class Receiver:
    """A receiver in a process of its own."""

    def __init__(self, name: str, *place: str, within: Sequence[str] = ()) -> None:
        self.name = name
        self.child = Child(receive, name, *place, within=within)
        self._ready = False
        self.owes = 0

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.child.__exit__()

    def wait_ready(self) -> None:
        if not self._ready:
            assert self.child.hear() == "ready"
            self._ready = True

    def told(self, sent: Sent, *, at: int = 0, number: int = 0, timeout_s: float = 30.0) -> None:
        self.wait_ready()
        self.owes += 1
        self.child.say(
            {
                "manifest": msgspec.json.encode(sent.manifest).decode(), "where": sent.where.hex(),
                "at": at, "signal": number, "timeout_s": timeout_s,
            }
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.child.hear()
        self.owes -= 1
        return answer

    def got(self, sent: Sent) -> dict[str, Any]:
        """It has every byte of it."""
        answer = self.answer()
        assert answer.get("content") == sent.content, (self.name, answer)
        return answer

    def failed(self, *words: str) -> str:
        answer = self.answer()
        assert "error" in answer, (self.name, answer)
        for word in words:
            assert word in answer["says"], answer
        return str(answer["error"])


class Sent:
    def __init__(self, manifest: Any, where: bytes, said: str) -> None:
        self.manifest, self.where, self.content = manifest, where, said


def received_of(publisher: Child) -> Sent:
    """What a publisher in another process says it has sent."""
    manifest, where, said = publisher.hear()
    return Sent(msgspec.json.decode(manifest, type=Manifest), bytes.fromhex(where), said)


def sent_by(sender: DistSender, version: int, nbytes: int = 2 * MB, **options: Any) -> Sent:
    manifest, memory = write(sender, version, nbytes, **options)
    return Sent(manifest, sender.send(manifest), content(memory))


Crew = Callable[[int], list[Receiver]]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """So many receivers, which live on for the next test unless they died in this one, or it failed."""
    everybody: list[Receiver] = []

    def alive(count: int) -> list[Receiver]:
        for lost in [each for each in everybody if each.owes or each.child._process.poll() is not None]:
            everybody.remove(lost)
            lost.child.kill()
        while len(everybody) < count:
            everybody.append(stack.enter_context(Receiver(f"r{next(numbers)}")))
        return everybody[:count]

    numbers = itertools.count()
    with contextlib.ExitStack() as stack:
        yield alive


@contextlib.contextmanager
def a_sender(**options: Any) -> Iterator[DistSender]:
    sender = DistTransport(**{"stall_s": 2.0, "gather_s": 30.0} | options).sender(HERE)
    assert isinstance(sender, DistSender)
    try:
        yield sender
    finally:
        sender.close()
        sender.close()


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start it; the returned call gives what it returned or raised."""
    came: list[Any] = []

    def run() -> None:
        try:
            came.append(work())
        except BaseException as error:
            came.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> Any:
        thread.join(60)
        assert came, "it hangs"
        return came[0]

    return join


def until(sender: DistSender, condition: Callable[[], object]) -> None:
    with sender._rounds._changed:
        assert sender._rounds._changed.wait_for(condition, 30)


def together(sender: DistSender, receivers: list[Receiver], sent: Sent, **damage: Any) -> None:
    """They ask for it, and are served together. ``damage``: what the second of them does."""
    for place, each in enumerate(receivers):
        each.told(sent, **damage if place == 1 else {})
    rounds = sender._rounds
    if not rounds._rounds:  # the first one does not know yet for whom to wait
        until(sender, lambda: len(rounds._asking) == len(receivers))
        with rounds._changed:
            rounds._gather_s, before = 0.0, rounds._gather_s
            rounds._changed.notify_all()
        until(sender, lambda: rounds._rounds)
        rounds._gather_s = before


def test_three_receivers_are_served_by_one_group_version_after_version(crew: Crew) -> None:
    receivers = crew(3)
    with a_sender() as sender:
        for version in range(1, 5):
            # when all ask for the newest
            sent = sent_by(sender, version)
            together(sender, receivers, sent)
            # then each has it, by one broadcast to all
            for each in receivers:
                assert each.got(sent)["moved"] == sent.manifest.nbytes
            sender.keep([version])
            assert (sender._rounds._rounds, sender._rounds._groups) == (version, 1)
        # and nobody listens anywhere but on loopback
        for each in receivers:
            each.child.say({"count": 1})
            assert {address for address, _ in each.child.hear()[2]} == {"0100007F"}
        assert {address for address, _ in listening()} == {"0100007F"}


def test_receivers_come_and_go_between_versions(crew: Crew) -> None:
    a, b, late = crew(3)
    with a_sender() as sender:
        first = sent_by(sender, 1)
        together(sender, [a, b], first)
        for each in (a, b):
            each.got(first)
        # when one comes later, it has the version that is current at once: the others have it
        late.told(first)
        late.got(first)
        # then the next goes to all three at once
        second = sent_by(sender, 2)
        for each in (a, b, late):
            each.told(second)
        for each in (a, b, late):
            each.got(second)
        rounds = sender._rounds._rounds
        # and when one has died, to the two that are left, whom nothing holds up
        a.child.kill()
        until(sender, lambda: len(sender._rounds._expected) == 2)
        third = sent_by(sender, 3)
        for each in (b, late):
            each.told(third)
        for each in (b, late):
            each.got(third)
        assert sender._rounds._rounds == rounds + 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_that_dies_or_stops_in_the_middle_is_named_and_left_behind(crew: Crew, how: int) -> None:
    a, bad, c = crew(3)
    with a_sender() as sender:
        sent = sent_by(sender, 7, 8 * MB)
        together(sender, [a, bad, c], sent, at=20, number=how)
        # then the others are told who it was, within their deadline
        for each in (a, c):
            said = f"{bad.name} {'died or left' if how == signal.SIGKILL else 'stopped answering'}"
            assert each.failed("version 7", said, "ask again") == "WireError"
        # and are served when they ask again, without it; so is the next version
        for each in (a, c):
            each.told(sent)
        for each in (a, c):
            each.got(sent)
        if how == signal.SIGSTOP:
            bad.child.resume()
            bad.failed("version 7", f"{bad.name} stopped answering")
        both = (a, c) if how == signal.SIGKILL else (a, bad, c)
        newer = sent_by(sender, 8)
        for each in both:
            each.told(newer)
        for each in both:
            each.got(newer)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_publisher_that_dies_or_stops_in_the_middle_is_named(crew: Crew, how: int) -> None:
    receivers = crew(2)
    with Child(publish, 3, 8 * MB, 40, how) as publisher:
        sent = received_of(publisher)
        # when
        for each in receivers:
            each.told(sent)
        # then
        for each in receivers:
            each.failed("version 3", "publisher trainer died or stopped")
        # and another publisher is served from at once, by the same receivers
        with a_sender() as sender:
            newer = sent_by(sender, 4)
            together(sender, receivers, newer)
            for each in receivers:
                each.got(newer)


def test_another_host_that_is_trusted_and_a_cable_that_is_cut_in_the_middle() -> None:
    with two_hosts() as hosts, contextlib.ExitStack() as stack:
        publisher = stack.enter_context(Child(publish, 3, 24 * MB, 0, 0, HERE_IP, within=hosts.here))
        receivers = [
            stack.enter_context(Receiver(n, address, within=hosts.there))
            for n, address in (("a", THERE_IP), ("b", "127.0.0.1"))
        ]
        for each in receivers:
            each.wait_ready()
        sent = received_of(publisher)
        for each in receivers:
            each.told(sent)
        for each in receivers:
            each.got(sent)
        # when
        middle, waits = receivers
        middle.told(sent, at=20, number=signal.SIGUSR1)
        assert middle.child.hear() == "in the middle"
        hosts.link.say({"cut": True})
        hosts.link.hear()
        waits.told(sent, timeout_s=2.0)
        middle.child.say("go on")
        # then
        assert middle.failed("version 3: round", "publisher trainer died or stopped") == "ServerLost"
        assert waits.failed("version 3 from trainer") == "DeadlineExceeded"
        # and once there is a network again, they are served
        hosts.link.say({"cut": False})
        hosts.link.hear()
        for each in receivers:
            each.told(sent, timeout_s=60.0)
        for each in receivers:
            each.got(sent)


def test_a_publisher_that_stopped_before_is_not_waited_for_past_the_deadline() -> None:
    with Child(publish, 3, MB, 0, 0) as publisher:
        sent = received_of(publisher)
        receiver = DistTransport().receiver(Host(directory=None, name="r"))
        assert isinstance(receiver, dist_receiver.DistReceiver)
        publisher.stop()
        with pytest.raises(DeadlineExceeded, match="version 3 from trainer"):
            receiver.fetch(sent.manifest, sent.where, timeout_s=0.5)
        # nor past an interrupt
        fetch = in_thread(lambda: receiver.fetch(sent.manifest, sent.where, timeout_s=60.0))
        while receiver._asking is None:
            threading.Event().wait(0.001)
        receiver.interrupt()
        error = fetch()
        assert isinstance(error, WireError)
        assert "interrupted" in str(error)
        # and it is served once the publisher goes on
        publisher.resume()
        assert content(receiver.fetch(sent.manifest, sent.where, timeout_s=60.0).chunks) == sent.content
        receiver.close()


@pytest.mark.parametrize(("starts", "looks"), [(40, 0), (0, 1)], ids=["in its broadcast", "while the group is made"])
def test_a_publisher_that_stops_in_a_round_is_not_waited_for_past_the_deadline(starts: int, looks: int) -> None:
    # given one that may hold up others for longer than this one has time
    stall_s = 6.0
    with (
        Child(publish, 3, 8 * MB, starts, signal.SIGSTOP, "127.0.0.1", stall_s, looks) as publisher,
        a_receiver() as receiver,
    ):
        sent = received_of(publisher)
        # when
        error = in_thread(lambda: receiver.fetch(sent.manifest, sent.where, timeout_s=3.0))()
        # then
        assert isinstance(error, DeadlineExceeded), error
        assert "version 3" in str(error)
        assert "trainer" in str(error)
        # and it is served once the publisher goes on
        os.waitpid(publisher.pid, os.WUNTRACED)
        publisher.resume()
        again = in_thread(lambda: receiver.fetch(sent.manifest, sent.where, timeout_s=60.0))()
        assert content(again.chunks) == sent.content


def test_a_flipped_bit_is_found_by_each_and_breaks_no_group(crew: Crew) -> None:
    receivers = crew(2)
    with a_sender() as sender:
        manifest, memory = write(sender, 5, 2 * MB)
        memory[0][MB + 77] ^= 4
        damaged = Sent(manifest, sender.send(manifest), "")
        together(sender, receivers, damaged)
        for each in receivers:
            assert each.failed("version 5", "bucket 16 of chunk 0", "holds head") == "DigestMismatch"
        sender.abandon()
        # and the version is gone for who asks again; the next goes through the same group
        receivers[0].told(damaged)
        assert receivers[0].failed("version 5 is no longer kept") == "VersionGone"
        sent = sent_by(sender, 6)
        for each in receivers:
            each.told(sent)
        for each in receivers:
            each.got(sent)
        assert sender._rounds._groups == 1


def test_a_trainer_that_uses_torch_distributed_itself_never_meets_it(crew: Crew, tmp_path: Path) -> None:
    receivers = crew(2)
    with (
        Child(train, 0, str(tmp_path / "rendezvous"), 4, 4 * MB) as trainer,
        Child(train, 1, str(tmp_path / "rendezvous"), 4, 4 * MB) as other,
    ):
        for _ in range(4):
            sent = received_of(trainer)
            for each in receivers:
                each.told(sent)
            for each in receivers:
                each.got(sent)
            trainer.say("next")
        assert trainer.hear()["steps"] == other.hear()["steps"] > 4


def test_many_versions_leave_nothing_behind(crew: Crew) -> None:
    receivers = crew(2)
    with a_sender(gather_s=0.2) as sender:
        seen = []
        for version in range(1, 31):
            sent = sent_by(sender, version)
            sender.keep([version - 1, version])
            some = receivers if version % 3 else receivers[:1]  # so that groups are made anew
            for each in some:
                each.told(sent)
            for each in some:
                each.got(sent)
            if version in (6, 30):
                for each in receivers:
                    each.child.say({"count": 1})
                seen.append([counts(), *(each.child.hear()[:2] for each in receivers)])
        assert sender._rounds._groups > 10
        assert seen[0] == seen[1]
        assert sender.nbytes <= 3 * (2 * MB + 4096) + MB


def test_memory_is_that_of_the_versions_and_of_a_bucket(crew: Crew) -> None:
    model = 96 * MB
    receivers = crew(2)
    with a_sender() as sender:
        for version in range(1, 7):
            manifest, _ = write(sender, version, model, bucket=4 * MB)
            sent = Sent(manifest, sender.send(manifest), "")
            sender.keep([version - 1, version])
            before = forget_peak()
            together(sender, receivers, sent)
            for each in receivers:
                # then a receiver takes one version, and none once it uses the memory of one that was released
                assert each.answer()["grown"] <= (model if version == 1 else 0) + 24 * MB
            # and the sender's end what is staged (each page of it once it is mapped): broadcasts add nothing of theirs
            assert peak_bytes() - before <= (model if version < 4 else 0) + 24 * MB
        assert sender.nbytes <= 3 * (model + 4096) + MB


# ---- in one process


@contextlib.contextmanager
def a_receiver(name: str = "r") -> Iterator[dist_receiver.DistReceiver]:
    receiver = DistTransport().receiver(Host(directory=None, name=name))
    assert isinstance(receiver, dist_receiver.DistReceiver)
    try:
        yield receiver
    finally:
        receiver.close()
        receiver.close()


def test_an_interrupt_ends_a_fetch_that_waits_for_its_round() -> None:
    with a_sender(gather_s=300.0) as sender, a_receiver() as receiver:
        sent = sent_by(sender, 1)  # the first round of all waits for others that may come
        fetch = in_thread(lambda: receiver.fetch(sent.manifest, sent.where, timeout_s=60.0))
        until(sender, lambda: sender._rounds._asking)
        receiver.interrupt()
        error = fetch()
        assert isinstance(error, WireError)
        assert "version 1: interrupted" in str(error)
        assert not sender._rounds._asking


def test_an_interrupt_ends_a_round_that_nobody_wants_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a round in the middle
    monkeypatch.setattr(dist_words, "STRETCH_BYTES", 1 << 18)
    middle, go_on = threading.Event(), threading.Event()
    arrived = dist_receiver._Part._arrived

    def held(part: Any, bucket: Any) -> None:
        middle.set()
        assert go_on.wait(30)
        arrived(part, bucket)

    monkeypatch.setattr(dist_receiver._Part, "_arrived", held)
    with a_sender(gather_s=0.1, stall_s=30.0) as sender, a_receiver() as receiver:
        sent = sent_by(sender, 1, 32 * MB)
        fetch = in_thread(lambda: receiver.fetch(sent.manifest, sent.where, timeout_s=60.0))
        assert middle.wait(30)
        # when
        receiver.interrupt()
        until(sender, lambda: sender._rounds._round.unwanted)
        go_on.set()
        # then
        error = fetch()
        assert isinstance(error, WireError)
        assert "interrupted" in str(error)
        # and the newer one comes
        newer = sent_by(sender, 2)
        assert content(receiver.fetch(newer.manifest, newer.where, timeout_s=30.0).chunks) == newer.content


def test_a_close_ends_a_fetch_that_waits_for_its_round_and_one_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_sender(gather_s=300.0) as sender, a_receiver() as receiver:
        sent = sent_by(sender, 1)
        fetch = in_thread(lambda: receiver.fetch(sent.manifest, sent.where, timeout_s=60.0))
        until(sender, lambda: sender._rounds._asking)
        receiver.close()
        error = fetch()
        assert isinstance(error, WireError)
        assert "version 1 from trainer" in str(error)
        until(sender, lambda: not sender._rounds._asking)
    middle, go_on = threading.Event(), threading.Event()
    arrived = dist_receiver._Part._arrived

    def held(part: Any, bucket: Any) -> None:
        middle.set()
        assert go_on.wait(30)
        arrived(part, bucket)

    monkeypatch.setattr(dist_receiver._Part, "_arrived", held)
    with a_sender(gather_s=0.1, stall_s=30.0) as sender, a_receiver() as receiver:
        sent = sent_by(sender, 1, 32 * MB)
        fetch = in_thread(lambda: receiver.fetch(sent.manifest, sent.where, timeout_s=60.0))
        assert middle.wait(30)
        receiver.close()
        go_on.set()
        error = fetch()
        assert isinstance(error, WireError)
        assert "this receiver was closed" in str(error)
        # and another one is served
        with a_receiver("other") as other:
            assert content(other.fetch(sent.manifest, sent.where, timeout_s=30.0).chunks) == sent.content


def test_a_publisher_that_closes_ends_the_round_and_who_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist_words, "STRETCH_BYTES", 1 << 18)
    middle, go_on = threading.Event(), threading.Event()
    arrived = dist_receiver._Part._arrived

    def held(part: Any, bucket: Any) -> None:
        middle.set()
        assert go_on.wait(30)
        arrived(part, bucket)

    monkeypatch.setattr(dist_receiver._Part, "_arrived", held)
    with a_sender(gather_s=0.1, stall_s=30.0) as sender, a_receiver("r") as receiver, a_receiver("s") as second:
        sent = sent_by(sender, 1, 32 * MB)
        fetch = in_thread(lambda: receiver.fetch(sent.manifest, sent.where, timeout_s=60.0))
        assert middle.wait(30)
        waits = in_thread(lambda: second.fetch(sent.manifest, sent.where, timeout_s=60.0))
        until(sender, lambda: sender._rounds._asking)
        close = in_thread(sender.close)
        until(sender, lambda: sender._rounds._closed)
        go_on.set()
        for error in (fetch(), waits()):
            assert isinstance(error, ServerLost)
            assert "its publisher trainer has closed" in str(error)
        assert close() is None


def test_training_goes_on_while_a_receiver_holds_up_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a receiver that has stopped in the middle of a round
    middle, go_on = threading.Event(), threading.Event()

    def held(part: Any, bucket: Any) -> None:
        middle.set()
        assert go_on.wait(30)

    monkeypatch.setattr(dist_receiver._Part, "_arrived", held)
    with a_sender(gather_s=0.1, stall_s=30.0) as sender, a_receiver() as receiver:
        sent = sent_by(sender, 1, 32 * MB)
        fetch = in_thread(lambda: receiver.fetch(sent.manifest, sent.where, timeout_s=60.0))
        assert middle.wait(30)
        # when the trainer publishes on, and drops what is being read
        for version in range(2, 6):
            sent_by(sender, version)
            sender.keep([version])
        # then nothing of it waited, and the version under way arrives as it was
        go_on.set()
        assert content(fetch().chunks) == sent.content
        with pytest.raises(VersionGone, match="version 1 is no longer kept"):
            receiver.fetch(sent.manifest, sent.where, timeout_s=30.0)


def test_a_receiver_that_outlives_its_trainers_keeps_no_link_to_them() -> None:
    files: list[int] = []
    with a_receiver() as receiver:
        for version in range(1, 5):
            with a_sender(gather_s=0.0) as sender:
                sent = sent_by(sender, version)
                receiver.fetch(sent.manifest, sent.where, timeout_s=30.0)
                assert list(receiver._links) == [sent.where]
                link = receiver._links[sent.where]
                receiver.fetch(sent.manifest, sent.where, timeout_s=30.0)
                assert receiver._links[sent.where] is link
                files.append(counts()[0])
        # then they come to be closed: ZeroMQ does it behind
        end = time.monotonic() + 30
        while counts()[0] > files[0]:
            assert time.monotonic() < end, f"{counts()[0]} of {files} are never closed"
            threading.Event().wait(0.01)


def test_what_cannot_work_is_refused_with_what_to_use_instead() -> None:
    far = Host(directory=None, name="far", address="10.1.2.3")
    with pytest.raises(ConfigError, match=r"10\.1\.2\.3: .*not encrypted.*plain=True.*tcp"):
        DistTransport().sender(far)
    with pytest.raises(ConfigError, match="no backend 'mpi'; it has gloo and nccl"):
        DistTransport("mpi")
    with pytest.raises(ConfigError, match="stall_s=0"):
        DistTransport(stall_s=0)
    with pytest.raises(ConfigError, match="nccl: there is no CUDA device.*gloo.*tcp"):
        DistTransport("nccl").sender(HERE)


def test_the_fetching_end_believes_no_publisher() -> None:
    with a_sender(gather_s=0.0) as sender:
        sent = sent_by(sender, 1)
        where = msgspec.msgpack.decode(sent.where, type=dist_words.Where)

        def fetch(**changes: Any) -> Any:
            receiver = DistTransport().receiver(HERE)
            raw = msgspec.msgpack.encode(msgspec.structs.replace(where, **changes))
            try:
                return receiver.fetch(sent.manifest, raw, timeout_s=30.0)
            finally:
                receiver.close()

        service = msgspec.msgpack.decode(where.service, type=Reached)
        for address in ("tcp://10.1.2.3:5", "tcp://[2001:db8::1]:5", "tcp://somewhere:5"):
            far = msgspec.structs.replace(service, address=address, trusted=True)
            with pytest.raises(ConfigError, match="dist at .* not encrypted"):
                fetch(service=msgspec.msgpack.encode(far))
        with pytest.raises(ConfigError, match="nccl: there is no CUDA device"):
            fetch(backend="nccl")
        with pytest.raises(ConfigError, match="no backend 'rm -rf'"):
            fetch(backend="rm -rf")
        for stall_s in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ProtocolError, match="lets others wait"):
                fetch(stall_s=stall_s)
        other = msgspec.structs.replace(sent.manifest, tensors=())
        receiver = DistTransport().receiver(HERE)
        with pytest.raises(ProtocolError, match="trainer has another manifest"):
            receiver.fetch(other, sent.where, timeout_s=30.0)
        receiver.close()
        assert fetch().moved == sent.manifest.nbytes


def test_who_speaks_nonsense_harms_nobody() -> None:
    gc.collect()  # errors of tests before may still refer to groups
    with a_sender(gather_s=0.0) as sender, a_receiver() as receiver:
        sent = sent_by(sender, 1)
        receiver.fetch(sent.manifest, sent.where, timeout_s=30.0)
        # to the service
        link = receiver._link(sent.where)
        for body in (
            b"", b"\xc1", b"\x90", *map(msgspec.msgpack.encode, (["join", 1], ["look", 9, []], ["put", 1, "x", b""],
            ["over", 1, "for fun"], ["over", -1, ""], ["leave", 0], ["leave", -1])),
        ):  # fmt: skip
            with contextlib.suppress(AsyncFlowError):
                link._client.call(body, 30.0)
        # and to every port at which this process listens, those of the group too
        ports = [port for _, port in listening()]
        assert len(ports) == 3
        with contextlib.ExitStack() as stack:
            for port in ports:
                for junk in (b"", b"x", b"GET / HTTP/1.0\r\n\r\n", bytes(64), b"\xff" * 100_000):
                    caller = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    with contextlib.suppress(OSError):
                        caller.sendall(junk)
            for _ in range(2):
                assert content(receiver.fetch(sent.manifest, sent.where, timeout_s=30.0).chunks) == sent.content
        assert sender._rounds._groups == 1


def test_only_members_of_a_round_write_and_read_on_its_board(monkeypatch: pytest.MonkeyPatch) -> None:
    middle, go_on = threading.Event(), threading.Event()
    made = dist_receiver.Group

    def held(*arguments: Any) -> Any:
        middle.set()
        assert go_on.wait(30)
        return made(*arguments)

    with a_sender(gather_s=0.0, stall_s=30.0) as sender, a_receiver() as receiver, a_receiver("stranger") as other:
        sent = sent_by(sender, 1)
        monkeypatch.setattr(dist_receiver, "Group", held)
        fetch = in_thread(lambda: receiver.fetch(sent.manifest, sent.where, timeout_s=30.0))
        assert middle.wait(30)
        # given a group that is being made
        group, stranger, member = sender._rounds._groups, other._link(sent.where), receiver._link(sent.where)
        for word in (dist_words.Put(group, "0/1", bytes(64)), dist_words.Look(group, ("0/0",))):
            with pytest.raises(ProtocolError, match="no member of round 1"):
                stranger._client.call(dist_words.encode(word), 30.0)
        # nor do members write without end
        with pytest.raises(ProtocolError, match="a group is made with less"):
            member._client.call(dist_words.encode(dist_words.Put(group, "x", bytes(1 << 15))), 30.0)
        with pytest.raises(ProtocolError, match="a board has"):
            member._client.call(dist_words.encode(dist_words.Look(group, ("x",) * 5000)), 30.0)
        # then it is made, and when its round is over, nobody has a word in it
        go_on.set()
        assert content(fetch().chunks) == sent.content
        until(sender, lambda: sender._rounds._round is None)
        for link in (stranger, member):
            with pytest.raises(WireError, match="that round is over"):
                link._client.call(dist_words.encode(dist_words.Put(group, "0/1", bytes(64))), 30.0)


def test_a_board_has_room_for_so_many_words() -> None:
    board = dist_board.Board()
    for number in range(dist_board.MAX_KEYS):
        board.put(str(number), b"x")
    board.put("0", b"y")
    with pytest.raises(ProtocolError, match="more than"):
        board.put("one more", b"x")


@pytest.mark.parametrize(
    "hold",
    [lambda v: v[3:5].view("<u2"), torch.from_numpy, memoryview, lambda v: v],
    ids=["view", "tensor", "buffer", "itself"],
)
def test_memory_is_used_again_only_when_nobody_refers_to_it(hold: Callable[[Any], Any]) -> None:
    manifest = Manifest(1, (), (Chunk(1000), Chunk(2000), Chunk(1000)))
    memory = Recycled()
    first = memory.take(manifest)
    places = {chunk.ctypes.data for chunk in first}
    held = hold(first[1])
    del first
    # when
    second = memory.take(manifest)
    # then
    again = places & {chunk.ctypes.data for chunk in second}
    assert len(again) == 2
    assert all(chunk.flags.writeable for chunk in second)
    del held, second
    assert len({chunk.ctypes.data for chunk in memory.take(manifest)}) == 3
