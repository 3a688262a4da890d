"""Launchers and supervision: where workers run, what is refused before any does, how they are stopped, and how often they are started again."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from echo_runs import check_whole, column, echo_workflow
from functions import length, length_and_cpu
from plugin_packages import install_plugin
from processes import alive
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import WorkerFailed
from asyncflow_sdk.interfaces import Launcher, Placement, WorkerExit, WorkerHandle, WorkerSpec
from asyncflow_sdk.types.events import Event, StepTrained, WorkerState
from asyncflow_sdk.workflow import CommandLauncher
from asyncflow_sdk.workflow.processes import launchers

PLUGIN = """
import asyncflow_sdk as af
@af.hookimpl
def asyncflow_adapters():
    return [af.AdapterSpec(kind="launcher", name="scripted", factory="test_launchers:scripted")]
"""
Ending = Callable[[WorkerHandle], WorkerExit]


class Handle(WorkerHandle):
    """A worker that ends as it is told."""

    def __init__(self, launcher: Scripted, name: str, ending: Ending) -> None:
        self.launcher, self.name, self.ending, self.stopped = launcher, name, ending, threading.Event()

    def wait(self) -> WorkerExit:
        return self.ending(self)

    def stop(self) -> None:
        self.launcher.told.append(f"stop {self.name}")
        self.stopped.set()

    def kill(self) -> None:
        self.launcher.told.append(f"kill {self.name}")


class Scripted(Launcher):
    """A launcher whose starts end, or fail, one after another as a test says. Not listed ones wait until they are stopped."""

    def __init__(self) -> None:
        self.starts, self.told = list[Any](), list[str]()

    def check(self, place: Placement) -> None:
        self.told.append("check")

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        self.told.append(f"start {spec.name}")
        this = self.starts.pop(0) if self.starts else until_stopped
        if isinstance(this, OSError):
            raise this
        return Handle(self, spec.name, this if callable(this) else lambda handle: raised_or(this))

    def close(self) -> None:
        self.told.append("close")


def until_stopped(handle: Any) -> WorkerExit:
    handle.stopped.wait()
    return WorkerExit(0)


def raised_or(ending: WorkerExit | Exception) -> WorkerExit:
    if isinstance(ending, Exception):
        raise ending
    return ending


made: list[Scripted] = []


def scripted() -> Scripted:
    return made[-1]


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """The launcher "scripted" is installed; what died is started again at once."""
    monkeypatch.setattr("asyncflow_sdk.workflow.processes.worker_pool.BACKOFF_S", 0.001)
    install_plugin(tmp_path, monkeypatch, "scripting", PLUGIN)
    made.append(Scripted())
    return made[-1]


def supervised(launcher: Scripted, *starts: Any, restarts: int = 2) -> tuple[list[str], WorkerFailed | None]:
    """The states that one worker goes through, and what its run fails with."""
    launcher.starts = list(starts)
    events: list[Event] = []
    with af.serve(on_event=events.append) as run:
        (worker,) = run.start(af.Stage(length, task="w", launcher="scripted", max_restarts=restarts))
        assert worker.ended.wait(60)
        run.queue.flush()
        failure = run.failure
        assert worker.lost == (failure is not None)
    assert failure is None or isinstance(failure, WorkerFailed)
    return [e.state for e in events if isinstance(e, WorkerState)], failure


def test_an_error_that_would_come_again_is_not_tried_again(launcher: Scripted) -> None:
    states, failure = supervised(launcher, WorkerExit(3, "Traceback ... no such option"))

    assert states == ["failed"]
    assert failure is not None
    assert failure.detail == "Traceback ... no such option"


def test_a_worker_is_started_again_so_often_and_no_more(launcher: Scripted) -> None:
    states, failure = supervised(launcher, *[WorkerExit(-9)] * 3)

    assert states == ["restarting", "restarting", "failed"]
    assert str(failure) == "worker 'w-0' was killed by SIGKILL after 2 restarts"


def test_it_is_waited_for_longer_each_time(launcher: Scripted) -> None:
    events: list[Event] = []
    launcher.starts = [WorkerExit(-9)] * 5
    with af.serve(on_event=events.append) as run:
        run.start(af.Stage(length, task="w", launcher="scripted", max_restarts=9))
        until(lambda: launcher.told.count("start w-0") == 6, "the start of one that lives")
    details = [e.detail for e in events if isinstance(e, WorkerState) and e.state == "restarting"]
    waits = [float(re.search(r"in ([\d.]+) s", detail).group(1)) for detail in details]  # type: ignore[union-attr]
    assert waits[0] == 0.001
    assert all(later in (2 * wait, waits[0]) for wait, later in itertools.pairwise(waits)), (
        "one that worked may begin anew"
    )


def test_a_worker_that_ends_well_after_it_died_is_through(launcher: Scripted) -> None:
    assert supervised(launcher, WorkerExit(1, "once"), WorkerExit(0)) == (["restarting", "stopped"], None)


def test_a_worker_that_has_died_is_not_waited_for_when_all_is_over(
    launcher: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncflow_sdk.workflow.processes.worker_pool.BACKOFF_S", 3600.0)
    events: list[Event] = []
    launcher.starts = [WorkerExit(-9)]
    with af.serve(on_event=events.append) as run:
        (worker,) = run.start(af.Stage(length, task="w", launcher="scripted"))
        until(lambda: events, "its death being told")

        in_thread(run.join_workers, 3600.0)()

        assert worker.ended.is_set()
        assert not worker.lost
    assert launcher.told.count("start w-0") == 1


def test_a_launcher_that_cannot_start_a_worker_again_is_named(launcher: Scripted) -> None:
    states, failure = supervised(launcher, WorkerExit(1), OSError("no more slots"))

    assert states == ["restarting", "failed"]
    assert "'w-0' cannot be started again: OSError: no more slots" in str(failure)


def test_a_launcher_that_cannot_start_a_worker_at_all_raises(launcher: Scripted) -> None:
    with pytest.raises(OSError, match="no more slots"):
        supervised(launcher, OSError("no more slots"))


def test_a_launcher_that_loses_a_worker_is_named_in_the_end(launcher: Scripted) -> None:
    states, failure = supervised(launcher, *[RuntimeError("the cluster is gone")] * 3)

    assert states == ["restarting", "restarting", "failed"]
    assert failure is not None
    assert failure.detail == "its launcher lost it: RuntimeError: the cluster is gone"


def test_a_signal_without_a_name_is_told_by_its_number(launcher: Scripted) -> None:
    _, failure = supervised(launcher, WorkerExit(-77), restarts=0)

    assert str(failure) == "worker 'w-0' was killed by signal 77"


def test_workers_are_stopped_and_killed_at_the_same_time_not_one_after_another(
    launcher: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And their launcher is closed when all have ended."""
    monkeypatch.setattr("asyncflow_sdk.workflow.processes.worker_pool.GRACE_S", 0.01)
    end = threading.Event()
    launcher.starts = [lambda handle: WorkerExit(0 * end.wait(60))] * 3
    with af.serve() as run:
        for task in ("a", "b", "c"):
            run.start(af.Stage(length, task=task, gives=[task], launcher="scripted"))
        before = len(launcher.told)

        run.stop_workers()

        assert launcher.told[before:] == [f"{what} {task}-0" for what in ("stop", "kill") for task in ("a", "b", "c")]
        end.set()
        until(lambda: all(worker.ended.is_set() for worker in run.workers), "the end of all")
    assert launcher.told[-1] == "close"


