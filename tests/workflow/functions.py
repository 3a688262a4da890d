"""Stage functions that worker processes can import: right ones, wrong ones, and some that wait."""

import os
import re
import signal
import subprocess
import sys
import time


def length(response_ids):
    return [float(len(row)) for row in response_ids]


def doubled_length(response_ids):
    return [2.0 * len(row) for row in response_ids]


def doubled(reward):
    return [2 * float(value) for value in reward]


def held_up(response_ids):
    """The length, once the file that the variable HELD_UP names is gone."""
    while os.path.exists(os.environ.get("HELD_UP", "")):
        time.sleep(0.02)
    return length(response_ids)


def vanishes(response_ids):
    """As libraries do that end the process themselves."""
    os._exit(0)


def writes_and_dies(response_ids):
    print(*(f"line {number}" for number in range(50_000)), sep="\n")
    os.write(2, b"the last line\n")
    os._exit(7)


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


_called = []


def looks_up(answers, row):
    return answers[row]


def raises_below(response_ids):
    return [looks_up({}, "no such answer") for _ in response_ids]


def length_and_cpu(response_ids):
    """The length, and the one CPU that every thread of this process is on."""
    cpus = {tuple(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
    ((cpu,),) = cpus
    return {"reward": length(response_ids), "cpu": [cpu for _ in response_ids]}


def fails_at_13(prompt_ids, response_ids):
    """The length, and the fault that the variable FAULT names for the prompt [13]."""
    faults = {
        "None": lambda: None, "NaN": lambda: float("nan"), "raises": lambda: looks_up({}, "no such answer"),
        "exits": lambda: sys.exit(3), "dies": lambda: os._exit(3), "hangs": lambda: re.match("(a+)+$", "a" * 64 + "b"),
    }  # fmt: skip
    return [
        faults[os.environ["FAULT"]]() if list(prompt) == [13] else float(len(row))
        for prompt, row in zip(prompt_ids, response_ids, strict=True)
    ]


async def converses(turns, answer):
    """As an agent whose verifier knows no number 13."""
    turn = await turns.generate()
    return float(len(turn.token_ids)) if answer != 13 else looks_up({}, "no such answer")


def answer_scored(answer, response_ids):
    return [float(number) for number in answer]


def stream_with_a_bad_record():
    """Record 20 lacks its answer, and has a key that no other has."""
    for number in range(100_000):
        yield {"prompt_ids": [number % 9], "answer": number % 7} if number != 20 else {"prompt_ids": [1], "id": {}}


def stream_workflow():
    """A run that a signal ends."""
    from echo_runs import echo_workflow

    import asyncflow_sdk as af

    return echo_workflow(processes=True, reward=length, steps=10_000, checkpoint=af.Checkpoint(every=2))
