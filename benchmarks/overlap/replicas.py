"""Some replicas in one process, on one event loop: ``python -m benchmarks.overlap.replicas ADDRESS PLAN NUMBER...``."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import msgspec

import asyncflow_sdk as af
from asyncflow_sdk.testing import TimedRollout
from asyncflow_sdk.workflow.run import Run

from .plan import Plan


async def generate(runs: list[Run], plan: Plan) -> None:
    sampling = af.Sampling(max_tokens=plan.rollout.longest)
    producers = [
        af.EngineProducer(
            run.queue, TimedRollout(**plan.options()), sampling=sampling, needs_first=True, swap=plan.swap
        )
        for run in runs
    ]
    await asyncio.gather(*(producer.run() for producer in producers))


def main(address: str, plan: Plan, numbers: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(af.connect(address, name=f"rollout-{number}")) for number in numbers]
        asyncio.run(generate(runs, plan))


if __name__ == "__main__":
    main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Plan), sys.argv[3:])
