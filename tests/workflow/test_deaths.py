"""Processes that die at the worst moment: the run finishes by itself, or says who died and why."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from echo_runs import alive, echo_workflow, segments, trained_rows
from functions import frozen_once, held_up, length, slow_as_said
from gates import Killer
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import WorkerFailed
from asyncflow_sdk.testing.echo import weights
from asyncflow_sdk.types.events import Event, LeaseReturned, Note, WorkerState
from asyncflow_sdk.workflow import supervise


@pytest.mark.parametrize("worker", ["rollout-0", "reward-0"])
def test_a_killed_worker_is_started_again_and_the_books_balance(tmp_path: Path, worker: str) -> None:
    killer = Killer(worker, at=[8, 20], gates=tmp_path / "gates")

    result = echo_workflow(steps=40, train=killer.trainer()).run(tmp_path / "run", on_event=killer)

    assert killer.killed == 2
    rows = trained_rows(tmp_path / "run")
    assert len(rows) == len(set(rows)) == 40 * 16
    assert result.summary["balanced"]
    assert result.summary["rows"]["consumed"] == 40 * 16
    assert af.staleness_of(tmp_path / "run").values.max() <= 1
    restarts = [e for e in killer.events if isinstance(e, WorkerState) and e.state == "restarting"]
    assert [e.worker for e in restarts] == [worker] * 2
    assert "SIGKILL" in restarts[0].detail


def test_one_of_two_replicas_dies_and_its_rows_move_on(tmp_path: Path) -> None:
    killer = Killer("rollout-1", at=[5], gates=tmp_path / "gates")

    rollout = {"replicas": 2, "max_rows": 8, "delay_s": 0.02}
    result = echo_workflow(steps=30, rollout=rollout, train=killer.trainer()).run(tmp_path / "run", on_event=killer)

    assert killer.killed == 1
    assert result.summary["rows"]["consumed"] == 30 * 16
    returned = [e for e in killer.events if isinstance(e, LeaseReturned) and "process ended" in e.reason]
    assert {e.worker for e in returned} <= {"rollout-1"}


def test_a_run_that_is_through_does_not_wait_for_a_worker_that_would_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "BACKOFF_S", 3600.0)
    killer = Killer("rollout-1", at=[3], gates=tmp_path / "gates")

    echo_workflow(rollout={"replicas": 2}, train=killer.trainer()).run(tmp_path / "run", on_event=killer)

    assert killer.killed == 1
    assert not [e.text for e in killer.events if isinstance(e, Note) and "did not end within" in e.text]


def test_a_worker_that_dies_after_the_last_step_is_started_again_for_the_rows_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer("aside-0", at=[3], gates=tmp_path / "gates")
    monkeypatch.setenv(
        "HELD_UP", str(tmp_path / "gates" / "4")
    )  # which is no step any more: rows are left until it is opened
    aside = af.Stage(held_up, task="aside", gives=["length"], batch=1)

    result = echo_workflow(steps=4, stages=[aside]).run(tmp_path / "run", on_event=killer)

    assert killer.killed == 1
    assert result.summary["rows"]["consumed"] == 4 * 16
    assert result.summary["reasons"] == {}


def test_a_worker_that_keeps_dying_ends_the_run_with_its_name(tmp_path: Path) -> None:
    killer = Killer("rollout-0", at=list(range(0, 100)))

    with pytest.raises(WorkerFailed, match=r"rollout-0.*killed by SIGKILL after 2 restarts"):
        echo_workflow(steps=1000, rollout={"max_restarts": 2}).run(tmp_path / "run", on_event=killer)


def test_a_trainer_that_fails_ends_the_run_with_its_traceback_and_keeps_the_data(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="told to fail at step 5") as caught:
        echo_workflow(train={"fail_at": 5}).run(tmp_path / "run")

    assert caught.value.worker == "train-0"
    assert "Traceback" in caught.value.detail or "RuntimeError" in caught.value.detail
    assert len(trained_rows(tmp_path / "run")) == 5 * 16
    summary = (tmp_path / "run" / "summary.json").read_text()
    assert '"failed"' in summary
    assert '"balanced": true' in summary


def driver(directory: Path, steps: int = 100_000, reward: str = "length") -> "subprocess.Popen[str]":
    script = Path(__file__).parent / "driver.py"
    return subprocess.Popen(
        [sys.executable, str(script), str(directory), str(steps), reward],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(process: "subprocess.Popen[str]", start: str) -> list[int]:
    """Read lines until one starts so; the worker pids told on the way."""
    pids = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready"):
            pids.append(int(line.split()[2]))
        if line.startswith(start):
            return pids
    raise AssertionError(f"the driver ended early: {process.stderr.read() if process.stderr else ''}")


@pytest.mark.parametrize("moment", ["ready reward-0", "step 0", "step 30"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_by_signal_leaves_no_process_and_no_memory(tmp_path: Path, moment: str, number: int) -> None:
    process = driver(tmp_path / "run")
    pids = read_until(process, moment)

    process.send_signal(number)
    _, errors = process.communicate(timeout=100)

    assert process.returncode != 0
    assert "Interrupted" in errors
    assert not [pid for pid in pids if alive(pid)]
    assert not segments(process.pid)
    assert '"interrupted"' in (tmp_path / "run" / "summary.json").read_text()


def test_impatient_ctrl_c_is_as_clean(tmp_path: Path) -> None:
    process = driver(tmp_path / "run")
    pids = read_until(process, "step 3")

    for _ in range(5):
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)

    assert not [pid for pid in pids if alive(pid)]
    assert not segments(process.pid)


def test_a_killed_driver_takes_its_workers_and_its_memory_with_it(tmp_path: Path) -> None:
    process = driver(tmp_path / "run")
    pids = read_until(process, "step 3")

    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.close()

    until(lambda: not [pid for pid in pids if alive(pid)], "the end of all workers")
    until(lambda: not segments(process.pid), "the removal of shared memory")


def test_a_killed_driver_takes_what_its_workers_started_with_it(tmp_path: Path) -> None:
    process = driver(tmp_path / "run", reward="starts_others")
    read_until(process, "step 0")

    process.kill()
    process.communicate()

    started = [int(line.split()[1]) for line in (tmp_path / "run/logs/reward-0.log").read_text().splitlines()]
    assert started
    until(lambda: not [pid for pid in started if alive(pid)], "the end of what a worker had started")


def test_a_frozen_worker_loses_its_rows_and_what_it_sends_when_it_thaws_is_refused(tmp_path: Path) -> None:
    events: list[Event] = []
    stage = af.Stage(frozen_once, task="reward", lease_s=0.5, batch=1000)

    def thaw(event: Event) -> None:
        events.append(event)
        if isinstance(event, LeaseReturned) and event.task == "reward" and "expired" in event.reason:
            (pid,) = {
                e.pid
                for e in events
                if isinstance(e, WorkerState) and (e.worker, e.state) == ("reward-0", "starting")
            }
            os.kill(pid, signal.SIGCONT)

    result = echo_workflow(reward=stage, steps=6).run(tmp_path / "run", on_event=thaw)

    assert result.summary["rows"]["consumed"] == 6 * 16
    assert len(set(trained_rows(tmp_path / "run"))) == 6 * 16
    assert any("expired" in e.reason for e in events if isinstance(e, LeaseReturned) and e.task == "reward")
    assert any("came too late" in e.text for e in events if isinstance(e, Note))


def test_a_frozen_rollout_loses_its_prompts_to_the_other_replica(tmp_path: Path) -> None:
    events: list[Event] = []
    held = tmp_path / "held"
    held.touch()
    with af.serve(tmp_path / "run", steps=4, on_event=events.append) as run:
        one, other = run.start(
            af.Rollout("gates:Held", held=str(held), prompt="prompt_ids", replicas=2, max_rows=8, lease_s=0.5)
        )
        until(lambda: _ready(events) == {one.name, other.name}, "both work")
        run.start(af.Stage(length, task="reward"))
        run.feed({"prompt_ids": [[1, 2], [3]]}, group_size=4, column="prompt_ids")
        steps = run.consumer(batch_size=16)
        until(lambda: any(s.leases and s.name == one.name for s in run.queue.status().sessions), "it holds prompts")
        # when
        os.kill(one.pid, signal.SIGSTOP)
        held.unlink()
        ids: list[int] = []
        publisher = run.weight_publisher("shm")
        for step in steps:
            ids += step.ids.tolist()
            publisher.publish(step.version + 1, weights(step.version + 1).items())
            step.ack()
        os.kill(one.pid, signal.SIGCONT)
        # then
        assert len(ids) == len(set(ids)) == 4 * 16
        assert any("expired" in e.reason for e in events if isinstance(e, LeaseReturned) and e.worker == one.name)
        until(one.ended.is_set, "that it ends with the stream")
        assert not one.lost


def test_work_that_takes_longer_than_its_lease_keeps_it(tmp_path: Path) -> None:
    events: list[Event] = []
    stage = af.Stage(slow_as_said, task="reward", lease_s=2.0, batch=1000)

    echo_workflow(reward=stage, steps=6).run(tmp_path / "run", on_event=events.append)

    assert not [e for e in events if isinstance(e, LeaseReturned) and e.task == "reward"]


def _ready(events: list[Event]) -> set[str]:
    return {event.worker for event in events if isinstance(event, WorkerState) and event.state == "ready"}
