"""Processes that die or freeze at the worst moment: the run finishes by itself, or says who died and why."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import functions
import pytest
from echo_runs import Driver, check_whole, echo_workflow, segments, trained_rows
from functions import frozen_once, held_up, vanishes
from gates import Killer
from processes import alive, state
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, WorkerFailed
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.types.events import Event, LeaseReturned, Note, WorkerState
from asyncflow_sdk.workflow.processes.signals import stop_signals

LONG = 100_000


def test_killed_workers_are_started_again_and_the_books_balance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of them dies after the last step, when rows are left for it alone."""
    # given two replicas, a reward and a stage that is held up until the trainer is through
    killer = Killer(
        tmp_path / "gates", {1: "rollout-1", 2: "reward-0", 5: "aside-0"}
    )  # after step 3 a reward may be through
    monkeypatch.setenv("HELD_UP", str(tmp_path / "gates" / "6"))  # no step any more
    aside = af.Stage(held_up, task="aside", gives=["length"], batch=1)
    rollout = {"replicas": 2, "max_rows": 8}

    # when
    result = echo_workflow(
        processes=True,
        steps=6,
        rollout=rollout,
        stages=[aside],
        train=killer.trainer(),
        reward=functions.length,
        capacity_rows=200,
    ).run(tmp_path / "run", on_event=killer)

    # then
    assert killer.killed == ["rollout-1", "reward-0", "aside-0"]
    check_whole(result, 6)
    assert result.summary["reasons"] == {}
    assert af.staleness_of(tmp_path / "run").values.max() <= 1
    restarts = {e.worker: e.detail for e in killer.states("restarting")}
    assert restarts.keys() >= {"reward-0", "aside-0"}  # the replica may have come back too late to be needed
    assert "SIGKILL" in restarts["reward-0"]
    returned = [e for e in killer.events if isinstance(e, LeaseReturned) and "process ended" in e.reason]
    assert {e.worker for e in returned} <= {"rollout-1", "reward-0", "aside-0"}


def test_a_worker_that_dies_by_each_row_ends_the_run_by_the_share_of_failures(tmp_path: Path) -> None:
    """As one that ends its process itself does, whatever its status. Its restarts are not what ends the run."""
    reward = af.Stage(vanishes, task="reward", gives=["reward"], max_restarts=1)
    with pytest.raises(
        ConfigError, match=r"\d of the last 100 groups failed, and max_failed is 0(.|\n)*task 'reward'"
    ):
        echo_workflow(reward=reward, max_failed=0).run(tmp_path / "run")


def test_a_trainer_that_fails_ends_the_run_with_its_traceback_and_keeps_the_data(tmp_path: Path) -> None:
    events: list[Event] = []
    with pytest.raises(WorkerFailed, match="told to fail at step 2") as caught:
        echo_workflow(processes=True, rollout={"launcher": "thread"}, train={"fail_at": 2}).run(
            tmp_path / "run", on_event=events.append
        )

    assert caught.value.worker == "train-0"
    first, _, more = str(caught.value).partition("\n")
    assert first == "RuntimeError: told to fail at step 2; worker 'train-0' ended with status 1"
    assert more.startswith("Traceback")
    assert "RuntimeError: told to fail" not in more
    assert len(trained_rows(tmp_path / "run")) == 2 * 16
    summary = (tmp_path / "run" / "summary.json").read_text()
    assert '"failed"' in summary
    assert '"balanced": true' in summary
    failed = [e.detail for e in events if isinstance(e, WorkerState) and e.state == "failed"]
    assert failed
    assert all("RuntimeError: told to fail at step 2" in detail for detail in failed)


def long_workflow(reward: str = "length") -> af.Workflow:
    """A run that does not end by itself: its reward and its replica are processes."""
    rollout = af.Rollout("echo", group_size=4, prompt="prompt_ids", delay_s=0.005)
    return echo_workflow(
        processes=True, rollout=rollout, train={"launcher": "thread"}, reward=getattr(functions, reward), steps=LONG
    )


@pytest.mark.parametrize(("number", "words"), [(signal.SIGINT, "worker ready reward-0"), (signal.SIGHUP, "step 3")])
def test_stopping_by_signal_leaves_no_process_and_no_memory(tmp_path: Path, words: str, number: int) -> None:
    driver = Driver(tmp_path / "run", "test_deaths:long_workflow")
    while not driver.last.startswith(words):
        driver.read()

    driver.stop()  # so that none comes when it has ended
    driver.signal(number)
    if words == "step 3":  # and again, as one who is impatient
        driver.signal(signal.SIGINT)
    driver.resume()

    assert "Interrupted" in driver.end()
    assert driver.wait() != 0
    assert driver.last.startswith("interrupted")
    assert not segments(driver.pid)
    assert '"interrupted"' in (tmp_path / "run" / "summary.json").read_text()


