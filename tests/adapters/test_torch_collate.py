"""Log-probs against one row at a time, micro-batches, and rows that cannot be trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.types import Batch, Ragged


@pytest.mark.parametrize(("budget", "temperature"), [(None, 1.0), (1, 0.7), (60, 0.7)])
def test_log_probs_and_entropy_equal_those_of_each_row_by_itself(
    tiny: str, trainer: Any, batch: Batch, budget: int | None, temperature: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    wanted, entropies = [], []
    with torch.no_grad():
        for prompt, response in zip(batch.ragged("prompt_ids"), batch.ragged("response_ids"), strict=True):
            ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.int64)
            table = (model(ids[None]).logits[0] / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
            wanted.append(table.gather(1, ids[len(prompt) :, None])[:, 0].numpy())
            entropies.append(-(table.exp() * table).sum(-1).numpy())
    engine = trainer(micro_batch_tokens=budget, temperature=temperature)

    found = engine.logprobs(batch)
    metrics = engine.train_step(batch).metrics

    np.testing.assert_allclose(found.values, np.concatenate(wanted), atol=1e-5)
    assert found.lengths.tolist() == batch.ragged("response_ids").lengths.tolist()
    used = [
        entropy
        for entropy, group in zip(entropies, batch.groups, strict=True)
        if len(set(batch.array("reward")[batch.groups == group])) > 1
    ]
    assert metrics["entropy"] == pytest.approx(np.concatenate(used).mean(), rel=1e-4)


def test_micro_batches_keep_to_the_budget_and_put_rows_of_like_length_together(
    trainer: Any, batch: Batch, passes: Any
) -> None:
    widths = batch.ragged("prompt_ids").lengths + batch.ragged("response_ids").lengths - 1
    engine, watched = trainer(micro_batch_tokens=60), passes()

    engine.logprobs(batch)

    assert len(watched.shapes) > 3
    assert all(rows * tokens <= 60 for rows, tokens in watched.shapes)
    longest, at = np.sort(widths)[::-1], 0
    for rows, tokens in watched.shapes:
        assert tokens == longest[at]
        at += rows
    assert at == batch.rows


def test_logits_are_computed_for_response_tokens_only(trainer: Any, batch: Batch) -> None:
    # given the sizes of what output layers give
    engine, sizes = trainer(), []

    def note(module: Any, _: Any, output: Any) -> None:
        if isinstance(module, torch.nn.Linear) and module.out_features == 43:
            sizes.append(output.numel() // module.out_features)

    hook = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        engine.logprobs(batch)
    finally:
        hook.remove()

    assert sizes == [batch.ragged("response_ids").lengths.sum()]


def test_a_mask_of_ones_changes_nothing(trainer: Any, batch: Batch) -> None:
    ones = Ragged(np.ones(len(batch.ragged("logprobs").values), np.uint8), batch.ragged("logprobs").offsets)
    columns = {name: batch[name] for name in batch}

    with_mask = trainer().train_step(Batch.of(columns | {"loss_mask": ones}, groups=batch.groups))

    assert with_mask.metrics == pytest.approx(trainer().train_step(batch).metrics)


GOOD: dict[str, Any] = {
    "prompt_ids": [np.array([5, 6], np.int32), np.array([7], np.int32)],
    "response_ids": [np.array([8], np.int32), np.array([9, 2], np.int32)],
    "logprobs": [np.array([-1.0], np.float32), np.array([-1.0, -2.0], np.float32)],
    "reward": np.array([0.0, 1.0], np.float32),
}


def test_rows_that_cannot_be_trained_on_are_refused_by_id_before_anything_changes(trainer: Any) -> None:
    engine = trainer()
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"reward": np.array([0.0, np.nan])}, "rows 1 have a reward that is no finite number"),
        ({"reward": np.array([-np.inf, 0.0])}, "rows 0 have a reward"),
        ({"reward": np.zeros((2, 1))}, "one number a row"),
        ({"logprobs": [np.zeros(1, np.float32)] * 2}, "rows 1 do not have one log-prob for each"),
        ({"logprobs": [np.zeros(1), np.array([0.0, np.nan])]}, "rows 1 have log-probs that are not finite"),
        ({"prompt_ids": [np.zeros(0, np.int32), np.array([7], np.int32)]}, "rows 0 have an empty prompt"),
        ({"response_ids": [np.array([8], np.int32), np.zeros(0, np.int32)]}, "rows 1 have an empty response"),
        ({"response_ids": [np.array([43], np.int32), np.array([9, 2], np.int32)]}, "rows 0 have response_ids"),
        ({"prompt_ids": [np.array([5, -1], np.int32), np.array([7], np.int32)]}, "rows 0 have prompt_ids"),
        ({"prompt_ids": [np.full(128, 5, np.int32), np.array([7], np.int32)]}, "rows 0 are longer than"),
        ({"loss_mask": Ragged.of([[1], [1]], np.uint8)}, "rows 1 do not have one value of the loss mask"),
        ({"loss_mask": Ragged.of([[1], [2, 1]], np.uint8)}, "rows 1 have a loss mask of other values"),
        ({"loss_mask": Ragged.of([[1], [0, 0]], np.uint8)}, "rows 1 have no token that the loss mask has trained"),
    ]
    for change, message in wrong:
        with pytest.raises(SchemaError, match=message):
            engine.train_step(Batch.of(GOOD | change, groups=np.zeros(2, np.int64)))
    with pytest.raises(SchemaError, match="no rows"):
        engine.train_step(Batch.of(GOOD).take([]))
    with pytest.raises(SchemaError, match="no column 'logprobs'"):
        engine.train_step(Batch.of({name: GOOD[name] for name in GOOD if name != "logprobs"}))
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_weights())
    engine.train_step(Batch.of(GOOD, groups=np.zeros(2, np.int64)))
