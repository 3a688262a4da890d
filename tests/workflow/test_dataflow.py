"""A workflow checks itself before anything starts, and shows what it will do."""

import contextlib
from typing import Any

import pytest
from echo_runs import echo_workflow
from functions import doubled, length
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, PluginError

pytestmark = pytest.mark.fast


def echo(**options: Any) -> af.Rollout:
    return af.Rollout("echo", **({"group_size": 4, "prompt": "prompt_ids"} | options))


def chain(needs: str, gives: str, task: str = "") -> af.Stage:
    return af.Stage(doubled, needs=[needs], gives=[gives], task=task or gives)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"stages": [chain("rewards", "twice")]},
            r"task 'twice' needs 'rewards' \(did you mean 'reward', of task 'reward'\?\), which nobody gives. There are:",
        ),
        (
            {"stages": [chain("b", "a"), chain("c", "b"), chain("a", "c")]},
            "task 'a' needs 'b' of task 'b', task 'b' needs 'c' of task 'c', task 'c' needs 'a' of task 'a'. Leave one",
        ),
        ({"stages": [chain("a", "a")]}, "columns wait for each other: task 'a' needs 'a' of task 'a'"),
        (
            {"stages": [chain("reward", "logprobs", "again")]},
            "column 'logprobs' is given by task 'rollout' and by task 'again', and can be written once",
        ),
        ({"stages": [chain("reward", "log probs")]}, "task 'log probs': a column cannot be named 'log probs': use 1 to 100"),
        ({"stages": [chain("reward", "prompt_ids")]}, "column 'prompt_ids' is given by the prompts and by task"),
        ({"stages": [chain("reward", "a"), chain("a", "b", "a")]}, "two tasks have the same name 'a': give one another"),
        ({"train": af.Train("echo", needs=["ref_logprobs"])}, "task 'train' needs 'ref_logprobs'.*, which nobody gives"),
        ({"capacity_rows": 8}, r"capacity_rows=8 is too small: steps of 16 rows .*; leave it out \(64 rows then\)"),
        ({"epochs": 0}, "epochs must be 1 or more, or None for as many as the steps take, not 0"),
        (
            {"epochs": 1, "batch_size": 32},
            "a step has 32 rows, and 4 prompts in groups of 4 give 16 in epochs=1: .*batch_size=16 or less",
        ),
        ({"rollout": []}, "a workflow needs a rollout"),
        ({"train": af.Train("echo", max_restarts=1)}, "max_restarts=1, and a trainer .* without a checkpoint"),
        ({"rollout": [echo(), echo(group_size=8)]}, "rollouts have group_size 4 and 8"),
        ({"rollout": [echo(task="second")]}, "one rollout task gives the columns that are trained.*: none"),
        (
            {"rollout": [echo(), echo(task="other", prefix="")]},
            "one rollout task gives the columns.*'rollout', 'other'",
        ),
        ({"stages": [af.Stage(lambda reward: reward, task="a", python="python3")]}, "stage 'a' .*driver.*no place of its own"),
        ({"weights": af.Weights(quorum=3), "rollout": [echo(), echo()]}, "quorum=3 .* there are 2"),
        ({"on_failure": "never"}, "on_failure must be 'stop' or 'continue'"),
    ],
)  # fmt: skip
def test_refused_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        echo_workflow(**changes)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        echo_workflow(
            rollout=echo(model="/no/folder"), stages=[chain("rewards", "twice")], steps=0, train=af.Train("ech")
        )

    text = str(caught.value)
    assert text.startswith("4 things in this workflow cannot work:\n  1. steps must be")
    assert "4. task 'twice' needs 'rewards'" in text
    assert "no train adapter is named 'ech'" in text


def test_a_missing_engine_alone_is_a_plugin_error() -> None:
    with pytest.raises(PluginError, match="no train adapter is named 'ech'"):
        echo_workflow(train=af.Train("ech"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: af.Stage(af.Generate("echo"), gives=["said"]), "needs one column of prompts and gives one"),
        (lambda: af.Stage(af.Logprobs("echo"), needs=["prompt_ids"]), "needs two columns"),
        (lambda: af.Stage(length, concurrency=0), "concurrency must be 1 or more"),
        (lambda: af.Stage("reward"), "a Logprobs or a Generate, not 'reward'"),  # type: ignore[arg-type]
        (lambda: af.Rollout(type("Local", (), {})), "cannot be imported by its worker: put the class into a module"),
        (lambda: af.Rollout("echo", cpus=[0, 0]), "cpus must be different numbers from 0"),
    ],
)
def test_a_part_that_cannot_work_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_it_shows_tasks_columns_and_choices() -> None:
    flow = echo_workflow(
        rollout=[echo(), echo(delay_s=0.1)], reward=lambda response_ids: response_ids,
        stages=[af.Stage(af.Logprobs("echo"), gives=["ref_logprobs"], env={"TOKEN": "secret"})],
    )  # fmt: skip

    text = str(flow)
    assert "3 steps of 16 rows, in groups of 4" in text
    assert "reward        function " in text
    assert "in a thread of the driver" in text
    assert "rollout ── response_ids, logprobs, version_spans, finish_reason ──▶ train" in text
    assert "column ref_logprobs: given by ref_logprobs and needed by nobody" in text
    assert "secret" not in text + str(flow.describe())
    assert {"from": "rollout", "to": "reward", "columns": ("response_ids",)} in flow.describe()["edges"]
    assert 'prompts_0 -->|"prompt_ids"| rollout_1' in flow.mermaid()


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True)),
        min_size=1, max_size=6, unique_by=lambda n: n[0],
    )
)  # fmt: skip
def test_a_cycle_is_found_exactly_where_no_order_exists(drawn: list[tuple[int, list[int]]]) -> None:
    """Task i gives column i; column 6 is of the prompts."""
    names = {number: f"c{number}" for number in range(6)} | {6: "prompt_ids"}
    stages = [
        af.Stage(doubled, needs=[names[c] for c in needs], gives=[names[n]], task=f"t{n}") for n, needs in drawn
    ]
    ready, left = {6}, dict(drawn)
    while able := {number for number, needs in left.items() if set(needs) <= ready}:
        ready |= able
        left = {number: needs for number, needs in left.items() if number not in able}

    refused = (
        contextlib.nullcontext() if not left else pytest.raises(ConfigError, match="wait for each other|nobody gives")
    )
    with refused:
        flow = echo_workflow(stages=stages)
        edges = {(edge["from"], edge["to"]) for edge in flow.describe()["edges"]}
        assert edges >= {(f"t{of}", f"t{number}") for number, needs in drawn for of in needs if of != 6}


@pytest.mark.parametrize(("capacity_rows", "said"), [(31, True), (32, False)])
def test_a_capacity_below_the_steps_under_way_is_said(capacity_rows: int, said: bool) -> None:
    """Two steps of 16 rows may be under way."""
    workflow = echo_workflow(capacity_rows=capacity_rows, staleness=af.Staleness(max_staleness=1))
    assert ("fewer than the 1 + 1 steps" in str(workflow)) == said


@pytest.mark.parametrize(("sampling", "cuts"), [({"top_p": 0.9}, "top_p"), ({}, "")])
def test_draws_from_a_part_of_the_vocabulary_are_said(sampling: dict[str, float], cuts: str) -> None:
    workflow = echo_workflow(rollout={"sampling": af.Sampling(**sampling)})
    assert (f"{cuts} cut them, and log-probs are of the whole vocabulary" in str(workflow)) == bool(cuts)
