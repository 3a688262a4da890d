"""Renewing: a lease lasts while work on it gets on, and not much longer. Renewals are counted; the clock of who renews runs ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import LeaseLost
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue import Renewing, renewing
from asyncflow_sdk.queue.connection import BlockingPort

LEASE_S, PART_S, PATIENCE_S = 60.0, 20.0, 150.0


class Watched(Renewing):
    """Its clock can be put on; ``sent`` are the leases that it has renewed, in order."""

    def __init__(self, connection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s, self.sent = 0.0, list[int]()
        sent = self.sent

        class Counted(BlockingPort):
            async def send(self, command: cmd.AnyCommand) -> Any:
                reply = await super().send(command)
                assert isinstance(command, cmd.Renew)
                sent.append(command.token)
                return reply

        monkeypatch.setattr(renewing, "BlockingPort", Counted)
        monkeypatch.setattr(renewing, "time", self)
        super().__init__(connection, PATIENCE_S)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def later(self, seconds: float) -> None:
        with self._news:
            self.ahead_s += seconds
            self._news.notify()


@pytest.fixture
def run() -> Iterator[af.Run]:
    with af.serve() as run:
        run.queue.declare("work", needs=["x"], lease_s=LEASE_S)
        run.queue.put({"x": [1, 2]})
        yield run


def end_of(run: af.Run) -> float:
    """When the server takes the oldest lease back, on its clock (seconds)."""
    report = run.queue.status()
    assert report.oldest is not None
    return report.time_s + report.oldest.left_s


def test_a_lease_is_kept_until_the_work_has_not_got_on_for_the_time_of_patience(
    run: af.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with af.connect(run.address) as worker:
        renewing = Watched(worker._connection, monkeypatch)
        batch = worker.queue.get("work", 2)
        end = end_of(run)
        # when the work takes long, and then gets on
        for count in range(1, 8):
            renewing.later(PART_S)
            until(lambda count=count: len(renewing.sent) == count, "a renewal")  # type: ignore[misc]
        assert end_of(run) > end
        batch.complete(index=[0])
        # then patience begins anew
        for count in range(8, 16):
            renewing.later(PART_S)
            until(lambda count=count: len(renewing.sent) == count, "a renewal")  # type: ignore[misc]
        assert set(renewing.sent) == {batch.token}
        # and when it hangs, it is not renewed any more
        since = batch._since
        renewing.later(PART_S)
        until(lambda: batch._since > since, "that it was looked at")
        renewing.later(PART_S)
        until(lambda: batch._since > since + PART_S, "that it was looked at again")
        assert len(renewing.sent) == 15


def test_a_batch_that_nobody_has_any_more_is_not_renewed(run: af.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with af.connect(run.address) as worker:
        renewing = Watched(worker._connection, monkeypatch)
        worker.queue.get("work")  # and drops it
        assert renewing._held

        renewing.later(PART_S)

        until(lambda: not renewing._held, "that it was looked at")
        assert renewing.sent == []


def test_what_is_not_renewed_is_anothers_and_what_comes_late_has_no_effect() -> None:
    with af.serve() as run, af.connect(run.address) as worker:
        run.queue.declare("work", needs=["x"], lease_s=0.3)
        run.queue.put({"x": [1]})
        Renewing(worker._connection, patience_s=0.0)

        batch = worker.queue.get("work")

        with run.queue.get("work", timeout_s=60) as again:
            assert again["x"].tolist() == [1]
            again.ack()
        with pytest.raises(LeaseLost):
            batch.ack()
