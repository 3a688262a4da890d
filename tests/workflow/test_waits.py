"""Every wait of the public API ends by its deadline and says for what it waited: edge, column, version or peer."""

import asyncio
import functools
import inspect
import json
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Child, hear, say
from echo_runs import echo_workflow
from functions import doubled
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import DeadlineExceeded, ServerLost
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.workflow.loops.waits import StallTimer


def serve_and_wait(directory: str) -> None:
    """In a process of its own: serve a run until told to end."""
    with af.serve(directory, checkpoints=True) as run:
        say(run.address)
        hear()


@pytest.fixture
def run() -> Iterator[af.Run]:
    """Two rows that lack their reward: one is held by a judge, one is ready for it; and no version but 0."""
    with af.serve(max_staleness=0, capacity_rows=4) as run:
        queue = run.queue
        queue.declare("rollout", needs=["prompt"], gives=["response_ids"], admits=True)
        queue.declare("reward", needs=["response_ids"], gives=["reward"])
        queue.declare("train", needs=["response_ids", "reward"], batch_rows=2)
        queue.put({"prompt": ["a", "b"], "response_ids": [[1], [2]]})
        with af.connect(run.address, name="judge") as judge:
            judge.queue.get("reward")
            yield run


EDGE = "step 0 lacks 2 of 2 rows.*2 rows lack column 'reward', given by task 'reward'"
HELD = "1 rows are leased in task 'reward', the oldest by judge for"


def publish_a_part(run: af.Run) -> None:
    """The limit leaves time to announce version 0 on a slow machine."""
    with run.weight_publisher(rank=0, world_size=2, timeout_s=3.0) as weights:
        for version in range(2):
            weights.publish(version, {"w": np.zeros(3, np.float32)}.items())


def follow(run: af.Run) -> None:
    with run.weight_updates(timeout_s=0.1) as updates:
        next(iter(updates))


WAITS: list[tuple[str, Callable[[af.Run], Any], list[str]]] = [
    ("get", lambda run: run.queue.get("train", timeout_s=0.1), [EDGE, HELD]),
    ("aget", lambda run: asyncio.run(run.queue.aio.get("train", timeout_s=0.1)), [EDGE, HELD]),
    ("stream", lambda run: next(iter(run.queue.stream("train", timeout_s=0.1))), [EDGE, HELD]),
    ("consumer", lambda run: next(iter(run.consumer("train", timeout_s=0.1))), [EDGE, HELD]),
    ("loader", lambda run: next(iter(af.StreamDataLoader(run.queue, "train", timeout_s=0.1))), [EDGE, HELD]),
    (
        "team",
        lambda run: run.queue.get("train", group="t", rank=0, world_size=2, timeout_s=0.1),
        ["rank 1 of 2 of group 't' have not asked"],
    ),
    (
        "put",
        lambda run: run.queue.put({"prompt": ["c"] * 3}, timeout_s=0.1),
        ["3 more rows do not fit: the queue has 2 of 4 rows", HELD],
    ),
    ("weight_updates", follow, ["no version newer than -1; no version was published yet"]),
    (
        "publish",
        publish_a_part,
        [r"version 1 must wait for another one; version 0 was announced .* and lacks rank 1 \(no session\)"],
    ),
    (
        "connect",
        lambda run: af.connect("ipc:///tmp/nobody-serves-here", timeout_s=0.1),
        ["/tmp/nobody-serves-here"],
    ),
]


@pytest.mark.parametrize(("call", "says"), [w[1:] for w in WAITS], ids=[w[0] for w in WAITS])
def test_a_wait_that_ends_says_for_what(run: af.Run, call: Callable[[af.Run], Any], says: list[str]) -> None:
    with pytest.raises((DeadlineExceeded, ServerLost)) as raised:
        call(run)

    text = str(raised.value)
    for said in says:
        assert re.search(said, text), text
    assert re.search(r"after \d+\.\d s|within|no answer|0\.1 s", text), text


def test_who_waits_is_said_while_it_waits(run: af.Run) -> None:
    def wait() -> None:
        with af.connect(run.address, name="trainer") as trainer, pytest.raises(af.Ended):
            trainer.queue.get("train", timeout_s=100)

    thread = threading.Thread(target=wait)
    thread.start()
    while "trainer" not in (waiting := run.queue.status().waiting):
        pass
    assert re.search(rf"after \d+\.\d s: task 'train' has nothing to give; {EDGE}.*{HELD}", waiting["trainer"])
    run.queue.end(cancel=True)
    thread.join()


def test_a_worker_that_does_not_end_is_named_with_what_it_waits_for(run: af.Run) -> None:
    (worker,) = run.start(af.Stage(lambda reward: reward, task="after", needs=["reward"], gives=["again"]))
    while worker.name not in run.queue.status().waiting:
        pass

    with pytest.raises(
        DeadlineExceeded, match=r"after 0\.1 s: after-0 has not ended; .*after-0 waits after .*: task 'after'"
    ):
        run.wait(worker, timeout_s=0.1)


def test_waiting_for_a_worker_ends_by_default() -> None:
    assert math.isfinite(inspect.signature(af.Run.wait).parameters["timeout_s"].default)


def test_a_worker_that_is_frozen_is_named_with_what_it_holds_and_leaves_when_it_is_told_to(
    run: af.Run,
) -> None:
    stage = af.Stage(doubled, task="after", needs=["reward"], gives=["again"])
    (worker,) = run.start(stage)
    until(lambda: worker.name in run.queue.status().waiting, "that it waits for rows")
    os.kill(worker.pid, signal.SIGSTOP)
    run.queue.put({"reward": [1.0]})
    until(lambda: run.queue.status().rows["after"].get("leased"), "that it holds one")

    with pytest.raises(
        DeadlineExceeded, match=r"after 0\.1 s: after-0 has not ended; .*after-0 has held 1 rows of task 'after' for"
    ):
        run.wait(worker, timeout_s=0.1)

    assert run.scale(stage, 0, grace_s=0.1) == []  # does not wait for it
    assert worker.ended.wait(60)
    until(lambda: not run.queue.status().rows["after"].get("leased"), "that its row is another's to have")


