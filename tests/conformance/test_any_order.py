"""Steps in any order: a right engine stands them, and of a wrong one a short list is told that can be read."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator

import pytest
import wrong_engines as wrong
import wrong_updates as updates
from own_engine import NumpyPolicy, NumpyRollout

import asyncflow_sdk as af
from asyncflow_sdk.testing import Conformance, EchoRollout, Result
from asyncflow_sdk.testing.kit.rollout_machine import LEAST

pytest.importorskip("hypothesis")


@pytest.fixture(scope="module")
def policy() -> NumpyPolicy:
    return NumpyPolicy()


def tried(engine: type[NumpyRollout], policy: NumpyPolicy, seed: int | None = None, limit_s: float = 24.0) -> Result:
    kit = Conformance("rollout", engine, policy=policy, only=["any_order"], limit_s=limit_s, seed=seed)
    (result,) = kit.run().results
    return result


def steps_of(result: Result) -> int:
    told = re.fullmatch(r"(\d+) steps in \d+ sequences", result.detail)
    assert told, result.detail
    return int(told[1])


def test_a_right_engine_stands_any_order(policy: NumpyPolicy) -> None:
    result = tried(NumpyRollout, policy)

    assert result.outcome == "passed", result.detail
    assert steps_of(result) >= LEAST


def test_an_engine_that_is_long_in_the_making_is_made_once_and_asked_as_much(policy: NumpyPolicy) -> None:
    wrong.TakesLongToMake.MADE.clear()

    result = tried(wrong.TakesLongToMake, policy, limit_s=12.0)

    assert result.outcome == "passed", result.detail
    assert steps_of(result) >= LEAST
    assert len(wrong.TakesLongToMake.MADE) == 1


def test_an_engine_that_is_long_in_the_making_and_wrong_is_caught(policy: NumpyPolicy) -> None:
    result = tried(updates.TakesLongAndKeepsTheCache, policy, limit_s=12.0)

    assert result.outcome == "failed"
    assert "load version" in result.detail


def test_too_few_steps_are_a_failure(policy: NumpyPolicy) -> None:
    result = tried(wrong.TakesLongForAll, policy, limit_s=2.0)

    assert result.outcome == "failed"
    assert re.search(r"only \d+ steps could be taken .* give the check more time \(--limit", result.detail)


@pytest.mark.parametrize("options", [{}, {"partial": True, "token_s": 0.001}, {"in_flight": True, "token_s": 0.001}])
def test_echo_stands_any_order_in_each_way_of_taking_weights(options: dict[str, object]) -> None:
    report = Conformance("rollout", EchoRollout, options=options, only=["any_order"], limit_s=20).run()

    (result,) = report.results
    assert result.outcome == "passed", result.detail
    assert steps_of(result) >= LEAST


@pytest.mark.parametrize(
    ("engine", "steps", "said"),
    [
        (updates.KeepsTheCache, "load version", "log-probs"),
        (updates.WritesAsItReads, "which breaks off before tensor", "#1|logprobs"),
        (updates.KeepsStates, "while requests run", "tokens .* of #"),
        (wrong.AbortsAll, "cancel #", "raised EngineError: .*aborted"),
    ],
    ids=lambda each: getattr(each, "__name__", "-"),
)
def test_a_wrong_engine_is_told_by_its_steps(
    engine: type[NumpyRollout], steps: str, said: str, policy: NumpyPolicy
) -> None:
    result = tried(engine, policy)

    assert result.outcome == "failed"
    first, *listed, last = result.detail.splitlines()
    assert first == "in any order of steps, this one fails:"
    assert listed[0].startswith("  1. make the engine")
    assert steps in "\n".join(listed)
    assert re.search(said, last)


def test_log_probs_that_are_off_by_less_than_one_token_may_be_are_caught_by_their_mean(policy: NumpyPolicy) -> None:
    kit = Conformance("rollout", wrong.SlightlyOff, policy=policy, only=["any_order"], tolerance=1.5, limit_s=24.0)
    (result,) = kit.run().results

    assert result.outcome == "failed"
    assert re.search(r"log-probs of tokens .* of #\d+ are on average 0\.5 from those of", result.detail), (
        result.detail
    )


@pytest.mark.timeout(300)
def test_steps_are_as_few_as_can_be(policy: NumpyPolicy) -> None:
    shortest = tried(wrong.AnswersNothing, policy, limit_s=240.0).detail  # so that no clock cuts the looking short

    assert [line[5:10] for line in shortest.splitlines()[1:-1]] == ["make ", "begin", "ask w"]


class EchoesNothing(EchoRollout):
    """An empty prompt is answered, by an engine of which shorter sequences are soon tried."""

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        if not len(request.prompt_ids):
            yield af.Completion(0, [5], [0.0])
            return
        async for completion in super().generate(request):
            yield completion


@pytest.mark.timeout(300)
def test_steps_are_the_same_each_time_but_for_a_seed() -> None:
    details = []
    for seed in (None, None, 7):
        kit = Conformance("rollout", EchoesNothing, only=["any_order"], limit_s=240.0, seed=seed)
        details.append(kit.run().results[0].detail)
    first, again, other = details

    assert first == again
    assert first.splitlines()[-1] == other.splitlines()[-1] == "an empty prompt was answered"


def test_without_hypothesis_it_is_not_asked(policy: NumpyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)

    result = tried(NumpyRollout, policy)

    assert result.outcome == "not asked"
    assert "pip install 'asyncflow-sdk[kit]'" in result.detail
