"""A workflow of echo engines, drivers in processes of their own, and the reading of what runs leave behind.

Workers are threads of the test's process; ``processes=True`` starts each in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import functions
from children import Child, say
from processes import alive
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.types.events import StepTrained, WorkerState
from asyncflow_sdk.workflow.processes.ranks import free_port

PROMPTS = {"prompt_ids": af.Ragged.of([[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]])}
TOML = """\
steps = 1
batch_size = 4
reward = "functions:length"
prompts = { prompt_ids = [[1], [2]] }
rollout = { engine = "echo", prompt = "prompt_ids", group_size = 4 }
train = { engine = "echo" }
"""


def echo_workflow(*, processes: bool = False, **changes: Any) -> af.Workflow:
    """``rollout``, ``train``: options of the echo engines, with another ``engine`` of a rollout, or other specs."""
    place: dict[str, Any] = {} if processes else {"launcher": "thread"}
    rollout, train = changes.pop("rollout", {}), changes.pop("train", {})
    if isinstance(rollout, dict):
        echo = {"group_size": 4, "prompt": "prompt_ids", "delay_s": 0.002, "spread": 1.0}
        options = echo | ({} if "python" in rollout else place) | rollout
        rollout = af.Rollout(options.pop("engine", "echo"), **options)
    if isinstance(train, dict):
        train = af.Train("echo", **(({} if {"python", "world_size"} & train.keys() else place) | train))
    reward = af.Stage(functions.length, task="reward", **place)
    usual = {"prompts": PROMPTS, "rollout": rollout, "train": train, "reward": reward, "batch_size": 16, "steps": 3}
    return af.Workflow(**(usual | changes))


def echo_weights(steps: int) -> dict[str, Any]:
    """The weights of the echo engines after so many steps."""
    engine = EchoTrain()
    engine.steps = steps
    return dict(engine.named_weights())


def declare_rollout(run: af.Run) -> None:
    """The task of a producer in one's own loop."""
    gives = ["response_ids", "logprobs", "version_spans"]
    run.queue.declare("rollout", needs=["prompt_ids"], gives=gives, admits=True)


def trained_rows(directory: Path) -> list[int]:
    """The ids of all rows of all recorded steps."""
    return [row for _, batch in af.read_steps(directory) for row in batch.ids.tolist()]


def column(directory: Path, name: str) -> list[Any]:
    """The values of a column in all recorded steps."""
    return [value for _, batch in af.read_steps(directory) for value in batch[name].tolist()]


def check_whole(result: af.Result, steps: int, rows: int = 16) -> None:
    """Every step was trained on rows of its own, and every row ended in one state."""
    trained = trained_rows(result.directory)
    assert len(trained) == len(set(trained)) == steps * rows
    summary = result.summary
    assert (summary["status"], summary["steps"], summary["balanced"]) == ("completed", steps, True)
    assert summary["rows"]["consumed"] == steps * rows


def events_of(directory: Path, kind: str) -> list[dict[str, Any]]:
    events = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == kind]


def segments(pid: int) -> set[str]:
    """Directories of runs in shared memory that a process made."""
    return {path.name for path in Path("/dev/shm").glob(f"asyncflow-{os.getuid()}-{pid}-*")}


def start_ranks(run: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start both ranks of a worker as torchrun does. ``arguments``: of the command, behind the run."""
    command = [sys.executable, "-m", "asyncflow_sdk.cli", "worker", str(run), *arguments]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return [
        subprocess.Popen(
            command, env={**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank}, cwd=run.parent,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) for rank in "01"
    ]  # fmt: skip


def check_joined(ranks: list[subprocess.Popen[str]]) -> None:
    """Wait for their end. Each has said its rank."""
    said = [process.communicate(timeout=200)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    assert [f"rank {rank} joins" in text for rank, text in enumerate(said)] == [True, True]


class Driver(Child):
    """A driver, and the workers that it started in processes: by name and by number.

    ``what``: "resume", or MODULE:FUNCTION[:ARGUMENT], which makes the workflow. ``within``: of a host of its own,
    from which neither its number nor those of its workers mean anything here.
    """

    def __init__(self, directory: Path, what: str, within: Sequence[str] = ()) -> None:
        super().__init__(drive, str(directory), what, within=within)
        self.workers: dict[str, int] = {}
        self.pids: set[int] = set()
        self.step = -1
        self.last = ""

    def read(self) -> None:
        self.last = self.hear()
        words = self.last.split()
        if words[0] == "worker":
            self.workers[" ".join(words[2:-1])] = int(words[-1])
            self.pids |= {int(words[-1])} - {self.pid}
        elif words[0] == "step":
            self.step = int(words[1])

    def follow(self, step: int) -> None:
        while self.step < step:
            self.read()

    def kill_all(self) -> None:
        """Kill the process that drives and serves, and its workers at once; else they see its end."""
        for pid in [self.pid, *self.pids]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> str:
        """Wait for its end and that of its workers; returns what it wrote to stderr."""
        with contextlib.suppress(AssertionError):  # it says nothing more
            while True:
                self.read()
        self.wait()
        until(lambda: not [pid for pid in self.pids if alive(pid)], "the end of all workers")
        with self:
            return self.errors()


def drive(directory: str, what: str) -> None:
    """Run or resume a workflow. Say its workers as they start, each step, and how it ended."""

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup

    def show(event: object) -> None:
        if isinstance(event, WorkerState) and event.state in ("starting", "ready"):
            say(f"worker {event.state} {event.worker} {event.pid}")
        if isinstance(event, StepTrained):
            say(f"step {event.step}")

    try:
        if what == "resume":
            af.resume(directory, on_event=show)
        else:
            module, function, *arguments = what.split(":")
            getattr(importlib.import_module(module), function)(*arguments).run(directory, on_event=show)
    except af.Interrupted as error:
        say(f"interrupted {'again' if error.repeated else 'once'}")
        raise
    say("done")
