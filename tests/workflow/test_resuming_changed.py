"""Runs that go on with other values: from the newest checkpoint, with the trainer's state, and a record of the change."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from echo_runs import echo_workflow, events_of
from functions import doubled_length

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, WorkerFailed
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.workflow.loops.record_files import read_batch
from asyncflow_sdk.workflow.run_directory import RunDirectory
from asyncflow_sdk.workflow.serialization import MAP, differences, to_json


class Rated(EchoTrain):
    """Notes for each step its number of earlier steps, which its checkpoints have, rate, rows, and if the reward was
    doubled."""

    def __init__(self, model: str = "", *, algorithm: Any = None, learning_rate: float = 1.0) -> None:
        super().__init__(model)
        self._rate = learning_rate

    def train_step(self, batch: af.Batch) -> af.StepResult:
        if self.steps in fails:
            fails.remove(self.steps)
            raise RuntimeError("told to fail")
        doubled = bool((batch.array("reward") == 2 * batch.ragged("response_ids").lengths).all())
        trained.append((self.steps, self._rate, batch.rows, doubled))
        return super().train_step(batch)


trained: list[tuple[int, float, int, bool]] = []
fails: set[int] = set()
CHANGES = {
    "steps": 12, "train.learning_rate": 0.5, "batch_size": 8, "rollout.sampling.max_tokens": 3,
    "reward.work": "functions:doubled_length",
}  # fmt: skip


def workflow(**changes: Any) -> af.Workflow:
    train = af.Train("test_resuming_changed:Rated", launcher="thread")
    usual = {"steps": 4, "checkpoint": af.Checkpoint(every=2), "seed": 3, "train": train}
    return echo_workflow(**(usual | changes))


def check_changed(result: af.Result, step: int, first: list[tuple[int, float, int, bool]]) -> None:
    """The first steps with the old values, then all others with the new ones, each step once in the record."""
    assert first[:step] == [(number, 1.0, 16, False) for number in range(step)]
    assert trained == [(number, 0.5, 8, True) for number in range(step, 12)]
    assert [(n, batch.rows) for n, batch in af.read_steps(result.directory)] == [
        (n, 16 if n < step else 8) for n in range(12)
    ]
    assert (
        max(int(b.ragged("response_ids").lengths.max()) for n, b in af.read_steps(result.directory) if n >= step) <= 3
    )
    assert af.staleness_of(result.directory).values.max() <= 1
    summary = result.summary
    assert (summary["status"], summary["steps"], summary["balanced"]) == ("completed", 12, True)
    assert summary["rows"]["consumed"] == 8 * (12 - step)
    # and what changed at which step is in the record
    (leg,) = summary["legs"]
    assert leg == json.loads((result.directory / "workflow.json").read_text())["legs"][0]
    assert (leg["step"], leg["checkpoint"]) == (step, f"step-{step:06d}")
    assert [*leg["changes"]["train.learning_rate"]] == [None, 0.5]
    assert {"steps", "batch_size", "reward.work", "train.learning_rate"} < leg["changes"].keys()
    notes = [note["text"] for note in events_of(result.directory, "note")]
    assert any(text.startswith(f"training goes on from step {step} on, after step-0") for text in notes), notes


def test_a_completed_run_goes_on_with_other_values(tmp_path: Path) -> None:
    trained.clear()
    workflow().run(tmp_path / "run")
    first = [*trained]
    trained.clear()

    result = af.resume(tmp_path / "run", changes=CHANGES)

    check_changed(result, 4, first)
    assert af.resume(tmp_path / "run").summary == result.summary, "nothing is left to do"


def test_a_failed_run_goes_on_with_a_changed_workflow_from_its_newest_checkpoint(tmp_path: Path) -> None:
    # given a run that failed, and again after its change
    trained.clear()
    fails.update([7, 9])
    with pytest.raises(WorkerFailed, match="told to fail"):
        workflow(steps=100).run(tmp_path / "run")
    first = [*trained]
    trained.clear()
    record = sorted(path for path in (tmp_path / "run").rglob("*") if {"queue", "steps"} & {*path.parts})
    with pytest.raises(ConfigError, match=r"prompts.safetensors has other data than this workflow"):
        workflow(steps=12, prompts={"prompt_ids": [[1], [2]]}).resume_in(tmp_path / "run")
    assert record == sorted(path for path in (tmp_path / "run").rglob("*") if {"queue", "steps"} & {*path.parts})
    changed = workflow(
        steps=12, batch_size=8, reward=af.Stage(doubled_length, task="reward", launcher="thread"),
        train=af.Train("test_resuming_changed:Rated", learning_rate=0.5, launcher="thread"),
        rollout={"sampling": af.Sampling(max_tokens=3)},
    )  # fmt: skip
    with pytest.raises(WorkerFailed, match="told to fail"):
        changed.resume_in(tmp_path / "run")
    assert [each[0] for each in trained] == [6, 7, 8]
    # when it is resumed as it is
    result = af.resume(tmp_path / "run")
    # then it goes on with the values changed last
    assert [each[0] for each in trained] == [6, 7, 8, 8, 9, 10, 11]
    del trained[2]
    check_changed(result, 6, first)


def test_a_changed_run_may_need_other_columns_of_the_same_prompts(tmp_path: Path) -> None:
    record, prompts = RunDirectory(tmp_path), {"prompt": ["a", "b"]}

    record.keep(af.Batch.of(prompts), None)
    record.keep(af.Batch.of(prompts | {"answer": ["c", "d"]}), None)
    record.keep(af.Batch.of(prompts | {"level": [1, 2]}), None)

    assert {*read_batch(tmp_path / "prompts.safetensors")} == {"prompt", "answer", "level"}
    with pytest.raises(ConfigError, match="has other data"):
        record.keep(af.Batch.of({"prompt": ["a", "b"], "level": [1, 3]}), None)


def test_prompts_left_out_follow_a_change_of_the_token_limit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8}')
    rollout = {"model": tmp_path, "sampling": af.Sampling(max_tokens=4)}
    ids = [[1] * 2, [1] * 4, [1] * 6]
    first = workflow(rollout=rollout, prompts={"prompt_ids": ids}, long_prompts="drop").run(tmp_path / "run")

    same = af.resume(tmp_path / "run", changes={"steps": 5})
    other = af.resume(tmp_path / "run", changes={"steps": 6, "rollout.sampling.max_tokens": 6})

    assert [each.summary["prompts_left_out"] for each in (first, same, other)] == [1, 1, 2]
    lengths = {n: {len(row) for row in batch["prompt_ids"]} for n, batch in af.read_steps(tmp_path / "run")}
    assert lengths[5] == {2}
    assert set.union(*(lengths[n] for n in range(5))) == {2, 4}


def test_what_cannot_change_is_refused_by_name(tmp_path: Path) -> None:
    workflow(steps=2).run(tmp_path / "run")
    before = (tmp_path / "run" / "workflow.json").read_bytes()

    for changes, message in [
        ({"seed": 4}, "seed cannot change in a run, here from 3 to 4: a run goes on with the order of its prompts"),
        ({"train.engine": "echo"}, "train.engine cannot change in a run"),
        ({"rollout.prompt": "question"}, "it has: prompt_ids"),
        ({"train.learning_rat": 1.0}, "has no option 'learning_rat'; did you mean 'learning_rate'"),
        ({"train.options.learning_rate": 1.0}, "the workflow has nothing at train.options"),
        ({"stepz": 4}, "'stepz'"),
        ({"steps": 1}, "steps=1: 2 steps are trained already"),
    ]:
        with pytest.raises(ConfigError, match=message):
            af.resume(tmp_path / "run", changes=changes)
    with pytest.raises(ConfigError, match=r"prompts.safetensors has other data than this workflow"):
        workflow(steps=9, prompts={"prompt_ids": [[1], [2]]}).resume_in(tmp_path / "run")

    assert (tmp_path / "run" / "workflow.json").read_bytes() == before


def test_a_field_that_an_earlier_sdk_lacked_had_its_default() -> None:
    new = to_json({"sampling": af.Sampling(top_k=5)}, "")
    old = copy.deepcopy(new)
    del old[MAP]["sampling"]["sampling_mask"]

    assert not [*differences(old, new)]
    masked = to_json({"sampling": af.Sampling(top_k=5, sampling_mask=True)}, "")
    assert [*differences(old, masked)] == [("sampling.sampling_mask", False, True)]
