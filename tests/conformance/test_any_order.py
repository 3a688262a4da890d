"""Steps in any order: a right engine passes them, and for a wrong one the kit prints a short list of steps."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import AsyncIterator

import pytest
from own_engine import NumpyPolicy, NumpyRollout
from wrong_rollouts import MADE, WrongRollout

import asyncflow_sdk as af
from asyncflow_sdk.testing import CheckResult, Conformance, EchoRollout
from asyncflow_sdk.testing.kit.rollout import machine
from asyncflow_sdk.testing.kit.rollout.machine import LEAST

pytest.importorskip("hypothesis")

LIMIT_S = 120.0
"""The check tries steps for SHARE_S of it, and longer where it came to few: on a busy machine."""
SHARE_S = 3.0


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SHARE", SHARE_S / LIMIT_S)


@pytest.fixture
def _thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many steps are tried before nothing is found, however slow the machine is."""
    monkeypatch.setattr(machine, "LEAST", 500)


@pytest.fixture(scope="module")
def policy() -> NumpyPolicy:
    return NumpyPolicy()


def tried(
    policy: NumpyPolicy, fault: str, *, limit_s: float = LIMIT_S, tolerance: float | None = None, **options: object
) -> CheckResult:
    kit = Conformance(
        "rollout", WrongRollout if fault else NumpyRollout, options={**({"fault": fault} if fault else {}), **options},
        policy=policy, only=["any_order"], limit_s=limit_s, tolerance=tolerance,
    )  # fmt: skip
    (result,) = kit.run().results
    return result


def steps_of(result: CheckResult) -> int:
    told = re.fullmatch(r"(\d+) steps in \d+ sequences", result.detail)
    assert told, result.detail
    return int(told[1])


def test_a_right_engine_passes_in_any_order(policy: NumpyPolicy) -> None:
    result = tried(policy, "")

    assert result.outcome == "passed", result.detail
    assert steps_of(result) >= LEAST


def test_an_engine_that_takes_long_to_make_is_made_once_and_asked_as_much(policy: NumpyPolicy) -> None:
    MADE.clear()

    result = tried(policy, "is slow", making_s=0.8)

    assert result.outcome == "passed", result.detail
    assert steps_of(result) >= LEAST
    assert MADE == ["is slow"]


@pytest.mark.usefixtures("_thorough")
def test_an_engine_that_takes_long_to_make_and_is_wrong_is_caught(policy: NumpyPolicy) -> None:
    result = tried(policy, "keeps the cache", limit_s=4 * LIMIT_S, making_s=0.8)

    assert result.outcome == "failed"
    assert "load version" in result.detail


@pytest.mark.usefixtures("_thorough")
def test_too_few_steps_are_a_failure(policy: NumpyPolicy) -> None:
    said = r"only \d+ steps could be taken .* give the check more time \(--limit"
    for limit_s in (2.0, 10.0):  # on a slow machine one step may take longer than the first
        result = tried(policy, "takes long for all", limit_s=limit_s)
        if re.search(said, result.detail):
            break

    assert result.outcome == "failed"
    assert re.search(said, result.detail)


@pytest.mark.parametrize("options", [{"partial": True, "token_s": 0.001}, {"in_flight": True, "token_s": 0.001}])
def test_echo_passes_in_any_order(options: dict[str, object]) -> None:
    report = Conformance("rollout", EchoRollout, options=options, only=["any_order"], limit_s=LIMIT_S).run()

    (result,) = report.results
    assert result.outcome == "passed", result.detail
    assert steps_of(result) >= LEAST


@pytest.mark.usefixtures("_thorough")
@pytest.mark.parametrize(
    ("fault", "steps", "said"),
    [
        ("writes as it reads", "which breaks off before tensor", "#1|logprobs"),
        ("keeps states", "while requests run", "tokens .* of #"),
    ],
)
def test_for_a_wrong_engine_the_kit_lists_the_steps(fault: str, steps: str, said: str, policy: NumpyPolicy) -> None:
    result = tried(policy, fault, limit_s=4 * LIMIT_S)

    assert result.outcome == "failed"
    first, *listed, last = result.detail.splitlines()
    assert first == "in any order of steps, this one fails:"
    assert listed[0].startswith("  1. make the engine")
    assert steps in "\n".join(listed)
    assert re.search(said, last)


@pytest.mark.usefixtures("_thorough")
def test_log_probs_that_are_off_by_less_than_one_token_may_be_are_caught_by_their_mean(policy: NumpyPolicy) -> None:
    result = tried(policy, "slightly off", limit_s=4 * LIMIT_S, tolerance=1.5)

    assert result.outcome == "failed"
    assert re.search(r"log-probs of tokens .* of #\d+ are on average 0\.5 from those of", result.detail), (
        result.detail
    )


class EchoesNothing(EchoRollout):
    """An empty prompt is answered."""

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        if not len(request.prompt_ids):
            yield af.Completion(0, [5], [0.0])
            return
        async for completion in super().generate(request):
            yield completion


def test_steps_are_as_few_as_can_be_and_the_same_each_time_but_for_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CHEAP_S", 60.0)
    details = []
    for seed in (None, None, 7):  # with so much time that no clock ends the search for fewer steps
        kit = Conformance("rollout", EchoesNothing, only=["any_order"], limit_s=10_000.0, seed=seed)
        details.append(kit.run().results[0].detail)
    first, again, other = details

    assert first == again
    steps = [line[5:10] for line in first.splitlines()[1:-1]]
    assert [step for step, _ in itertools.groupby(steps)] == ["make ", "begin", "ask w"]
    assert len(steps) <= 4
    assert first.splitlines()[-1] == other.splitlines()[-1] == "an empty prompt was answered"


def test_without_hypothesis_it_is_not_asked(policy: NumpyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)

    result = tried(policy, "")

    assert result.outcome == "not asked"
    assert "pip install 'asyncflow-sdk[kit]'" in result.detail
