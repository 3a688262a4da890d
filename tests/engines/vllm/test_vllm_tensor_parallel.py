"""Two ranks: each loads its shard; after a load that broke off, neither generates before a whole one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_ends import cut_short
from one_vllm import OPTIONS

from asyncflow_sdk.errors import EngineError, WeightError
from asyncflow_sdk.testing.kit.rollout.lab import RolloutLab

SHARDED = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from asyncflow_torch.reference import HuggingFacePolicy, tiny_model
    from asyncflow_vllm.rollout import VllmEngine

    folder = tiny_model(tmp_path_factory.mktemp("two"), num_key_value_heads=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        lab = RolloutLab(VllmEngine, HuggingFacePolicy(folder), {**OPTIONS, "tensor_parallel": 2}, limit_s=300.0)
        lab.start()
        yield lab
        lab.close()


def test_versions_reach_both_ranks(two_ranks: Any) -> None:
    async def body(lab: Any) -> None:
        await lab.check_greedy(lab.policy.prompts(3))
        for _ in range(2):
            await lab.update()
            await lab.check_greedy(lab.policy.prompts(3), when=" after the update")

    two_ranks.ask(body, "updates of two ranks")


def test_a_load_that_breaks_off_on_two_ranks_leaves_no_answers_behind(two_ranks: Any, tmp_path: Path) -> None:
    async def body(lab: Any) -> None:
        prompts, version = lab.policy.prompts(3, seed=1), lab.version + 1
        broken = cut_short(lab.make_update(version), SHARDED, tmp_path / "short")
        with pytest.raises(WeightError, match="could not be loaded whole: rank 0: "):
            await lab.load(broken)
        with pytest.raises(EngineError, match="holds a mixture of versions"):
            await lab.answer(lab.request(prompts[0]))
        for _ in range(2):  # answers of ranks that were left over would come now
            await lab.update()
            await lab.check_greedy(prompts, when=" after a load that broke off")

    two_ranks.ask(body, "a load that breaks off")
