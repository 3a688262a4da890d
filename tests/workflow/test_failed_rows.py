"""Faults in the middle of a run, in real processes: each costs what it must, is counted and named, and nothing else ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_runs import Driver, check_whole, echo_workflow, events_of
from functions import answer_scored, converses, fails_at_13, stream_with_a_bad_record
from judges import Judge
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, WorkerFailed
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types.reports import FailedGroup
from asyncflow_sdk.workflow.loops import user_code
from asyncflow_sdk.workflow.loops.waits import FailureLimit
from asyncflow_sdk.workflow.processes.launchers import WorkerOutput

PROMPTS: dict[str, Any] = {"prompt_ids": af.Ragged.of([[13], *([n, n] for n in range(8))])}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("None", "fails_at_13() returned, as column 'reward', None"),
        ("NaN", "fails_at_13() returned, as column 'reward', nan"),
        ("raises", "fails_at_13() raised KeyError: 'no such answer'"),
        ("exits", "fails_at_13() raised SystemExit: 3"),
        ("dies", "its process ended"),
        ("hangs", "its process ended"),
    ],
)
def test_a_fault_of_one_row_costs_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    monkeypatch.setenv("FAULT", fault)
    reward = af.Stage(fails_at_13, task="reward", gives=["reward"], timeout_s=2.0 if fault == "hangs" else 600.0)

    result = echo_workflow(processes=True, prompts=PROMPTS, reward=reward, steps=3).run(tmp_path / "run")

    check_failed(result, f"failed: failed 3 times in task 'reward'; last: {reason}")


def check_failed(result: af.Result, reason: str) -> None:
    """At most two groups failed, for one reason, and all steps were trained."""
    check_whole(result, 3)
    failed = {text: rows for text, rows in result.summary["reasons"].items() if text.startswith("failed: ")}
    assert [reason in text for text in failed] == [True], failed
    assert 0 < sum(failed.values()) == result.summary["rows"]["failed"] <= 8


def test_an_agent_that_fails_for_one_row_costs_its_group(tmp_path: Path) -> None:
    rollout = {"agent": converses, "gives": ["reward"]}
    prompts = {**PROMPTS, "answer": [13, *range(8)]}

    result = echo_workflow(processes=True, prompts=prompts, rollout=rollout, reward=None, steps=3).run(
        tmp_path / "run"
    )

    check_failed(result, "converses() raised KeyError: 'no such answer'")


def test_a_service_that_fails_in_the_middle_costs_nothing(tmp_path: Path, judge: Judge) -> None:
    judge.script = ["hang up", 503, b"[1.0,"] * 2  # each call twice, but for what comes after

    reward = af.HttpReward(judge.url, needs=["response_ids"])
    result = echo_workflow(processes=True, reward=reward, steps=3).run(tmp_path / "run")

    check_whole(result, 3)
    assert result.summary["rows"].get("failed", 0) == 0
    assert any(judge.url in note["text"] for note in events_of(tmp_path / "run", "note"))


def test_a_record_that_changes_is_left_out_by_its_number(tmp_path: Path) -> None:
    stream = stream_with_a_bad_record
    result = echo_workflow(processes=True, prompts=stream, reward=answer_scored, steps=12).run(tmp_path / "run")

    check_whole(result, 12)
    assert result.summary["prompts_left_out"] == 1
    assert any("record 20 of the stream" in note["text"] for note in events_of(tmp_path / "run", "note"))


def test_a_run_whose_terminal_is_closed_goes_on_with_other_values(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "run", "functions:stream_workflow")
    driver.follow(4)
    os.kill(driver.pid, signal.SIGHUP)
    driver.end()
    assert driver.last == "interrupted once"
    trained = json.loads((tmp_path / "run" / "summary.json").read_text())["steps"]

    result = af.resume(tmp_path / "run", changes={"steps": trained + 3, "rollout.sampling.max_tokens": 3})

    summary = result.summary
    assert (summary["status"], summary["steps"], summary["balanced"]) == ("completed", trained + 3, True)
    (leg,) = summary["legs"]
    assert {"steps", "rollout.sampling"} == leg["changes"].keys()


def test_a_coroutine_of_one_row_that_takes_too_long_costs_its_group(tmp_path: Path) -> None:
    async def waits(prompt_ids: Any, response_ids: Any) -> Any:
        if any(list(each) == [13] for each in prompt_ids):
            await asyncio.sleep(3600)
        return [float(len(row)) for row in response_ids]

    reward = af.Stage(waits, task="reward", gives=["reward"], timeout_s=5.0)  # a busy machine delays the loop, too
    result = echo_workflow(prompts=PROMPTS, reward=reward, steps=3).run(tmp_path / "run")

    check_whole(result, 3)
    assert any("waits() did not return in its timeout_s" in text for text in result.summary["reasons"])


def test_a_cancellation_leaked_by_an_awaited_reward_is_a_fault_of_its_row() -> None:
    async def leaks(number: Any) -> Any:
        if 3 in number:
            raise asyncio.CancelledError
        return number + 0.5

    with af.serve() as run:
        (worker,) = run.start(af.Stage(leaks, task="reward", gives=["reward"], batch=8, launcher="thread"))
        run.queue.declare("end", needs=["reward"])
        run.queue.put({"number": np.arange(8)})
        run.queue.end()
        rows = [reward for batch in run.consumer("end", count=8) for reward in (batch["reward"], batch.ack())[0]]
        (letter,) = run.queue.failed(9)
        assert not worker.lost

    assert sorted(rows) == [n + 0.5 for n in range(8) if n != 3]
    assert "leaks() raised CancelledError\ncalled with number of row 3" in letter.reasons[-1]
    assert "in leaks" in letter.reasons[-1]


def test_a_function_with_groups_gets_the_whole_group_of_a_failed_row_again() -> None:
    calls: list[tuple[int, int]] = []

    def spread(number: Any, groups: Any) -> Any:
        calls.append((len(number), len(set(groups.tolist()))))
        return [*[float(len(number))] * (len(number) - 1), float("nan") if 1 in number else float(len(number))]

    with af.serve() as run:
        run.start(af.Stage(spread, task="reward", gives=["reward"], batch=8, launcher="thread"))
        run.queue.declare("end", needs=["reward"])
        run.queue.put({"number": np.arange(2)}, group_size=4)
        run.queue.end()
        rows = [reward for batch in run.consumer("end", count=8) for reward in (batch["reward"], batch.ack())[0]]
        (letter,) = run.queue.failed(9)

    assert calls == [(8, 2), (4, 1), (4, 1)]
    assert rows == [8.0] * 4
    assert (letter.rows, letter.task) == (4, "reward")


HANGS_DEEP = """
import faulthandler, time
def deep(depth):
    deep(depth - 1) if depth else innermost()
