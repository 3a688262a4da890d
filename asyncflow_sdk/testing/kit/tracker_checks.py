"""Trackers: opened, given steps, closed, as a run does."""

from __future__ import annotations

import time

import numpy as np

from ...interfaces import TrackedRun, Tracker
from ...types.events import Note
from .check import check, expect
from .plain_lab import PlainLab


def _made(lab: PlainLab) -> Tracker:
    tracker = lab.made()
    expect(isinstance(tracker, Tracker), f"the factory made {tracker!r}, no asyncflow_sdk.Tracker")
    assert isinstance(tracker, Tracker)
    return tracker


@check(
    "tracker", "basic",
    means="the run goes on without it: the first thing it raises ends a tracker",
    look="open(), log(), event(), close(): called once, for each step, for each event, once",
)  # fmt: skip
def follows(lab: PlainLab) -> None:
    """It takes the steps of a run, and events, from its start to its end."""
    tracker = _made(lab)
    tracker.open(
        TrackedRun(directory=lab.directory(), description={"name": "checked", "steps": 3, "rollout": [{"n": 1}]})
    )
    for step in range(3):
        tracker.log(step, step, {"reward": 0.25 * step, "staleness_mean": 0.0, "a name/with signs": 1.0})
        tracker.event(Note(time_s=time.monotonic(), worker="checked", text="a note", level="info"))
    tracker.close()


@check(
    "tracker", "basic",
    means="one odd number, as diverging runs have them, and nothing more is tracked",
    look="log(): numbers may be nan or infinite, and other ones from step to step",
)  # fmt: skip
def odd_numbers(lab: PlainLab) -> None:
    """Numbers that are not finite, and metrics that come and go, are no reason to end."""
    tracker = _made(lab)
    tracker.open(TrackedRun(directory=lab.directory(), description={}))
    for step, value in enumerate((float("nan"), float("inf"), 1e300, float(np.float32(0.1)))):
        tracker.log(step, step, {"reward": value} if step % 2 else {"loss": value, "reward": 0.0})
    tracker.log(9, 9, {})
    tracker.close()


@check(
    "tracker", "full",
    means="a resumed run loses what was tracked of it before, or is not tracked any more",
    look="open() with resumed=True, and log() of a step that was logged before",
)  # fmt: skip
def resumed(lab: PlainLab) -> None:
    """A run that goes on, and trains steps again, goes on being tracked; one without any step can be closed."""
    directory = lab.directory()
    for again, steps in ((False, range(4)), (True, range(2, 6)), (True, range(0))):
        tracker = _made(lab)
        tracker.open(TrackedRun(directory=directory, description={"again": again}, resumed=again))
        for step in steps:
            tracker.log(step, step, {"reward": float(step)})
        tracker.close()
