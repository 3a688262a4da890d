"""Ray's object store: a node on each host, one object for each batch; references go through an actor on the server's host.

Without keys. Ray would run its workers at niceness 15, behind everybody else here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import ray

from .drive import Job, ready, receive

PORT = 7000
AHEAD = 8
"""Batches of a pair that are put and not taken yet, at most."""
STORE_BYTES = 512 << 20
SETTINGS = {
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Mailbox:
    """References of each pair."""

    def __init__(self) -> None:
        self._refs: Any = defaultdict(lambda: asyncio.Queue(AHEAD))

    async def put(self, pair: int, refs: list[Any]) -> None:
        await self._refs[pair].put(refs)

    async def take(self, pair: int) -> list[Any]:
        refs: list[Any] = await self._refs[pair].get()
        return refs


def join(job: Job, *options: str) -> None:
    """Start a node on this host, the first one on the server's, and connect to it."""
    os.environ |= SETTINGS
    head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
    where = head if job.own == job.server else [f"--address={job.server}:{PORT}"]
    options = (
        f"--node-ip-address={job.own}",
        "--num-cpus=4",
        f"--object-store-memory={STORE_BYTES}",
        *where,
        *options,
    )
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
    subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
    end = time.monotonic() + 600
    while True:
        with contextlib.suppress(Exception):
            address = f"{job.server}:{PORT}"
            ray.init(address, namespace="hosts", _node_ip_address=job.own, log_to_driver=False, logging_level="ERROR")
            return
        if time.monotonic() > end:
            raise SystemExit("no node of Ray on this host")
        time.sleep(0.5)


def serve(job: Job) -> None:
    join(job)
    box = ray.remote(Mailbox).options(name="mailbox", num_cpus=0, max_concurrency=100).remote()
    ray.get(box.__ray_ready__.remote())
    ready()


def produce(job: Job) -> None:
    join(job)
    box, values = ray.get_actor("mailbox"), job.values()
    ready()
    for _ in range(job.batches):
        ray.get(box.put.remote(job.pair, [ray.put(values)]))
    ready()


def consume(job: Job) -> None:
    join(job)
    box = ray.get_actor("mailbox")

    def batches() -> Iterator[int]:
        for _ in range(job.batches):
            yield ray.get(ray.get(box.take.remote(job.pair))[0]).nbytes

    receive(batches())
