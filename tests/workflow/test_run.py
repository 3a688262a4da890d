"""Whole runs over echo engines: one of real processes that many tests look at, and others in threads."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import functions
import msgspec
import numpy as np
import pytest
from echo_runs import check_whole, column, echo_workflow, events_of, trained_rows
from waiting import in_thread

import asyncflow_sdk as af
from asyncflow_sdk.types import token_versions
from asyncflow_sdk.types.events import Event, Published

STEPS = 8


def two_columns(response_ids: Any) -> dict[str, list[Any]]:
    return {"reward": functions.length(response_ids), "note": ["ok" for _ in response_ids]}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> af.Result:
    """A run of four processes: two replicas, a reward, a trainer; and a stage in the driver."""
    folder = tmp_path_factory.mktemp("ran")
    (folder / "met").mkdir()
    rollout = af.Rollout(
        "gates:Together", met=str(folder / "met"), replicas=2, max_rows=8, delay_s=0.002, group_size=4, prompt="prompt_ids"
    )  # fmt: skip
    noted = af.Stage(lambda reward: [f"{value:g} tokens" for value in reward], task="noted", gives=["note"])
    flow = echo_workflow(
        processes=True, rollout=rollout, stages=[noted, af.Stage(functions.doubled, gives=["doubled"], launcher="thread")],
        train={"needs": ["doubled", "note"]}, steps=STEPS, staleness=af.Staleness(max_staleness=2),
    )  # fmt: skip
    return flow.run(folder / "run")


@pytest.mark.starts("launcher process", "store local")
def test_every_row_is_trained_once_within_its_staleness(ran: af.Result) -> None:
    check_whole(ran, STEPS)
    assert ran.summary["rows_put"] == STEPS * 16
    late = af.staleness_of(ran.directory).values
    assert 0 <= late.min() <= late.max() <= 2
    assert ran.summary["staleness_max"] == late.max()
    assert ran.summary["warnings"] == []


def test_steps_are_whole_groups_of_one_prompt(ran: af.Result) -> None:
    for _, batch in af.read_steps(ran.directory):
        groups, sizes = np.unique(batch.groups, return_counts=True)
        assert sizes.tolist() == [4] * 4
        for group in groups:
            assert len({tuple(batch.ragged("prompt_ids")[i]) for i in np.flatnonzero(batch.groups == group)}) == 1


@pytest.mark.starts("transport shm")
def test_every_trained_row_was_made_by_the_weights_it_names(ran: af.Result) -> None:
    versions = set()
    for _, batch in af.read_steps(ran.directory):
        named = token_versions(batch.ragged("version_spans")).values
        assert (-batch.ragged("logprobs").values == named).all()  # echo's log-probs say which weights it held
        versions |= set(named.tolist())
    assert max(versions) >= STEPS - 3  # new versions kept coming


def test_two_replicas_share_the_work(ran: af.Result) -> None:
    who = {event["worker"] for event in events_of(ran.directory, "span") if event["kind"] == "generate"}
    assert who == {"rollout-0", "rollout-1"}


def test_stages_chain_in_processes_and_in_the_driver(ran: af.Result) -> None:
    rewards = column(ran.directory, "reward")
    assert column(ran.directory, "doubled") == [2 * reward for reward in rewards]
    for _, batch in af.read_steps(ran.directory):
        assert batch.texts("note") == [f"{reward:g} tokens" for reward in batch.array("reward")]


def test_the_directory_tells_the_run_again(ran: af.Result) -> None:
    directory = ran.directory
    assert json.loads((directory / "summary.json").read_text()) == ran.summary
    events = [msgspec.json.decode(line, type=Event) for line in (directory / "events.jsonl").open("rb")]
    assert [e.version for e in events if isinstance(e, Published)] == list(range(STEPS + 1))
    assert [number for number, _ in af.read_steps(directory)] == list(range(STEPS))
    assert json.loads((directory / "workflow.json").read_text())["steps"] == STEPS
    logs = {path.name for path in (directory / "logs").iterdir()}
    assert logs >= {"reward-0.log", "rollout-0.log", "rollout-1.log", "train-0.log"}
    assert json.loads((directory / "model" / "echo.json").read_text()) == {"steps": STEPS}


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.starts("launcher thread")
def test_a_run_in_threads_is_as_whole_and_leaves_no_thread_behind(tmp_path: Path, max_staleness: int) -> None:
    before = set(threading.enumerate())

    result = echo_workflow(
        rollout={"replicas": 2}, reward=af.Stage(two_columns, gives=["reward", "note"], launcher="thread"), steps=6,
        staleness=af.Staleness(max_staleness=max_staleness),
    ).run(tmp_path / "run")  # fmt: skip

    check_whole(result, 6)
    assert af.staleness_of(result.directory).values.max() <= max_staleness
    assert not list(result.directory.glob("logs/rollout*"))
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(60)
    assert not [thread.name for thread in left if thread.is_alive()]


def test_more_rows_than_are_kept_at_a_time_are_all_recorded(tmp_path: Path) -> None:
    """The rows of a step are forgotten as soon as it is acknowledged."""
    result = echo_workflow(steps=40, rollout={"delay_s": 0.0}, capacity_rows=64).run(tmp_path / "run")

    check_whole(result, 40)
    assert all(
        {"response_ids", "logprobs", "version_spans", "reward"} <= set(batch)
        for _, batch in af.read_steps(result.directory)
    )
    assert result.summary["warnings"] == []


@pytest.mark.parametrize(("steps", "each"), [(1, 1), (2, 1), (5, 2)])
def test_the_first_and_the_last_reward_of_a_short_run_share_no_step(tmp_path: Path, steps: int, each: int) -> None:
    rows: list[int] = []

    def later_is_more(response_ids: list[np.ndarray]) -> list[float]:
        rows.extend(range(len(rows), len(rows) + len(response_ids)))
        return [float(row) for row in rows[-len(response_ids) :]]

    # given a synchronous run: a step's rows come after those of the step before
    workflow = echo_workflow(steps=steps, reward=later_is_more, staleness=af.Staleness(max_staleness=0))

    result = workflow.run(tmp_path / "run")

    rewards = [batch.array("reward").mean() for _, batch in af.read_steps(tmp_path / "run")]
    assert len(rows) == steps * 16
    assert result.summary["reward_steps"] == each
    assert result.rewards == pytest.approx((np.mean(rewards[:each]), np.mean(rewards[-each:])))
    assert (result.rewards[0] < result.rewards[1]) == (steps > 1)


def test_two_runs_at_once_do_not_meet_and_neither_writes_into_the_others_directory(tmp_path: Path) -> None:
    other = in_thread(echo_workflow().run, tmp_path / "other")
    result = echo_workflow().run(tmp_path / "run")

    check_whole(other(), 3)
    check_whole(result, 3)
    before = (tmp_path / "run" / "summary.json").read_bytes()
    with pytest.raises(af.AsyncFlowError, match="already holds a run"):
        echo_workflow(steps=1).run(tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").read_bytes() == before
    assert len(trained_rows(tmp_path / "run")) == 48
