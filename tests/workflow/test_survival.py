"""Rollouts, the trainer and the server are killed in one run: it ends by itself, and its weights had every row once."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from echo_runs import alive, segments
from gates import Gates
from noting_run import GROUP, PROMPTS, ROWS, STEPS, notes_of
from test_resuming import Driver

import asyncflow_sdk as af

EVERY = 5
"""So many steps after one rollout's death the other is killed."""
SURELY = {5: "a rollout", 10: "a rollout", STEPS // 3: "train-0", 15: "a rollout", STEPS * 2 // 3: "server"}
"""After these steps the trainer waits until these were killed; what is killed besides, is as the run goes."""


class Killer:
    """Runs a workflow, as it goes on kills its processes, and resumes it when that was the driver, who serves the queue."""

    def __init__(self, directory: Path, what: str, gates: Gates) -> None:
        self.directory, self.killed, self.gates = directory, Counter[str](), gates
        self._step = -1
        self.drivers = [Driver(directory, what)]
        self._pids: dict[str, int] = {}
        self._due = EVERY
        while not self._follow(self.drivers[-1]):
            self.drivers.append(Driver(directory, "resume"))

    def _follow(self, driver: Driver) -> bool:
        """Whether the run ended by itself; else its driver was killed."""
        assert driver.process.stdout is not None
        for line in driver.process.stdout:
            word, *said = line.split()
            if word == "starting":
                self._pids[said[0]] = int(said[1])
                driver.pids.append(int(said[1]))
            elif word == "step":
                self._step = int(said[0])
            if word in ("starting", "step") and self._after(self._step, driver):
                return False
            if word == "done":
                driver.close()
                return True
        raise AssertionError(f"it ended early: {driver.process.stderr.read() if driver.process.stderr else ''}")

    def _after(self, step: int, driver: Driver) -> bool:
        """Kill whose turn it is. Returns whether that was the driver."""
        if step == STEPS // 3 and not self.killed["train-0"]:
            assert self._kill("train-0")
            self.gates.open(step + 1)
        if step == STEPS * 2 // 3 and not self.killed["server"]:
            self.killed["server"] += 1
            self._pids.clear()
            driver.kill(everything=False)
            self.gates.open(step + 1)
            return True
        if self._due <= step < STEPS - EVERY:
            first = self.killed["rollout-0"] > self.killed["rollout-1"]
            if self._kill(f"rollout-{int(first)}") or self._kill(f"rollout-{int(not first)}"):
                self._due = step + EVERY
                if SURELY.get(step) == "a rollout":
                    self.gates.open(step + 1)
        return False

    def _kill(self, name: str) -> bool:
        pid = self._pids.pop(name, 0)
        if not pid or not alive(pid):
            return False
        os.kill(pid, signal.SIGKILL)
        self.killed[name] += 1
        return True


def restarts(directory: Path) -> Counter[str]:
    """How often the run saw each worker killed."""
    events = map(json.loads, filter(None, (directory / "events.jsonl").read_text().splitlines()))
    return Counter(
        event["worker"] for event in events
        if event["event"] == "worker" and event["state"] == "restarting" and "SIGKILL" in event["detail"]
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["wait", "drop", "count"])
def test_a_run_survives_the_death_of_each_of_its_processes(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, gates = tmp_path / "run", Gates(tmp_path / "gates", *(step + 1 for step in SURELY))
    monkeypatch.setenv("GATES", str(gates.folder))
    if policy == "drop":
        (tmp_path / "outlasted").mkdir()
        monkeypatch.setenv("OUTLASTED", str(tmp_path / "outlasted"))

    killer = Killer(directory, f"noting_run:{policy}", gates)

    # they were killed, and the run knows it
    assert killer.killed["train-0"] == killer.killed["server"] == 1
    assert killer.killed["rollout-0"] > 0
    assert killer.killed["rollout-1"] > 0
    seen = restarts(directory)
    assert seen["train-0"] == 1
    assert sum(seen.values()) > 3
    # it ended by itself, and its books balance: by its own word, and by its journal carried out again
    summary, found = json.loads((directory / "summary.json").read_text()), af.replay(directory)
    assert (summary["status"], summary["steps"], summary["balanced"]) == ("completed", STEPS, True)
    assert (found.differing, found.cut, found.audit.balanced) == (0, 0, True)
    assert (found.audit.terminal, found.audit.put) == (summary["rows"], summary["rows_put"])
    assert (found.audit.consumed, found.audit.live) == (STEPS * ROWS, 0)
    # each row once in the weights that it ended with, in the order of the record
    notes = notes_of(directory)
    rows = [row for step in notes for row in step["rows"]]
    assert len(notes) == STEPS
    assert len(rows) == len(set(rows)) == STEPS * ROWS
    assert [step["rows"] for step in notes] == [batch.ids.tolist() for _, batch in af.read_steps(directory)]
    # and each prompt as often as its group is large, where none was replaced
    trained = Counter(prompt for step in notes for prompt in step["prompts"])
    if policy == "drop":
        assert set(trained.values()) <= {GROUP, 2 * GROUP}
        assert found.audit.put == found.audit.consumed + found.audit.expired
        assert found.audit.expired > 0
        assert list(found.audit.reasons) == ["expired: older than max_staleness 1 (policy 'drop')"]
    else:
        assert trained == Counter({prompt[0]: GROUP for prompt in PROMPTS})
        assert found.audit.put == found.audit.consumed
    # the reward rose by training alone: it is the number of steps that a response's weights had had
    behind = [k - reward for k, step in enumerate(notes) for reward in step["rewards"]]
    assert min(behind) == 0
    if policy != "count":
        assert max(behind) <= 1
    assert sum(notes[-1]["rewards"]) > sum(notes[0]["rewards"])
    assert not any(segments(driver.process.pid) for driver in killer.drivers)
