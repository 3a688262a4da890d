"""References: in shards of FSDP2 as a stage of two ranks, the numbers of one process; and engines that only compute log-probs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import run_with_a_sharded_reference

from asyncflow_sdk.algorithms import GRPO
from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.types import Batch

pytestmark = pytest.mark.usefixtures("warm")


def test_a_reference_in_shards_gives_one_processs_numbers_though_a_rank_is_killed(tiny: str, tmp_path: Path) -> None:
    run_with_a_sharded_reference("fsdp", tiny, tmp_path)


@pytest.mark.parametrize("name", ["torch", "fsdp"])
def test_a_frozen_engine_gives_the_same_logprobs_from_weights_as_small_as_they_are_computed(
    name: str, tiny: str, batch: Batch, tmp_path: Path
) -> None:
    make: Any = registry().get("train", name).load()
    options: dict[str, Any] = {"model": tiny, "algorithm": GRPO(), "dtype": "bfloat16", "threads": 1}
    with contextlib.closing(make(**options)) as trainer:
        wanted = trainer.logprobs(batch)

    with contextlib.closing(make(**options, frozen=True)) as engine:
        found = engine.logprobs(batch)
        first, second = dict(engine.named_weights()), dict(engine.named_weights())
        for refused in (engine.train_step, engine.save, engine.load, engine.load_weights):
            with pytest.raises(EngineError, match="frozen=True computes only log-probs"):
                refused(batch if refused == engine.train_step else tmp_path)

    assert found.values.tolist() == wanted.values.tolist()
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
    # views of the weights: converted ones would be new each time
    assert all(first[each].data_ptr() == second[each].data_ptr() for each in first)
