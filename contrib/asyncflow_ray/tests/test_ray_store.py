"""Runs with their payload in the object store of a real Ray."""

from __future__ import annotations

import contextlib
import os
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
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.stored_run import StoredRun, squares, until

kit = Conformance("store", "ray", options={"memory_bytes": 64 << 20})


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[str]:
    ray.init(
        num_cpus=2, object_store_memory=256 << 20, include_dashboard=False, log_to_driver=False,
        configure_logging=False,
    )  # fmt: skip
    address = os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    yield address
    del os.environ["RAY_ADDRESS"]
    ray.shutdown()


def run_with(cluster: str, **options: Any) -> StoredRun:
    return StoredRun(af.Store(kind="ray", options={"address": cluster, "memory_bytes": 64 << 20, **options}))


@kit.parametrize
def test_contract(check: Any) -> None:
    check()


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


def test_a_whole_run_and_an_owner_that_dies(cluster: str) -> None:
    # given rows of a producer, made further by a stage, all in Ray; both have ended
    with run_with(cluster) as stored:
        stored.start_unit()
        run = stored.run
        run.queue.declare("square", needs=["x"], gives=["y"])
        run.queue.declare("use", needs=["x", "y"])
        stored.process("put", 8, "first")
        stored.process("put", 4)
        stored.process("square", 12)
        stored.process("use", 4)
        assert run.audit().consumed == 4
        # when the owner dies
        (home,) = run.homes()
        ray.kill(ray.get_actor(home.address.split()[0], "asyncflow"))
        until(lambda: run.audit().failed, "the loss of the home", 90)
        # then its rows are counted, and the home has begun another epoch
        audit = run.audit()
        assert (audit.put, audit.failed, audit.consumed, audit.live, audit.balanced) == (12, 8, 4, 0, True)
        until(lambda: run.homes()[0].epoch == 2 and not run.homes()[0].lost, "the next epoch")
        stored.process("put", 8, "first")
        for action in ("square", "use"):
            stored.process(action, run.audit().live)
        audit = run.audit()
        assert (audit.live, audit.balanced) == (0, True)


def test_a_unit_that_dies_loses_nothing(cluster: str) -> None:
    with run_with(cluster) as stored:
        stored.start_unit(process=True)
        stored.run.queue.declare("read", needs=["x"])
        stored.process("put", 4)
        stored.kill_unit()
        stored.start_unit()
        assert stored.run.homes()[0].epoch == 1
        with stored.queue().get("read", 4) as batch:
            assert batch.array("x").tolist() == [0, 1, 2, 3]
            batch.ack()


@pytest.mark.starts("contrib/asyncflow_ray/README.md: asyncflow store tcp://10.0.0.1:7000 --key run.key", "store ray")
def test_a_unit_typed_by_hand_serves_workers_of_the_run(cluster: str, tmp_path: Path) -> None:
    store = af.Store(kind="ray", options={"address": cluster, "memory_bytes": 64 << 20})
    with af.serve(tmp_path, address="tcp://127.0.0.1:0", store=store) as run:
        typed = [sys.executable, "-m", "asyncflow_sdk.cli", "store", run.addresses[-1], "--key", tmp_path / "run.key"]
        with contextlib.ExitStack() as ends:
            ends.callback(ends.enter_context(subprocess.Popen(typed)).terminate)
            until(lambda: [home for home in run.homes() if home.address], "the unit")
            run.start(af.Stage(squares, task="square", gives=["y"]))
            run.queue.declare("use", needs=["y"])
            run.queue.put({"x": np.arange(3.0)})
            with run.queue.get("use", 3, at_least=3, timeout_s=120.0) as batch:
                assert batch.array("y").tolist() == [0, 1, 4]
                assert run.audit().homes[-1].payload_bytes > 0
                batch.ack()
