"""Stages of several processes: a reference whose ranks share every lease, take part in every pass, and end together."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_runs import TOML, check_joined, check_whole, column, echo_workflow, start_ranks
from functions import length
from gates import Listener
from waiting import in_thread, kill_at, until, wait_at

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, LeaseLost
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.testing.echo_ranks import Gather
from asyncflow_sdk.types import Batch, Ragged
from asyncflow_sdk.types.events import Balanced, Span, WorkerState

RANKS = ("ref_logprobs-0 rank 0", "ref_logprobs-0 rank 1")


class Sharded(EchoTrain):
    """Log-probs that need all ranks in each call: of each token its id, of the whole call's rows the number. ``notes``: a folder, where
    each rank writes what it was called with. Rank 1 waits in a call while there is a file of its number there."""

    def __init__(self, model: str = "", *, algorithm: Any = None, notes: str = "") -> None:
        super().__init__(model, algorithm=algorithm)
        self._gather = Gather(deaf=True)
        self._notes, self._calls = Path(notes), 0

    def logprobs(self, batch: Batch) -> Ragged:
        rank, call = self._gather.rank, self._calls
        self._calls += 1
        if rank == 1:
            wait_at(self._notes / str(call))
        calls = self._gather(call)
        assert calls == [call] * len(calls), "ranks are in calls of their own"
        with (self._notes / f"{os.getpid()}-{rank}").open("a") as notes:
            notes.write(json.dumps(batch.ids.tolist()) + "\n")
        responses = batch.ragged("response_ids")
        return Ragged(-responses.values.astype(np.float32), responses.offsets)

    def close(self) -> None:
        (self._notes / f"{os.getpid()}-closed").touch()
        self._gather.close()


def sharded(notes: Path, **options: Any) -> af.Logprobs:
    notes.mkdir(exist_ok=True)
    return af.Logprobs("test_stage_ranks:Sharded", notes=str(notes), **({"world_size": 2} | options))


def calls_of(notes: Path) -> list[list[list[int]]]:
    """By process: the rows of each of its calls. Ordered by rank."""
    files = sorted(notes.glob("*-[0-9]"), key=lambda file: file.name.partition("-")[2])
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def check_scored(directory: Path) -> None:
    scores, ids = column(directory, "ref_logprobs"), column(directory, "response_ids")
    assert scores == [[-float(token) for token in row] for row in ids]


def kept_by(run: af.Run) -> list[list[float]]:
    """The scores of all rows, of the last task of the stream."""
    kept: list[list[float]] = []
    for batch in run.consumer("keep", count=8):
        kept += [row.tolist() for row in batch["ref_logprobs"]]
        batch.ack()
    return kept


def test_ranks_share_every_lease_of_a_stage(tmp_path: Path) -> None:
    listener = Listener()
    stage = af.Stage(sharded(tmp_path / "notes"), gives=["ref_logprobs"])

    result = echo_workflow(stages=[stage], train={"needs": ["ref_logprobs"]}).run(tmp_path / "run", on_event=listener)

    check_whole(result, 3)
    check_scored(result.directory)
    one, two = calls_of(tmp_path / "notes")
    assert len(one) == len(two)
    rows = [row for call in (*one, *two) for row in call]
    assert len(rows) == len(set(rows)) >= 3 * 16
    assert all(abs(len(a) - len(b)) <= 1 for a, b in zip(one, two, strict=True))
    assert {e.worker for e in listener.events if isinstance(e, Span) and e.kind == "ref_logprobs"} == {*RANKS}
    assert len(list((tmp_path / "notes").glob("*-closed"))) == 2
    assert {path.name for path in (result.directory / "logs").glob("ref*")} == {
        f"ref_logprobs-0-rank-{rank}.log" for rank in range(2)
    }


def test_a_step_is_not_held_up_by_a_row_that_is_left_over(tmp_path: Path) -> None:
    # given steps of an odd number of rows, of which none is generated before the step before it is trained
    stage = af.Stage(sharded(tmp_path / "notes"), gives=["ref_logprobs"], batch=2)

    result = echo_workflow(
        stages=[stage], train={"needs": ["ref_logprobs"]}, rollout={"group_size": 3}, batch_size=15,
        staleness=af.Staleness(max_staleness=0), stall_timeout_s=200,
    ).run(tmp_path / "run")  # fmt: skip

    check_whole(result, 3, rows=15)
    one, two = calls_of(tmp_path / "notes")
    assert [] in two
    assert [] not in one


def test_the_last_rows_may_be_fewer_than_ranks_and_all_take_part(tmp_path: Path) -> None:
    stage = af.Stage(sharded(tmp_path / "notes", world_size=3), gives=["ref_logprobs"], batch=3)
    with af.serve(tmp_path / "run") as run:
        run.queue.declare("keep", needs=["ref_logprobs"])
        run.declare(stage)
        run.queue.put({"prompt_ids": [[1]] * 4, "response_ids": [[n, n + 1] for n in range(4)]})
        run.queue.end()
        (worker,) = run.start(stage)
        kept = kept_by(run)
        run.wait(worker)

    assert sorted(kept, reverse=True) == [[-n, -n - 1] for n in range(4)]
    assert [[len(call) for call in calls] for calls in calls_of(tmp_path / "notes")] == [[1, 1], [1, 0], [1, 0]]


def test_a_rank_that_is_killed_restarts_all_and_no_row_is_lost(tmp_path: Path) -> None:
    # given a rank that stands in its second pass, in which the other waits for it for ever
    notes, listener = tmp_path / "notes", Listener()
    stage = af.Stage(sharded(notes), gives=["ref_logprobs"], batch=4)
    killed = kill_at(notes / "1")
    workflow = echo_workflow(stages=[stage], train={"needs": ["ref_logprobs"]}, steps=2)
    result = workflow.run(tmp_path / "run", on_event=listener)

    assert killed() is None
    check_whole(result, 2)
    check_scored(result.directory)
    restarts = listener.states("restarting")
    assert [e.worker for e in restarts] == [*RANKS]
    assert all("rank 1 was killed by SIGKILL; restart 1 of 3" in e.detail for e in restarts)
    assert len(calls_of(notes)) == 4


def test_several_workers_of_a_stage_are_rank_groups_of_their_own(tmp_path: Path) -> None:
    notes, listener = tmp_path / "notes", Listener()
    work = af.Logprobs("test_stage_ranks:MeetsFour", notes=str(notes), world_size=2)
    stage = af.Stage(work, gives=["ref_logprobs"], batch=2)
    notes.mkdir()
    with af.serve(tmp_path / "run", on_event=listener) as run:
        run.queue.declare("keep", needs=["ref_logprobs"])
        run.start(stage)
        workers = run.scale(stage, 2)
        run.queue.put({"prompt_ids": [[1]] * 4, "response_ids": [[n] for n in range(4)]})
        run.queue.end()
        kept = kept_by(run)
        for worker in workers:
            run.wait(worker)

    assert sorted(kept) == [[-3], [-2], [-1], [0]]
    names = [f"ref_logprobs-{worker} rank {rank}" for worker in range(2) for rank in range(2)]
    assert Counter(e.worker for e in listener.events if isinstance(e, WorkerState) and e.state == "ready") == Counter(
        names
    )


class MeetsFour(Sharded):
    """Gives nothing before four processes were called."""

    def logprobs(self, batch: Batch) -> Ragged:
        (self._notes / f"called-{os.getpid()}").touch()
        until(lambda: len(list(self._notes.glob("called-*"))) == 4, "the ranks of both workers")
        return super().logprobs(batch)


def test_a_process_that_another_replaced_as_a_rank_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a rank of one's own, under torchrun, that waits for the other
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stage = af.Stage(af.Logprobs(EchoTrain, world_size=2), gives=["ref_logprobs"])
    with af.serve() as run, af.connect(run.address, name="old") as old, af.connect(run.address, name="new") as new:
        worked = in_thread(stage.run, old.queue)
        until(lambda: run.queue.status().parked, "the old rank's request")
        # when another process becomes this rank
        in_thread(new.queue.get, "ref_logprobs", 64, group="ref_logprobs", rank=0, world_size=2, at_least=1)

        assert isinstance(worked(), LeaseLost)
        assert "rank 0 of group 'ref_logprobs' is new now" in str(worked())
        run.queue.end()


@pytest.mark.parametrize(
    ("work", "more", "what"),
    [
        (af.Logprobs("echo", world_size=2), {}, "engine 'echo' works in one process.*several ranks: .*echo-ranks"),
        (af.Logprobs("torch", world_size=2), {}, "engine 'torch' works in one process.*several ranks: .*fsdp"),
        (af.Logprobs("echo-ranks", world_size=2), {"launcher": "thread"}, "launcher='thread' starts no ranks"),
        (af.Logprobs("echo-ranks", world_size=2), {"cpus": [0]}, r"cpus=\[0\] for world_size=2"),
        (af.Logprobs("echo-ranks", world_size=2), {"env": {"LOCAL_RANK": "0"}}, "env= sets LOCAL_RANK"),
    ],
)
def test_ranks_that_cannot_be_had_are_refused_with_the_reason(work: Any, more: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        echo_workflow(stages=[af.Stage(work, gives=["ref_logprobs"], **more)])


def test_a_trainer_of_one_process_has_no_ranks() -> None:
    with pytest.raises(ConfigError, match="engine 'echo' works in one process: world_size=2"):
        echo_workflow(train={"world_size": 2})


def test_more_ranks_than_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="a lease of batch=2 rows cannot be dealt out to world_size=3 ranks"):
        af.Stage(af.Logprobs("echo-ranks", world_size=3), batch=2)
    with pytest.raises(ConfigError, match="world_size must be 1 or more, not 0"):
        af.Logprobs("echo-ranks", world_size=0)


def test_a_function_has_no_ranks() -> None:
    made: Any = af.Stage
    with pytest.raises(
        TypeError, match=r"no argument 'world_size'; it is of an engine's work, as Logprobs\(\.\.\., "
    ):
        made(length, world_size=2)


def test_a_process_that_is_no_rank_works_as_none() -> None:
    stage = af.Stage(af.Logprobs("echo-ranks", world_size=2), gives=["ref_logprobs"])
    with af.serve() as run, pytest.raises(ConfigError, match="world_size=2: run.start starts its processes"):
        stage.run(run.queue)


STAGE = '\n[[stages]]\nwork = { logprobs = "echo-ranks", world_size = 2 }\ngives = ["ref_logprobs"]\n'


def test_ranks_of_a_stage_are_read_from_a_file_and_shown(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TOML + STAGE)

    flow = af.load_workflow(file)

    assert "log-probs by engine echo-ranks × 2 ranks" in str(flow)
    assert flow.describe()["stages"][-1]["work"]["Logprobs"]["world_size"] == 2
    file.write_text(TOML + '\n[[stages]]\nwork = "functions:length"\nworld_size = 2\n')
    with pytest.raises(
        ConfigError, match=r"run.toml: stages.0.world_size: there is no such key; it is of an engine's"
    ):
        af.load_workflow(file)
    file.write_text(TOML + STAGE.replace("echo-ranks", "echo"))
    with pytest.raises(ConfigError, match=r"run.toml: stages.0.work.*: engine 'echo' works in one process"):
        af.load_workflow(file)


def test_by_hand_each_process_of_a_stage_is_the_rank_of_its_environment(tmp_path: Path) -> None:
    file, events = tmp_path / "run.toml", list[Any]()
    file.write_text(TOML + STAGE)
    with af.serve(tmp_path / "run", on_event=events.append) as run:
        run.queue.declare("keep", needs=["ref_logprobs"])
        by_hand = start_ranks(tmp_path / "run", "--from", str(file), "stage", "ref_logprobs")
        until(lambda: len(run.queue.status().waiting) or any(p.poll() for p in by_hand), "a rank that waits for rows")
        run.queue.put({"prompt_ids": [[1]] * 3, "response_ids": [[5]] * 3})
        run.queue.end()
        assert len(kept_by(run)) == 3
        check_joined(by_hand)
    assert {e.shards for e in events if isinstance(e, Balanced)} == {2}
