"""Trainers of several processes: one lease, one version, one checkpoint of all ranks, and one end."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from echo_runs import TOML, check_joined, check_whole, echo_workflow, start_ranks
from functions import length
from gates import Killer
from processes import alive
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.cli import main
from asyncflow_sdk.errors import ConfigError, WorkerFailed
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.testing.echo_ranks import EchoRanks
from asyncflow_sdk.types.events import Balanced, Event, Note, Published, Span, StepTrained, WorkerState

RANKS = ("train-0 rank 0", "train-0 rank 1")
LENGTHS = (9, 1, 2, 8, 3, 7, 4, 6)


class Telling(EchoRanks):
    """Its model is also what each rank found around it."""

    NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OWN")

    def export(self, path: Path) -> None:
        super().export(path)
        path.mkdir(parents=True, exist_ok=True)
        found = {name: os.environ.get(name) for name in self.NAMES} | {"cpus": sorted(os.sched_getaffinity(0))}
        (path / str(self.rank)).write_text(repr(found))


class Dying(EchoRanks):
    """Rank 1 kills itself in its second step."""

    def begin_step(self, step: int) -> None:
        if self.rank == self.steps == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().begin_step(step)


def test_each_rank_trains_its_share_of_one_lease_and_all_of_them_publish_one_version(tmp_path: Path) -> None:
    events: list[Event] = []
    prompts = {"prompt_ids": af.Ragged.of([list(range(1, 1 + n)) for n in LENGTHS])}
    cpus = sorted(os.sched_getaffinity(0))[:2]
    place: dict[str, Any] = {"cpus": cpus} if len(cpus) == 2 else {}
    train = af.Train("test_train_ranks:Telling", world_size=2, env={"OWN": "1"}, **place)

    result = echo_workflow(prompts=prompts, batch_size=32, train=train, steps=4).run(
        tmp_path / "run", on_event=events.append
    )

    # each row once, in whole groups, about as many tokens for each rank
    check_whole(result, 4, rows=32)
    spans = [e for e in events if isinstance(e, Span) and e.kind == "train"]
    assert Counter(e.worker for e in spans) == dict.fromkeys(RANKS, 4)
    assert sum(e.rows for e in spans) == 4 * 32
    assert all(e.rows % 4 == 0 for e in spans)
    assert sum(e.tokens for e in spans) == 4 * sum(length * 4 for length in LENGTHS)
    assert max(e.imbalance for e in events if isinstance(e, Balanced)) < 0.3
    # said once, of the whole step
    trained = [e for e in events if isinstance(e, StepTrained)]
    assert [(e.step, e.worker, e.metrics["rows"]) for e in trained] == [(s, RANKS[0], 32.0) for s in range(4)]
    recorded = [batch.ages(step).metrics() for step, batch in af.read_steps(tmp_path / "run")]
    told = [{name: value for name, value in e.metrics.items() if name.startswith("staleness")} for e in trained]
    assert told == [pytest.approx(each) for each in recorded]
    assert result.summary["staleness_max"] <= 1
    # versions of both ranks' pieces, which replicas put together, and a model of all
    assert [e.version for e in events if isinstance(e, Published)] == list(range(5))
    assert {path.name for path in (tmp_path / "run" / "model").iterdir()} == {"echo.json", "0", "1"}
    assert {e.worker for e in events if isinstance(e, WorkerState) and "train" in e.worker} == set(RANKS)
    # each rank has its environment, and its share of the CPUs
    found = [eval((tmp_path / "run" / "model" / f"{rank}").read_text()) for rank in range(2)]
    assert [each.pop("cpus") for each in found] == ([cpus[:1], cpus[1:]] if place else [cpus] * 2)
    assert found[0].pop("MASTER_PORT") == found[1].pop("MASTER_PORT")
    same = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OWN": "1"}
    assert found == [{"RANK": str(rank), "LOCAL_RANK": str(rank), **same} for rank in range(2)]


def test_a_rank_that_is_killed_ends_the_others_and_all_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    # given ranks that would wait for ever for one that has gone
    killer = Killer(tmp_path / "gates", {2: RANKS[1]})

    train = killer.trainer("gates:GatedRanks", world_size=2, deaf=True, max_restarts=1)
    result = echo_workflow(train=train, steps=6, checkpoint=af.Checkpoint(every=2)).run(
        tmp_path / "run", on_event=killer
    )

    assert killer.killed == [RANKS[1]]
    check_whole(result, 6)
    assert sum("training goes on with step 2 from" in text for text in killer.texts(Note)) == 1
    restarts = killer.states("restarting")
    assert [e.worker for e in restarts] == [*RANKS]
    assert all("rank 1 was killed by SIGKILL; restart" in e.detail for e in restarts)
    assert [e.step for e in killer.events if isinstance(e, StepTrained)] == [0, 1, 2, 2, 3, 4, 5]
    last = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    assert sorted(path.name for path in (last / "engine").iterdir()) == ["rank-0.json", "rank-1.json"]


def test_without_restarts_it_is_said_which_rank_ended_and_how_and_no_process_is_left(tmp_path: Path) -> None:
    events: list[Event] = []

    train = af.Train("test_train_ranks:Dying", world_size=3, deaf=True)
    with pytest.raises(WorkerFailed, match=r"worker 'train-0' rank 1 was killed by SIGKILL"):
        echo_workflow(train=train).run(tmp_path / "run", on_event=events.append)

    pids = {e.pid for e in events if isinstance(e, WorkerState) and e.worker.startswith("train-0")}
    assert len(pids) == 3
    until(lambda: not any(map(alive, pids)), "the end of all")
    assert len([e for e in events if isinstance(e, StepTrained)]) == 1


def begin(run: af.Run) -> None:
    """What a trainer needs beside it."""
    run.start(af.Rollout("echo", prompt="prompt_ids", group_size=4, launcher="thread"))
    run.start(af.Stage(length, task="reward", launcher="thread"))
    run.feed({"prompt_ids": [[1], [2, 3]]}, group_size=4, column="prompt_ids")


def test_who_waits_for_a_rank_says_for_which_and_where(tmp_path: Path) -> None:
    # given a rank that hangs in its second step, and another that waits for it where the step ends
    with af.serve(tmp_path / "run", steps=3) as run:
        train = af.Train("test_train_ranks:Lonely", world_size=2, slow=1)
        run.declare(train, 16)
        begin(run)
        (worker,) = run.start(train)
        waits = lambda: run.queue.status().waiting.get(RANKS[0], "")  # noqa: E731
        until(lambda: "have not reached 'the end of step 1'" in waits(), "a rank that waits for the other")

        with pytest.raises(af.DeadlineExceeded) as caught:
            run.wait(worker, timeout_s=0.1)

    text = str(caught.value)
    assert re.search(r"train-0 rank 1 has held \d+ rows of task 'train' for", text)
    assert re.search(r"train-0 rank 0 waits after [\d.]+ s: rank 1 of 2 of group 'train' have not reached", text)


class Lonely(EchoTrain):
    """Ranks that need nothing of each other. Rank ``slow`` hangs in its second step."""

    def __init__(self, model: str = "", *, algorithm: Any = None, slow: int = -1) -> None:
        super().__init__(model, algorithm=algorithm)
        self.rank, self._slow = int(os.environ["RANK"]), slow

    def train_step(self, batch: af.Batch) -> af.StepResult:
        if (self.rank, self.steps) == (self._slow, 1):
            time.sleep(3600.0)
        return super().train_step(batch)

    def named_weights(self) -> Any:
        return super().named_weights() if not self.rank else ()


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


def test_a_workflow_of_ranks_says_so_and_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TOML.replace('train = { engine = "echo" }', 'train = { engine = "echo-ranks", world_size = 2 }'))

    flow = af.load_workflow(file)

    assert "engine echo-ranks × 2 ranks" in str(flow)
    assert flow.describe()["train"]["world_size"] == 2
    with pytest.raises(ConfigError, match="^train.launcher=thread: train: launcher='thread' starts no ranks"):
        af.load_workflow(file, {"train.launcher": "thread"})


@pytest.mark.starts("train echo-ranks")
def test_by_hand_each_process_finds_its_rank_in_the_environment_that_its_launcher_gave_it(tmp_path: Path) -> None:
    events: list[Event] = []
    with af.serve(tmp_path / "run", steps=3, on_event=events.append) as run:
        begin(run)
        # when two processes are started as torchrun does
        by_hand = start_ranks(tmp_path / "run", "train", "--engine", "echo-ranks", "--batch-size", "16")
        # then
        check_joined(by_hand)
        until(lambda: run.audit().live == 0, "the end of all rows")
        assert run.audit().consumed == 3 * 16
    spans = [e for e in events if isinstance(e, Span) and e.kind == "train"]
    assert Counter(e.worker.partition(" ")[2] for e in spans) == {"rank 0": 3, "rank 1": 3}
    assert len([e for e in events if isinstance(e, StepTrained)]) == 3


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "are no numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is no rank of WORLD_SIZE=2"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "needs MASTER_PORT too"),
    ],
)
def test_an_environment_that_names_no_rank_is_refused(
    tmp_path: Path,
    environment: dict[str, str],
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with af.serve(tmp_path / "run"):
        monkeypatch.setattr(sys, "argv", ["asyncflow", "worker", str(tmp_path / "run"), "train", "--engine", "echo"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code
    assert what in " ".join(capsys.readouterr().err.split())
