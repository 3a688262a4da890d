"""Ends of the transport ``dist`` that are interrupted, closed or held up while a round waits or is under way."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from children import Child
from dist_children import content, publish
from dist_ends import MB, Gate, a_receiver, a_sender, fetching, received_of, sent_by, until
from waiting import in_thread

from asyncflow_sdk.errors import (
    DeadlineExceeded,
    ServerLost,
    VersionGone,
    WireError,
)
from asyncflow_sdk.interfaces import Host
from asyncflow_torch import dist_receiver, dist_words
from asyncflow_torch.transport_dist import DistTransport


def test_a_publisher_that_stopped_before_is_not_waited_for_past_the_deadline() -> None:
    with Child(publish, 3, MB, 0, 0) as publisher:
        sent = received_of(publisher)
        receiver = DistTransport().receiver(Host(directory=None, name="r"))
        assert isinstance(receiver, dist_receiver.DistReceiver)
        publisher.stop()
        with pytest.raises(DeadlineExceeded, match="version 3 from trainer"):
            receiver.fetch(sent.manifest, sent.where, timeout_s=0.5)
        # nor past an interrupt
        fetch = fetching(receiver, sent)
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
        error = fetching(receiver, sent, 3.0)()
        # then
        assert isinstance(error, DeadlineExceeded), error
        assert "version 3" in str(error)
        assert "trainer" in str(error)
        # and it is served once the publisher goes on
        os.waitpid(publisher.pid, os.WUNTRACED)
        publisher.resume()
        again = fetching(receiver, sent)()
        assert content(again.chunks) == sent.content


def test_an_interrupt_ends_a_fetch_that_waits_for_its_round() -> None:
    with a_sender(gather_s=300.0) as sender, a_receiver() as receiver:
        sent = sent_by(sender, 1)  # the first round of all waits for others that may come
        fetch = fetching(receiver, sent)
        until(sender, lambda: sender._rounds._asking)
        receiver.interrupt()
        error = fetch()
        assert isinstance(error, WireError)
        assert "version 1: interrupted" in str(error)
        assert not sender._rounds._asking


def test_an_interrupt_ends_a_round_that_nobody_wants_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a round in the middle
    monkeypatch.setattr(dist_words, "STRETCH_BYTES", 1 << 18)
    middle = Gate(monkeypatch, dist_receiver._Part, "_arrived")
    with a_sender(gather_s=0.1, stall_s=30.0) as sender, a_receiver() as receiver:
        sent = sent_by(sender, 1, 32 * MB)
        fetch = fetching(receiver, sent)
        middle.wait()
        # when
        receiver.interrupt()
        until(sender, lambda: sender._rounds._round.unwanted)
        middle.open()
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
        fetch = fetching(receiver, sent)
        until(sender, lambda: sender._rounds._asking)
        receiver.close()
        error = fetch()
        assert isinstance(error, WireError)
        assert "version 1 from trainer" in str(error)
        until(sender, lambda: not sender._rounds._asking)
    middle = Gate(monkeypatch, dist_receiver._Part, "_arrived")
    with a_sender(gather_s=0.1, stall_s=30.0) as sender, a_receiver() as receiver:
        sent = sent_by(sender, 1, 32 * MB)
        fetch = fetching(receiver, sent)
        middle.wait()
        receiver.close()
        middle.open()
        error = fetch()
        assert isinstance(error, WireError)
        assert "this receiver was closed" in str(error)
        # and another one is served
        with a_receiver("other") as other:
            assert content(other.fetch(sent.manifest, sent.where, timeout_s=30.0).chunks) == sent.content


def test_a_publisher_that_closes_ends_the_round_and_who_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist_words, "STRETCH_BYTES", 1 << 18)
    middle = Gate(monkeypatch, dist_receiver._Part, "_arrived")
    with a_sender(gather_s=0.1, stall_s=30.0) as sender, a_receiver("r") as receiver, a_receiver("s") as second:
        sent = sent_by(sender, 1, 32 * MB)
        fetch = fetching(receiver, sent)
        middle.wait()
        waits = fetching(second, sent)
        until(sender, lambda: sender._rounds._asking)
        close = in_thread(sender.close)
        until(sender, lambda: sender._rounds._closed)
        middle.open()
        for error in (fetch(), waits()):
            assert isinstance(error, ServerLost)
            assert "its publisher trainer has closed" in str(error)
        assert close() is None


def test_training_goes_on_while_a_receiver_holds_up_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a receiver that has stopped in the middle of a round
    middle = Gate(monkeypatch, dist_receiver._Part, "_arrived")
    with a_sender(gather_s=0.1, stall_s=30.0) as sender, a_receiver() as receiver:
        sent = sent_by(sender, 1, 32 * MB)
        fetch = fetching(receiver, sent)
        middle.wait()
        # when the trainer publishes on, and drops what is being read
        for version in range(2, 6):
            sent_by(sender, version)
            sender.keep([version])
        # then nothing of it waited, and the version under way arrives as it was
        middle.open()
        assert content(fetch().chunks) == sent.content
        with pytest.raises(VersionGone, match="version 1 is no longer kept"):
            receiver.fetch(sent.manifest, sent.where, timeout_s=30.0)
