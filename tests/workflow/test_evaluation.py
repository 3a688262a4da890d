"""Evaluations of a workflow: each of one exact version, whatever training, replicas and drivers do meanwhile."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import functions
import numpy as np
import pytest
from echo_runs import Driver, echo_weights, echo_workflow, events_of
from gates import Listener
from safetensors.numpy import load_file

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.interfaces import Completion, Request
from asyncflow_sdk.testing import EchoRollout, EchoTrain
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types import token_versions
from asyncflow_sdk.workflow.loops.record_files import read_batch

HELD_OUT = {"prompt_ids": [[7, 7], [8, 8, 8], [9]]}


def falls(response_ids: Any) -> list[float]:
    """The second evaluation of the run in the folder RUN is bad."""
    done = Path(os.environ.get("RUN", ""), "evaluations.jsonl")
    bad = done.is_file() and len(done.read_bytes().splitlines()) == 1
    return [float(not bad)] * len(response_ids)


def raises(response_ids: Any) -> list[float]:
    raise ValueError("no answer key")


def test_the_seed_of_a_workflow_reaches_the_judge_of_an_evaluation() -> None:
    judge = af.Stage(af.Generate("echo"), needs=["response_ids"], gives=["reward"])

    (work,) = (each.work for each in evaluated({"reward": judge}, seed=3).plan.stages if each.task != "reward")

    assert isinstance(work, af.Generate)
    assert work.sampling.seed is not None


GUARDED = {"reward": af.Stage(falls, launcher="thread"), "rollback_margin": 0.5, "every": 1}


def evaluated(evaluate: dict[str, Any] | None = None, **changes: Any) -> af.Workflow:
    options: dict[str, Any] = {
        "prompts": HELD_OUT,
        "every": 2,
        "reward": af.Stage(functions.length, launcher="thread"),
    }
    return echo_workflow(**({"steps": 6} | changes), evaluate=af.Evaluation(**(options | (evaluate or {}))))


def versions_of(directory: Path) -> dict[int, set[int]]:
    """The versions that generated the rows of each evaluation."""
    files = sorted((directory / "evaluations").glob("*.safetensors"))
    rows = {int(file.stem): read_batch(file) for file in files}
    return {
        version: set(token_versions(batch.ragged("version_spans")).values.tolist()) for version, batch in rows.items()
    }


def check_model(folder: Path, steps: int) -> None:
    """A folder holds the weights after so many steps, bit for bit."""
    held = load_file(folder / "model.safetensors")
    assert all(np.array_equal(held[name], array) for name, array in echo_weights(steps).items())
    assert held.keys() == echo_weights(steps).keys()


@pytest.mark.parametrize("aside", [False, True])
def test_each_evaluation_is_of_one_version_and_the_last_version_is_evaluated(tmp_path: Path, aside: bool) -> None:
    own = af.Rollout("echo", launcher="thread", replicas=2) if aside else None
    place = {"replicas": 2, "max_rows": 4}

    result = evaluated({"samples": 4, "rollout": own}, rollout=place).run(tmp_path / "run")

    versions = versions_of(tmp_path / "run")
    assert all(made_by == {version} for version, made_by in versions.items())
    assert [each.version for each in result.evaluations] == list(versions)
    assert list(versions)[-1] == 6
    assert result.summary["evaluations"] == {str(version): 2.0 for version in versions}
    assert {each.rows for each in result.evaluations} == {12}
    assert result.best is not None
    assert result.best.version == result.summary["best_version"] == min(versions)
    assert [each.best for each in result.evaluations] == [True] + [False] * (len(versions) - 1), (
        "as good is not better"
    )
    assert result.best.pass_at == {"1": 1.0, "2": 1.0, "4": 1.0}
    check_model(tmp_path / "run" / "best", result.best.version)
    assert (result.summary["status"], result.summary["balanced"]) == ("completed", True)


def test_an_evaluation_slower_than_every_skips_the_versions_that_it_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held"
    held.touch()
    monkeypatch.setenv("HELD_UP", str(held))

    class Opens(Listener):
        def __call__(self, event: Any) -> None:
            super().__call__(event)
            if isinstance(event, ev.Published) and event.version == 6:
                held.unlink()

    slow = af.Stage(functions.held_up, launcher="thread")
    result = evaluated({"reward": slow}).run(tmp_path / "run", on_event=Opens())

    first, last = result.evaluations
    assert first.version == 2
    assert last.version == 6
    assert (result.summary["steps"], result.summary["balanced"]) == (6, True)


def test_a_version_that_scores_worse_is_rolled_back_and_training_descends_from_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN", str(tmp_path / "run"))
    heard = Listener()

    result = evaluated(GUARDED).run(tmp_path / "run", on_event=heard)

    first, second, *others = result.evaluations
    assert (first.version, first.score, second.score) == (1, 1.0, 0.0)
    assert [each.score for each in others] == [1.0] * len(others) != []
    (back,) = [event for event in heard.events if isinstance(event, ev.Published) and event.source >= 0]
    assert (back.source, back.version > second.version) == (1, True)
    assert [event.source for event in heard.events if isinstance(event, ev.Restored)] == [1]
    assert any("rolled back, as version" in text for text in heard.texts(ev.Note))
    assert result.summary["balanced"]


def test_training_ends_early_without_a_better_score(tmp_path: Path) -> None:
    heard = Listener()

    result = evaluated({"every": 1, "early_stopping_patience": 2}, steps=10_000).run(tmp_path / "run", on_event=heard)

    assert 2 < result.summary["steps"] < 10_000
    assert result.summary["status"] == "completed"
    assert any("training ends early" in text for text in heard.texts(ev.Note))
    assert result.evaluations[-1].version == result.summary["steps"]


def test_a_reward_that_raises_costs_the_evaluation_and_not_the_run(tmp_path: Path) -> None:
    result = evaluated({"reward": af.Stage(raises, launcher="thread"), "every": 3}, max_failed=0).run(
        tmp_path / "run"
    )

    assert (result.summary["status"], result.summary["balanced"]) == ("completed", True)
    assert any("raises() raised ValueError: no answer key" in text for text in result.summary["reasons"])
    notes = [
        note["text"] for note in events_of(tmp_path / "run", "note") if "of an evaluation failed" in note["text"]
    ]
    cause = "evaluation_reward: raises() raised ValueError: no answer key"
    assert set(notes) == {f"3 of 3 rows of an evaluation failed, and it has no score; the last one: {cause}"}
    assert len(notes) == result.summary["rows"]["failed"] // 3
    assert len(notes) <= 4, "of versions 0, 3 and 6, and perhaps of the last one again"


def test_held_out_prompts_without_a_column_that_their_reward_needs_are_refused() -> None:
    def right(response_ids: Any, answer: list[str]) -> list[float]:
        return [0.0 for _ in answer]

    with pytest.raises(ConfigError, match="'evaluation_reward' needs 'answer', which nobody gives"):
        evaluated({"reward": right})


class DiesOnce(EchoRollout):
    """Its process is killed in the first evaluation."""

    def __init__(self, model: str = "", *, alive: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._alive = Path(alive)

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        if self._alive.exists():
            self._alive.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        async for completion in super().generate(request):
            yield completion


def test_a_replica_killed_in_an_evaluation_generates_it_again_with_the_same_version(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    alive.touch()
    own = af.Rollout("test_evaluation:DiesOnce", alive=str(alive))

    result = evaluated({"rollout": own}).run(tmp_path / "run")

    versions = versions_of(tmp_path / "run")
    assert not alive.exists()
    assert all(made_by == {version} for version, made_by in versions.items())
    assert {each.rows for each in result.evaluations} == {3}
    assert result.evaluations[-1].version == 6


def killed(folder: str, transport: str) -> af.Workflow:
    """Its driver is killed as it begins to roll back, and its workers end with it."""
    os.environ["RUN"] = str(Path(folder) / "run")
    af.Run.rollback = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign, misc]
    path = {"path": str(Path(folder) / "weights")} if transport == "file" else {}
    weights = af.Weights(transport=transport, options=path)
    return evaluated(GUARDED, weights=weights, checkpoint=af.Checkpoint(every=1), processes=transport == "shm")


@pytest.mark.parametrize("transport", ["file", "shm"])
def test_a_driver_killed_between_score_and_rollback_rolls_back_when_it_is_resumed(
    tmp_path: Path, transport: str
) -> None:
    with Driver(tmp_path / "run", f"test_evaluation:killed:{tmp_path}:{transport}") as driver:
        driver.end()
    with Driver(tmp_path / "run", "resume") as driver:
        errors = driver.end()

    assert driver.last == "done", errors
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert events.count("scored 0, and version 1 1: rolled back, as version") == 1
    scores = [each.score for each in af.Result(tmp_path / "run", {}).evaluations]
    assert scores == [1.0, 0.0, *([1.0] * (len(scores) - 2))]


def test_a_guard_whose_best_version_dies_with_the_trainer_is_refused() -> None:
    lost = {"weights": af.Weights(transport="tcp"), "checkpoint": af.Checkpoint(every=1)}

    with pytest.raises(ConfigError, match=r"transport 'tcp' loses it .* say weights=af.Weights\(transport='file'"):
        evaluated(GUARDED, **lost)
    evaluated(GUARDED, weights=lost["weights"])
    evaluated(**lost)


class FullDisk(EchoTrain):
    """Its disk is full in the middle of the folder of step 4."""

    def export(self, path: Path) -> None:
        super().export(path)
        if self.steps == 4:
            (path / "half").touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_no_half_folder_and_training_goes_on(tmp_path: Path) -> None:
    heard = Listener()
    train = af.Train("test_evaluation:FullDisk", launcher="thread")

    result = echo_workflow(train=train, steps=8, save_steps=2, save_total_limit=2).run(
        tmp_path / "run", on_event=heard
    )

    assert result.summary["status"] == "completed"
    assert sorted(path.name for path in (tmp_path / "run" / "models").iterdir()) == ["step-000006", "step-000008"]
    assert any("no model folder was written: OSError" in text for text in heard.texts(ev.Note))


def test_wrong_arguments_are_refused() -> None:
    for wrong in ({"every": 0}, {"samples": 0}, {"rollback_margin": -1.0}, {"early_stopping_patience": 0}):
        with pytest.raises(ConfigError):
            evaluated(wrong)
