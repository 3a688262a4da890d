"""Runs that are closed while somebody works on them, and of which a part does not close: the rest is closed all the same."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from echo_runs import segments
from plugin_packages import install_plugin
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ServerLost
from asyncflow_sdk.interfaces import Launcher, WorkerExit, WorkerHandle, WorkerSpec
from asyncflow_sdk.testing import EchoTrain

pytestmark = pytest.mark.fast

PLUGIN = """
import asyncflow_sdk as af
@af.hookimpl
def asyncflow_adapters():
    return [af.AdapterSpec(kind="launcher", name="stuck", factory="test_closing:Stuck")]
"""


class Idle(WorkerHandle):
    """A worker that waits until it is stopped."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def wait(self) -> WorkerExit:
        self.stopped.wait()
        return WorkerExit(0)

    def stop(self) -> None:
        self.stopped.set()

    kill = stop


class Stuck(Launcher):
    """A launcher that does not close."""

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        return Idle()

    def close(self) -> None:
        raise RuntimeError("it does not close")


def doubled(x: Any) -> Any:
    return 2 * x


def test_a_run_of_which_a_part_does_not_close_leaves_no_worker_no_server_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given
    install_plugin(tmp_path, monkeypatch, "sticking", PLUGIN)
    before = segments(os.getpid())
    run = af.serve(tmp_path / "run")
    (worker,) = run.start(af.Stage(doubled, needs=["x"], gives=["y"], launcher="stuck"))
    assert segments(os.getpid()) - before
    # when
    with pytest.raises(RuntimeError, match="does not close"):
        run.close()
    # then
    assert worker.ended.is_set()
    assert segments(os.getpid()) <= before
    assert not (tmp_path / "run" / "address").exists()


@pytest.mark.parametrize("holds", [False, True])
def test_a_worker_was_through_with_a_run_that_is_closed_unless_it_holds_rows(tmp_path: Path, holds: bool) -> None:
    # given a worker of another client than the one that serves
    entered, opened = threading.Event(), threading.Event()

    def waits(x: Any) -> Any:
        entered.set()
        assert opened.wait(60)
        return x

    run = af.serve(tmp_path / "run")
    with af.connect(run.address, name="client") as client:
        (worker,) = client.start(af.Stage(waits, needs=["x"], gives=["y"], max_restarts=0))
        if holds:
            run.queue.put({"x": [1.0]})
            assert entered.wait(60)
        else:
            until(lambda: run.queue.status().parked, "that it waits for rows")
        # when
        run.close()
        opened.set()
        assert worker.ended.wait(60)
        # then
        assert worker.lost == holds
        if holds:
            with pytest.raises(ServerLost, match="was closed"):
                client.check()


def test_a_trainer_closes_its_engine_also_when_its_run_is_gone(tmp_path: Path) -> None:
    closed.clear()
    with af.serve(tmp_path / "run", steps=2) as run, af.connect(tmp_path / "run", name="client") as client:
        # given a trainer whose run is closed in the middle of a step
        runs.append(run)
        columns = {name: [[0]] for name in af.TRAIN_COLUMNS} | {"reward": [1.0], "logprobs": [[-0.0]]}
        run.queue.declare("train", needs=af.TRAIN_COLUMNS, batch_rows=1)
        run.queue.put(columns | {"version_spans": [[[0, 0, 1]]]})
        # when
        (worker,) = client.start(af.Train("test_closing:Cut", launcher="thread"))
        assert worker.ended.wait(60)
        # then
        assert closed.is_set()
        assert worker.lost


runs, closed = list[af.Run](), threading.Event()


class Cut(EchoTrain):
    """Its run is closed while it trains."""

    def train_step(self, batch: af.Batch) -> af.StepResult:
        runs.pop().close()
        return super().train_step(batch)

    def close(self) -> None:
        closed.set()


def test_a_thread_that_does_not_end_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncflow_sdk.workflow.processes.worker_pool.GRACE_S", 0.01)
    entered, opened = threading.Event(), threading.Event()

    def waits(x: list[float]) -> list[float]:
        entered.set()
        assert opened.wait(100)
        return x

    with af.serve(tmp_path / "run") as run:
        run.queue.put({"x": [1.0]})
        (worker,) = run.start(af.Stage(waits, needs=["x"], gives=["y"]))
        assert entered.wait(100)
        # when the run is closed in the middle of the call
        assert in_thread(run.close)() is None
        # then
        assert worker.ended.is_set()
        assert not worker.lost
        opened.set()


def test_an_error_that_a_client_reads_says_that_the_run_was_closed() -> None:
    run = af.serve()
    with af.connect(run.address) as client:
        run.close()
        with pytest.raises(ServerLost, match="was closed by the process that served it"):
            client.queue.status()
