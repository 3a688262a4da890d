"""Rollouts and stages of other partitions than training's: an evaluation beside it."""

from pathlib import Path

import numpy as np
import pytest
from echo_runs import echo_workflow, trained_rows
from functions import length
from gates import Gates
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError

pytestmark = pytest.mark.fast

GREEDY = af.Sampling(temperature=0, max_tokens=9)


def trains(**options: object) -> af.Rollout:
    return af.Rollout("echo", group_size=4, prompt="prompt_ids", launcher="thread", **options)  # type: ignore[arg-type]


def evaluates(**options: object) -> af.Rollout:
    named = {
        "task": "eval",
        "partitions": ["eval"],
        "prompt": "prompt_ids",
        "sampling": GREEDY,
        "launcher": "thread",
    } | options
    return af.Rollout("echo", **named)  # type: ignore[arg-type]


def scores(**options: object) -> af.Stage:
    return af.Stage(
        length, gives=["reward"], **({"task": "reward", "partitions": ["", "eval"], "launcher": "thread"} | options)
    )  # type: ignore[arg-type]


def test_an_evaluation_runs_beside_training_and_none_of_its_rows_is_trained(tmp_path: Path) -> None:
    # given a workflow whose trainer waits at its third step
    gates, out = Gates(tmp_path / "gates", 3), tmp_path / "run"
    flow = echo_workflow(
        rollout=[trains(), evaluates()], reward=scores(), train=gates.trainer(), steps=8, capacity_rows=99
    )
    ended = in_thread(flow.run, out)
    until(lambda: list(out.glob("steps/000002.*")), "the second step")

    # when held-out prompts are put meanwhile
    with af.connect(out) as run:
        run.queue.declare("scores", needs=["response_ids", "reward", "version_spans"], partitions=["eval"])
        run.queue.put({"prompt_ids": af.Ragged.of([[9, 9], [8]])}, partition="eval")
        batch = run.queue.get("scores", count=2, at_least=2, timeout_s=60)
        found, rewards, ids = batch.ragged("response_ids").lengths, batch["reward"], batch.ids.tolist()
        batch.complete()

    # then they are answered as the evaluation samples, scored by the function that scores training, and training goes on
    gates.open(3)
    result = ended()
    assert sorted(found.tolist()) == [1, 2] and np.array_equal(rewards, found)
    assert result.summary["status"] == "completed" and result.summary["balanced"]
    assert result.summary["rows"]["consumed"] == 8 * 16 + 2
    assert not set(ids) & set(trained_rows(out))
    assert not result.summary["warnings"]


def test_a_workflow_shows_what_takes_which_rows() -> None:
    flow = echo_workflow(rollout=[evaluates(), trains()], reward=scores(), train={})
    assert flow.plan.rollout.task == "rollout", "whose prompts are fed"
    assert [(e["from"], e["to"]) for e in flow.describe()["edges"] if "eval" in e["from"]] == [
        ("partition eval", "eval"),
        ("eval", "reward"),
    ]
    assert "task eval: answers the rows of partition 'eval'; the staleness rule does not hold it" in str(flow)
    assert "partitions of reward: it takes the rows of training and partition 'eval'" in str(flow)
    assert '["partition eval"]' in flow.mermaid()


def test_a_file_names_partitions(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        """
steps = 2
batch_size = 8
prompts = { prompt_ids = [[1], [2]] }
rollout = [
  { engine = "echo", group_size = 4, prompt = "prompt_ids" },
  { engine = "echo", task = "eval", partitions = ["eval"], prompt = "prompt_ids", sampling = { temperature = 0 } },
]
reward = "functions:length"
train = { engine = "echo" }
stages = [{ work = "functions:length", task = "eval_reward", gives = ["reward"], partitions = ["eval"] }]
"""
    )
    flow = af.load_workflow(tmp_path / "run.toml")
    assert [rollout.declare().partitions for rollout in flow.plan.rollouts] == [("",), ("eval",)]
    assert [stage.declare().partitions for stage in flow.plan.stages] == [("",), ("eval",)]


def test_what_cannot_work_is_found_in_every_partition() -> None:
    def refused(rollout: object, *stages: af.Stage) -> str:
        with pytest.raises(ConfigError) as error:
            echo_workflow(rollout=rollout, reward=None, stages=stages)
        return str(error.value)

    # one name for two tasks, which one queue cannot have, though no row sees both
    both = [trains(), evaluates()]
    text = refused(both, scores(partitions=[""]), scores(partitions=["eval"]))
    assert "two tasks have the same name 'reward'" in text
    # a column that rows of the evaluation would get twice
    assert "column 'reward' is given by task 'reward' and by task 'more'" in refused(
        both, scores(), scores(task="more", partitions=["eval"])
    )
    # no rollout for the rows that are trained
    assert "one rollout task gives the columns that are trained" in refused([evaluates()], scores())
    # partitions that are no list of names
    with pytest.raises(ConfigError, match="partitions must be a list of str, not str: 'eval'"):
        scores(partitions="eval")
    with pytest.raises(ConfigError, match="it has none"):
        evaluates(partitions=[])


def test_a_rollout_of_every_partition_admits() -> None:
    spec = trains(partitions=["*"]).declare()
    assert spec.admits and spec.takes("eval") and spec.sampler is None
    assert not evaluates().declare().admits
    assert evaluates(partitions=[""]).declare().gives[0].startswith("eval_"), "a second answer to what is trained"
