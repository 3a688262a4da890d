"""Runs with their payload in a real Mooncake, over tcp on this host."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

try:
    import mooncake.store  # noqa: F401
except ImportError as error:  # its libraries are not there
    pytest.skip(f"Mooncake cannot be imported: {error}", allow_module_level=True)

from masters import Master

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, MemoryFull
from asyncflow_sdk.interfaces import TransferQueue
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.stored_run import StoredRun, squares, until
from asyncflow_sdk.workflow.processes.ranks import free_port

SHARED = f"127.0.0.1:{free_port()}"
kit = Conformance("store", "mooncake", options={"master": SHARED, "segment_bytes": 64 << 20})


@pytest.fixture(scope="module")
def shared_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    master = Master(tmp_path_factory.mktemp("master"), SHARED)
    yield master
    master.kill()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    master = Master(tmp_path)
    yield master
    master.kill()


def run_with(master: Master, megabytes: int = 64, **options: Any) -> StoredRun:
    settings = {"master": master.address, "segment_bytes": megabytes << 20, **options}
    return StoredRun(af.Store(kind="mooncake", options=settings))


def test_a_run_without_a_master_is_refused() -> None:
    with pytest.raises(ConfigError, match="no mooncake_master answers at"):
        af.serve(store=af.Store(kind="mooncake", options={"master": f"127.0.0.1:{free_port()}"}))
    with pytest.raises(ConfigError, match="'host:port'"):
        af.serve(store=af.Store(kind="mooncake", options={"master": "here"}))


def test_payload_on_disk_is_refused(shared_master: Master, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="durability='host'"):
        af.serve(
            tmp_path / "run",
            durability="host",
            store=af.Store(kind="mooncake", options={"master": shared_master.address}),
        )


def test_a_full_segment_raises_memory_full_though_another_has_room(shared_master: Master) -> None:
    with run_with(shared_master, 256) as large, run_with(shared_master, 32) as small:
        large.start_unit(process=True)
        small.start_unit(process=True)
        queue = small.queue()
        queue.declare("read", needs=["x"])
        with pytest.raises(MemoryFull):
            put_megabytes(queue, 40)
        written = small.run.audit().put
        assert 60 <= written <= 128
        # freed blocks make room
        queue.get("read", 16).ack()
        for _ in range(4):
            queue.put({"x": np.ones((4, 1 << 18), np.uint8)})
        # and hard-pinned ones are all there
        read = 0
        while read < written:
            with queue.get("read", 16) as batch:
                read += batch.rows
                batch.ack()
        assert small.run.audit().failed == 0


def put_megabytes(queue: TransferQueue, count: int) -> None:
    for _ in range(count):
        queue.put({"x": np.zeros((4, 1 << 18), np.uint8)})


def test_a_whole_run_and_a_master_that_forgets_all(master: Master) -> None:
    # given rows of a producer, made further by a stage, all in Mooncake
    with run_with(master, fetch_s=10.0) as stored:
        stored.start_unit()
        run = stored.run
        run.queue.declare("square", needs=["x"], gives=["y"])
        run.queue.declare("use", needs=["x", "y"])
        stored.process("put", 8, "first")
        stored.process("put", 4)
        stored.process("square", 12)
        stored.process("use", 4)
        assert run.audit().consumed == 4
        # when the master is killed, rows cannot be read, and none is lost
        master.kill()
        with pytest.raises(af.AsyncFlowError):
            stored.queue("late").get("use", 4, timeout_s=1.0)
        assert run.audit().failed == 0
        # and columns of new rows go to the server
        stored.queue("other").put({"x": np.arange(20.0, 23)})
        # when another master is started, which has forgotten all
        master.start()
        until(lambda: run.audit().failed, "the loss of the home", 90)
        audit = run.audit()
        assert (audit.put, audit.failed, audit.consumed, audit.live, audit.balanced) == (15, 8, 4, 3, True)
        assert {group.reasons[0].split(":")[0] for group in run.queue.failed()} == {"payload lost"}
        # then the home has begun another epoch, and the run goes on
        until(lambda: run.homes()[0].epoch == 2 and not run.homes()[0].lost, "the next epoch")
        stored.process("put", 8, "first")
        for action in ("square", "use"):
            stored.process(action, run.audit().live)
        audit = run.audit()
        assert (audit.live, audit.balanced) == (0, True)


def test_rows_with_columns_in_lost_memory_are_put_again(master: Master) -> None:
    with run_with(master) as stored:
        run = stored.run
        run.queue.declare("square", needs=["x"], gives=["y"])
        run.queue.declare("use", needs=["x", "y"])
        run.queue.put(rows := {"x": np.arange(6.0)}, key="rows")  # without a unit: in the server's memory
        stored.start_unit()
        stored.process("square", 4)
        # when the master forgets the squares
        master.kill()
        master.start()
        until(lambda: run.audit().failed == 4, "the loss of the home", 90)
        run.queue.put(rows, key="rows")  # then the same put adds their rows again
        stored.process("square", 6)
        stored.process("use", 6)
        audit = run.audit()
        assert (audit.put, audit.failed, audit.consumed, audit.live, audit.balanced) == (10, 4, 6, 0, True)


@pytest.mark.starts(
    "contrib/asyncflow_mooncake/README.md: asyncflow store tcp://10.0.0.1:7000 --key run.key", "store mooncake"
)
def test_a_unit_typed_by_hand_serves_workers_of_the_run(shared_master: Master, tmp_path: Path) -> None:
    store = af.Store(kind="mooncake", options={"master": shared_master.address, "segment_bytes": 64 << 20})
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


@kit.parametrize
@pytest.mark.usefixtures("shared_master")
def test_contract(check: Any) -> None:
    """Last: the master does not know for 10 s that a unit was killed, and its segment takes blocks of others."""
    check()
