"""Relays that lie, stay silent or wait for ever: the host behind one fetches from somewhere else, and says why."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from transport_ends import FakeRelay, RelayHosts

from asyncflow_sdk.testing.transport_harness import BUCKET
from asyncflow_sdk.weights.transports import relay_receiver, tcp_fetch

NBYTES = 12 * BUCKET
NOTHING = msgspec.msgpack.encode([b""])
RAW = msgspec.msgpack.encode([b"\0"])


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda: (RAW, [bytes(BUCKET)]), "differs from the published bytes"),
        (lambda: (RAW, [bytes(BUCKET - 1)]), "bytes of kind 0 for bucket"),
        (lambda: (b"\xff", []), "cannot read this"),
        (lambda: (msgspec.msgpack.encode([b"\0" * 300]), []), "300 buckets in 0 frames"),
        (lambda: (NOTHING, []), "it has had nothing new for 30 requests"),
        (lambda: None, "gave no answer"),
    ],
    ids=["wrong bytes", "too few bytes", "no reply", "too many", "always waiting", "silent"],
)
def test_a_relay_that_is_none_is_left(answer: Callable[[], Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    liar = FakeRelay(answer)
    with RelayHosts(fanout=1) as hosts:
        sent = hosts.publish(1, NBYTES)
        # given a host that joined first, so that the next one fetches from it
        client, _ = hosts.join(sent, "liar", liar.where)
        # when
        with monkeypatch.context() as impatient:
            if why == "gave no answer":
                impatient.setattr(tcp_fetch, "STALL_S", 1.0)
            fetched = hosts.fetch(sent, "b")()
        # then
        (note,) = fetched.notes
        assert "version 1 does not come from a relay at tcp://" in note
        assert why in note
        # and it is asked no more, neither for this version nor for the next
        asked = liar.asked
        assert asked
        assert not hosts.fetch(sent, "c")().notes
        sent = hosts.publish(2, NBYTES)
        again, _ = hosts.join(sent, "liar", liar.where)
        assert not hosts.fetch(sent, "b")().notes
        assert liar.asked == asked
        client.close()
        again.close()
    liar.service.close()


@pytest.mark.parametrize("source", [b"", b"\xc1", b"x" * 2000])
def test_an_assignment_that_cannot_be_read_ends_at_the_publisher(source: bytes) -> None:
    with RelayHosts(fanout=1) as hosts:
        sent = hosts.publish(1, NBYTES)
        client, _ = hosts.join(sent, "liar", source or b"\x93\x01")
        fetched = hosts.fetch(sent, "b")()
        assert fetched.moved == NBYTES
        client.close()


def test_the_memory_of_another_user_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_receiver, "STALL_S", 5.0)
    share = msgspec.msgpack.encode(["/etc", [["w0-1", 0, 1, 64]], 0])
    liar = FakeRelay(lambda: (share, []))
    with RelayHosts() as hosts:
        sent = hosts.publish(1, NBYTES)
        # given a stranger in the place of the host's relay
        client, _ = hosts.join(sent, "b", liar.where)
        # when
        fetched = hosts.fetch(sent, "b")()
        # then the replica fetches itself
        assert fetched.moved == NBYTES
        assert "no memory of this user is at '/etc'" in fetched.notes[0]
        client.close()
    liar.service.close()
