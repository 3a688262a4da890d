"""Trainers that go on through a rollback: a step leased when numbers were further ahead is published as it was told."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.interfaces import StepResult
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.types.spans import one_version
from asyncflow_sdk.workflow.roles import train

ROWS = 4
LIMIT_S = 30.0


@pytest.fixture
def run() -> Iterator[af.Run]:
    """Rows of two steps are there."""
    with af.serve(steps=4) as run:
        run.queue.declare("train", needs=["version_spans"], batch_rows=ROWS)
        for _ in range(2):
            feed(run)
        yield run


def feed(run: af.Run) -> None:
    """Rows of one more step."""
    run.queue.put({"version_spans": one_version(0, np.full(ROWS, 3))})


class Doubting(EchoTrain):
    """Somebody rolls back while it trains step 1; then the next step is leased ahead."""

    def __init__(self, run: af.Run) -> None:
        super().__init__()
        self.run = run
        self.rolled_back_to = -1

    def train_step(self, batch: af.Batch) -> StepResult:
        self.steps += 1
        if self.steps == 2:
            self.rolled_back_to = self.run.rollback(0)
            feed(self.run)
            until(lambda: self.run.queue.status().lease_count == 2, "the next step is leased")
        elif self.steps == 3:
            feed(self.run)
        return StepResult({})


def test_a_training_worker_publishes_a_step_that_it_had_leased_ahead_of_a_rollback(run: af.Run) -> None:
    with af.connect(run.address, name="trainer") as trainer:
        engine = Doubting(run)
        train(trainer.queue, engine)

    assert engine.rolled_back_to == 2
    assert engine.steps == 4
    assert run.queue.status().version == 5  # steps 2 and 3: under the numbers that they were told, 3 + 1 and 4 + 1
    assert run.audit().consumed == 4 * ROWS


def test_so_does_a_loop_of_ones_own(run: af.Run) -> None:
    weights = EchoTrain().named_weights
    with run.weight_publisher() as publisher:
        publisher.publish(0, weights())
        first = run.queue.get("train")
        publisher.publish(first.version + 1, weights()).wait(LIMIT_S)
        first.ack()
        before = run.queue.get("train")
        assert publisher.rollback(0) == 2
        feed(run)
        ahead = run.queue.get("train")
        assert (before.version, ahead.version) == (1, 3)
        with pytest.raises(ConfigError, match="Load 2 into the trainer"):
            publisher.publish(before.version + 1, weights())
        before.ack()

        publisher.publish(ahead.version + 1, weights()).wait(LIMIT_S)

        ahead.ack()
        feed(run)
        with run.queue.get("train") as following:
            assert following.version == 4
