"""The conformance kit sees each way in which a train engine is wrong, by the check that is there for it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from bigram import BigramTrain
from faults import LEFT
from wrong_trainers import WrongTrain

from asyncflow_sdk.testing import CheckFailed, Conformance, checks_of
from asyncflow_sdk.testing.kit import resources
from asyncflow_sdk.testing.kit.conformance import BoundCheck

CAUGHT = {
    "aborted_step": ["keeps aborted parts", "begins twice", "ends without rows", "keeps a refused step"],
    "algorithm": ["ignores the algorithm"],
    "asked": ["says that it computes"],
    "bad_batches": ["trains on NaN", "clips tokens", "refuses half-way", "keeps the gradient", "raises whatever comes"],
    "closes": ["leaves a thread"],
    "companions": ["mean over padding"],
    "direction": ["the other sign"],
    "every_token": ["drops the last token", "drops the first token"],
    "export": ["exports half precision"],
    "fresh_logprobs": ["caches log-probs"],
    "live_views": ["gathers into one buffer", "trains as it is read"],
    "load_weights": ["loads half", "keeps its momentum", "keeps the update's memory", "loads whatever comes"],
    "logprobs": ["pads log-probs", "log-probs of the token beside"],
    "loss_mask": ["ignores the loss mask"],
    "made": ["takes any option", "is never awaited"],
    "memory": ["leaks"],
    "names": ["gives tied weights twice", "keeps the wrapper's prefix"],
    "no_gradient": ["trains equal rewards", "filters what it trains"],
    "off_policy": [
        "recomputes behaviour", "clips above by clip_low", "clips below by clip_high", "swaps the clips",
        "clips on both sides",
    ],
    "resume": ["forgets the optimizer"],
    "row_order": ["takes groups as they lie"],
    "save_is_whole": ["starts anew without a checkpoint", "keeps the first save", "writes down its folder"],
    "small_updates": ["steps in bfloat16", "publishes float32", "exports float32"],
    "step": ["never moves", "writes into the batch", "reports NaN"],
    "step_in_parts": [
        "divides parts by their own tokens", "steps at each part", "filters the last part", "reports the last part",
    ],
    "token_mean": ["mean over rows"],
}  # fmt: skip

right = Conformance("train", BigramTrain)


@pytest.fixture(scope="module", autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    LEFT.close()


def wrong(fault: str, *checks: str, **options: object) -> Conformance:
    return Conformance("train", WrongTrain, options={"fault": fault}, only=checks, **options)  # type: ignore[arg-type]


@right.parametrize
def test_a_right_engine_passes(check: BoundCheck) -> None:
    check()


@pytest.mark.parametrize(("check", "fault"), [(check, fault) for check, faults in CAUGHT.items() for fault in faults])
def test_a_wrong_engine_is_caught(check: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "leaves a thread":
        monkeypatch.setattr(resources, "GONE_S", 0.2)  # it does not go, however long it is waited for
    (result,) = wrong(fault, check).run().results

    assert result.outcome == "failed"
    assert not re.search("(Type|Name|Attribute|Value)Error", result.detail), (
        result.detail
    )  # the fault is seen, no other


def test_every_check_catches_some_engine() -> None:
    assert CAUGHT.keys() == {check.name for check in checks_of("train") if check.tier != "chaos"}


def test_a_trainer_that_is_killed_goes_on_in_another_process() -> None:
    """Also one that cannot export a model in the end, which the interface leaves open."""
    report = wrong("cannot export", "killed", "export").run()

    assert {r.check.name: r.outcome for r in report.results} == {"export": "does not apply", "killed": "passed"}


def test_a_checkpoint_that_dies_with_its_process_is_caught_by_a_kill_only() -> None:
    report = wrong("keeps its state in memory", "resume", "save_is_whole", "killed").run()

    (failed,) = (result for result in report.results if result.bad)
    assert failed.check.name == "killed"
    assert "KeyError" in failed.detail


def test_an_engine_that_hangs_is_left_behind_and_it_is_said_where() -> None:
    for limit_s in (3, 30):  # a slow machine may need more for what does not hang
        report = wrong("hangs", "step", "names", limit_s=limit_s).run()
        outcomes = {result.check.name: result.outcome for result in report.results}
        detail = next(result.detail for result in report.results if result.bad)
        if outcomes["names"] == "passed" and "accumulate" in detail:
            break

    assert outcomes == {"names": "passed", "step": "failed"}
    assert f"check 'step' did not end within {limit_s} s; its thread is in wait" in detail
    assert "accumulate (bigram.py" in detail


def test_a_factory_that_makes_something_else_is_told() -> None:
    with pytest.raises(CheckFailed, match="no asyncflow_sdk.TrainEngine"):
        next(iter(Conformance("train", lambda model, algorithm: object(), policy="bigram:BigramPolicy")))()
