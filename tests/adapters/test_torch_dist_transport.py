"""The transport ``dist`` between processes, which die, stop, are cut off and hold memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from children import Child
from dist_parts import (
    LOOPBACK,
    MB,
    Gate,
    Sent,
    a_receiver,
    a_sender,
    fetching,
    long_sent_by,
    own_sockets,
    publish,
    receive,
    sent_by,
    write,
)
from hosts_in_namespaces import HERE, THERE, network
from waiting import in_thread, until

from asyncflow_sdk.errors import DeadlineExceeded, DigestMismatch, ServerLost, VersionGone, WireError


def leave_nothing(senders: int, versions: int) -> None:
    """Many versions to changing receivers, which outlive their senders. There are no more descriptors and threads at
    the last version of a sender than at that of the first."""

    def settled() -> bool:
        found[-1] = [len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task")]
        return all(have <= most for have, most in zip(found[-1], found[0], strict=True))

    found: list[list[int]] = []
    with a_receiver("a") as a, a_receiver("b") as b:
        for _ in range(senders):
            with a_sender() as sender:
                for version in range(versions):
                    sent = sent_by(sender, version)
                    sender.keep([version - 1, version])
                    for fetch in [fetching(each, sent) for each in ((a, b) if version % 3 else (a,))]:
                        sent.check(fetch())
                found.append([])
                until(settled, "no more descriptors and threads than at first")  # sockets are closed a little later
                assert sender.nbytes <= 4 * (2 * MB + 4096), sender.nbytes


class Receiver:
    """A receiver in a process of its own."""

    def __init__(self, *place: str, **options: Any) -> None:
        self.child = Child(receive, *place, **options)

    def __enter__(self) -> Receiver:
        assert self.child.hear() == "ready"
        return self

    def __exit__(self, *exc: object) -> None:
        self.child.__exit__()

    def ask(self, sent: Sent, *, wait: bool = False, timeout_s: float = 60.0) -> None:
        """``wait``: behind the first bucket, until it is told to go on."""
        self.child.say([sent.packed(), wait, timeout_s])

    def got(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.child.hear()
        assert "error" not in answer, answer
        return answer

    def failed(self, kind: str, says: str) -> None:
        answer = self.child.hear()
        assert (answer["error"], says in answer["says"]) == (kind, True), answer


@pytest.fixture(scope="module")
def far() -> Iterator[Receiver]:
    with Receiver("far") as receiver:
        yield receiver


def together(sent: Sent, far: Receiver, *receivers: Any) -> None:
    """All of them ask, and all are served."""
    far.ask(sent)
    for fetch in [fetching(each, sent) for each in receivers]:
        sent.check(fetch())
    far.got()


def test_receivers_come_are_served_by_one_group_and_one_that_stops_or_dies_is_named_and_left_behind() -> None:
    others = own_sockets("0A")
    with (
        a_sender(stall_s=6.0, gather_s=10.0) as sender,
        Receiver("far") as far,
        a_receiver("a") as a,
        a_receiver("b") as b,
    ):
        # given receivers that know each other, one of which came later
        first = sent_by(sender, 1)
        together(first, far, a)
        first.check(b.fetch(first.manifest, first.where, timeout_s=60.0))
        together(sent_by(sender, 2), far, a, b)
        group = own_sockets("0A") - others  # each member listens for it, as long as it is the same

        # then the next versions are sent in the same group, and nobody listens anywhere but on loopback
        for version in (3, 4):
            together(sent_by(sender, version), far, a, b)
        assert own_sockets("0A") - others == group
        assert {local.partition(":")[0] for local, _ in group} == {"0100007F"}

        # and a flipped bit is found by each, the version is gone for later ones, and the group stays
        manifest = write(sender, 5, flip=77)
        damaged = Sent(manifest, sender.send(manifest))
        far.ask(damaged)
        for error in [fetch() for fetch in [fetching(each, damaged) for each in (a, b)]]:
            assert isinstance(error, DigestMismatch)
            assert "version 5: bucket 0 of chunk 0" in str(error)
        far.failed("DigestMismatch", "holds w0")
        sender.abandon()
        with pytest.raises(VersionGone, match="version 5 is no longer kept"):
            a.fetch(damaged.manifest, damaged.where, timeout_s=30.0)
        together(sent_by(sender, 6), far, a, b)
        assert own_sockets("0A") - others == group

        # when one stops in the middle of a round, and later is killed
        for version, how, says in ((7, "stop", "stopped answering"), (8, "kill", "died or left")):
            sent = long_sent_by(sender, version)
            far.ask(sent, wait=True)
            fetches = [fetching(each, sent) for each in (a, b)]
            assert far.child.hear() == "in the middle"
            getattr(far.child, how)()
            # then the others are told who it was, are served without it, and it is served when it is back
            for error in [fetch() for fetch in fetches]:
                assert isinstance(error, WireError), error
                assert f"far {says}" in str(error)
                assert "ask again" in str(error)
            for fetch in [fetching(each, sent) for each in (a, b)]:
                sent.check(fetch())
            if how == "stop":
                far.child.resume()
                far.child.say("go on")
                far.failed("WireError", "far stopped answering")
                far.ask(sent)
                far.got()


def test_a_publisher_that_stops_or_dies_is_not_waited_for_and_another_one_serves() -> None:
    with Child(publish, True) as publisher, a_receiver() as receiver:
        sent = Sent.of(publisher.hear())
        # given one that stopped before: a deadline, or an interrupt
        publisher.stop()
        with pytest.raises(DeadlineExceeded, match="version 3 from trainer"):
            receiver.fetch(sent.manifest, sent.where, timeout_s=0.3)
        error = interrupted(receiver, sent)
        assert "interrupted" in str(error)
        publisher.resume()
        sent.check(receiver.fetch(sent.manifest, sent.where, timeout_s=60.0))

        # given one that stops in a broadcast
        gate = Gate(receiver, sent, timeout_s=3.0)
        publisher.stop()
        error = gate.opened()
        assert isinstance(error, DeadlineExceeded), error
        assert "version 3" in str(error)
        assert "trainer" in str(error)
        publisher.resume()
        sent.check(receiver.fetch(sent.manifest, sent.where, timeout_s=60.0))

        # given one that dies in it
        gate = Gate(receiver, sent)
        publisher.kill()
        error = gate.opened()
        assert isinstance(error, WireError), error
        assert "publisher trainer died or stopped" in str(error)
        with a_sender() as sender:
            newer = sent_by(sender, 4)
            newer.check(receiver.fetch(newer.manifest, newer.where, timeout_s=60.0))


def interrupted(receiver: Any, sent: Sent) -> Any:
    """The outcome of a fetch that is interrupted until it ends."""
    outcome: list[Any] = []
    fetch = fetching(receiver, sent)
    waiting = threading.Thread(target=lambda: outcome.append(fetch()))
    waiting.start()
    while waiting.is_alive():
        receiver.interrupt()
        waiting.join(0.05)
    return outcome[0]


def test_another_host_that_is_trusted_and_a_cable_that_is_cut_in_the_middle() -> None:
    with network(2) as hosts, contextlib.ExitStack() as stack:
        publisher = stack.enter_context(Child(publish, True, HERE, within=hosts.within(1)))
        middle, waits = (
            stack.enter_context(Receiver(name, address, within=hosts.within(2)))
            for name, address in (("a", THERE), ("b", LOOPBACK))
        )
        sent = Sent.of(publisher.hear())
        for each in (middle, waits):
            each.ask(sent)
        for each in (middle, waits):
            each.got()
        # when
        middle.ask(sent, wait=True, timeout_s=10.0)
        assert middle.child.hear() == "in the middle"
        hosts.cut(2)
        waits.ask(sent, timeout_s=1.0)
        middle.child.say("go on")
        # then
        waits.failed("DeadlineExceeded", "version 3 from trainer")
        middle.failed("DeadlineExceeded", "version 3: round")
        # and once there is a network again, they are served
        hosts.mend(2)
        for each in (middle, waits):
            each.ask(sent)
        for each in (middle, waits):
            each.got()


def test_a_trainer_that_uses_torch_distributed_itself_never_meets_it(far: Receiver, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    with contextlib.ExitStack() as stack, a_sender() as sender:
        stack.callback(dist.destroy_process_group)
        for version in range(3):
            far.ask(sent_by(sender, version))
            dist.all_reduce(total := torch.ones(2))
            far.got()
            assert (dist.get_world_size(), total.tolist()) == (1, [1.0, 1.0])


def test_memory_is_that_of_the_versions_and_of_a_bucket(far: Receiver) -> None:
    model = 48 * MB
    with a_sender() as sender:
        for version in range(1, 5):
            sent = sent_by(sender, version, chunk=model // 2, count=2, bucket=4 * MB)
            sender.keep([version - 1, version])
            far.ask(sent)
            # then a receiver takes one version, and none once it uses the memory of one that was released
            assert far.got()["grown"] <= (model if version == 1 else 0) + 24 * MB
        assert sender.nbytes <= 3 * (model + 4096) + MB


def test_versions_and_trainers_that_are_gone_leave_nothing_behind() -> None:
    with Child(leave_nothing, 3, 6) as child:
        assert child.wait() == 0, child.errors()


def test_an_interrupt_or_a_close_ends_a_fetch_that_waits_for_its_round() -> None:
    with a_sender(gather_s=300.0) as sender, a_receiver() as receiver:
        sent = sent_by(sender, 1)  # the first round of all waits for others that may come
        error = interrupted(receiver, sent)
        assert isinstance(error, WireError)
        assert "version 1: interrupted" in str(error)


def test_an_interrupt_in_the_middle_ends_a_round_that_nobody_wants_any_more() -> None:
    with a_sender() as sender, a_receiver() as receiver:
        gate = Gate(receiver, long_sent_by(sender, 1))
        before = set(threading.enumerate())
        receiver.interrupt()
        until(lambda: set(threading.enumerate()) <= before, "the publisher's answer to the interrupt")
        error = gate.opened()
        assert isinstance(error, WireError)
        assert "interrupted" in str(error)
        newer = sent_by(sender, 2)
        newer.check(receiver.fetch(newer.manifest, newer.where, timeout_s=30.0))


def test_a_receiver_that_closes_in_the_middle_and_one_that_holds_up_a_round() -> None:
    with a_sender() as sender:
        with a_receiver() as receiver:
            sent = long_sent_by(sender, 1)
            gate = Gate(receiver, sent)
            receiver.close()
            error = gate.opened()
            assert isinstance(error, WireError)
            assert "this receiver was closed" in str(error)
        with a_receiver("other") as receiver:
            gate = Gate(receiver, sent)
            # when the trainer publishes on, and drops what is being read
            for version in range(2, 6):
                sent_by(sender, version)
                sender.keep([version])
            # then nothing of it waited, and the version under way arrives as it was
            sent.check(gate.opened())
            with pytest.raises(VersionGone, match="version 1 is no longer kept"):
                receiver.fetch(sent.manifest, sent.where, timeout_s=30.0)


def test_a_publisher_that_closes_ends_the_round_and_who_waits_for_one() -> None:
    with a_sender() as sender, a_receiver("r") as receiver, a_receiver("s") as second:
        sent = long_sent_by(sender, 1)
        gate = Gate(receiver, sent)
        waits = fetching(second, sent)
        close = in_thread(sender.close)
        for error in (waits(), gate.opened()):
            assert isinstance(error, ServerLost)
            assert "its publisher trainer has closed" in str(error)
        assert close() is None
