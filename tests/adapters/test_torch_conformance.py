"""The engines of this package keep to the contract."""

from __future__ import annotations

from asyncflow_sdk.testing.kit.conformance import BoundCheck, Conformance

rollout = Conformance("rollout", "transformers", options={"threads": 1, "max_rows": 32})
any_order = Conformance(
    "rollout", "transformers", options={"threads": 1, "max_rows": 32}, only=["any_order"], limit_s=40.0
)
train = Conformance("train", "torch", options={"threads": 1, "lr": 1e-3})
parts = Conformance(
    "train", "torch", options={"threads": 1, "micro_batch_tokens": 64}, only=["row_order", "companions"]
)


@rollout.parametrize
def test_the_rollout_engine_conforms(check: BoundCheck) -> None:
    check()


@any_order.parametrize
def test_the_rollout_engine_conforms_in_any_order(check: BoundCheck) -> None:
    check()


@train.parametrize
def test_the_train_engine_conforms(check: BoundCheck) -> None:
    check()


@parts.parametrize
def test_the_train_engine_conforms_in_micro_batches(check: BoundCheck) -> None:
    check()


def test_the_rollout_engine_in_a_real_run_whose_replicas_are_killed() -> None:
    report = Conformance("rollout", "transformers", options={"threads": 1}, only=["killed"]).run()

    assert report.ok, report.to_dict()
