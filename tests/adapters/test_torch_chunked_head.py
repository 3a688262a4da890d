"""Log-probs in chunks of tokens: the numbers and gradients of full logits, without a tensor larger than a chunk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rank_runs import peak_bytes
from torch.profiler import ProfilerActivity, profile

from asyncflow_sdk.types import Batch
from asyncflow_torch import chunked_head as module
from asyncflow_torch.chunked_head import ChunkedHead, chunked_head
from asyncflow_torch.collate import MicroBatch, collate, no_rows
from asyncflow_torch.logprobs import response_logprobs

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.05,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 128,
    "rotary_dim": 8,
    "initializer_range": 0.05,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", SIZES | {"tie_word_embeddings": False}),
    "tied": ("Llama", SIZES | {"tie_word_embeddings": True}),
    "capped": ("Gemma2", SIZES | {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}),
    "divided": ("Granite", SIZES | {"logits_scaling": 7.3}),
    "multiplied": ("Cohere", SIZES | {"logit_scale": 0.0625}),
    "biased": ("GPTJ", GPT),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", 4 * VOCABULARY)


def made(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    family, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options | more)
    return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()


def rows_of(*lengths: int, packed: bool = False, masked: bool = False) -> MicroBatch:
    """``masked``: with a sampling mask, of every other token."""
    rng = np.random.default_rng(3)
    drawn = [rng.integers(3, VOCABULARY, 3 + length) for length in lengths]
    columns = {"prompt_ids": [row[:3] for row in drawn], "response_ids": [row[3:] for row in drawn]}
    if masked:
        kept = [
            [[token, *{1, 2, 7, 40} - {token}] * (at % 2) for at, token in enumerate(row[3:].tolist())]
            for row in drawn
        ]
        columns["kept_ids"] = [np.array([token for ids in row for token in ids]) for row in kept]
        columns["kept_ids_counts"] = [np.array([len(ids) for ids in row]) for row in kept]
    return collate(Batch.of(columns), np.arange(len(lengths)), device="cpu", packed=packed)


def gradients(
    model: Any, part: MicroBatch, head: ChunkedHead | None, temperature: float, with_entropy: bool
) -> tuple[Any, dict[str, Any]]:
    """Log-probs and entropies, and gradients of a ratio whose size differs by token, with a part of the entropy."""
    model.zero_grad()
    stats = response_logprobs(model, part, head=head, temperature=temperature, entropy_gradient=with_entropy)
    assert stats.entropy.requires_grad == with_entropy
    weights = torch.linspace(-1, 1, len(part.targets))
    loss = ((stats.logprobs - stats.logprobs.detach().roll(1) * 0.01).exp() * weights).sum()
    if with_entropy:
        loss = loss + 0.1 * (stats.entropy * weights.flip(0)).sum()
    loss.backward()
    return torch.stack(stats).detach(), {name: each.grad.clone() for name, each in model.named_parameters()}


def apart(one: Any, other: Any) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-3))


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 2e-6), (torch.float64, 1e-8)])
@pytest.mark.parametrize(("temperature", "with_entropy", "packed"), [(1.0, False, False), (0.7, True, True)])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_full_logits(
    name: str, temperature: float, with_entropy: bool, packed: bool, dtype: torch.dtype, near: float
) -> None:
    """In float32 both are as far from those of float64."""
    # given rows whose tokens are no multiple of a chunk
    model, part = made(name, dtype), rows_of(7, 11, 4, packed=packed, masked=packed)
    head = chunked_head(model, "cpu")
    assert head is not None
    assert head.tokens == 4

    # when
    have, grads = gradients(model, part, head, temperature, with_entropy)
    want, wanted = gradients(model, part, None, temperature, with_entropy)

    # then
    assert apart(have, want) < near
    assert max(apart(grads[weight], wanted[weight]) for weight in wanted) < near


def test_a_pass_without_tokens_has_gradients_of_zero() -> None:
    model = made("tied")
    head = chunked_head(model, "cpu")
    part = no_rows(device="cpu")

    found = head.stats(
        model, lambda: model(input_ids=part.input_ids, use_cache=False), part, temperature=0.7, entropy_gradient=True
    )
    found.sum().backward()

    assert found.shape == (2, 0)
    assert all(not each.grad.any() for each in model.parameters() if each.grad is not None)
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize("name", ["plain", "capped", "multiplied"])
@pytest.mark.parametrize("autocast", [False, True])
def test_in_bfloat16_log_probs_are_those_of_full_logits_and_gradients_near(name: str, autocast: bool) -> None:
    model, part = made(name, torch.float32 if autocast else torch.bfloat16), rows_of(7, 11, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        head = chunked_head(model, "cpu")
        have, grads = gradients(model, part, head, 0.7, True)
        want, wanted = gradients(model, part, None, 0.7, True)

    assert head is not None
    assert torch.equal(have[0], want[0])
    assert max(apart(grads[weight], wanted[weight]) for weight in wanted) < 3e-2


def test_an_unknown_change_of_logits_is_said_once_and_full_logits_are_taken(
    caplog: pytest.LogCaptureFixture, trainer: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a model that squares its logits
    plain = transformers.LlamaForCausalLM.forward

    def squared(self: Any, *args: Any, **given: Any) -> Any:
        output = plain(self, *args, **given)
        output.logits = output.logits.square()
        return output

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", squared)

    # when
    with caplog.at_level(logging.WARNING):
        engine = trainer()
        engine.logprobs(batch)
        engine.train_step(batch)

    # then
    assert [record.message for record in caplog.records if "all tokens" in record.message] == [
        "log-probs of LlamaForCausalLM take the logits of all tokens of a pass: the change of its output layer's output is unknown"
    ]


def peak_of(compute: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        compute()
    return peak_bytes(prof)


@pytest.mark.parametrize("name", ["tied", "capped"])
def test_memory_beside_the_models_own_is_of_some_chunks_however_long_a_response(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a vocabulary beside which the model is small
    vocabulary, tokens = 4096, 64
    monkeypatch.setattr(module, "CHUNK_LOGITS", vocabulary * tokens)
    model = made(name, vocab_size=vocabulary, num_hidden_layers=1, max_position_embeddings=2048)
    head = chunked_head(model, "cpu")

    def own(part: MicroBatch) -> None:
        model.zero_grad()
        model.base_model(input_ids=part.input_ids, use_cache=False).last_hidden_state.sum().backward()

    beside: dict[tuple[bool, int], int] = {}
    for rows in (4, 16):
        part = rows_of(*[tokens] * rows)
        for chunked in (True, False):
            peak = peak_of(partial(gradients, model, part, head if chunked else None, 0.7, True))
            beside[chunked, rows] = peak - peak_of(partial(own, part))

    # then
    chunk = 4 * vocabulary * tokens
    assert beside[True, 4] < 6 * chunk
    assert beside[True, 16] < 6 * chunk
    assert beside[False, 16] > 16 * 4 * chunk
