"""The conformance kit sees each way in which a train engine is wrong, by the check that is there for it, and no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import wrong_trainers
from bigram import BigramTrain
from wrong_trainers import WRONG, CannotExport, Hangs, KeepsStateInMemory, LeavesAThread

from asyncflow_sdk.testing import CheckFailed, Conformance, checks_of
from asyncflow_sdk.testing.kit import resources
from asyncflow_sdk.testing.kit.conformance import BoundCheck

right = Conformance("train", BigramTrain)


@pytest.fixture(scope="module", autouse=True)
def _threads_end() -> Iterator[None]:
    yield
    wrong_trainers.ENDED.set()


@right.parametrize
def test_a_right_engine_passes(check: BoundCheck) -> None:
    check()


@pytest.mark.parametrize("engine", WRONG, ids=lambda engine: engine.__name__)
def test_a_wrong_engine_is_caught(engine: type[BigramTrain], monkeypatch: pytest.MonkeyPatch) -> None:
    if engine is LeavesAThread:
        monkeypatch.setattr(resources, "GONE_S", 0.2)  # it does not go, however long it is waited for
    report = Conformance("train", engine).run()

    failed = {result.check.name: result.detail for result in report.results if result.bad}
    wanted, more = WRONG[engine]
    assert wanted == set(failed) or (more and wanted < set(failed)), failed


def test_a_trainer_that_is_killed_goes_on_in_another_process() -> None:
    """Also one that cannot export a model in the end, which the interface leaves open."""
    report = Conformance("train", CannotExport, tiers=["chaos"]).run()

    assert [result.outcome for result in report.results] == ["passed"], report


def test_a_checkpoint_that_dies_with_its_process_is_caught_by_a_kill_only() -> None:
    report = Conformance("train", KeepsStateInMemory, tiers=["full", "chaos"]).run()

    (failed,) = (result for result in report.results if result.bad)
    assert failed.check.name == "killed"
    assert "KeyError" in failed.detail


def test_an_engine_without_export_is_not_asked_for_one() -> None:
    report = Conformance("train", CannotExport, only=["export"]).run()

    assert [result.outcome for result in report.results] == ["does not apply"]


def test_every_check_catches_some_engine() -> None:
    caught = set().union(*(wanted for wanted, _ in WRONG.values()))
    assert caught == {check.name for check in checks_of("train") if check.tier != "chaos"}


def test_an_engine_that_hangs_is_left_behind_and_it_is_said_where() -> None:
    kit = Conformance("train", Hangs, only=["step", "names"], limit_s=10.0)

    report = kit.run()

    assert {result.check.name: result.outcome for result in report.results} == {"names": "passed", "step": "failed"}
    detail = next(result.detail for result in report.results if result.bad)
    assert "check 'step' did not end within 10 s; its thread is in wait" in detail
    assert "train_step (wrong_trainers.py" in detail


def test_a_factory_that_makes_something_else_is_told() -> None:
    with pytest.raises(CheckFailed, match="no asyncflow_sdk.TrainEngine"):
        next(iter(Conformance("train", lambda model, algorithm: object(), policy="bigram:BigramPolicy")))()
