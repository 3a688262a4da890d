"""Ascend's TransferQueue 0.1.11 with a storage unit on each of two producers' hosts, and its low-level client.

A row's unit is its number modulo the units, so half of every batch crosses a link when it is put. Without keys.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import ray

from ..queue.peer import PeerClient, set_up
from .drive import Job, ready, receive
from .peer_ray import join

LIMIT_S = 600.0


def serve(job: Job) -> None:
    join(job)

    def start() -> None:
        while len(ray.nodes()) < 1 + job.pairs:
            time.sleep(0.1)
        text = set_up({"work": ["x"]}, required_node_resource="unit")
        unfinished = _file(job).with_suffix(".new")
        unfinished.write_text(text)
        unfinished.rename(_file(job))

    threading.Thread(target=start, daemon=True).start()  # producers' hosts join later
    ready()


def produce(job: Job) -> None:
    join(job, '--resources={"unit": 1}')
    client = _client(job)
    prepared = client.prepare({"x": job.values()})
    ready()
    for _ in range(job.batches):
        client.put(prepared)
    ready()


def consume(job: Job) -> None:
    client = _client(job)

    def batches() -> Iterator[int]:
        for _ in range(job.batches):
            taken = client.take("work", job.rows, lambda: True)
            yield sum(values.nbytes for values in client.values(taken))

    receive(batches())


def _client(job: Job) -> PeerClient:
    end = time.monotonic() + LIMIT_S
    while not _file(job).exists():
        if time.monotonic() > end:
            raise SystemExit("TransferQueue does not start")
        time.sleep(0.1)
    client = PeerClient(_file(job).read_text())
    client.part = job.pair
    return client


def _file(job: Job) -> Path:
    return Path(job.folder, "transfer_queue.json")
