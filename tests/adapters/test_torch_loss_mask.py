"""Tokens that the policy did not draw are read and not trained: against a loss computed one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncflow_sdk.algorithms import GRPO
from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.types import Batch, Ragged
from asyncflow_torch.collate import check_training


@pytest.fixture
def masked(batch: Batch) -> Batch:
    """The rows, of which a third of the tokens were observed; their log-probs are 0, and others' have drifted."""
    rng = np.random.default_rng(4)
    logprobs = batch.ragged("logprobs")
    mask = rng.random(len(logprobs.values)) < 0.66
    mask[logprobs.offsets[:-1]] = True
    drifted = np.where(mask, logprobs.values + rng.normal(0, 0.3, len(mask)), 0).astype(np.float32)
    columns = {name: batch[name] for name in batch} | {
        "logprobs": Ragged(drifted, logprobs.offsets), "loss_mask": Ragged(mask, logprobs.offsets),
    }  # fmt: skip
    return Batch.of(columns, groups=batch.groups)


def _naive(folder: str, batch: Batch) -> tuple[float, dict[str, Any], int]:
    """Loss (DAPO's eq. 8), gradients and number of drawn tokens: row by row, token by token."""
    config = GRPO()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    advantages = config.advantages(batch)
    names = ("prompt_ids", "response_ids", "logprobs", "loss_mask")
    terms = []
    for row in range(batch.rows):
        prompt, response, old, mask = (batch.ragged(name)[row] for name in names)
        if advantages[row] == 0:
            continue
        ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.int64)
        table = model(ids[None]).logits[0].log_softmax(-1)
        for t in np.flatnonzero(mask):
            ratio = (table[len(prompt) + t - 1, int(response[t])] - float(old[t])).exp()
            a = float(advantages[row])
            terms.append(torch.minimum(ratio * a, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * a))
    loss = -torch.stack(terms).sum() / len(terms)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}, len(terms)


@pytest.mark.parametrize("budget", [None, 50])
def test_loss_gradient_and_token_mean_are_of_the_drawn_tokens(
    tiny: str, trainer: Any, masked: Batch, budget: int | None
) -> None:
    loss, gradients, tokens = _naive(tiny, masked)
    norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())

    engine = trainer(micro_batch_tokens=budget, max_grad_norm=1e9)
    metrics = engine.train_step(masked).metrics

    assert metrics["tokens"] == tokens
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
    for name, parameter in engine._model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5, msg=name)


def test_a_mask_of_ones_changes_nothing(trainer: Any, batch: Batch) -> None:
    ones = Ragged(np.ones(len(batch.ragged("logprobs").values), np.uint8), batch.ragged("logprobs").offsets)
    columns = {name: batch[name] for name in batch}

    with_mask = trainer().train_step(Batch.of(columns | {"loss_mask": ones}, groups=batch.groups))

    assert with_mask.metrics == pytest.approx(trainer().train_step(batch).metrics)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1], [1]], "rows 1 do not have one value of the loss mask"),
        ([[1], [2, 1]], "rows 1 have a loss mask of other values"),
        ([[1], [0, 0]], "rows 1 have no token that the loss mask has trained"),
    ],
)
def test_masks_that_cannot_be_trained_with_are_refused_by_id(mask: list[list[int]], message: str) -> None:
    columns = {
        "response_ids": Ragged.of([[8], [9, 2]], np.int32), "logprobs": Ragged.of([[-1.0], [-1.0, -2.0]], np.float32),
        "reward": np.zeros(2, np.float32), "loss_mask": Ragged.of(mask, np.uint8),
    }  # fmt: skip
    with pytest.raises(SchemaError, match=message):
        check_training(Batch.of(columns))
