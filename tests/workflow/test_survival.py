"""Rollouts, the trainer and the server are killed in one run: it ends by itself, and its weights had every row once."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from echo_runs import Driver, echo_workflow, events_of, segments
from gates import Gates

import asyncflow_sdk as af

STEPS, ROWS, GROUP = 18, 16, 4
PROMPTS = [[n, n + 1, n + 2] for n in range(STEPS * ROWS // GROUP)]
"""As many as the steps have groups: each is trained once."""
KILLS = {3: "rollout-0", 6: "train-0", 9: "rollout-1", 12: "server"}
"""After these steps the trainer waits until these were killed."""


def steps_had(logprobs: af.Ragged) -> list[float]:
    """How many steps the weights had had that drew each response."""
    return [-float(row[0]) for row in logprobs]


def workflow() -> af.Workflow:
    rollout = {"group_size": GROUP, "replicas": 2, "max_rows": 8, "delay_s": 0.005, "max_restarts": 1000}
    return echo_workflow(
        processes=True, prompts={"prompt_ids": af.Ragged.of(PROMPTS)}, rollout=rollout,
        reward=af.Stage(steps_had, task="reward", gives=["reward"], launcher="thread"),
        train=af.Train("gates:Gated", max_restarts=1), batch_size=ROWS, steps=STEPS,
        checkpoint=af.Checkpoint(every=4, history=True),
    )  # fmt: skip


def run_and_kill(directory: Path, what: str, gates: Gates) -> list[Driver]:
    """Run a workflow, kill its processes as it goes on, and resume it when that was the driver, who serves the queue."""
    drivers, left = [Driver(directory, what)], dict(KILLS)
    while True:
        driver = drivers[-1]
        driver.read()
        if driver.last == "done":
            assert not left
            driver.end()
            return drivers
        step = next(iter(left), STEPS)
        if driver.step < step:
            continue
        if left[step] == "server":
            driver.kill()
            driver.end()
            drivers.append(Driver(directory, "resume"))
        elif pid := driver.workers.pop(left[step], 0):
            os.kill(pid, signal.SIGKILL)
        else:  # it has not started yet
            continue
        del left[step]
        gates.open(step + 1)


def test_a_run_survives_the_death_of_each_of_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, gates = tmp_path / "run", Gates(tmp_path / "gates", *(step + 1 for step in KILLS))
    monkeypatch.setenv("GATES", str(gates.folder))

    drivers = run_and_kill(directory, "test_survival:workflow", gates)

    # they were killed, and the run knows it
    restarts = Counter(
        e["worker"] for e in events_of(directory, "worker") if e["state"] == "restarting" and "SIGKILL" in e["detail"]
    )
    assert restarts["train-0"] == 1
    # it ended by itself, and its books balance: by its own word, and by its journal carried out again
    summary, found = json.loads((directory / "summary.json").read_text()), af.replay(directory)
    assert (summary["status"], summary["steps"], summary["balanced"]) == ("completed", STEPS, True)
    assert (found.differing, found.torn_bytes, found.audit.balanced) == (0, 0, True)
    assert (found.audit.terminal, found.audit.put) == (summary["rows"], summary["rows_put"])
    assert (found.audit.consumed, found.audit.live) == (STEPS * ROWS, 0)
    # each row once in the weights that it ended with, in the order of the record
    notes = json.loads((directory / "model" / "notes.json").read_text())
    rows = [row for step in notes for row in step["rows"]]
    assert len(notes) == STEPS
    assert len(rows) == len(set(rows)) == STEPS * ROWS
    assert [step["rows"] for step in notes] == [batch.ids.tolist() for _, batch in af.read_steps(directory)]
    # and each prompt as often as its group is large
    trained = Counter(prompt for step in notes for prompt in step["prompts"])
    assert trained == Counter({prompt[0]: GROUP for prompt in PROMPTS})
    assert found.audit.put == found.audit.consumed
    # the reward rose by training alone: it is the number of steps that a response's weights had had
    behind = [k - reward for k, step in enumerate(notes) for reward in step["rewards"]]
    assert (min(behind), max(behind) <= 1) == (0, True)
    assert sum(notes[-1]["rewards"]) > sum(notes[0]["rewards"])
    assert not any(segments(driver.pid) for driver in drivers)
