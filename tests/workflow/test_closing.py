"""Whatever fails while a run or a trainer is closed, the rest of it is closed all the same."""

from pathlib import Path

import pytest

import asyncflow_sdk as af
from asyncflow_sdk.errors import ServerLost
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.types import Batch
from asyncflow_sdk.workflow.roles import train


def shout(text: list[str]) -> list[str]:
    return [each.upper() for each in text]


class Stuck:
    """Weight updates that do not close."""

    def close(self) -> None:
        raise RuntimeError("it does not close")


def test_a_run_of_which_a_part_does_not_close_leaves_no_worker_no_server_and_no_memory(tmp_path: Path) -> None:
    # given
    run = af.serve(tmp_path / "run")
    (worker,) = run.start(af.Stage(shout, task="shout", gives=["loud"]))
    memory = run._connection.directory
    run._updates.append(Stuck())  # type: ignore[arg-type]
    # when
    with pytest.raises(RuntimeError, match="does not close"):
        run.close()
    # then
    assert worker.ended.is_set()
    assert not memory.exists()
    assert not (tmp_path / "run" / "address").exists()


def test_a_trainer_closes_its_engine_also_when_its_run_is_gone(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run", steps=2) as run:
        connection = af.connect(tmp_path / "run", name="trainer")

        class Cut(EchoTrain):
            closed = False

            def train_step(self, batch: Batch) -> af.StepResult:
                connection._connection.wire.close()
                return super().train_step(batch)

            def close(self) -> None:
                self.closed = True

        # given a trainer whose connection is lost in the middle of a step
        columns = {name: [[0]] for name in af.TRAIN_COLUMNS} | {"reward": [1.0], "logprobs": [[-0.0]]}
        run.queue.declare("train", needs=af.TRAIN_COLUMNS, batch_rows=1)
        run.queue.put(columns | {"version_spans": [[[0, 0, 1]]]})
        engine = Cut()
        # when
        with pytest.raises(ServerLost):
            train(connection.queue, engine)
        # then
        assert engine.closed
