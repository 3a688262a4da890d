"""A run directory of before, of a server that was killed: its journal is replayed, and a server goes on with it."""

from __future__ import annotations

import fcntl
import json
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from today import renew_snapshot

import asyncflow_sdk as af

pytestmark = pytest.mark.fast
HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "expected.json").read_text())["run"]


def make(directory: Path) -> None:
    """Serve a run up to its midst, for a process that is killed then. This made ``run.tar.xz``."""
    run = af.serve(directory, durability="host", checkpoints=True, steps=4)
    queue = run.queue
    queue.declare("work", needs=["x"], gives=["y"])
    queue.declare("train", needs=["x", "y"], batch_rows=4)
    queue.put({"x": np.arange(5.0)}, group_size=2, key="first")
    queue.put({"x": np.arange(5.0, 7.0)}, group_size=2, key="second", priority=1)
    batch = queue.get("work", 10)
    batch.complete({"y": 2 * batch.array("x")})
    queue.get("train").ack()
    run.checkpoint(lambda path: (path / "weights").write_text("of step 1"))
    queue.get("train").ack()
    queue.get("work", 2)
    queue.put({"x": np.arange(7.0, 8.0)}, group_size=2)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Of one test at a time on this host: the journal names the run's directory in shared memory."""
    with tarfile.open(HERE / "run.tar.xz") as file:
        file.extractall(tmp_path, filter="data")
    renew_snapshot(tmp_path / "run", tmp_path / "fresh")
    with (Path(tempfile.gettempdir()) / "asyncflow-frozen-run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield tmp_path / "run"


def test_its_journal_is_replayed(directory: Path) -> None:
    found = af.replay(directory)
    assert (found.records, found.differing, found.torn_bytes) == (EXPECTED["records"], 0, 0)
    assert found.audit.terminal | {"put": found.audit.put, "live": found.audit.live} == EXPECTED["audit"]
    assert [[each.step, each.version, each.audit.live] for each in found.milestones] == EXPECTED["cuts"]


def test_a_server_goes_on_with_it(directory: Path) -> None:
    with af.serve(directory, checkpoints=True) as run:
        # nothing is lost, and the checkpoint is there
        resumed = run.resume()
        assert (resumed.step, (resumed.path / "weights").read_text()) == (1, "of step 1")
        assert run.audit().live == 16
        # what was put is known, what was leased can be had again, and the steps are trained with the rows they had
        again = run.queue.put({"x": np.arange(5.0)}, group_size=2, key="first")
        assert (again.first, again.count, again.again) == (0, 10, True)
        batch = run.queue.get("work", 10)
        batch.complete({"y": 2 * batch.array("x")})
        trained = []
        for _ in range(3):
            step = run.queue.get("train")
            assert np.array_equal(step.array("y"), 2 * step.array("x"))
            trained.append(sorted(step.array("x").tolist()))
            step.ack()
        assert trained == EXPECTED["steps"]
        run.checkpoint(lambda path: None, keep=1)
        audit = run.audit()
    assert (audit.put, audit.live, audit.consumed) == (16, 0, 16)
