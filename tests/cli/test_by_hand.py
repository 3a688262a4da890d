"""Runs by hand: ``asyncflow serve`` in one process, ``asyncflow worker`` in others, as on hosts of their own."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from children import warm_python
from commands import Command
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.types.events import Event, StepTrained

PROMPTS = [{"prompt_ids": [1, 2, n]} for n in range(8)]


def asyncflow(*arguments: str, cwd: Path, within: Sequence[str] = ()) -> Command:
    """``within``: the command that starts it on another host."""
    return Command([*within, warm_python(), "-m", "asyncflow_sdk.cli", *arguments], cwd)


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(
        "def length(response_ids):\n    return [float(len(row)) for row in response_ids]\n"
    )
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(row) for row in PROMPTS))
    return tmp_path


@pytest.mark.parametrize(
    ("served", "shown", "come"),
    [
        (["--address", "tcp://0.0.0.0:0"], " --key run.key", ["--key", "run/run.key"]),
        ([], "", []),
        (["--insecure"], " --insecure", ["--insecure"]),
    ],
    ids=["a copy of the key", "the same user's host", "without keys"],
)
@pytest.mark.starts("asyncflow serve", "asyncflow worker rollout", "asyncflow worker stage", "asyncflow worker train")
def test_a_run_is_served_and_worked_on_by_commands_alone(
    module: Path, served: list[str], shown: str, come: list[str]
) -> None:
    options = ["--prompts", "data.jsonl", "--column", "prompt_ids", "--group-size", "4", "--steps", "3"]
    with asyncflow("serve", "run", *served, *options, cwd=module) as server:
        # given the commands that it prints
        port = server.until(rf"worker tcp://\S+:(\d+){shown} train.*")[1]
        server.until(rf"asyncflow top tcp://\S+{shown}\n")
        come = ["worker", f"tcp://127.0.0.1:{port}", *come]
        # when
        with (
            asyncflow(*come, "train", "--engine", "echo", "--batch-size", "16", cwd=module) as train,
            asyncflow(
                *come, "--replicas", "2", "rollout", "--engine", "echo", "--prompt", "prompt_ids", cwd=module
            ) as rollout,
            asyncflow(*come, "stage", "mine:length", "--task", "reward", "--gives", "reward", cwd=module) as stage,
        ):
            # then each ends by itself, with the stream
            assert [each.end() for each in (train, rollout, stage)] == [0, 0, 0], (
                train.said + rollout.said + stage.said
            )
        assert server.end() == 0, server.said
    assert rollout.said.count("joins tcp://") == 2
    assert "consumed=48" in server.said
    assert [step for step, _ in af.ages_of(module / "run")] == [0, 1, 2], "the rows of its steps are recorded"
    assert (module / "run" / "events.jsonl").read_text().count('"event":"step"') == 3


def test_a_worker_that_is_interrupted_finishes_what_it_holds(module: Path) -> None:
    with af.serve(module / "run") as run:
        run.queue.declare("end", needs=["reward"])
        with asyncflow(
            "worker", str(module / "run"), "stage", "mine:length", "--task", "reward", cwd=module
        ) as worker:
            worker.until("joins")
            run.queue.put({"response_ids": [[1], [2, 3]]})
            with run.queue.get("end", 2, at_least=2, timeout_s=250) as batch:
                batch.ack()

            worker.process.send_signal(signal.SIGINT)

            assert worker.end() == 130
        assert "leaving" in worker.said
        until(lambda: run.queue.status().session_count == 1, "that its session is gone")
        run.queue.put({"response_ids": [[1]]})
        with pytest.raises(af.DeadlineExceeded):
            run.queue.get("end", timeout_s=0.1)


def test_who_waits_when_the_run_is_closed_ends_with_the_stream_though_its_process_lives_on(module: Path) -> None:
    with af.serve(module / "run") as run:
        run.queue.put({"response_ids": [[1]]})
        come = ["worker", str(module / "run")]
        with (
            asyncflow(*come, "rollout", "--engine", "echo", "--prompt", "prompt_ids", cwd=module) as rollout,
            asyncflow(*come, "stage", "mine:length", "--task", "reward", cwd=module) as stage,
        ):
            run.queue.declare("end", needs=["reward"])
            run.queue.get("end", timeout_s=250).ack()
            until(lambda: len(run.queue.status().waiting) == 2, "both to wait")
            # when
            run.close()
            # then
            assert [each.end() for each in (rollout, stage)] == [0, 0], rollout.said + stage.said
        assert rollout.said.endswith("the stream has ended\n")


@pytest.mark.parametrize("leave", [False, True])
def test_who_works_when_the_run_is_closed_says_so_and_is_not_started_again(module: Path, leave: bool) -> None:
    # given a worker in the middle of a call, which counts how often it is made
    (module / "slow.py").write_text(
        "import pathlib, time\n\ndef slow(response_ids):\n"
        "    with open('calls', 'a') as calls:\n        calls.write('x')\n"
        "    while not pathlib.Path('go').exists():\n        time.sleep(0.01)\n"
        "    return [1.0] * len(response_ids)\n"
    )
    with af.serve(module / "run", address="tcp://127.0.0.1:0") as run:
        run.queue.put({"response_ids": [[1]]})
        with asyncflow("worker", run.address, "stage", "slow:slow", "--task", "reward", cwd=module) as worker:
            until(lambda: (module / "calls").exists() and (module / "calls").read_text(), "the call")
            # when the run is closed under it, and this process lives on
            run.close()
            if leave:
                worker.process.send_signal(signal.SIGINT)
                worker.until("leaving|interrupted")  # where it waits for its worker already, or not yet
            (module / "go").touch()
            # then
            assert worker.end() == (130 if leave else 2), worker.said
        closed = f"error: the run at {run.address} was closed before worker"
        assert worker.said.count(closed) == (0 if leave else 1), worker.said
        assert (module / "calls").read_text() == "x"
        assert len(list((module / "logs").glob("reward-*.log"))) == 1


def test_a_role_as_a_workflows_file_has_it(module: Path) -> None:
    (module / "flow.toml").write_text(
        'steps = 2\nbatch_size = 8\nprompts = "data.jsonl"\nreward = { work = "mine:length", task = "reward" }\n'
        'rollout = { engine = "echo", prompt = "prompt_ids", group_size = 4, replicas = 3 }\n'
        'train = { engine = "echo" }\n'
    )
    with af.serve(module / "run", steps=2) as run:
        run.feed(str(module / "data.jsonl"), group_size=4, column="prompt_ids")
        come = ["worker", str(module / "run"), "--from", "flow.toml"]
        with (
            asyncflow(*come, "train", cwd=module) as train,
            asyncflow(*come, "--max-restarts", "0", "rollout", cwd=module) as rollout,
            asyncflow(*come, "stage", "reward", cwd=module) as stage,
        ):
            assert [each.end() for each in (train, rollout, stage)] == [0, 0, 0], (
                train.said + rollout.said + stage.said
            )
        assert run.audit().consumed == 16
        assert len(list((module / "logs").glob("rollout-*.log"))) == 1, "as many as this command was told to start"


def test_a_trainer_by_hand_trains_steps_in_parts(module: Path) -> None:
    events: list[Event] = []
    with af.serve(module / "run", steps=2, on_event=events.append) as run:
        run.feed(str(module / "data.jsonl"), group_size=4, column="prompt_ids")
        run.start(af.Rollout("echo", prompt="prompt_ids", group_size=4, launcher="thread"))
        run.start(af.Stage(lambda response_ids: [1.0 for _ in response_ids], task="reward"))
        train = ["train", "--engine", "echo", "--batch-size", "8", "--part-rows", "4"]
        with asyncflow("worker", str(module / "run"), *train, cwd=module) as trainer:
            assert trainer.end() == 0, trainer.said
    assert [event.metrics["parts"] >= 1 for event in events if isinstance(event, StepTrained)] == [True, True]


def test_what_other_roles_need_where_they_run_is_not_looked_for_here(module: Path) -> None:
    # given a file of which this host has neither the trainer's GPU and model, nor the rollout's interpreter and engine
    (module / "flow.toml").write_text(
        'steps = 2\nbatch_size = 8\nprompts = "data.jsonl"\n'
        'reward = { work = "mine:length", task = "reward", gpus = [98] }\n'
        'rollout = { engine = "not-here", prompt = "prompt_ids", group_size = 4, python = "no/python", model = "no" }\n'
        'train = { engine = "not-here", gpus = [99], cpus = [9999], model = "no" }\n'
    )
    with af.serve(module / "run") as run:
        run.queue.put({"response_ids": [[1]]})
        come = ["worker", str(module / "run"), "--from", "flow.toml"]
        # when
        with (
            asyncflow(*come, "--cpus", "0", "stage", "reward", cwd=module) as here,
            asyncflow(*come, "rollout", cwd=module) as away,
        ):
            # then each is told of its own alone
            assert here.end() == away.end() == 2
        assert "gpus=[98]: this host has no GPU 98" in here.said
        assert "rollout model" in away.said
        assert not {"99", "not-here"} & set(re.findall(r"[\w-]+", here.said + away.said))


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["rollout"], "needs --engine, or --from"),
        (["rollout", "--engine", "ecco", "--prompt", "prompt_ids"], "no rollout adapter is named 'ecco'"),
        (["stage", "mine:nothing"], "'mine:nothing' cannot be imported"),
        (["rollout", "--engine", "echo", "--prompt", "prompt_ids", "--set", "delay"], "--set takes NAME=VALUE"),
    ],
)
def test_what_cannot_join(module: Path, arguments: list[str], what: str) -> None:
    with af.serve(module / "run"), asyncflow("worker", str(module / "run"), *arguments, cwd=module) as worker:
        assert worker.end() == 2
        assert what in " ".join(worker.said.split())
