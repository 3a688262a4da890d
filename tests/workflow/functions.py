"""Stage functions that worker processes can import."""

import math
import os
import signal
import subprocess
import sys
import time

import numpy as np

from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_sdk.testing import EchoRollout


def length(response_ids):
    return [float(len(row)) for row in response_ids]


def slow_length(response_ids):
    time.sleep(0.05)
    return length(response_ids)


def raises(response_ids):
    raise KeyError("no such answer")


def nan(response_ids):
    return [math.nan for _ in response_ids]


def filters_oddly(response_ids):
    return {"reward": length(response_ids), "filtered": np.zeros((len(response_ids), 1), bool)}


def interrupts(response_ids):
    raise KeyboardInterrupt


def says_no_text(response_ids):
    raise ValueError("\ud800")


def too_few(response_ids):
    return [1.0]


def doubled(reward):
    return [2 * float(value) for value in reward]


def two_columns(response_ids):
    return {"reward": [1.0 for _ in response_ids], "note": ["ok" for _ in response_ids]}


def exits(response_ids):
    sys.exit(0)


def vanishes(response_ids):
    """As libraries do that end the process themselves."""
    os._exit(0)


def starts_others(response_ids):
    """Each call leaves a process behind, which its log names."""
    print("started", subprocess.Popen(["sleep", "3600"]).pid, flush=True)
    return length(response_ids)


def frozen_once(response_ids):
    """The first call of a process stops it, as a debugger does, until somebody lets it go on."""
    if not _called:
        _called.append(True)
        os.kill(os.getpid(), signal.SIGSTOP)
    return length(response_ids)


def slow_as_said(response_ids):
    """The first call of a process takes much longer than its lease."""
    if not _called:
        _called.append(True)
        time.sleep(4.0)
    return length(response_ids)


_called = []


def pinned(x):
    """The one CPU that every thread of this process is on."""
    cpus = {os.sched_getaffinity(int(task)) == os.sched_getaffinity(0) for task in os.listdir("/proc/self/task")}
    assert cpus == {True}
    (cpu,) = os.sched_getaffinity(0)
    return [cpu for _ in x]


def stuck(response_ids):
    time.sleep(3600.0)


class IgnoresWeights(EchoRollout):
    """Says that it took them."""

    async def load_weights(self, update: WeightUpdate) -> set[str]:
        return set(update.tensors)


def held_up(response_ids):
    """The length, once nothing lies where the variable HELD_UP points."""
    while os.path.exists(os.environ.get("HELD_UP", "")):
        time.sleep(0.02)
    return length(response_ids)


def gives_none_for_the_last(response_ids):
    return [*length(response_ids)[:-1], None]


def looks_up(answers, row):
    return answers[row]


def raises_below(response_ids):
    return [looks_up({}, "no such answer") for _ in response_ids]


async def raises_awaited(response_ids):
    return raises_below(response_ids)


async def agent_that_raises(turns):
    await turns.generate()
    looks_up({}, "no such answer")
