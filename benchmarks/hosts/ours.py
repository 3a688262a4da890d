"""A run of ours with keys, by the store of the job; with "hosts", a storage unit on each producer's host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import asyncflow_sdk as af

from .drive import Job, ready, receive

PORT = 7000
WAIT_S = 120.0


def serve(job: Job) -> None:
    with af.serve(job.folder, address=_address(job), store=job.store, capacity_bytes=256 << 20) as run:
        run.queue.declare("work", needs=["x"])
        ready()
        audit = run.audit()
        if not audit.balanced or audit.consumed != job.pairs * job.batches * job.rows:
            raise SystemExit(f"rows are missing: {audit}")
        run.queue.end(cancel=True)


def produce(job: Job) -> None:
    if job.store == "hosts":
        command = [sys.executable, "-m", "asyncflow_sdk.cli", "store", _address(job), "--key", _key(job)]
        unit = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert unit.stdout is not None and unit.stdout.readline(), "no storage unit"
    with af.connect(_address(job), key=_key(job), name="producer") as run:
        values = job.values()
        ready()
        for _ in range(job.batches):
            run.queue.put({"x": values}, timeout_s=WAIT_S)
        ready()


def consume(job: Job) -> None:
    with af.connect(_address(job), key=_key(job), name="consumer") as run:

        def batches() -> Iterator[int]:
            with run.queue.stream("work", job.rows, at_least=job.rows, timeout_s=WAIT_S) as stream:
                for _, batch in zip(range(job.batches), stream, strict=False):
                    yield batch["x"].nbytes
                    batch.ack()

        receive(batches())


def _address(job: Job) -> str:
    return f"tcp://{job.server}:{PORT}"


def _key(job: Job) -> str:
    return f"{job.folder}/run.key"
