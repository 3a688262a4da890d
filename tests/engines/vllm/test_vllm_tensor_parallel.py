"""Two ranks: each loads its shard; what only one of them cannot load, neither generates with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm_options import OPTIONS

from asyncflow_sdk.errors import EngineError, WeightError
from asyncflow_sdk.testing.kit.rollout_lab import RolloutLab

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


def test_what_one_rank_cannot_load_is_loaded_by_none(two_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(lab: Any) -> None:
        prompts, version = lab.policy.prompts(3, seed=1), lab.version + 1
        whole = lab.policy.tensors(version)
        broken = {**whole, SHARDED: whole[SHARDED][:-1].copy()}  # of which the second rank has the end
        with monkeypatch.context() as blind:  # as if the comparison with the folder had found nothing
            blind.setattr(lab.engine._checkpoint, "check", lambda update: {})
            with pytest.raises(WeightError, match="could not be loaded whole: rank 1: "):
                await lab.load(lab.make_update(version, broken))
        with pytest.raises(EngineError, match="holds a mixture of versions"):
            await lab.answer(lab.request(prompts[0]))
        for _ in range(2):  # answers of ranks that were left over would come now
            await lab.update()
            await lab.check_greedy(prompts, when=" after a load that one rank could not do")

    two_ranks.ask(body, "a load that one rank cannot do")
