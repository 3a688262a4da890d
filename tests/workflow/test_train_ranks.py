"""Trainers of several processes: one lease, one version, one checkpoint of all ranks, and one end."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from echo_runs import alive, echo_workflow, trained_rows
from functions import length
from gates import Killer
from test_resuming import STEPS, check, prompts_trained
from test_resuming import workflow as resumable
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, WorkerFailed
from asyncflow_sdk.types.events import Balanced, Event, Note, Published, Span, StepTrained, WorkerState
from asyncflow_sdk.workflow.ranks import own_rank
from asyncflow_sdk.workflow.waiting import what_stands

RANKS = ("train-0 rank 0", "train-0 rank 1")
LENGTHS = (9, 1, 2, 8, 3, 7, 4, 6)


def two(**options: Any) -> af.Train:
    return af.Train("echo-ranks", world_size=2, **options)


def spread(**changes: Any) -> af.Workflow:
    """Groups of unequal lengths."""
    prompts = {"prompt_ids": af.Ragged.of([list(range(1, 1 + n)) for n in LENGTHS])}
    return echo_workflow(prompts=prompts, batch_size=32, **changes)


def test_each_rank_trains_its_share_of_one_lease_and_all_of_them_publish_one_version(tmp_path: Path) -> None:
    events: list[Event] = []

    result = spread(train=two(), steps=8).run(tmp_path / "run", on_event=events.append)

    # each row once, in whole groups, about as many tokens for each rank
    rows = trained_rows(tmp_path / "run")
    assert len(set(rows)) == len(rows) == 8 * 32
    spans = [e for e in events if isinstance(e, Span) and e.kind == "train"]
    assert Counter(e.worker for e in spans) == dict.fromkeys(RANKS, 8)
    assert sum(e.rows for e in spans) == 8 * 32
    assert all(e.rows % 4 == 0 for e in spans)
    assert sum(e.tokens for e in spans) == 4 * sum(length * 8 for length in LENGTHS)
    assert max(e.imbalance for e in events if isinstance(e, Balanced)) < 0.3
    # said once, of the whole step
    trained = [e for e in events if isinstance(e, StepTrained)]
    assert [(e.step, e.worker, e.metrics["rows"]) for e in trained] == [(s, RANKS[0], 32.0) for s in range(8)]
    recorded = [batch.ages(step).metrics() for step, batch in af.read_steps(tmp_path / "run")]
    told = [{name: value for name, value in e.metrics.items() if name.startswith("staleness")} for e in trained]
    assert told == [pytest.approx(each) for each in recorded]
    assert result.summary["rows"]["consumed"] == 8 * 32
    assert result.summary["staleness_max"] <= 1
    # versions of both ranks' pieces, which replicas put together, and a model of all
    assert [e.version for e in events if isinstance(e, Published)] == list(range(9))
    assert [path.name for path in (tmp_path / "run" / "model").iterdir()] == ["echo.json"]
    assert {e.worker for e in events if isinstance(e, WorkerState) and "train" in e.worker} == set(RANKS)


def test_a_rank_that_is_killed_ends_the_others_and_all_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    whole_run = tmp_path / "whole"
    resumable(checkpoint=None, train={}).run(whole_run)
    # given ranks that would wait for ever for one that has gone
    killer = Killer(RANKS[1], at=[3, 12], gates=tmp_path / "gates")

    train = killer.trainer("gates:GatedRanks", world_size=2, deaf=True, max_restarts=2)
    result = resumable(train=train).run(tmp_path / "run", on_event=killer)

    assert killer.killed == 2
    check(tmp_path / "run", result.summary, prompts_trained(whole_run))
    notes = [e.text for e in killer.events if isinstance(e, Note)]
    assert sum("training goes on with step" in text for text in notes) == 2, notes
    assert any("training goes on with step 10 from" in text for text in notes), notes
    restarts = [e for e in killer.events if isinstance(e, WorkerState) and e.state == "restarting"]
    assert [e.worker for e in restarts] == [*RANKS, *RANKS]
    assert all("rank 1 was killed by SIGKILL; restart" in e.detail for e in restarts)
    trained = [e.step for e in killer.events if isinstance(e, StepTrained)]
    assert len(trained) > STEPS, "no step was trained again"
    last = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    assert sorted(path.name for path in (last / "engine").iterdir()) == ["rank-0.json", "rank-1.json"]


def test_without_restarts_it_is_said_which_rank_ended_and_how_and_no_process_is_left(tmp_path: Path) -> None:
    events: list[Event] = []

    with pytest.raises(WorkerFailed, match=r"worker 'train-0' rank 1 was killed by SIGKILL"):
        echo_workflow(train=two(deaf=True, die_at=2)).run(tmp_path / "run", on_event=events.append)

    pids = {e.pid for e in events if isinstance(e, WorkerState) and e.worker in RANKS}
    assert len(pids) == 2
    assert not [pid for pid in pids if alive(pid)]
    assert len([e for e in events if isinstance(e, StepTrained)]) == 2


def test_a_rank_that_raises_is_named_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"worker 'train-0' rank [01] ended with status 1") as caught:
        echo_workflow(train=two(fail_at=2)).run(tmp_path / "run")

    assert "RuntimeError: told to fail at step 2" in caught.value.detail


def test_who_waits_for_a_rank_says_for_which_and_where(tmp_path: Path) -> None:
    # given a rank that hangs in its second step, and another that waits for it where the step ends
    with af.serve(tmp_path / "run", steps=3) as run:
        train = af.Train("ranks_apart:Apart", world_size=2, slow=1, at=1)
        run.declare(train, 16)
        begin(run)
        (worker,) = run.start(train)

        def stands() -> str:
            return what_stands(run.queue.status(), *worker.pids)

        until(lambda: "did not come to 'the end of step 1'" in stands(), "a rank that waits for the other")
        text = stands()
        with pytest.raises(af.DeadlineExceeded) as caught:
            run.wait(worker, timeout_s=0.1)

    assert re.search(r"train-0 rank 1 has held \d+ rows of task 'train' for", text)
    assert re.search(r"train-0 rank 0 waits after [\d.]+ s: rank 1 of 2 of team 'train' did not come to", text)
    assert "train-0 rank 0 waits after" in str(caught.value)


def begin(run: af.Run) -> None:
    """What a trainer needs beside it."""
    run.start(af.Rollout("echo", prompt="prompt_ids", group_size=4))
    run.start(af.Stage(length, task="reward"))
    run.feed({"prompt_ids": [[1], [2, 3]]}, group_size=4, column="prompt_ids")


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ({"launcher": "thread"}, "launcher='thread' starts no ranks.*torchrun"),
        ({"cpus": [0]}, r"cpus=\[0\] for world_size=2: give each rank as many"),
        ({"env": {"RANK": "3"}}, "env= sets RANK"),
        ({"world_size": 0}, "world_size must be 1 or more, not 0"),
    ],
)
def test_ranks_that_cannot_be_had_are_refused_before_anything_starts(place: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        echo_workflow(train=af.Train("echo-ranks", **({"world_size": 2} | place)))


def test_each_rank_has_its_share_of_the_cpus_and_its_own_environment(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("one CPU cannot be shared out")

    echo_workflow(train=af.Train("ranks_apart:Telling", world_size=2, cpus=cpus, env={"OWN": "1"}), steps=1).run(
        tmp_path / "run"
    )

    told = [eval((tmp_path / "run" / "model" / f"{rank}").read_text()) for rank in range(2)]
    assert [each.pop("cpus") for each in told] == [[cpus[0]], [cpus[1]]]
    assert told[0].pop("MASTER_PORT") == told[1].pop("MASTER_PORT")
    same = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OWN": "1"}
    assert told == [{"RANK": str(rank), "LOCAL_RANK": str(rank), **same} for rank in range(2)]


def test_a_workflow_of_ranks_says_so_and_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def length(response_ids):\n    return [float(len(r)) for r in response_ids]\n"
    )
    (tmp_path / "run.toml").write_text(
        'steps = 2\nbatch_size = 16\nprompts = { prompt_ids = [[1], [2, 3]] }\nreward = "rewards:length"\n'
        'rollout = { engine = "echo", group_size = 4, prompt = "prompt_ids" }\n'
        'train = { engine = "echo-ranks", world_size = 2 }\n'
    )

    flow = af.load_workflow(tmp_path / "run.toml")

    assert "engine echo-ranks × 2 ranks" in str(flow)
    assert flow.describe()["train"]["world_size"] == 2
    with pytest.raises(ConfigError, match="^train.launcher=thread: train: launcher='thread' starts no ranks"):
        af.load_workflow(tmp_path / "run.toml", {"train.launcher": "thread"})


def test_by_hand_each_process_finds_its_rank_in_the_environment_that_its_launcher_gave_it(tmp_path: Path) -> None:
    events: list[Event] = []
    with af.serve(tmp_path / "run", steps=3, on_event=events.append) as run:
        begin(run)
        # when two processes are started as torchrun does
        meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        by_hand = [
            subprocess.Popen(
                [sys.executable, "-m", "asyncflow_sdk.cli", "worker", str(tmp_path / "run"), "train", "--engine",
                 "echo-ranks", "--batch-size", "16"],
                env={**os.environ, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
            ) for rank in range(2)
        ]  # fmt: skip
        said = [process.communicate(timeout=60)[0] for process in by_hand]
        # then
        assert [process.returncode for process in by_hand] == [0, 0], said
        assert [f"rank {rank} joins" in text for rank, text in enumerate(said)] == [True, True]
        until(lambda: run.audit().live == 0, "the end of all rows")
        assert run.audit().consumed == 3 * 16
    spans = [e for e in events if isinstance(e, Span) and e.kind == "train"]
    assert Counter(e.worker.partition(" ")[2] for e in spans) == {"rank 0": 3, "rank 1": 3}
    assert len([e for e in events if isinstance(e, StepTrained)]) == 3


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "are no numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is no rank of WORLD_SIZE=2"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "needs MASTER_PORT too"),
    ],
)
def test_an_environment_that_names_no_rank_is_refused(environment: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        own_rank(environment)


def test_one_process_alone_is_no_rank() -> None:
    assert own_rank({}) is None
    assert own_rank({"RANK": "0", "WORLD_SIZE": "1"}) is None
