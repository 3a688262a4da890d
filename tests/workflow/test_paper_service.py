"""The service interface: five calls over a run, each what the run's own would do."""

from pathlib import Path

import numpy as np
import pytest
from functions import length

import asyncflow_sdk as af
from asyncflow_sdk.testing import EchoTrain

pytestmark = pytest.mark.fast

PROMPTS = {"prompt_ids": af.Ragged.of([[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]])}
ROLLOUT = {"prompt": "prompt_ids", "group_size": 2, "launcher": "thread"}


def test_a_trainer_of_ones_own_trains_steps_by_five_calls(tmp_path: Path) -> None:
    engine, versions = EchoTrain(), []
    with af.serve(tmp_path, max_staleness=0, steps=2) as run, af.Trainer(run, timeout_s=100) as trainer:
        rollout = af.Rollout("echo", **ROLLOUT)
        trainer.init_engines(
            rollout, af.Stage(length, task="reward", launcher="thread"), batch_size=4, weights=engine.named_weights()
        )
        rows = trainer.put_prompts_data(PROMPTS, group_size=2, column="prompt_ids", key="a")
        again = trainer.put_prompts_data(PROMPTS, group_size=2, column="prompt_ids", key="a")
        for _ in range(2):
            step = trainer.get_experience_data()
            engine.train_step(step)  # raises for rows that other weights made than those they name
            versions.append(trainer.weight_sync_notify(engine.named_weights()))
            trainer.put_experience_data(step)
        with pytest.raises(af.Ended):
            trainer.get_experience_data()

        assert versions == [1, 2]
        assert (rows.count, again.again) == (8, True)
        assert run.audit().consumed == 8
        assert run.queue.status().publisher == "driver"


def test_the_role_of_the_publisher_is_given_up_with_the_trainer() -> None:
    with af.serve() as run:
        with af.Trainer(run) as trainer:
            assert trainer.weight_sync_notify({"w": np.ones(3, np.float32)}) == 0
            assert trainer.weight_sync_notify({"w": np.ones(3, np.float32)}, version=5, untrained=["mtp.w"]) == 5
            with run.weight_updates(timeout_s=60) as updates, next(iter(updates)) as update:
                assert update.untrained == ("mtp.w",)
                update.took(["w"])
        assert run.queue.status().publisher == ""
        assert run.queue.status().version == 5


def test_columns_are_typed_and_rows_that_are_not_put_come_again() -> None:
    with af.serve() as run:
        run.queue.declare("judge", needs=["x"], gives=["score"])
        with af.connect(run.address) as away, af.Trainer(away, timeout_s=20) as judge:
            run.queue.put({"x": [1, 2]})
            first = judge.get_experience_data("judge", ["x"])
            judge.put_experience_data(first, {"score": [1.0]})
            second = judge.get_experience_data("judge")
            with pytest.raises(af.SchemaError, match="'score' is .*; it cannot take"):
                judge.put_experience_data(second, {"score": ["good"]})
        with af.Trainer(run, timeout_s=20) as judge:
            with pytest.raises(af.SchemaError, match="takes the batch that get_experience_data gave, not NoneType"):
                judge.put_experience_data(None, {"score": [0.5]})  # type: ignore[arg-type]
            third = judge.get_experience_data("judge")
            assert third.ids.tolist() == second.ids.tolist()
            judge.put_experience_data(third, {"score": [0.5]}, filtered=[True])
        assert run.audit().filtered == 1


def test_a_worker_that_failed_is_told_instead_of_an_end() -> None:
    with af.serve() as run, af.Trainer(run, timeout_s=100) as trainer:
        run.queue.declare("last", needs=["y"])
        run.fail(af.WorkerFailed("worker 'reward-0' failed", "reward-0"))
        with pytest.raises(af.WorkerFailed, match="reward-0"):
            trainer.get_experience_data("last")


def test_what_belongs_to_the_task_of_training_is_refused_without_it() -> None:
    with (
        af.serve() as run,
        af.Trainer(run) as trainer,
        pytest.raises(af.ConfigError, match="sampler belongs to the task"),
    ):
        trainer.init_engines(sampler="shuffled")
