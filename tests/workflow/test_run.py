"""Whole runs over echo engines: real processes, the real queue, the real weight path."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from echo_runs import echo_workflow, trained_rows
from functions import doubled, two_columns

import asyncflow_sdk as af
from asyncflow_sdk.types.events import Event, Published, Span


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_run_trains_every_row_once_within_its_staleness(tmp_path: Path, max_staleness: int) -> None:
    result = echo_workflow(staleness=af.Staleness(max_staleness=max_staleness)).run(tmp_path / "run")

    rows = trained_rows(tmp_path / "run")
    assert len(rows) == len(set(rows)) == 12 * 16
    assert result.summary["rows"]["consumed"] == 12 * 16
    assert result.summary["rows_put"] == 12 * 16
    assert result.summary["balanced"]
    late = af.staleness_of(tmp_path / "run").values
    assert late.min() >= 0
    assert late.max() <= max_staleness
    assert result.summary["staleness_max"] == late.max()


def test_a_long_run_records_every_step_whole(tmp_path: Path) -> None:
    """More rows than the ledger keeps at a time: those of a step are forgotten as soon as it is acknowledged."""
    result = echo_workflow(steps=300).run(tmp_path / "run")

    steps = list(af.read_steps(tmp_path / "run"))
    assert [number for number, _ in steps] == list(range(300))
    assert all({"response_ids", "logprobs", "version_spans", "reward"} <= set(batch) for _, batch in steps)
    assert result.summary["warnings"] == []


def test_steps_are_whole_groups_of_one_prompt(tmp_path: Path) -> None:
    echo_workflow().run(tmp_path / "run")

    for _, batch in af.read_steps(tmp_path / "run"):
        groups, sizes = np.unique(batch.groups, return_counts=True)
        assert sizes.tolist() == [4] * 4
        for group in groups:
            prompts = {tuple(batch.ragged("prompt_ids")[i]) for i in np.flatnonzero(batch.groups == group)}
            assert len(prompts) == 1


def test_every_trained_row_was_made_by_the_weights_it_names(tmp_path: Path) -> None:
    echo_workflow(staleness=af.Staleness(max_staleness=2)).run(tmp_path / "run")

    versions = set()
    for _, batch in af.read_steps(tmp_path / "run"):
        named = af.types.token_versions(batch.ragged("version_spans")).values  # type: ignore[attr-defined]
        assert (-batch.ragged("logprobs").values == named).all()  # echo's log-probs say which weights it held
        versions |= set(named.tolist())
    assert max(versions) >= 9  # new versions kept coming


def test_two_replicas_share_the_work(tmp_path: Path) -> None:
    events: list[Event] = []
    met = tmp_path / "met"
    met.mkdir()
    rollout = af.Rollout(
        "gates:Together", met=str(met), replicas=2, max_rows=8, delay_s=0.01, group_size=4, prompt="prompt_ids"
    )
    echo_workflow(rollout=rollout, steps=20).run(tmp_path / "run", on_event=events.append)

    who = {event.worker for event in events if isinstance(event, Span) and event.kind == "generate"}
    assert who == {"rollout-0", "rollout-1"}


def test_stages_chain_and_may_give_several_columns(tmp_path: Path) -> None:
    stages = [af.Stage(doubled, gives=["doubled"])]
    echo_workflow(reward=af.Stage(two_columns, task="reward", gives=["reward", "note"]), stages=stages).run(
        tmp_path / "run"
    )

    _, batch = next(iter(af.read_steps(tmp_path / "run")))
    assert set(batch.texts("note")) == {"ok"}


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
    assert result.summary["reward_steps"] == each
    assert result.rewards == pytest.approx((np.mean(rewards[:each]), np.mean(rewards[-each:])))
    assert (result.rewards[0] < result.rewards[1]) == (steps > 1)


def test_a_function_no_process_can_import_runs_in_the_driver(tmp_path: Path) -> None:
    seen = []
    result = echo_workflow(reward=lambda response_ids: [seen.append(1) or 3.0 for _ in response_ids]).run(
        tmp_path / "run"
    )

    assert result.rewards == (3.0, 3.0)
    assert len(seen) == 12 * 16


def test_the_directory_tells_the_run_again(tmp_path: Path) -> None:
    result = echo_workflow().run(tmp_path / "run")

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == result.summary
    events = [msgspec.json.decode(line, type=Event) for line in (tmp_path / "run" / "events.jsonl").open("rb")]
    assert [e.version for e in events if isinstance(e, Published)] == list(range(13))
    assert json.loads((tmp_path / "run" / "workflow.json").read_text())["steps"] == 12
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {
        "reward-0.log",
        "rollout-0.log",
        "train-0.log",
    }
    assert json.loads((tmp_path / "run" / "model" / "echo.json").read_text()) == {"steps": 12}


def test_a_second_run_into_the_same_directory_is_refused(tmp_path: Path) -> None:
    echo_workflow(steps=1).run(tmp_path / "run")
    before = (tmp_path / "run" / "summary.json").read_bytes()

    with pytest.raises(af.AsyncFlowError, match="already holds a run"):
        echo_workflow(steps=1).run(tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    import threading

    results = {}
    threads = [
        threading.Thread(target=lambda name=name: results.update({name: echo_workflow().run(tmp_path / name)}))
        for name in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [results[name].summary["rows"]["consumed"] for name in ("a", "b")] == [192, 192]
