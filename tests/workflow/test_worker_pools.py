"""Worker pools: replicas join and leave while a run goes on, and some fail for good."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from functions import length
from processes import alive
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, WorkerFailed
from asyncflow_sdk.types.events import Event, LeaseReturned, WorkerState

THREAD: dict[str, Any] = {"launcher": "thread"}


def slow_length(response_ids: Any) -> list[float]:
    time.sleep(0.02)
    return length(response_ids)


def put(run: af.Run, rows: int) -> None:
    run.queue.put({"response_ids": [[1] * (1 + i % 5) for i in range(rows)]})


def through(run: af.Run, rows: int) -> set[int]:
    """Take what came through the stage until it is so many rows."""
    run.queue.declare("end", needs=["reward"])
    ids: list[int] = []
    while len(ids) < rows:
        with run.queue.get("end", rows, timeout_s=60) as batch:
            ids += batch.ids.tolist()
            batch.ack()
    assert len(ids) == len(set(ids)), "each row once"
    return set(ids)


def test_replicas_are_added_and_leave_and_nothing_is_lost(tmp_path: Path) -> None:
    events: list[Event] = []
    with af.serve(tmp_path / "run", on_event=events.append) as run:
        stage = af.Stage(slow_length, task="reward", batch=1, **THREAD)
        (first,) = run.start(stage)
        put(run, 40)
        # when
        three = run.scale(stage, 3)
        until(lambda: len(_ready(events)) == 3, "three that work")
        one = run.scale("reward", 1)
        # then
        assert [worker.name for worker in three] == ["reward-0", "reward-1", "reward-2"]
        assert one == [first]
        assert through(run, 40) == set(range(40))
        until(lambda: all(worker.ended.is_set() for worker in three[1:]), "the leavers' end")
        assert not any(worker.lost for worker in three)
        assert not first.ended.is_set()
        assert run.audit().consumed == 40
    assert not [e for e in events if isinstance(e, LeaseReturned)], "leavers finish what they hold"


def test_a_run_that_is_closed_starts_nobody(tmp_path: Path) -> None:
    with af.serve(tmp_path) as run:
        stage = af.Stage(length, task="reward", **THREAD)
        (worker,) = run.start(stage)

    with pytest.raises(ConfigError, match="no worker of 'reward' can be started: the run is closed"):
        run.scale(stage, 2)
    assert run.workers == [worker]
    assert worker.ended.is_set()


def test_scaled_to_none_rows_wait_until_somebody_comes_back(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run") as run:
        stage = af.Stage(length, task="reward", **THREAD)
        (first,) = run.start(stage)
        assert run.scale(stage, 0) == []
        until(first.ended.is_set, "the first one's end")
        put(run, 4)
        run.queue.declare("end", needs=["reward"])
        with pytest.raises(af.DeadlineExceeded):
            run.queue.get("end", timeout_s=0.05)

        (second,) = run.scale(stage, 1)

        assert second.name == "reward-1"
        assert through(run, 4) == set(range(4))


def test_a_leaver_that_does_not_get_through_is_stopped_and_its_rows_go_to_others(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run") as run:
        stage = af.Stage(length, task="reward", batch=1)
        (frozen,) = run.start(stage)
        until(lambda: run.queue.status().parked, "that it waits for rows")
        os.kill(frozen.pid, signal.SIGSTOP)
        put(run, 1)
        until(lambda: run.queue.status().lease_count, "that it holds one")

        run.scale(stage, 0, grace_s=0.1)
        run.scale(stage, 1)

        assert through(run, 1) == {0}
        until(frozen.ended.is_set, "its end")
        assert not alive(frozen.pid)


@pytest.mark.parametrize(
    ("which", "replicas", "what"),
    [
        ("judge", 1, "nothing was started here for 'judge'; started were: 'reward'"),
        ("reward", -1, "replicas must be 0 or more"),
    ],
)
def test_what_cannot_be_scaled(tmp_path: Path, which: str, replicas: int, what: str) -> None:
    with af.serve(tmp_path / "run") as run:
        run.start(af.Stage(length, task="reward", **THREAD))
        with pytest.raises(af.ConfigError, match=what):
            run.scale(which, replicas)


def test_the_run_goes_on_with_others_and_says_so_when_the_last_one_fails(tmp_path: Path) -> None:
    events: list[Event] = []
    with af.serve(tmp_path / "run", on_event=events.append, on_failure="continue") as run:
        stage = af.Stage(slow_length, task="reward", batch=1, max_restarts=0)
        run.start(stage)
        first, second = run.scale(stage, 2)
        until(lambda: len(_ready(events)) == 2, "two that work")
        put(run, 10)
        os.kill(second.pid, signal.SIGKILL)
        assert through(run, 10) == set(range(10))
        until(second.ended.is_set, "the second's end")
        run.check()
        said = "'reward-1' was killed by SIGKILL; the run goes on with reward-0"
        until(lambda: any(said in e.text for e in events if getattr(e, "level", "") == "warning"), said)

        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match=r"'reward-0' .*; it was the last of 'reward'"):
            run.wait(first)


def test_a_replica_that_never_starts_again_is_given_up_though_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    with af.serve(tmp_path / "run", on_event=events.append, on_failure="continue") as run:
        stage = af.Stage(slow_length, task="reward", batch=1, max_restarts=2)
        run.start(stage)
        _, second = run.scale(stage, 2)
        until(lambda: len(_ready(events)) == 2, "two that work")

        monkeypatch.setenv("PYTHONHOME", str(tmp_path / "nowhere"))
        os.kill(second.pid, signal.SIGKILL)
        put(run, 2000)  # the other one has work
        until(second.ended.is_set, "the end of the second one")

        again = [e.detail for e in events if isinstance(e, WorkerState) and e.state == "restarting"]

    assert [text.partition("; ")[2] for text in again] == ["restart 1 of 2 in 0.5 s", "restart 2 of 2 in 1 s"]


def _ready(events: list[Event]) -> set[str]:
    return {event.worker for event in events if isinstance(event, WorkerState) and event.state == "ready"}