def test_a_run_whose_server_is_frozen_is_named_by_what_asks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Child(serve_and_wait, str(tmp_path / "run")) as server:
        address = server.hear()
        monkeypatch.chdir(tmp_path)
        with af.connect(address, timeout_s=30) as run:
            (worker,) = run.start(af.Stage(doubled, task="after", needs=["reward"], gives=["again"]))
            server.stop()
            with monkeypatch.context() as impatient:
                impatient.setattr("asyncflow_sdk.queue.connection.CALL_S", 0.2)
                impatient.setattr("asyncflow_sdk.wire.client.GRACE_S", 0.3)
                for call in (lambda: run.checkpoint(lambda path: None, directory=tmp_path), run.audit):
                    no_answer = rf" gave no answer in \d+\.\d s; its process {server.pid} lives"
                    with pytest.raises(ServerLost, match=re.escape(address) + no_answer):
                        call()
                assert run.scale("after", 0, grace_s=0.1) == []
                assert worker.ended.wait(60)
            server.resume()
        server.say("end")
        assert server.wait() == 0


class Skipped(StallTimer):
    """The time that a run may be without a step, which a test lets pass at once."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        timers.append(self)

    @property
    def left_s(self) -> float:
        return min(super().left_s, 0.1)  # so that it is looked at again

    def skip(self) -> None:
        self._since -= self.timeout_s + 1


timers: list[Skipped] = []


@pytest.fixture
def skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncflow_sdk.workflow.workflow.StallTimer", Skipped)


def test_a_run_in_which_nothing_is_trained_ends_and_says_why(tmp_path: Path, skipped: None) -> None:
    ended = threading.Event()

    def stuck(response_ids: Any) -> Any:
        with af.connect(tmp_path / "run", name="onlooker") as other:
            until(lambda: "train-0" in other.queue.status().waiting, "the trainer")
        timers[-1].skip()
        ended.wait(100)
        return [1.0 for _ in response_ids]

    with pytest.raises(
        DeadlineExceeded, match=r"nothing was trained for 300 s, after 0 steps \(stall_timeout_s\)"
    ) as raised:
        echo_workflow(reward=stuck, stall_timeout_s=300).run(tmp_path / "run")

    ended.set()
    assert "given by task 'reward'" in str(raised.value)
    assert "rows are leased in task 'reward', the oldest by reward-0 for" in str(raised.value)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", str(raised.value))


class Lasting(EchoTrain):
    """Exports its model for longer than a run may be without a step."""

    def export(self, path: Path) -> None:
        until(lambda: timers[-1].steps, "that the step is known")
        timers[-1].skip()
        until(lambda: timers[-1].complete, "a look at what is left")
        super().export(path)


def test_what_comes_after_the_last_step_is_no_stall(tmp_path: Path, skipped: None) -> None:
    train = af.Train("test_waits:Lasting", launcher="thread")
    result = echo_workflow(train=train, steps=1, stall_timeout_s=300.0, rollout={"delay_s": 0.0}).run(
        tmp_path / "run"
    )
    assert result.summary["status"] == "completed"


def test_a_limit_that_would_end_every_run_is_refused() -> None:
    with pytest.raises(af.ConfigError, match="stall_timeout_s must be above 0"):
        echo_workflow(stall_timeout_s=0)


def rows_until_failure(run: af.Run) -> list[int]:
    """Take the rows of three full steps; a worker fails during the first."""
    taken: list[int] = []
    run.queue.declare("train", needs=["x"], batch_rows=2)
    run.queue.put({"x": list(range(6))})

    def train() -> None:
        for step in run.consumer("train", timeout_s=math.inf):
            taken.extend(step.array("x").tolist())
            step.finish()
            run.fail(RuntimeError("a worker failed"))

    with pytest.raises(RuntimeError, match="a worker failed"):
        train()
    return taken


def test_a_failure_ends_the_loop_of_a_driver_after_the_full_steps() -> None:
    with af.serve() as run:
        assert rows_until_failure(run) == list(range(6))
        assert run.audit().consumed == 6


def test_a_failure_ends_the_loop_of_another_process_at_once() -> None:
    with af.serve() as run, af.connect(run.address) as other:
        assert rows_until_failure(other) == [0, 1]
        assert (run.audit().consumed, run.audit().live) == (2, 4)


def test_a_wait_is_repeated_only_where_no_failure_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncflow_sdk.workflow.run.CHECK_S", 0.05)
    with af.serve() as run, af.connect(run.address) as other:
        run.queue.declare("train", needs=["x"], batch_rows=2)
        checks = {each: list[None]() for each in (run, other)}
        for each, called in checks.items():
            monkeypatch.setattr(each, "check", functools.partial(called.append, None))

            with pytest.raises(DeadlineExceeded, match=r"after \d+\.\d s"):
                next(iter(each.consumer("train", timeout_s=0.2)))

        assert not checks[run]
        assert len(checks[other]) >= 4, "one before each part of the wait"


def test_a_consumer_takes_its_own_options_alone() -> None:
    with af.serve() as run, pytest.raises(TypeError, match=r"consumer\(\) has no parameter 'ahead'"):
        run.consumer("train", ahead=True)  # type: ignore[call-overload]