def test_hangups_stop_a_run_unless_they_are_ignored_as_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert stop_signals() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert stop_signals() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_kills_the_workers_that_the_first_has_not_ended(tmp_path: Path) -> None:
    # given a run with a worker that cannot end by itself
    driver = Driver(tmp_path / "run", "test_deaths:patient_workflow")
    driver.follow(2)
    os.kill(driver.workers["rollout-0"], signal.SIGSTOP)
    # when it is stopped and, once the others have been told to end, again
    driver.signal(signal.SIGINT)
    until(lambda: not alive(driver.workers["reward-0"]), "the end of a worker that can end")
    driver.signal(signal.SIGINT)
    # then
    driver.end()
    assert driver.last == "interrupted again"
    assert not segments(driver.pid)
    assert '"interrupted"' in (tmp_path / "run" / "summary.json").read_text()


def patient_workflow() -> af.Workflow:
    """Its driver waits for workers that do not end until it is told again."""
    from asyncflow_sdk.workflow.processes import worker_pool

    worker_pool.GRACE_S = 3600.0
    return long_workflow()


def test_a_killed_driver_takes_its_workers_what_they_started_and_its_memory_with_it(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "run", "test_deaths:long_workflow:starts_others")
    driver.follow(0)

    driver.kill()
    driver.end()

    until(lambda: not segments(driver.pid), "the removal of shared memory")
    started = [int(line.split()[1]) for line in (tmp_path / "run/logs/reward-0.log").read_text().splitlines()]
    assert started
    until(lambda: not [pid for pid in started if alive(pid)], "the end of what a worker had started")


def test_a_frozen_worker_loses_its_rows_and_what_it_sends_when_it_thaws_is_refused(tmp_path: Path) -> None:
    events: list[Event] = []
    stage = af.Stage(frozen_once, task="reward", gives=["reward"], lease_s=0.5, batch=1000)

    def thaw(event: Event) -> None:
        events.append(event)
        if isinstance(event, LeaseReturned) and event.task == "reward" and "expired" in event.reason and not thawed:
            (pid,) = {
                e.pid
                for e in events
                if isinstance(e, WorkerState) and (e.worker, e.state) == ("reward-0", "starting")
            }
            until(lambda: state(pid) == "T", "its stop, which may come after the end of its lease")
            thawed.append(os.kill(pid, signal.SIGCONT))

    thawed: list[None] = []
    result = echo_workflow(reward=stage).run(tmp_path / "run", on_event=thaw)

    check_whole(result, 3)
    assert any("expired" in e.reason for e in events if isinstance(e, LeaseReturned) and e.task == "reward")
    assert any("came too late" in e.text for e in events if isinstance(e, Note))


def test_a_frozen_rollout_loses_its_prompts_to_the_other_replica(tmp_path: Path) -> None:
    events: list[Event] = []
    (met := tmp_path / "met").mkdir()
    options: dict[str, Any] = {"met": str(met), "together": 3, "prompt": "prompt_ids", "max_rows": 8, "lease_s": 0.5}
    with af.serve(tmp_path / "run", steps=3, on_event=events.append) as run:
        (one,) = run.start(af.Rollout("gates:Together", **options))
        run.start(af.Rollout("gates:Together", launcher="thread", **options))
        run.start(af.Stage(functions.length, task="reward", launcher="thread"))
        run.feed({"prompt_ids": [[1, 2], [3]]}, group_size=4, column="prompt_ids")
        steps = run.consumer(batch_size=16)
        until(lambda: len(list(met.iterdir())) == 2, "that both hold prompts")
        # when
        os.kill(one.pid, signal.SIGSTOP)
        (met / "the third").touch()
        ids: list[int] = []
        publisher, engine = run.weight_publisher("shm"), EchoTrain()
        for step in steps:
            ids += step.ids.tolist()
            engine.train_step(step)
            publisher.publish(step.version + 1, engine.named_weights())
            step.ack()
        os.kill(one.pid, signal.SIGCONT)
        # then
        assert len(ids) == len(set(ids)) == 3 * 16
        assert any("expired" in e.reason for e in events if isinstance(e, LeaseReturned) and e.worker == one.name)
        until(one.ended.is_set, "that it ends with the stream")
        assert not one.lost


def test_work_that_takes_longer_than_its_lease_keeps_it(tmp_path: Path) -> None:
    """A worker in a thread has its lease renewed while its function runs for two leases."""
    events, began = list[Event](), list[float]()

    def slow(response_ids: Any) -> Any:
        if not began:
            began.append(0.0)
            run_until_renewed()
        return functions.length(response_ids)

    def run_until_renewed() -> None:
        with af.connect(tmp_path / "run", name="onlooker") as other:
            first = other.queue.status().time_s
            until(lambda: other.queue.status().time_s > first + 4.0, "two leases' time")

    stage = af.Stage(slow, task="reward", gives=["reward"], lease_s=2.0, batch=1000)
    result = echo_workflow(reward=stage).run(tmp_path / "run", on_event=events.append)

    check_whole(result, 3)
    assert not [e for e in events if isinstance(e, LeaseReturned) and e.task == "reward"]
