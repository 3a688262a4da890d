"""DeepSpeed at each stage keeps to the contract of train engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deepspeed_parts import RANKS, options

from asyncflow_sdk.testing import Conformance
from asyncflow_torch.families import family

KEPT = "DeepSpeed 0.19.8 keeps what stage 3 has trained with in classes that it makes for autograd, until its process ends"
# Steps of each stage are compared with the plain engine's elsewhere; small_updates looks at names and exports, too.
OF_A_STAGE = ["row_order", "resume", "small_updates"]
ON_TWO_RANKS = {
    "stage 3": Conformance("train", RANKS, options=options(3), limit_s=400.0),
    # it differs from stage 3 in what is whole on each rank
    "stage 2": Conformance("train", RANKS, options=options(2), limit_s=400.0, only=[*OF_A_STAGE, "live_views"]),
    # it differs from stage 2 in when gradients are summed
    "stage 1": Conformance("train", RANKS, options=options(1), limit_s=400.0, only=["row_order"]),
    "stage 0": Conformance("train", RANKS, options=options(0), limit_s=400.0, only=OF_A_STAGE),
    # activations computed again, the optimizer offloaded, several passes, and parameters that stay whole as by default
    "with more": Conformance(
        "train", RANKS, limit_s=400.0, only=["fresh_logprobs", "row_order", "resume"],
        options=options(3, gradient_checkpointing=True, offload=True, micro_batch_tokens=64, config={}),
    ),
}  # fmt: skip
ALONE = {
    "stage 3": Conformance(
        "train", "deepspeed", options=options(3, micro_batch_tokens=96), limit_s=400.0, expected={"closes": KEPT},
        only=["logprobs", "resume", "save_is_whole", "closes"],
    ),
    "stage 0": Conformance("train", "deepspeed", options=options(0), limit_s=400.0, only=["resume", "closes"]),
}  # fmt: skip


def checks(kits: dict[str, Conformance]) -> Any:
    """One kit after another; the last check of each closes its engine."""
    return pytest.mark.parametrize(
        "check", [pytest.param(each, id=f"{name}, {each}") for name, kit in kits.items() for each in kit]
    )


@checks(ON_TWO_RANKS)
def test_two_ranks(check: Any) -> None:
    check()


@checks(ALONE)
def test_one_rank(check: Any) -> None:
    check()


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_next"])
def test_two_ranks_with_family_of_each_kind(model: str, tmp_path: Path) -> None:
    checks = ["names", "logprobs", "fresh_logprobs", "export", "load_weights"]

    report = Conformance(
        "train", RANKS, model=family(model, tmp_path), options=options(3), limit_s=400.0, only=checks
    ).run()

    assert [(each.check.name, each.detail) for each in report.results if each.outcome != "passed"] == []
