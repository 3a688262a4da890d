"""The engine ``transformers`` with a tiny model of each family: keys and values, windows, and recurrent states."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.interfaces import Completion, Request
from asyncflow_sdk.types import Sampling
from asyncflow_sdk.types.events import Event, StepTrained
from asyncflow_torch.families import family
from asyncflow_torch.folder_map import FolderMap, runs_of
from asyncflow_torch.kit_model import VOCABULARY
from asyncflow_torch.policy import load_policy

REFUSED = {"recurrent_gemma": r"RecurrentGemmaForCausalLM \(its layers \[0\] do not use the cache\); use vllm"}
APART = [
    "llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba2", "mamba", "bamba", "falcon_h1", "lfm2", "qwen3_5",
    "qwen2_5_vl",
]  # fmt: skip
"""One for each way to keep what was read; the layers of others are like theirs, and `make models` runs all."""
LIMIT_S = 240
# Of plain transformers, too: a recurrent layer reads a prompt in chunks, and decodes token by token.
ATOL = 5e-5


def _continued(model: Any, prefix: list[int], tokens: int) -> list[int]:
    """The greedy continuation by plain transformers."""
    ids = torch.tensor([prefix])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
    return out[0, len(prefix) :].tolist()


def _logits(model: Any, prompt: Any, completion: Completion) -> Any:
    """The logits (tokens, vocabulary) of a response, by one pass over the whole row."""
    ids = torch.tensor([[*prompt.tolist(), *completion.token_ids.tolist()]])
    with torch.inference_mode():
        return model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]


async def _all(engine: Any, request: Request) -> list[Completion]:
    return sorted([c async for got in engine.generate(request) for c in got.each()], key=lambda c: c.index)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", APART)
def test_rows_of_a_family_are_those_of_plain_transformers(
    name: str, tmp_path: Path, rollout: Callable[..., Any], passes: Callable[..., Any], make_update: Any
) -> None:
    # given two versions, greedy requests and sampled groups of prompts of several lengths, and one that is aborted
    folders = [family(name, tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    versions = [load_policy(folder, dtype="auto", device="cpu") for folder in folders]
    held, runs = FolderMap.of(versions[1], folders[1]), runs_of(versions[1])
    update = make_update({name: held.whole(name, runs) for name in held.kinds})
    update.untrained = held.untrained
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, VOCABULARY, length).astype(np.int32) for length in (6, 1, 12, 9)]
    limits = (20, 5, 30, 25)
    requests = [
        *(Request(p, Sampling(temperature=0, max_tokens=m)) for p, m in zip(prompts, limits, strict=True)),
        *(
            Request(p, Sampling(max_tokens=m, top_k=k, top_p=cut), n=3, seed=k)
            for p, m, k, cut in zip(prompts, limits, (0, 5, 7, 0), (1, 1, 0.9, 0.8), strict=True)
        ),
    ]
    engine = rollout(folders[0])

    async def scenario() -> list[list[Completion]]:
        gate = passes(8, vocabulary=VOCABULARY)
        running = [asyncio.ensure_future(_all(engine, request)) for request in requests]
        doomed = asyncio.ensure_future(_all(engine, Request(prompts[0], Sampling(max_tokens=60), n=5)))

        # when one request is aborted, and later version 1 comes
        await gate.reached()
        doomed.cancel()
        await asyncio.wait([doomed])
        gate.hold(6)
        gate.go_on()
        await gate.reached()
        await gate.load(engine, update)
        return await asyncio.gather(*running)

    groups = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))

    # then each log-prob is that of a whole pass with the token's version, and cut draws stay inside their cut
    assert len({span.version for group in groups for c in group for span in c.spans}) == 2
    for request, group in zip(requests, groups, strict=True):
        assert len(group) == request.n
        for c in group:
            for span in c.spans:
                at = slice(span.start, span.end)
                scores = _logits(versions[span.version], request.prompt_ids, c)[at].log_softmax(-1)
                ids = torch.tensor(c.token_ids[at].tolist())[:, None]
                wanted = scores.gather(-1, ids)
                np.testing.assert_allclose(c.logprobs[at], wanted[:, 0], atol=ATOL)
                if request.sampling.top_k:
                    assert bool(((scores > wanted + ATOL).sum(-1) < request.sampling.top_k).all())
    # and greedy rows are those of each version alone, token for token
    for request, (c,) in zip(requests[:4], groups[:4], strict=True):
        prompt, tokens = request.prompt_ids.tolist(), c.token_ids.tolist()
        for span in c.spans:
            most = request.sampling.max_tokens - span.start
            alone = _continued(versions[span.version], [*prompt, *tokens[: span.start]], most)
            assert tokens[span.start : span.end] == alone[: span.end - span.start]
            assert span.end < len(tokens) or len(alone) == span.end - span.start, "it ended where it had to"
    # and a seed draws the same tokens beside no other request
    for request, group in zip(requests[4:], groups[4:], strict=True):
        alone = asyncio.run(_all(rollout(folders[0]), request))
        for one, beside in zip(alone, group, strict=True):
            same = beside.spans[0].end if beside.spans[0].version == 0 else 0
            assert one.token_ids[:same].tolist() == beside.token_ids[:same].tolist()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_family_with_its_state_elsewhere_is_refused(name: str, tmp_path: Path, rollout: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=f"cannot keep the state of {REFUSED[name]}"):
        rollout(family(name, tmp_path / "model"))


@pytest.mark.timeout(600)
def test_a_hybrid_is_trained_on_its_own_rows(tmp_path: Path, warm: None) -> None:
    # given prompts of several lengths, and a model with linear attention in its first layer
    folder = family("qwen3_5_text", tmp_path / "model")
    rng, events = np.random.default_rng(0), list[Event]()
    prompts = [rng.integers(4, VOCABULARY, length).astype(np.int32) for length in (3, 9, 5, 14)]

    # when
    result = af.Workflow(
        prompts={"prompt_ids": af.Ragged.of(prompts)},
        rollout=af.Rollout(
            "transformers",
            model=folder,
            group_size=4,
            prompt="prompt_ids",
            sampling=af.Sampling(max_tokens=24),
        ),
        reward=lambda response_ids: [float((np.asarray(ids) % 2).mean()) for ids in response_ids],
        train=af.Train("torch", model=folder, learning_rate=1e-2),
        batch_size=8,
        steps=3,
        staleness=af.Staleness(max_staleness=0),
    ).run(tmp_path / "run", on_event=events.append)

    # then each step trains on the log-probs of its own weights
    assert result.summary["balanced"]
    drifts = [event.metrics["logprob_drift"] for event in events if isinstance(event, StepTrained)]
    assert len(drifts) == 3
    assert max(drifts) < 1e-4
