"""How workers are stopped: all at the same time, in the middle of what they do, and killed where that is not enough."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from echo_runs import alive, segments
from functions import length
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.memory import SharedDirectory
from asyncflow_sdk.workflow import crews
from asyncflow_sdk.workflow.supervise import Worker
from asyncflow_sdk.workflow.work import FunctionWork
from asyncflow_sdk.workflow.worker import StageJob, WorkerConfig

A_WORKER = """
import sys
from pathlib import Path
from asyncflow_sdk.workflow import worker
worker.remove_if_ownerless = lambda path, wait_s: Path(sys.argv[1]).touch()
sys.exit(worker.main())
"""
FROZEN = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import driver
from asyncflow_sdk.workflow import crews
crews.GRACE_S = 3600.0

def show(event):
    driver.show(event)
    if isinstance(event, driver.StepTrained) and event.step == 2:
        os.kill(frozen[0], signal.SIGSTOP)
        print("frozen", flush=True)
    if isinstance(event, driver.WorkerState):
        if event.worker == "rollout-0":
            frozen.append(event.pid)
        if event.state == "stopped":
            print("stopped", flush=True)

frozen = []
workflow = driver.af.Workflow(
    prompts={"prompt_ids": [[1, 2, 3], [4], [5, 6]]}, rollout=driver.af.Rollout("echo", group_size=4, prompt="prompt_ids"),
    reward=driver.functions.length, train=driver.af.Train("echo"), batch_size=16, steps=100_000,
)
try:
    workflow.run(sys.argv[1], on_event=show)
except driver.af.Interrupted as error:
    print("again" if error.again else "once", flush=True)
"""


class Recorded(af.WorkerHandle):
    """A worker that ends when the test says so, whatever it is told."""

    def __init__(self, name: str, told: list[str], end: threading.Event) -> None:
        self._name, self._told, self._end = name, told, end

    def wait(self) -> af.WorkerEnding:
        self._end.wait()
        return af.WorkerEnding(0)

    def stop(self) -> None:
        self._told.append(f"stop {self._name}")

    def kill(self) -> None:
        self._told.append(f"kill {self._name}")


class Launches(af.Launcher):
    def __init__(self, told: list[str], end: threading.Event) -> None:
        self._told, self._end = told, end

    def start(self, order: af.WorkerOrder) -> af.WorkerHandle:
        return Recorded(order.name, self._told, self._end)


class Waited(threading.Event):
    """The end of a worker, which says when somebody waits for it."""

    def __init__(self, name: str, told: list[str]) -> None:
        super().__init__()
        self._name, self._told = name, told

    def wait(self, timeout: float | None = None) -> bool:
        self._told.append(f"wait {self._name}")
        return super().wait(timeout)


class Quiet:
    """Somebody to tell of workers who does nothing with it."""

    over = False

    def report(self, event: af.Event) -> None: ...

    def gone(self, worker: Worker, why: str) -> None: ...

    def failed(self, worker: Worker, error: af.WorkerFailed) -> None: ...

    def ended(self, worker: Worker) -> None: ...


def test_workers_are_stopped_and_killed_at_the_same_time_not_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crews, "GRACE_S", 0.01)
    told: list[str] = []
    end = threading.Event()
    workers = []
    for name in ("a", "b", "c"):
        order = af.WorkerOrder(name=name, config=b"", place=af.Place(), log=tmp_path / "log")
        workers.append(Worker(Launches(told, end), order, "role", Quiet()))
        workers[-1].ended = Waited(name, told)

    crews._end(workers)

    assert told == [f"{what} {name}" for what in ("stop", "wait", "kill", "wait") for name in ("a", "b", "c")]
    end.set()
    until(lambda: all(worker.ended.is_set() for worker in workers), "the end of all")


@pytest.mark.parametrize("lives", [True, False])
def test_only_a_worker_whose_driver_is_gone_waits_to_clean_up_after_it(tmp_path: Path, lives: bool) -> None:
    # given a worker in the middle of something: it waits for a server
    job = StageJob(FunctionWork("functions:length"), "reward", ("response_ids",), ("reward",), 1, 1, False)
    directory = SharedDirectory()
    config = WorkerConfig("w", f"ipc://{directory.path}/queue", job, [])
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen(
        [sys.executable, "-c", A_WORKER, str(tmp_path / "waited")], stdin=theirs.fileno(), start_new_session=True
    ) as worker:  # fmt: skip
        theirs.close()
        ours.sendall(msgspec.json.encode(config) + b"\n")
        # when
        if lives:
            ours.shutdown(socket.SHUT_WR)
        else:
            ours.close()
        worker.wait(100)
    # then
    directory.close()
    assert (tmp_path / "waited").exists() == (not lives)


def test_a_thread_that_does_not_end_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "GRACE_S", 0.01)
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
        closed = in_thread(run.close)
        assert closed() is None
        # then
        assert worker.ended.is_set()
        assert not worker.lost
        opened.set()


def test_a_second_ctrl_c_kills_the_workers_that_the_first_has_not_ended(tmp_path: Path) -> None:
    # given a run with a worker that cannot end by itself
    here = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", FROZEN, str(tmp_path / "run"), here],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        pids = []
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready"):
                pids.append(int(line.split()[2]))
            if line == "frozen\n":  # when it is stopped
                process.send_signal(signal.SIGINT)
            if line == "stopped\n":  # and, while the others end, again
                process.send_signal(signal.SIGINT)
                break
        last, _ = process.communicate(timeout=100)
    # then
    assert last.endswith("again\n")
    assert pids
    assert not [pid for pid in pids if alive(pid)]
    assert not segments(process.pid)
    assert '"interrupted"' in (tmp_path / "run" / "summary.json").read_text()


def test_a_run_that_was_interrupted_says_whether_it_was_asked_again(tmp_path: Path) -> None:
    def stop(event: af.Event) -> None:
        if isinstance(event, af.types.events.StepTrained) and not stopped:
            stopped.append(event.step)
            os.kill(os.getpid(), signal.SIGINT)

    stopped: list[int] = []
    with pytest.raises(af.Interrupted) as caught:
        af.Workflow(
            prompts={"prompt_ids": [[1, 2, 3], [4]]}, rollout=af.Rollout("echo", group_size=4, prompt="prompt_ids"),
            reward=length, train=af.Train("echo"), batch_size=16, steps=100_000,
        ).run(tmp_path / "run", on_event=stop)  # fmt: skip

    assert not caught.value.again
