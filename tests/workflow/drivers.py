"""Drivers in processes of their own, to be interrupted, killed and gone on with."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
from pathlib import Path

from children import Child, say
from echo_runs import alive
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.types.events import StepTrained, WorkerState


class Driver(Child):
    """A driver, and the workers that it started in processes: by name and by number.

    ``what``: "resume", or MODULE:FUNCTION[:ARGUMENT], which makes the workflow.
    """

    def __init__(self, directory: Path, what: str) -> None:
        super().__init__(drive, str(directory), what)
        self.workers: dict[str, int] = {}
        self.pids: set[int] = set()
        self.step = -1
        self.last = ""

    def read(self) -> None:
        """Read the next line that it says."""
        self.last = self.hear()
        words = self.last.split()
        if words[0] == "worker":
            self.workers[words[2]] = int(words[3])
            self.pids |= {int(words[3])} - {self.pid}
        elif words[0] == "step":
            self.step = int(words[1])

    def follow(self, step: int) -> None:
        """Read on until a step was trained."""
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
