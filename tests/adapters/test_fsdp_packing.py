"""Packing: rows in one pass without padding have the log-probs of rows passed alone, or are not packed."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as flash_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncflow_fsdp.engine import FsdpEngine
from asyncflow_sdk.algorithms import PPO
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types import Batch
from asyncflow_torch.families import FAMILIES, family

GPT_OSS_KERNEL = "kernels-community/vllm-flash-attn3"
STATES = {name for name, each in FAMILIES.items() if each.kind == "hybrid"} | {"qwen3_5"}
UNMASKED = {"gpt_oss", "qwen2_5_vl"}
"""Their masks are made without position ids; FlashAttention reads them itself."""
WITHOUT_SDPA = {"gpt_oss", "mamba", "mamba2"}
LENGTHS = [(3, 12), (9, 4), (1, 9), (14, 17), (6, 1), (2, 7)]
CASES = [(name, "eager" if name in WITHOUT_SDPA else "sdpa") for name in FAMILIES]
CASES += [(name, "eager") for name in ("llama", "gemma3_text", "deepseek_v3", "qwen3_next", "qwen2_5_vl")]
"""Each family, and a model of each kind of layers with the other attention."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, str] = {}
    return lambda name: made.setdefault(name, family(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def rows() -> Batch:
    random = np.random.default_rng(0)
    prompts, responses = ([random.integers(80, 160, n) for n in lengths] for lengths in zip(*LENGTHS, strict=True))
    return Batch.of({"prompt_ids": prompts, "response_ids": responses})


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """FlashAttention computed by torch on the CPU. Returns the lengths of the rows of each packed call."""
    calls: list[list[int]] = []

    def attention(
        q: Any, k: Any, v: Any, causal: bool = True, softmax_scale: Any = None, window_size: Any = (-1, -1), s_aux: Any = None
    ) -> Any:  # fmt: skip
        back = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        seen = (back >= 0) & (back <= window_size[0]) if window_size[0] >= 0 else back >= 0
        many = q.shape[2] // k.shape[2]
        q, k, v = q.transpose(1, 2), *(each.transpose(1, 2).repeat_interleave(many, 1) for each in (k, v))
        scores = (q @ k.transpose(2, 3) * (softmax_scale or q.shape[-1] ** -0.5)).masked_fill(~seen, -torch.inf)
        if s_aux is not None:
            scores = torch.cat([scores, s_aux[:, None, None].expand(len(scores), -1, scores.shape[2], 1)], -1)
        return (scores.softmax(-1)[..., : len(seen)] @ v).transpose(1, 2)

    def packed(
        q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        causal: bool = True, softmax_scale: Any = None, window_size: Any = (-1, -1), s_aux: Any = None,
    ) -> Any:  # fmt: skip
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        lengths = cu_seqlens_q.diff().tolist()
        assert max(lengths) == max_seqlen_q == max_seqlen_k
        calls.append(lengths)
        rows = zip(*(each.split(lengths) for each in (q, k, v)), strict=True)
        found = [
            attention(a[None], b[None], c[None], causal, softmax_scale, window_size, s_aux)[0] for a, b, c in rows
        ]
        return torch.cat(found)

    monkeypatch.setattr(flash_attention, "_loaded_implementation", None)
    monkeypatch.setattr(flash_attention, "_lazy_imports", lambda *_, **__: (attention, packed, None, None, None))
    for registered in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):  # transformers loads it from the hub
        monkeypatch.setitem(registered, GPT_OSS_KERNEL, registered["flash_attention_2"])
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    return calls


def logprobs(folder: str, rows: Batch, **options: Any) -> Any:
    engine = FsdpEngine(folder, device="cpu", **options)
    try:
        return engine.logprobs(rows).values
    finally:
        engine.close()


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_rows_in_one_pass_have_the_logprobs_of_rows_alone(
    name: str, attention: str, folders: Any, rows: Batch
) -> None:
    of = partial(logprobs, folders(name), rows, attention=attention)

    alone = of(micro_batch_tokens=1)

    np.testing.assert_allclose(of(micro_batch_tokens=40), alone, atol=1e-5)  # padded
    if name in STATES | UNMASKED:
        with pytest.raises(ConfigError, match="gives wrong log-probs: .* Leave packed out"):
            of(packed=True)
    else:
        np.testing.assert_allclose(of(packed=True, micro_batch_tokens=40), alone, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_next", "lfm2"]
)
def test_flash_attention_packs_by_itself_models_that_keep_rows_apart(
    name: str, dtype: str, flash: list[list[int]], folders: Any, rows: Batch
) -> None:
    of = partial(logprobs, folders(name), rows, attention="flash_attention_2", dtype=dtype)

    alone = of(micro_batch_tokens=1, packed=False)
    assert not flash
    together = of()

    np.testing.assert_allclose(together, alone, atol=1e-5 if dtype == "float32" else 0.25)
    everything = sorted(sum(lengths) - 1 for lengths in LENGTHS)
    assert (everything in map(sorted, flash)) is (name not in STATES)


def test_policy_is_not_packed_beside_critic_that_reads_across_rows(folders: Any) -> None:
    make = partial(FsdpEngine, folders("llama"), algorithm=PPO(), device="cpu", packed=True)

    make(critic=folders("qwen3")).close()

    with pytest.raises(ConfigError, match="in the critic by"):
        make(critic=folders("lfm2"))
