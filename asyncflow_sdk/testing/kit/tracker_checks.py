"""Checks of trackers: open, log and close them like a run."""

from __future__ import annotations

import time

import numpy as np

from ...interfaces import TrackedRun, Tracker
from ...types.events import Note
from .check import checks, expect
from .lab import PlainLab


def _made(lab: PlainLab) -> Tracker:
    tracker = lab.made()
    expect(isinstance(tracker, Tracker), f"the factory made {tracker!r}, no asyncflow_sdk.interfaces.Tracker")
    assert isinstance(tracker, Tracker)
    return tracker


def follows(lab: PlainLab) -> None:
    """It takes the steps and events of a run, from start to end."""
    tracker = _made(lab)
    tracker.open(
        TrackedRun(directory=lab.directory(), description={"name": "checked", "steps": 3, "rollout": [{"n": 1}]})
    )
    for step in range(3):
        tracker.log(step, step, {"reward": 0.25 * step, "staleness_mean": 0.0, "a name/with signs": 1.0})
        tracker.event(Note(time_s=time.monotonic(), worker="checked", text="a note", level="info"))
    tracker.close()


def odd_numbers(lab: PlainLab) -> None:
    """Non-finite numbers, and metrics missing in some steps, raise no error."""
    tracker = _made(lab)
    tracker.open(TrackedRun(directory=lab.directory(), description={}))
    for step, value in enumerate((float("nan"), float("inf"), 1e300, float(np.float32(0.1)))):
        tracker.log(step, step, {"reward": value} if step % 2 else {"loss": value, "reward": 0.0})
    tracker.log(9, 9, {})
    tracker.close()


def resumed(lab: PlainLab) -> None:
    """A resumed run with repeated steps is still tracked; one without any step can be closed."""
    directory = lab.directory()
    for again, steps in ((False, range(4)), (True, range(2, 6)), (True, range(0))):
        tracker = _made(lab)
        tracker.open(TrackedRun(directory=directory, description={"again": again}, resumed=again))
        for step in steps:
            tracker.log(step, step, {"reward": float(step)})
        tracker.close()


CHECKS = checks("tracker", {
    follows: ("basic", (), "the run goes on without it: the first thing it raises ends a tracker",
        "open(), log(), event(), close(): called once, for each step, for each event, once"),
    odd_numbers: ("basic", ("follows",), "one odd number, as diverging runs have them, and nothing more is tracked",
        "log(): numbers may be nan or infinite, and other ones from step to step"),
    resumed: ("full", ("follows",), "a resumed run loses its earlier records, or is no longer tracked",
        "open() with resumed=True, and log() of a step logged before"),
})  # fmt: skip
