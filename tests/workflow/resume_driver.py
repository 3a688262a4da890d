"""A run to be killed and gone on with: ``python resume_driver.py DIRECTORY MODULE[:POLICY]|resume``, where MODULE has the function
``workflow``. Prints its workers' pids as they start, and each step."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import asyncflow_sdk as af
from asyncflow_sdk.types.events import StepTrained, WorkerState


def show(event: object) -> None:
    if isinstance(event, WorkerState) and event.state == "starting":
        print("starting", event.worker, event.pid, flush=True)
    if isinstance(event, StepTrained):
        print("step", event.step, flush=True)


if __name__ == "__main__":
    directory, what = sys.argv[1:3]
    if what == "resume":
        af.resume(directory, on_event=show)
    else:
        module, _, policy = what.partition(":")
        changes = {"staleness": af.Staleness(policy=policy)} if policy else {}
        importlib.import_module(module).workflow(**changes).run(directory, on_event=show)
    print("done", flush=True)
