"""One fault is reported as one probable cause, with the failures that follow from it."""

from __future__ import annotations

import numpy as np
import pytest
from bigram import BigramTrain
from own_engine import NumpyPolicy
from wrong_rollouts import WrongRollout
from wrong_trainers import WrongTrain

import asyncflow_sdk as af
from asyncflow_sdk.testing import CheckResult, Conformance, Report, checks_of
from asyncflow_sdk.testing.kit.check import prerequisites, probable_causes
from asyncflow_sdk.testing.kit.conformance import KINDS
from asyncflow_sdk.testing.kit.diagnosis import diagnose_numbers

ROLLOUT = {
    "log-probs of the token beside": "logprobs: shifted by one token",
    "log-probs at temperature 1": "logprobs: the temperature of the request is not applied",
    "log-probs to base 2": "logprobs: logarithms to base 2, not natural ones",
    "cuts log-probs": "logprobs: of a distribution that is cut (top_k, top_p or min_p)",
    "probabilities": "logprobs: probabilities, not logarithms",
    "drops the first token": "prompt: the first token is lost",
    "puts a special token twice": "prompt: token 1 is added before it",
    "pads prompts": "batching: the answer to a prompt depends on the prompts beside it",
    "ignores updates": "load_weights: no tensor is loaded",
    "takes all but one": "load_weights: 'mix.bias' is not loaded",
    "keeps the cache": "load_weights: a prefix or KV cache of the old weights is kept",
    "stops following": "load_weights: later versions are not loaded",
}
ASKED = ("completions", "greedy", "company", "logprobs", "stops", "update", "stale_cache", "updates_in_a_row")
TRAIN = {
    "log-probs of the token beside": "logprobs: shifted by one token",
    "keeps the wrapper's prefix": "named_weights: names have the prefix 'module.'",
    "the other sign": "loss: the sign is reversed",
    "drops the last token": "loss: the last token of a response is not trained",
    "forgets the optimizer": "load: the optimizer's state is not restored",
}


@pytest.fixture(scope="module")
def policy() -> NumpyPolicy:
    return NumpyPolicy()


def rollout_report(engine: type[WrongRollout], fault: str, policy: NumpyPolicy) -> Report:
    return Conformance("rollout", engine, options={"fault": fault}, policy=policy, only=ASKED).run()


@pytest.mark.parametrize("fault", ROLLOUT)
def test_a_fault_of_a_rollout_engine_is_one_cause(fault: str, policy: NumpyPolicy) -> None:
    report = rollout_report(WrongRollout, fault, policy)

    (cause,) = report.causes
    assert cause.title == ROLLOUT[fault]
    assert 1 + len(cause.same) + len(cause.consequences) == sum(result.bad for result in report.results)


@pytest.mark.parametrize("fault", TRAIN)
def test_a_fault_of_a_train_engine_is_one_cause(fault: str) -> None:
    only = ("made", "names", "step", "logprobs", "direction", "every_token", "fresh_logprobs", "resume")
    (cause,) = Conformance("train", WrongTrain, options={"fault": fault}, only=only).run().causes

    assert cause.title == TRAIN[fault]


def test_a_transposed_tensor_is_named(policy: NumpyPolicy) -> None:
    report = rollout_report(WrongRollout, "transposes", policy)

    assert report.causes[0].title == "load_weights: 'mix.weight' is transposed"


class ReturnsPrompt(WrongRollout):
    """Answers with the prompt and the response, as generate() of transformers does."""

    async def generate(self, request: af.Request):  # type: ignore[no-untyped-def]
        async for got in super().generate(request):
            ids = np.concatenate([request.prompt_ids, got.token_ids])[: len(got.token_ids)]
            yield af.Completion(got.index, ids, got.logprobs, got.finish_reason, got.spans)


def test_a_response_with_the_prompt_is_named(policy: NumpyPolicy) -> None:
    report = rollout_report(ReturnsPrompt, "", policy)

    assert "response: it begins with the prompt" in [cause.title for cause in report.causes]


def test_an_engine_that_cannot_be_made_is_one_cause() -> None:
    report = Conformance("train", BigramTrain, options={"no_such": 1}, tiers=["basic"]).run()

    (cause,) = report.causes
    assert cause.title.startswith("the engine cannot be made: TypeError")
    assert len(cause.same) == len(report.results) - 1


def test_independent_failures_are_causes_of_their_own() -> None:
    checks = {check.name: check for check in checks_of("rollout")}

    def failed(name: str, cause: str = "") -> CheckResult:
        return CheckResult(checks[name], "failed", f"{name} is wrong", 0.0, cause)

    results = [
        failed("greedy"),
        failed("closes"),
        failed("update", "load_weights: no tensor is loaded"),
        failed("memory"),
    ]
    first, second = probable_causes(results, tuple(checks.values()))

    assert first.title == "greedy: greedy is wrong"
    assert [result.check.name for result in first.consequences] == ["update", "memory"]
    assert (second.title, second.consequences) == ("closes: closes is wrong", [])


def test_every_presupposed_check_is_there_and_none_presupposes_itself() -> None:
    for kind in KINDS:
        table = {check.name: check for check in checks_of(kind)}
        for name, check in table.items():
            assert set(check.after) <= table.keys(), name
            assert all(name not in table[other].after for other in prerequisites(name, table)), name


WANTED = -np.array([0.2, 1.7, 0.9, 3.1, 0.4])


@pytest.mark.parametrize(
    ("have", "cause"),
    [
        (np.roll(WANTED, 1), "logprobs: shifted by one token"),
        (-WANTED, "logprobs: the sign is reversed"),
        (np.exp(WANTED), "logprobs: probabilities, not logarithms"),
        (np.cumsum(WANTED), "logprobs: cumulative sums"),
        (0 * WANTED, "logprobs: all are 0"),
        (WANTED / np.log(10), "logprobs: logarithms to base 10, not natural ones"),
        (np.add(WANTED, [0.01, -0.02, 0.03, -0.01, 0.0]), "logprobs: rounded, as in 16-bit arithmetic"),
        (WANTED - 5.0, ""),
    ],
)  # fmt: skip
def test_numbers_name_the_fault(have: np.ndarray, cause: str) -> None:
    assert diagnose_numbers(WANTED, have, 1e-4).cause == cause
