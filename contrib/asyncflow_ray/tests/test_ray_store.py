"""Runs with their payload in the object store of a real Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import asyncflow_sdk as af
from asyncflow_sdk.errors import MemoryFull
from asyncflow_sdk.interfaces import TransferQueue
from asyncflow_sdk.testing.store_contract import StoreContract, StoredRun, until

SQUARE = """
rows = {rows}
while rows:
    with queue.get("square", rows, timeout_s=60) as batch:
        rows -= batch.rows
        batch.complete({{"y": batch["x"] ** 2}})
"""
USE = """
rows = {rows}
while rows:
    with queue.get("use", rows, timeout_s=60) as batch:
        rows -= batch.rows
        assert (batch["y"] == batch["x"] ** 2).all()
        batch.ack()
"""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[str]:
    ray.init(
        num_cpus=2, object_store_memory=256 << 20, include_dashboard=False, log_to_driver=False,
        configure_logging=False,
    )  # fmt: skip
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def run_with(cluster: str, **options: Any) -> StoredRun:
    return StoredRun(store=af.Store(kind="ray", options={"address": cluster, "memory_bytes": 64 << 20, **options}))


class TestContract(StoreContract):
    @pytest.fixture
    def stored(self, cluster: str) -> Iterator[StoredRun]:
        with run_with(cluster) as stored:
            stored.start_unit()
            yield stored


def test_a_run_without_a_ray_is_refused() -> None:
    script = "import asyncflow_sdk as af\naf.serve(store=af.Store(kind='ray', options={'address': '127.0.0.1:1'}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert "ConfigError: no Ray can be reached at '127.0.0.1:1'" in done.stderr


def test_blocks_beyond_the_limit_raise_memory_full(cluster: str) -> None:
    with run_with(cluster, memory_bytes=8 << 20) as stored:
        stored.start_unit()
        queue = stored.queue()
        queue.declare("read", needs=["x"])
        with pytest.raises(MemoryFull):
            put_megabytes(queue, 20)
        # freed blocks make room
        queue.get("read", 8).ack()
        put_megabytes(queue, 2)


def put_megabytes(queue: TransferQueue, count: int) -> None:
    for _ in range(count):
        queue.put({"x": np.zeros((4, 1 << 18), np.uint8)})


def test_a_whole_run_and_an_owner_that_dies(cluster: str, tmp_path: Path) -> None:
    # given rows of a producer, made further by a stage, all in Ray; both have ended
    with run_with(cluster) as stored:
        stored.start_unit()
        run = stored.run
        run.queue.declare("square", needs=["x"], gives=["y"])
        run.queue.declare("use", needs=["x", "y"])
        address = run.addresses[1]
        child(
            tmp_path, address, "queue.put({'x': np.arange(8.0)}, key='first'); queue.put({'x': np.arange(8.0, 12)})"
        )
        child(tmp_path, address, SQUARE.format(rows=12))
        child(tmp_path, address, USE.format(rows=4))
        assert run.audit().consumed == 4
        # when the owner dies
        (home,) = run.homes()
        ray.kill(ray.get_actor(home.address.split()[0], "asyncflow"))
        until(lambda: run.audit().failed, "the loss of the home", 90)
        # then its rows are counted, and the home has begun another epoch
        audit = run.audit()
        assert (audit.put, audit.failed, audit.consumed, audit.live, audit.balanced) == (12, 8, 4, 0, True)
        until(lambda: run.homes()[0].epoch == 2 and not run.homes()[0].lost, "the next epoch")
        child(tmp_path, address, "queue.put({'x': np.arange(8.0)}, key='first')")
        child(tmp_path, address, SQUARE.format(rows=run.audit().live))
        child(tmp_path, address, USE.format(rows=run.audit().live))
        audit = run.audit()
        assert (audit.live, audit.balanced) == (0, True)


def test_a_unit_that_dies_loses_nothing(cluster: str, tmp_path: Path) -> None:
    with run_with(cluster) as stored:
        stored.start_unit()
        run = stored.run
        run.queue.declare("read", needs=["x"])
        child(tmp_path, run.addresses[1], "queue.put({'x': np.arange(4.0)})")
        unit = next(client for client in run.queue.status().sessions if client.name == "store")
        os.kill(unit.pid, signal.SIGKILL)
        until(lambda: not run.homes()[0].address, "the absent home")
        stored.start_unit()
        assert run.homes()[0].epoch == 1
        with stored.queue().get("read", 4) as batch:
            assert batch.array("x").tolist() == [0, 1, 2, 3]
            batch.ack()


def child(folder: Path, address: str, text: str) -> None:
    """Run a client in a process of its own, and wait for its end."""
    script = folder / "client.py"
    script.write_text(
        f"import numpy as np\nimport asyncflow_sdk as af\n\nwith af.connect({address!r}, name='child') as run:\n    queue = run.queue\n"
        + "\n".join("    " + line for line in text.strip().splitlines())
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
