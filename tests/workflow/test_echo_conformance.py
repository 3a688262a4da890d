"""Echo engines keep to the contract of real ones, in each way of taking weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from echo_runs import echo_weights

import asyncflow_sdk as af
from asyncflow_sdk.errors import WeightMismatch
from asyncflow_sdk.testing import Conformance, EchoPolicy, EchoRollout, EchoTrain
from asyncflow_sdk.testing.kit.train.lab import TrainLab, changed
from asyncflow_sdk.testing.kit.updates import HeldUpdate
from asyncflow_sdk.types import VERSION_SPANS, one_version


class IgnoresWeights(EchoRollout):
    """Says that it took them."""

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        return set(update.tensors)


plain = Conformance("rollout", "echo")
training = Conformance("train", "echo")
two_ranks = Conformance("train", "echo-ranks", world_size=2)
flying = Conformance("rollout", "echo", options={"in_flight": True, "partial": True, "token_s": 0.001})


@plain.parametrize
def test_echo_conforms(check: Callable[[], None]) -> None:
    check()


@flying.parametrize
def test_echo_conforms_while_requests_run(check: Callable[[], None]) -> None:
    check()


@training.parametrize
def test_the_train_engine_conforms(check: Callable[[], None]) -> None:
    check()


@two_ranks.parametrize
def test_the_train_engine_of_two_ranks_conforms(check: Callable[[], None]) -> None:
    check()


def test_an_expected_failure_that_passes_is_a_failure() -> None:
    kit = Conformance("rollout", "echo", only=["greedy"], expected={"greedy": "it was broken once"})

    report = kit.run()

    assert not report.ok
    assert report.results[0].outcome == "passed unexpectedly"
    with pytest.raises(AssertionError, match="take the expectation out"):
        next(iter(kit))()


def test_a_failure_that_is_expected_keeps_the_level_down() -> None:
    kit = Conformance(
        "rollout", "faulty_echo:FaultyRollout", options={"ignore_at": 1}, expected={"update": "version 1 is ignored, as it was told"},
        only=["greedy", "update"],
    )  # fmt: skip

    report = kit.run()

    assert [result.outcome for result in report.results] == ["passed", "failed as expected"]
    assert report.ok
    assert report.level == ""


def test_it_passes_in_a_real_run_whose_replicas_are_killed() -> None:
    report = Conformance("rollout", "echo", only=["killed"]).run()

    assert report.ok, report.to_dict()


def test_a_version_stands_for_the_weights_that_the_engine_loaded_under_its_number(tmp_path: Path) -> None:
    """Numbers need not be numbers of steps: a run that goes on, or is rolled back, gives the same weights another one."""
    batch = TrainLab(EchoTrain, EchoPolicy(), {}).batch()  # made by weights that have had no step
    renumbered = changed(batch, **{VERSION_SPANS: one_version(3, batch.ragged("response_ids").lengths)})
    engine = EchoTrain()
    engine.save(tmp_path)

    engine.load_weights(HeldUpdate(3, echo_weights(2)))
    with pytest.raises(WeightMismatch, match="by version 3, which has had 2 steps; .* that have had 0"):
        engine.train_step(renumbered)
    engine.load(tmp_path)
    engine.train_step(renumbered)
    engine.load_weights(HeldUpdate(4, echo_weights(0)))
    engine.train_step(renumbered)


def test_weights_that_are_not_taken_are_seen_in_a_real_run() -> None:
    report = Conformance("rollout", "test_echo_conformance:IgnoresWeights", only=["killed"]).run()

    assert report.results[0].outcome == "failed"
    assert "are said to be of version" in report.results[0].detail
