"""Replicas come and go, are killed, join a run that is gone on with, while versions come in flight, and somebody looks on."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import functions
import numpy as np
import pytest
from echo_runs import echo_workflow, trained_rows
from gates import Gates, Pauses
from test_resuming import Driver
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.types.events import StepTrained, WorkerState

DRAWING: dict[str, Any] = {
    "in_flight": True, "token_s": 0.01, "delay_s": 0.0, "max_rows": 8, "group_size": 4, "prompt": "prompt_ids",
}  # fmt: skip
REPLICA: dict[str, Any] = DRAWING | {"swap": "in_flight"}
PROMPTS = {"prompt_ids": af.Ragged.of([[n, n + 1, n + 2] for n in range(1, 40)])}
STEPS = 24
# a replica pauses until these steps are trained; none is killed or leaves before the responses of the pause are trained
PAUSED = (0, 5, 13)


def check_spans(batch: af.Batch) -> int:
    """Each response says which versions drew it, one after another; how many were drawn by several."""
    mixed = 0
    for spans, ids in zip(batch.ragged("version_spans"), batch.ragged("response_ids"), strict=True):
        assert (spans[0, 1], spans[-1, 2]) == (0, len(ids))
        assert (spans[1:, 1] == spans[:-1, 2]).all()
        assert (np.diff(spans[:, 0]) > 0).all()
        mixed += len(spans) > 1
    return mixed


class Onlooker:
    """``asyncflow top`` in a terminal, to its end."""

    def __init__(self, directory: Path) -> None:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "asyncflow_sdk.cli", "top", str(directory), "--every", "0.1"]
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "LINES": "40"}
        self._process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        self.shown, self._fd = "", ours
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        try:
            while more := os.read(self._fd, 1 << 16):
                self.shown += more.decode(errors="replace")
        except OSError:  # its end
            pass

    def end(self) -> int:
        code = self._process.wait(60)
        self._reading.join(60)
        os.close(self._fd)
        return code


def test_versions_come_in_flight_while_replicas_are_killed_join_and_leave(tmp_path: Path) -> None:
    pids: dict[str, int] = {}

    def told(event: object) -> None:
        if isinstance(event, WorkerState) and event.state == "ready":
            pids[event.worker] = event.pid

    engine, rows, mixed, killed = EchoTrain(), [], 0, 0
    pauses = Pauses(tmp_path / "pauses")
    pauses.request()
    with af.serve(tmp_path / "run", max_staleness=2, steps=STEPS, on_event=told) as run:
        # given a run of two replicas, and somebody who looks on
        replica = pauses.rollout(replicas=2, max_restarts=50, **REPLICA)
        run.start(replica)
        run.start(af.Stage(functions.length, task="reward"))
        run.queue.put({"prompt_ids": af.Ragged.of([[n, n + 1] for n in range(STEPS * 4)])}, group_size=4)
        weights, onlooker, guests = run.weight_publisher("shm"), Onlooker(tmp_path / "run"), []
        weights.publish(0, engine.named_weights())

        def replicas() -> int:
            return sum(each.replica for each in run.queue.status().sessions)

        for step in run.consumer("train", batch_size=16):
            if step.index == 2:
                until(lambda: "rollout-0" in onlooker.shown, "a look at the replicas")
            if step.index in (3, 7, 11, 15, 19):  # when they are killed in turns
                name = f"rollout-{step.index // 4 % 2}"
                until(lambda name=name: name in pids, f"{name} to be there")
                os.kill(pids.pop(name), signal.SIGKILL)
                killed += 1
            if step.index in (4, 12):  # others join, by clients of their own
                have = replicas()
                guests.append(af.connect(tmp_path / "run"))
                guests[-1].start(pauses.rollout(**REPLICA))
                until(lambda have=have: replicas() > have, "the one that joins")
            if step.index in (9, 17):  # and leave: told to, or with who started them
                if len(guests) == 1:
                    guests[0].scale("rollout", 0)
                else:
                    guests[1].close()
            if step.index == 14:
                run.scale(replica, 3)
            if step.index == 19:
                run.scale(replica, 1)
            if step.index in PAUSED:  # the next version comes while a response is drawn
                pauses.begun()
            elif step.index + 1 in PAUSED:
                pauses.request()
            engine.train_step(step)  # raises for tokens that other weights made than those they name
            weights.publish(step.version + 1, engine.named_weights())
            if step.index in PAUSED:
                pauses.ended()
            mixed += check_spans(step)
            assert step.version - 2 <= step.ragged("version_spans").values[:, 0].min()
            rows += step.ids.tolist()
            step.ack()
        # then
        assert run.audit().balanced
        assert run.audit().consumed == len(rows) == len(set(rows)) == STEPS * 16
        guests[0].close()
    assert killed == 5
    assert mixed, "no response was drawn by two versions"
    assert onlooker.end() == 0
    assert "has ended" in onlooker.shown
    assert "Traceback" not in onlooker.shown


def workflow() -> af.Workflow:
    return echo_workflow(
        prompts=PROMPTS, rollout=DRAWING | {"replicas": 2}, weights=af.Weights(swap="in_flight", verify=["held"]),
        reward=functions.held_up, staleness=af.Staleness(max_staleness=2), steps=STEPS, train=af.Train("gates:Gated", delay_s=0.1),
        checkpoint=af.Checkpoint(every=5, keep=2),
    )  # fmt: skip


def test_a_replica_joins_a_run_that_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a run whose driver was killed with all its workers
    gate, directory, reached = tmp_path / "gate", tmp_path / "run", threading.Event()
    monkeypatch.setenv("HELD_UP", str(gate))
    gates = Gates(tmp_path / "gates", 12)
    monkeypatch.setenv("GATES", str(gates.folder))
    driver = Driver(directory, "test_churn")
    assert driver.follow(steps=7)
    driver.kill(everything=True)
    gates.open(12)
    # when it is resumed, and a replica joins in the midst of it

    def told(event: object) -> None:
        if isinstance(event, StepTrained) and not reached.is_set():
            gate.touch()
            reached.set()

    results: list[af.Result] = []
    resuming = threading.Thread(target=lambda: results.append(af.resume(directory, on_event=told)))
    resuming.start()
    assert reached.wait(100)
    with af.connect(directory) as there:
        (guest,) = there.start(af.Rollout("echo", **REPLICA))
        until(lambda: sum(each.replica for each in there.queue.status().sessions) == 3, "the one that joins")
        gate.unlink()
        resuming.join(100)
    # then
    assert not guest.lost
    (result,) = results
    assert (result.summary["status"], result.summary["steps"], result.summary["balanced"]) == (
        "completed",
        STEPS,
        True,
    )
    rows = trained_rows(directory)
    assert len(rows) == len(set(rows)) == STEPS * 16
    assert af.staleness_of(directory).values.max() <= 2
    for _, batch in af.read_steps(directory):
        check_spans(batch)
