"""The other side of the run: ``python -m benchmarks.engines.queue_side DIRECTORY OPTIONS`` serves it; for each line that it reads it puts
prompts, consumes what comes of them as one step, and prints the seconds and tokens.
"""

from __future__ import annotations

import json
import sys
import time

import asyncflow_sdk as af
from asyncflow_sdk.workflow.specs import declare_task, rollout_task

from .work import Work


def main() -> None:
    directory, work = sys.argv[1], Work(**json.loads(sys.argv[2]))
    with af.serve(directory, max_staleness=1 << 20) as run:
        declare_task(run.queue, rollout_task("rollout", "prompt_ids", "", False))
        needs = ["prompt_ids", "response_ids", "logprobs", "version_spans"]
        steps = iter(run.consumer("train", batch_size=work.prompts * work.n, needs=needs, timeout_s=600.0))
        print(run.address, flush=True)
        for number, _ in enumerate(sys.stdin):
            prompts = af.Ragged.of(work.batch(number))
            began = time.perf_counter()
            run.queue.put({"prompt_ids": prompts}, group_size=work.n)
            step = next(steps)
            tokens = int(step.ragged("response_ids").lengths.sum())
            step.ack()
            print(json.dumps({"s": time.perf_counter() - began, "tokens": tokens}), flush=True)
        run.queue.end()


if __name__ == "__main__":
    main()
