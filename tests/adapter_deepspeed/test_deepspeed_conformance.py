"""DeepSpeed at each stage keeps to the contract of train engines."""

from __future__ import annotations

from typing import Any

from deepspeed_parts import options

from asyncflow_sdk.testing import Conformance

stage_3 = Conformance("train", "deepspeed", options=options(3), world_size=2, limit_s=120.0)
stage_2 = Conformance("train", "deepspeed", options=options(2), world_size=2, limit_s=120.0)
stage_0 = Conformance("train", "deepspeed", options=options(0), world_size=2, limit_s=120.0)
stage_1 = Conformance(
    "train", "deepspeed", options=options(1), world_size=2, limit_s=120.0,
    only=["names", "step", "row_order", "resume", "export", "live_views", "small_updates"],
)  # fmt: skip
"""It differs from stage 2 in when gradients are summed."""
KEPT = "DeepSpeed 0.19.8 keeps what stage 3 has trained with in classes that it makes for autograd, until its process ends"
alone = Conformance(
    "train", "deepspeed", options=options(3, micro_batch_tokens=96), limit_s=120.0, expected={"closes": KEPT}
)
alone_0 = Conformance(
    "train", "deepspeed", options=options(0), limit_s=120.0, only=["step", "row_order", "resume", "closes"]
)
with_more = Conformance(
    "train", "deepspeed", world_size=2, limit_s=120.0, only=["fresh_logprobs", "row_order", "resume", "live_views"],
    options=options(3, checkpointing=True, offload=True, micro_batch_tokens=64, config={}),
)  # fmt: skip
"""Activations computed again, the optimizer offloaded, several passes, and parameters that stay whole, as DeepSpeed's defaults have small ones."""


@stage_3.parametrize
def test_stage_3_on_two_ranks(check: Any) -> None:
    check()


@with_more.parametrize
def test_stage_3_with_offload_and_checkpointing(check: Any) -> None:
    check()


@stage_2.parametrize
def test_stage_2_on_two_ranks(check: Any) -> None:
    check()


@stage_1.parametrize
def test_stage_1_on_two_ranks(check: Any) -> None:
    check()


@stage_0.parametrize
def test_stage_0_on_two_ranks(check: Any) -> None:
    check()


@alone.parametrize
def test_stage_3_alone(check: Any) -> None:
    check()


@alone_0.parametrize
def test_stage_0_alone(check: Any) -> None:
    check()