def innermost():
    time.sleep(3600)
faulthandler.dump_traceback_later(0.1, exit=True)
deep(60)
"""


def test_the_end_of_a_log_names_the_innermost_frames_of_a_call_that_took_too_long(tmp_path: Path) -> None:
    copied, into = os.pipe()
    with open(into, "wb", buffering=0) as file:
        output = WorkerOutput(tmp_path / "worker.log", file, copied)
        subprocess.run([sys.executable, "-c", HANGS_DEEP], stderr=file, check=False)

    lines = output.text().splitlines()
    assert "in innermost" in lines[2], lines
    assert [line.split()[-1] for line in lines[3:]] == ["deep"] * 7


def test_a_coroutine_that_swallows_its_cancellation_ends_as_a_call_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "GRACE_S", 0.1)
    released = threading.Event()

    async def retries(number: Any) -> Any:
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return number

    with af.serve() as run:
        run.start(af.Stage(retries, gives=["reward"], timeout_s=0.5, launcher="thread"))
        run.queue.put({"number": [7]})
        until(lambda: run.failure, "that its thread is given up")
        released.set()
        with pytest.raises(WorkerFailed, match=r"of row 0, did not return in 0.5 s .*cancellation(.|\n)*in retries"):
            run.check()


def test_a_call_in_the_driver_that_takes_too_long_ends_the_run_with_its_row_and_stack(tmp_path: Path) -> None:
    released = threading.Event()

    def waits(prompt_ids: Any) -> Any:
        released.wait(600)
        return [0.0 for _ in prompt_ids]

    flow = echo_workflow(reward=af.Stage(waits, task="reward", gives=["reward"], timeout_s=0.5))
    assert "none can end a call: one of more than 0.5 s ends the run" in str(flow)
    with pytest.raises(
        WorkerFailed, match=r"with prompt_ids of rows? \d+.*, did not return in 0.5 s(.|\n)*in waits"
    ) as failed:
        flow.run(tmp_path / "run")
    released.set()
    assert not re.findall("threading.py|stage_worker.py", str(failed.value)), "only the user's frames are shown"


class Letters:
    """As a client that has failed groups."""

    def failed(self, count: int) -> list[FailedGroup]:
        return [FailedGroup(0, 4, "reward", "", "", -1, ("no answer\nin score()", "its process ended"), 0.0)] * count


def test_more_failures_than_the_share_end_the_run_with_examples() -> None:
    limit, letters = FailureLimit(0.1, step_groups=4, group_size=4), Letters()
    for state, groups in (("consumed", 200), ("failed", 10), ("cancelled", 500)):
        limit.event(ev.RowsEnded(time_s=0.0, state=state, count=4 * groups))
    limit.event(ev.RowsEnded(time_s=0.0, state="failed", count=100, partition="evaluation"))
    limit.event(
        ev.RowsEnded(time_s=0.0, state="failed", count=4 * 50, reason="payload lost: home a was lost, silent")
    )
    limit.check(letters)  # type: ignore[arg-type]

    limit.event(ev.RowsEnded(time_s=0.0, state="failed", count=4))
    with pytest.raises(
        ConfigError, match=r"11 of the last 100 groups failed(.|\n)*row 0 in task 'reward': no answer\nin score"
    ):
        limit.check(letters)  # type: ignore[arg-type]
