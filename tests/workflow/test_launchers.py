"""Launchers: where workers run, and what is refused before any does."""

import os
import subprocess
import sys
import threading
import venv
from pathlib import Path
from typing import Any

import msgspec
import pytest
from echo_runs import alive, echo_workflow
from functions import interrupts, length, pinned
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import WorkerFailed
from asyncflow_sdk.types import Sampling
from asyncflow_sdk.types.events import Event, WorkerState
from asyncflow_sdk.workflow import checking
from asyncflow_sdk.workflow.threads import ThreadLauncher
from asyncflow_sdk.workflow.worker import RolloutJob, WorkerConfig

ANY_ROLLOUT: dict[str, Any] = {
    "engine": "echo", "model": "", "options": {}, "sampling": Sampling(), "prompt": "prompt_ids", "tokenizer": "",
    "needs_first": False, "swap": "boundary", "verify": (),
}  # fmt: skip


def test_a_whole_run_in_threads(tmp_path: Path) -> None:
    result = echo_workflow(rollout={"launcher": "thread", "replicas": 2}, train={"launcher": "thread"}, steps=6).run(
        tmp_path / "run"
    )

    assert result.summary["rows"]["consumed"] == 6 * 16
    assert not list((tmp_path / "run").glob("logs/rollout*"))


def test_a_launcher_that_looks_before_anything_starts_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # given one that needs something to look with, as a cluster's does
    did: list[str] = []

    class Looks(ThreadLauncher):
        def check(self, place: af.Place) -> None:
            did.append("looks")

        def close(self) -> None:
            did.append("closes")

    monkeypatch.setattr(checking, "launcher_named", lambda name: Looks())

    echo_workflow(rollout={"launcher": "mine"}, train={"launcher": "mine"})

    assert did == ["looks", "looks", "looks", "closes", "closes"], "one of each name"


def test_workers_in_threads_leave_no_thread_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())

    echo_workflow(steps=2, reward=af.Stage(lambda response_ids: length(response_ids), task="reward")).run(tmp_path)

    until(lambda: set(threading.enumerate()) <= before, "the end of all threads")


def test_a_thread_that_a_function_ends_says_so() -> None:
    with af.serve() as run:
        run.queue.put({"response_ids": [[1], [2]]})
        (worker,) = run.start(af.Stage(interrupts, task="out", launcher="thread", max_restarts=0))
        with pytest.raises(WorkerFailed, match=r"in interrupts(.|\n)*KeyboardInterrupt"):
            run.wait(worker, timeout_s=60)


def test_a_worker_is_kept_on_its_cpus_with_all_its_threads(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    with af.serve(tmp_path / "run") as run:
        run.queue.put({"x": [0.0]})
        run.start(af.Stage(pinned, needs=["x"], gives=["cpu"], cpus=[cpu]))
        run.queue.declare("end", needs=["cpu"])

        with run.queue.get("end", timeout_s=60) as batch:
            assert batch.array("cpu").tolist() == [cpu]
            batch.ack()
    assert len(os.sched_getaffinity(0)) == os.cpu_count() or cpu in os.sched_getaffinity(0)


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
def test_what_cannot_be_had_is_refused_before_anything_starts(tmp_path: Path, place: dict, what: str) -> None:
    with af.serve(tmp_path / "run") as run, pytest.raises(af.AsyncFlowError, match=what):
        run.start(af.Rollout("echo", prompt="prompt_ids", **place))
    assert not (tmp_path / "run" / "logs").exists()


def test_an_interpreter_without_the_sdk_is_told_what_to_install(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")

    with pytest.raises(WorkerFailed, match=f"{python} cannot load the AsyncFlow SDK: No module named"):
        echo_workflow(rollout={"python": python, "env": {"PYTHONPATH": ""}}).run(tmp_path / "run")


def test_a_worker_is_named_with_its_traceback_not_with_what_it_printed_last(tmp_path: Path) -> None:
    events: list[Event] = []
    with pytest.raises(WorkerFailed, match="told to fail at step 2") as caught:
        echo_workflow(train={"fail_at": 2}, steps=5).run(tmp_path / "run", on_event=events.append)

    assert caught.value.detail.startswith("Traceback")
    assert caught.value.detail.rstrip().endswith("RuntimeError: told to fail at step 2")
    failed = [e.detail for e in events if isinstance(e, WorkerState) and e.state == "failed"]
    assert failed
    assert all("RuntimeError: told to fail at step 2" in detail for detail in failed)


def test_workers_of_a_driver_killed_while_it_starts_them_end(tmp_path: Path) -> None:
    code = (
        "import os, sys, asyncflow_sdk as af\n"
        "run = af.serve(sys.argv[1])\n"
        "workers = run.start(af.Rollout('echo', prompt='prompt_ids', replicas=3))\n"
        "print(*(w.pid for w in workers), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, timeout=60, check=False
    )

    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 3, done.stderr
    until(lambda: not any(alive(pid) for pid in pids), "the end of all workers")
    until(lambda: not list(Path("/dev/shm").glob(f"asyncflow-{os.getuid()}-{_driver(tmp_path)}-*")), "no memory left")


def test_a_worker_whose_driver_died_before_it_had_connected_leaves_no_memory_either() -> None:
    code = (
        "import os, asyncflow_sdk.memory as memory\n"
        "print(memory.SharedDirectory().path, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    left = Path(made.stdout.strip())
    assert left.is_dir()
    told = msgspec.json.encode(WorkerConfig("late", f"ipc://{left}/queue", RolloutJob(**ANY_ROLLOUT), []))

    subprocess.run([sys.executable, "-m", "asyncflow_sdk.workflow"], input=told + b"\n", timeout=60, check=False)

    assert not left.exists()


def _driver(tmp_path: Path) -> str:
    address = (tmp_path / "run" / "address").read_text()
    return address.split(f"asyncflow-{os.getuid()}-")[1].split("-")[0]
