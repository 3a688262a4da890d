"""A driver to be interrupted and killed: ``python driver.py DIRECTORY STEPS [REWARD]``. Prints worker pids as they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import functions

import asyncflow_sdk as af
from asyncflow_sdk.types.events import StepTrained, WorkerState


def show(event: object) -> None:
    if isinstance(event, WorkerState) and event.state == "ready":
        print("ready", event.worker, event.pid, flush=True)
    if isinstance(event, StepTrained):
        print("step", event.step, flush=True)


if __name__ == "__main__":
    af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[1, 2, 3], [4], [5, 6]])},
        rollout=af.Rollout("echo", group_size=4, prompt="prompt_ids", delay_s=0.005),
        reward=getattr(functions, sys.argv[3] if len(sys.argv) > 3 else "length"),
        train=af.Train("echo", delay_s=0.01),
        batch_size=16,
        steps=int(sys.argv[2]),
    ).run(sys.argv[1], on_event=show)
