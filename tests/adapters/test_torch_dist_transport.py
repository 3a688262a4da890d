"""The transport ``dist``: rounds and groups of real processes, which die, stop, come late and ask for more."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest
from children import Child
from dist_children import listening, publish, train, write
from dist_ends import MB, Crew, Receiver, Sent, a_sender, received_of, sent_by, together, until
from two_hosts import HERE as HERE_IP
from two_hosts import THERE as THERE_IP
from two_hosts import two_hosts


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