def test_a_launcher_that_looks_before_anything_starts_is_closed_again(launcher: Scripted) -> None:
    """As one that needs something to look with, like a cluster's."""
    echo_workflow(rollout={"launcher": "scripted"}, train={"launcher": "scripted"})

    assert launcher.told == ["check", "check", "close"]


ENDS_ONE = """
import sys
for _ in "01": sys.stdin.readline()
print('{"rank": 0, "pid": 1, "host": "far"}\\n{"rank": 0, "status": 0}', flush=True)
sys.stdin.read()
"""


class OneCommand(CommandLauncher):
    """Two ranks by one command, which goes on after the end of the first."""

    def command(self, spec: WorkerSpec) -> list[str]:
        return [sys.executable, "-c", ENDS_ONE]


def test_a_rank_that_ends_well_does_not_wait_for_the_log_of_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "_COPY_S", 3600.0)
    launcher, place = OneCommand(), Placement()
    specs = [
        WorkerSpec(name=f"w-{n}", role={}, address="", rank=n, placement=place, log=tmp_path / f"{n}") for n in (0, 1)
    ]
    first, second = launcher.start_together(specs, launcher.command(specs[0]))
    try:
        ended: list[WorkerExit] = []
        threading.Thread(target=lambda: ended.append(first.wait()), daemon=True).start()
        until(lambda: ended, "the end of the first rank")
        assert ended[0].status == 0
    finally:
        second.kill()
    assert second.wait().status == -signal.SIGKILL


