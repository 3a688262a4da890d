"""Collation and log-probs against one row at a time; rows that cannot be trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.types import Batch
from asyncflow_torch.collate import check_tokens, check_training, micro_batches
from asyncflow_torch.logprobs import response_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("budget", [None, 1, 60])
def test_log_probs_equal_those_of_each_row_by_itself(
    tiny: str, batch: Batch, budget: int | None, temperature: float
) -> None:
    # given the model as transformers loads it
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    seen: list[int] = []

    with torch.no_grad():
        for part in micro_batches(batch, tokens=budget, device="cpu"):
            # when
            stats = response_logprobs(model, part, temperature=temperature)

            # then the packed numbers are those of the rows of this part, in order
            start = 0
            for row in part.rows.tolist():
                ids = torch.tensor(np.concatenate([prompts[row], responses[row]]), dtype=torch.int64)
                table = (model(ids[None]).logits[0] / temperature).log_softmax(-1)[len(prompts[row]) - 1 : -1]
                wanted = table.gather(1, ids[len(prompts[row]) :, None])[:, 0]
                place = slice(start, start + len(wanted))
                torch.testing.assert_close(stats.logprobs[place], wanted, atol=1e-5, rtol=0)
                entropy = -(table.exp() * table).sum(-1)
                torch.testing.assert_close(stats.entropy[place], entropy, atol=1e-5, rtol=1e-5)
                start = place.stop
            assert start == len(part.targets)
            seen += part.rows.tolist()
    assert sorted(seen) == list(range(batch.rows))


def test_micro_batches_keep_to_the_budget_and_put_rows_of_like_length_together(batch: Batch) -> None:
    widths = batch.ragged("prompt_ids").lengths + batch.ragged("response_ids").lengths - 1
    parts = list(micro_batches(batch, tokens=60, device="cpu"))
    assert len(parts) > 3
    assert all(part.input_ids.numel() <= 60 for part in parts)
    order = np.concatenate([part.rows for part in parts])
    assert (np.diff(widths[order]) <= 0).all()
    assert [part.input_ids.shape[1] for part in parts] == [widths[part.rows].max() for part in parts]


def test_logits_are_computed_for_response_tokens_only(tiny: str, batch: Batch) -> None:
    # given a model whose output layer tells what it gets
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    shapes: list[Any] = []
    model.lm_head.register_forward_hook(lambda _layer, inputs, _output: shapes.append(inputs[0].shape))

    # when
    (part,) = micro_batches(batch, tokens=None, device="cpu")
    response_logprobs(model, part, temperature=1.0)
    model(part.input_ids)

    # then, and the hook is gone afterwards
    assert shapes == [(1, len(part.targets), 64), (*part.input_ids.shape, 64)]


GOOD: dict[str, Any] = {
    "prompt_ids": [np.array([5, 6], np.int32), np.array([7], np.int32)],
    "response_ids": [np.array([8], np.int32), np.array([9, 2], np.int32)],
    "logprobs": [np.array([-1.0], np.float32), np.array([-1.0, -2.0], np.float32)],
    "reward": np.array([0.0, 1.0], np.float32),
}


def _check(batch: Batch) -> None:
    check_tokens(batch, vocabulary=43, context=9)
    check_training(batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": np.array([0.0, np.nan])}, "rows 1 have a reward that is no finite number"),
        ({"reward": np.array([-np.inf, 0.0])}, "rows 0 have a reward"),
        ({"reward": np.zeros((2, 1))}, "one number a row"),
        ({"logprobs": [np.zeros(1, np.float32)] * 2}, "rows 1 do not have one log-prob for each"),
        ({"logprobs": [np.zeros(1), np.array([0.0, np.nan])]}, "rows 1 have log-probs that are not finite"),
        ({"prompt_ids": [np.zeros(0, np.int32), np.array([7], np.int32)]}, "rows 0 have an empty prompt"),
        ({"response_ids": [np.array([8], np.int32), np.zeros(0, np.int32)]}, "rows 1 have an empty response"),
        ({"response_ids": [np.array([43], np.int32), np.array([9, 2], np.int32)]}, "rows 0 have response_ids"),
        ({"prompt_ids": [np.array([5, -1], np.int32), np.array([7], np.int32)]}, "rows 0 have prompt_ids"),
        ({"prompt_ids": [np.full(9, 5, np.int32), np.array([7], np.int32)]}, "rows 0 are longer than"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused_by_id(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        _check(Batch.of(GOOD | change))


def test_good_rows_pass_and_an_empty_batch_does_not() -> None:
    _check(Batch.of(GOOD))
    with pytest.raises(SchemaError, match="no rows"):
        _check(Batch.of(GOOD).take([]))
