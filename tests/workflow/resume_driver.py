"""A run to be killed and gone on with: ``python resume_driver.py DIRECTORY run|resume``. Prints its workers' pids as they start,
and each step."""

import sys
from pathlib import Path

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
    if what == "run":
        from test_resuming import workflow

        workflow().run(directory, on_event=show)
    else:
        af.resume(directory, on_event=show)
    print("done", flush=True)