def test_a_thread_that_a_function_ends_says_so() -> None:
    def interrupts(response_ids: Any) -> Any:
        raise KeyboardInterrupt

    with af.serve() as run:
        run.queue.put({"response_ids": [[1], [2]]})
        (worker,) = run.start(af.Stage(interrupts, task="out", max_restarts=0))
        with pytest.raises(WorkerFailed, match=r"in interrupts(.|\n)*KeyboardInterrupt"):
            run.wait(worker, timeout_s=60)


def test_a_worker_is_kept_on_its_cpus_with_all_its_threads(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    stage = af.Stage(length_and_cpu, task="reward", gives=["reward", "cpu"], cpus=[cpu])

    result = echo_workflow(steps=1, reward=stage).run(tmp_path / "run")

    check_whole(result, 1)
    assert set(column(result.directory, "cpu")) == {cpu}


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ({"cpus": [4095]}, "may not use CPU 4095; it may use"),
        ({"gpus": [99]}, "this host has no GPU 99"),
        ({"launcher": "slurm"}, "no launcher adapter is named 'slurm'; installed: process, thread"),
        ({"launcher": "thread", "python": sys.executable}, "python= is for workers in processes"),
        ({"launcher": "thread", "env": {"A": "1"}}, "env= is for workers in processes"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_starts(
    tmp_path: Path, place: dict[str, Any], what: str
) -> None:
    with af.serve(tmp_path / "run") as run, pytest.raises(af.AsyncFlowError, match=what):
        run.start(af.Rollout("echo", prompt="prompt_ids", **place))
    assert not (tmp_path / "run" / "logs").exists()


def test_an_interpreter_without_the_sdk_is_told_what_to_install(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")

    with pytest.raises(WorkerFailed, match=f"{python} cannot load the AsyncFlow SDK: No module named"):
        echo_workflow(rollout={"python": python, "env": {"PYTHONPATH": ""}}).run(tmp_path / "run")


def test_workers_of_a_driver_killed_while_it_starts_them_end(tmp_path: Path) -> None:
    """Whether they have connected or not: they leave no memory of the run."""
    code = (
        "import os, sys, asyncflow_sdk as af\n"
        "run = af.serve(sys.argv[1])\n"
        "workers = run.start(af.Rollout('echo', prompt='prompt_ids', replicas=2))\n"
        "print(os.getpid(), *(w.pid for w in workers), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, timeout=100, check=False
    )

    driver, *pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    until(lambda: not any(alive(pid) for pid in pids), "the end of all workers")
    until(lambda: not list(Path("/dev/shm").glob(f"asyncflow-{os.getuid()}-{driver}-*")), "no memory left")


def test_a_run_that_was_interrupted_says_whether_it_was_asked_again(tmp_path: Path) -> None:
    stopped: list[int] = []

    def stop(event: Event) -> None:
        if isinstance(event, StepTrained) and not stopped:
            stopped.append(event.step)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(af.Interrupted) as caught:
        echo_workflow(steps=100_000).run(tmp_path / "run", on_event=stop)

    assert not caught.value.repeated
