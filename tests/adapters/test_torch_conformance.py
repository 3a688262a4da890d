"""The engines of this package keep to the contract."""

from __future__ import annotations

from asyncflow_sdk.testing.kit.conformance import BoundCheck, Conformance

rollout = Conformance("rollout", "transformers", options={"threads": 1, "max_rows": 32})


@rollout.parametrize
def test_the_rollout_engine_conforms(check: BoundCheck) -> None:
    check()
