"""The model of the kit has what engines stumble over: those that do are caught, each by the check that is for it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.kit.chance import FALSE_ALARM, chance

pytest.importorskip("torch")

from wrong_models import WrongModel

from asyncflow_torch.kit_model import END, END_OF_TURN
from asyncflow_torch.reference import HuggingFacePolicy

CAUGHT = {
    "default top_k": ("draws", r"none was beyond the (49|50) likeliest, and \d+\.\d% should be: the draw is cut"),
    "default temperature": ("logprobs", r"at temperature 1 "),
    "knows one end token": ("ends", rf"is \[{END_OF_TURN}\], which ends a response, and it goes on to \d+ tokens"),
    "drops the end token": ("ends", r"says that it ended at a stop token, and its last one is \[\d+\]"),
    "prompts as text": ("retokenised", r"(those after|the answer to) the prompt decoded to text and encoded again"),
    "responses as text": ("retokenised", r"are decoded to text and encoded again"),
}


@pytest.fixture(scope="module")
def policy() -> HuggingFacePolicy:
    return HuggingFacePolicy()


@pytest.mark.parametrize("fault", CAUGHT)
def test_a_wrong_engine_is_caught(fault: str, policy: HuggingFacePolicy) -> None:
    check, reason = CAUGHT[fault]
    (result,) = (
        Conformance("rollout", WrongModel, options={"fault": fault}, policy=policy, only=[check]).run().results
    )

    assert result.outcome == "failed"
    assert re.search(reason, result.detail), result.detail


def test_the_right_one_passes_them(policy: HuggingFacePolicy) -> None:
    checks = sorted({check for check, _ in CAUGHT.values()})
    report = Conformance("rollout", WrongModel, policy=policy, only=checks).run()

    assert [result.outcome for result in report.results] == ["passed"] * len(checks)


def test_greedy_comes_to_each_end_token_and_text_keeps_few_prompts(policy: HuggingFacePolicy) -> None:
    """The checks look for such prompts: here they are, and none is passed for want of them."""
    prompts = policy.prompts(96, seed=10)
    last = {int(policy.greedy(0, prompt, 24)[-1]) for prompt in prompts}
    changed = [not np.array_equal(policy.retokenised(prompt), prompt) for prompt in prompts]

    assert policy.ends == (END, END_OF_TURN)
    assert {END, END_OF_TURN} <= last
    assert sum(changed) > 80


def test_chance_is_never_less_than_what_happens() -> None:
    """A mean that comes about by chance is not said to be rarer than it is; one that does not, is."""
    random = np.random.default_rng(0)
    shares = random.dirichlet(np.ones(30))
    values = np.log(shares)
    means = random.choice(values, (20_000, 50), p=shares).mean(1)
    for share in (0.1, 0.01, 0.001):
        mean = float(np.quantile(means, share))
        assert chance(values, shares, mean, 50) >= share * 0.9
    assert chance(values, shares, float(values.max()), 640) < FALSE_ALARM
    assert chance([0, 1], [0.5, 0.5], 0.5, 640) == 1.0
