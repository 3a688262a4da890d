"""Drivers in processes of their own, to be interrupted, killed and gone on with.

``python drivers.py DIRECTORY MODULE:FUNCTION[:ARGUMENT]`` runs the workflow that a function makes, ``python drivers.py DIRECTORY resume``
goes on with it. It prints its workers as they start, each step, and how it ended.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from echo_runs import alive
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.types.events import StepTrained, WorkerState


class Driver:
    """A driver, and the workers that it started in processes: by name and by number."""

    def __init__(self, directory: Path, what: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(directory), what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.workers: dict[str, int] = {}
        self.pids: set[int] = set()
        self.step = -1
        self.last = ""

    def read(self) -> list[str]:
        """The words of its next line; none at its end."""
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        if words[:1] == ["worker"]:
            self.workers[words[2]] = int(words[3])
            self.pids |= {int(words[3])} - {self.process.pid}
        elif words[:1] == ["step"]:
            self.step = int(words[1])
        self.last = " ".join(words) or self.last
        return words

    def follow(self, step: int) -> None:
        """Read on until a step was trained."""
        while self.step < step:
            assert self.read(), f"the driver ended early: {self.end()}"

    def kill(self, *, everything: bool) -> None:
        """Kill the process that drives and serves; with ``everything`` its workers too, at once, else they see its end."""
        for pid in [self.process.pid, *(self.pids if everything else ())]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.end()

    def end(self) -> str:
        """Wait for its end and that of its workers; returns what it wrote to stderr."""
        while self.read():
            pass
        _, errors = self.process.communicate(timeout=100)
        until(lambda: not [pid for pid in self.pids if alive(pid)], "the end of all workers")
        return errors


def _show(event: object) -> None:
    if isinstance(event, WorkerState) and event.state in ("starting", "ready"):
        print("worker", event.state, event.worker, event.pid, flush=True)
    if isinstance(event, StepTrained):
        print("step", event.step, flush=True)


def _main(directory: str, what: str) -> None:
    try:
        if what == "resume":
            af.resume(directory, on_event=_show)
        else:
            module, function, *arguments = what.split(":")
            getattr(importlib.import_module(module), function)(*arguments).run(directory, on_event=_show)
    except af.Interrupted as error:
        print("interrupted", "again" if error.again else "once", flush=True)
        raise
    print("done", flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
