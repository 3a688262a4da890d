"""Of a session that has ended, or never began, a server keeps nothing."""

import pytest
from queue_runs import RawClient, running
from waiting import until

from asyncflow_sdk.errors import ProtocolError
from asyncflow_sdk.ledger import commands as cmd

pytestmark = pytest.mark.fast


def test_a_client_that_never_says_hello_is_answered_and_forgotten() -> None:
    with running() as run:
        queue = run.queue()
        for _ in range(3):
            stranger = RawClient(run.address, sdk=None)
            with pytest.raises(ProtocolError):
                stranger.send_bytes(b"\xc0")
            with pytest.raises(ProtocolError):
                stranger.send(cmd.GetAudit())
            with pytest.raises(ProtocolError):
                RawClient(run.address, sdk="0.0.1")
            stranger.close()
        assert [session.name for session in queue.status().sessions] == ["driver", "test"]


def test_what_a_client_held_goes_when_it_is_evicted() -> None:
    with running() as run:
        # given a client with rows in memory of its own, one of which it leased
        queue, lost = run.queue(), run.client("lost")
        queue.declare("work", needs=["x"])
        lost.queue.put({"x": [b"1" * 5000, b"2" * 5000]})
        held = lost.queue.get("work", 1)
        segments = f"s{lost.session}-*"
        # when it is said to have ended, with its host
        run.run.evict(lost.session)
        # then its row is another's, and with the last of its rows its memory goes
        assert list(run.memory.glob(segments))
        queue.get("work", 2, at_least=2, timeout_s=60).ack()
        until(lambda: not list(run.memory.glob(segments)), "the end of its memory")
        # and it is refused when it lives after all
        with pytest.raises(ProtocolError, match="send hello first"):
            held.ack()
        assert [session.name for session in queue.status().sessions] == ["driver", "test"]


def test_a_segment_that_cannot_be_removed_stops_nobody() -> None:
    with running() as run:
        queue, left = run.queue(), run.client("left")
        queue.declare("work", needs=["x"])
        # given memory of a session with something in its place that is no file
        directory = run.memory / f"s{left.session}-0-directory"
        directory.mkdir()
        # when the session ends, then others go on
        left.close()
        assert queue.put({"x": [1]}, timeout_s=20).count == 1
        directory.rmdir()
