"""Workers as actors of a real Ray."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

sys.path.insert(0, str(Path(__file__).parent))

import functions

import asyncflow_sdk as af
from asyncflow_sdk.errors import WorkerFailed
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.types.events import Event, WorkerState

kit = Conformance("launcher", "ray")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@kit.parametrize
def test_contract(check: Any) -> None:
    check()


def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def through(run: af.Run, rows: int) -> set[int]:
    """The processes that worked on so many rows."""
    pids: list[int] = []
    while len(pids) < rows:
        with run.queue.get("end", rows, timeout_s=90) as batch:
            pids += batch.array("pid").tolist()
            batch.ack()
    return set(pids)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[af.Run]:
    with af.serve(tmp_path / "run") as run:
        run.queue.declare("end", needs=["pid"])
        yield run


def test_a_whole_run_with_rollouts_of_ray(tmp_path: Path) -> None:
    result = af.Workflow(
        prompts={"prompt_ids": [[1, 2, 3], [4], [5, 6]]},
        rollout=af.Rollout("echo", group_size=4, prompt="prompt_ids", launcher="ray", replicas=2, cpus=[0]),
        reward=lambda response_ids: [float(len(row)) for row in response_ids],
        train=af.Train("echo"),
        batch_size=16,
        steps=5,
    ).run(tmp_path / "run")

    assert result.summary["rows"]["consumed"] == 5 * 16
    until(lambda: ray.available_resources().get("CPU") == 2, "that all CPUs are free again")


def test_a_worker_whose_process_is_killed_is_started_again_by_ray(run: af.Run) -> None:
    (worker,) = run.start(af.Stage(functions.pid, task="pid", needs=["x"], launcher="ray", batch=1))
    run.queue.put({"x": list(range(3))})
    assert through(run, 3) == {worker.pid}

    os.kill(worker.pid, signal.SIGKILL)
    run.queue.put({"x": list(range(3))})

    others = through(run, 3)
    assert len(others) == 1
    assert others != {worker.pid}
    assert not worker.ended.is_set()


def test_scaling_down_ends_an_actor_when_it_is_through(run: af.Run) -> None:
    stage = af.Stage(functions.pid, task="pid", needs=["x"], launcher="ray", batch=1)
    (worker,) = run.start(stage)
    run.queue.put({"x": list(range(3))})
    through(run, 3)

    run.scale(stage, 0)

    until(worker.ended.is_set, "its end")
    until(lambda: not alive(worker.pid), "its process' end")
    assert not worker.lost


def test_a_worker_that_fails_for_good_is_named_with_its_traceback(tmp_path: Path) -> None:
    events: list[Event] = []
    with af.serve(tmp_path / "run", on_event=events.append) as run:
        (worker,) = run.start(af.Rollout("echo", prompt="prompt_ids", launcher="ray", no_such_option=1))
        with pytest.raises(WorkerFailed, match="no_such_option") as caught:
            run.wait(worker)
    assert "Traceback" in caught.value.detail
    assert any(isinstance(event, WorkerState) and event.state == "failed" for event in events)


def test_what_the_cluster_has_not_is_refused(run: af.Run) -> None:
    for place, what in [
        ({"cpus": list(range(99))}, "asks for 99 CPUs for one worker, and this Ray cluster has 2"),
        ({"gpus": [0]}, "asks for 1 GPUs"),
        ({"python": sys.executable}, "the environment that Ray was started in"),
    ]:
        with pytest.raises(af.ConfigError, match=what):
            run.start(af.Rollout("echo", prompt="prompt_ids", launcher="ray", **place))


def test_actors_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time, asyncflow_sdk as af\n"
        "run = af.serve(sys.argv[1])\n"
        "print(*(w.pid for w in run.start(af.Rollout('echo', prompt='prompt_ids', launcher='ray'))), flush=True)\n"
        "time.sleep(600)\n"
    )
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, env=env
    ) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        assert alive(pid)

        driver.kill()

        until(lambda: not alive(pid), "the actor's end")


def test_a_ray_that_a_run_started_ends_with_it_for_good(tmp_path: Path) -> None:
    code = (
        "import sys, ray, asyncflow_sdk as af\n"
        "with af.serve(sys.argv[1]) as run:\n"
        "    run.start(af.Rollout('echo', prompt='prompt_ids', launcher='ray'))\n"
        "    print(ray.is_initialized())\n"
        "    run.finish()\n"  # as a workflow does, before it closes its run
        "print(ray.is_initialized())\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, env=env, check=False
    )

    said = [line for line in done.stdout.splitlines() if line in ("True", "False")]  # Ray prints there, too
    assert said == ["True", "False"], done.stdout + done.stderr
