"""Algorithms of one's own in the torch engine, against independent sums over rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import asyncflow_sdk as af
from asyncflow_sdk.errors import EngineError, SchemaError
from asyncflow_sdk.types import Batch, Ragged


@dataclass(frozen=True)
class Reinforce(af.Algorithm):
    """One number a row, no clip; a penalty by a column of the reference's log-probs."""

    baseline: float = 0.5
    beta: float = 0.1
    needs = ("ref_logprobs",)

    def advantages(self, batch):
        return batch.array("reward") - self.baseline

    def loss(self, tokens):
        ratio = (tokens.logprobs - tokens.behaviour).exp()
        penalty = (tokens.logprobs - tokens.columns["ref_logprobs"]).square().sum() / tokens.total_tokens
        loss = -(ratio * tokens.advantages).sum() / tokens.total_tokens + self.beta * penalty
        return loss, {"penalty": penalty.detach(), "rows": tokens.row_count}


@dataclass(frozen=True)
class Sequences(af.Algorithm):
    """Advantages of tokens, a mean over rows, and ratios of whole rows; rows without an advantage are left out."""

    discount: float = 0.9
    drop_zero_advantage: bool = True

    def advantages(self, batch):
        lengths = batch.ragged("response_ids").lengths
        back = np.concatenate([np.arange(n)[::-1] for n in lengths])
        return af.Ragged.from_lengths(np.repeat(batch.array("reward"), lengths) * self.discount**back, lengths)

    def loss(self, tokens):
        zeros = tokens.logprobs.new_zeros(tokens.row_count)
        count = zeros.index_add(0, tokens.rows, tokens.logprobs * 0 + 1)
        ratio = (zeros.index_add(0, tokens.rows, tokens.logprobs - tokens.behaviour) / count).exp()
        gain = zeros.index_add(0, tokens.rows, tokens.advantages) / count
        return -(ratio * gain).sum() / tokens.total_rows, {"share": tokens.row_count / tokens.total_rows}


class Bad(Sequences):
    """Gives what is no advantage: ``discount`` says which."""

    def advantages(self, batch):
        rows = batch.rows
        return {0: np.zeros(rows + 1), 1: np.full(rows, np.nan), 2: af.Ragged.of([[1.0]] * rows)}[int(self.discount)]


def with_columns(batch: Batch, **more: Any) -> Batch:
    return Batch.of({name: batch[name] for name in batch} | more, groups=batch.groups)


def drifted(batch: Batch, seed: int) -> Ragged:
    column = batch.ragged("logprobs")
    noise = np.random.default_rng(seed).normal(0, 0.3, len(column.values))
    return Ragged((column.values + noise).astype(np.float32), column.offsets)


def row_logprobs(folder: str, batch: Batch) -> tuple[Any, list[Any]]:
    """The model, and with gradient the log-probs of each row, one forward pass a row."""
    model, rows = AutoModelForCausalLM.from_pretrained(folder).eval(), []
    for row in range(batch.rows):
        prompt, response = (
            torch.tensor(batch.ragged(n)[row].astype(np.int64)) for n in ("prompt_ids", "response_ids")
        )
        table = model(torch.cat([prompt, response])[None]).logits[0].log_softmax(-1)
        rows.append(table[len(prompt) - 1 : -1].gather(1, response[:, None])[:, 0])
    return model, rows


def norm_of(model: Any) -> float:
    return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())


@pytest.mark.parametrize("budget", [None, 60])
def test_a_penalty_by_a_column_that_the_algorithm_needs(
    tiny: str, trainer: Any, batch: Batch, budget: int | None
) -> None:
    # given: another policy drew the rows, and a reference has its own log-probs; some tokens were observed
    mask = np.random.default_rng(1).random(len(batch.ragged("logprobs").values)) < 0.7
    mask[batch.ragged("logprobs").offsets[:-1]] = True
    offsets = batch.ragged("logprobs").offsets
    given = with_columns(
        batch, logprobs=drifted(batch, 5), ref_logprobs=drifted(batch, 6), loss_mask=Ragged(mask, offsets)
    )
    engine = trainer(algorithm=Reinforce(baseline=0.25, beta=0.5), micro_batch_tokens=budget, learning_rate=1e-9)

    result = engine.train_step(given)

    # then
    model, rows = row_logprobs(tiny, given)
    total = int(mask.sum())
    gain, penalty = torch.tensor(0.0), torch.tensor(0.0)
    for row, logprobs in enumerate(rows):
        drawn = torch.tensor(given.ragged("loss_mask")[row])
        old, ref = (torch.tensor(given.ragged(n)[row]) for n in ("logprobs", "ref_logprobs"))
        gain = gain + ((logprobs - old).exp()[drawn] * (float(given.array("reward")[row]) - 0.25)).sum() / total
        penalty = penalty + (logprobs - ref)[drawn].square().sum() / total
    (-gain + 0.5 * penalty).backward()
    assert result.metrics["loss"] == pytest.approx(float((-gain + 0.5 * penalty).detach()), rel=1e-4)
    assert result.metrics["penalty"] == pytest.approx(float(penalty.detach()), rel=1e-4)
    assert result.metrics["grad_norm"] == pytest.approx(norm_of(model), rel=1e-3)
    assert result.metrics["rows"] == given.rows
    assert result.filtered is None, "nothing is dropped unless the algorithm says so"


@pytest.mark.parametrize("budget", [None, 60])
def test_advantages_of_tokens_and_ratios_of_rows(tiny: str, trainer: Any, batch: Batch, budget: int | None) -> None:
    reward = np.random.default_rng(2).normal(size=batch.rows).astype(np.float32)
    reward[::3] = 0.0
    given = with_columns(batch, logprobs=drifted(batch, 7), reward=reward)
    engine = trainer(algorithm=Sequences(), micro_batch_tokens=budget, learning_rate=1e-9)

    result = engine.train_step(given)

    model, rows = row_logprobs(tiny, given)
    loss = torch.tensor(0.0)
    used = np.flatnonzero(reward)
    for row in used:
        old = torch.tensor(given.ragged("logprobs")[row])
        gain = reward[row] * (0.9 ** np.arange(len(old))[::-1]).mean()
        loss = loss - (rows[row] - old).mean().exp() * float(gain) / len(used)
    loss.backward()
    assert result.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert result.metrics["grad_norm"] == pytest.approx(norm_of(model), rel=1e-3)
    assert result.metrics["share"] == pytest.approx(1.0)
    assert result.filtered is not None
    np.testing.assert_array_equal(result.filtered, reward == 0)


@pytest.mark.parametrize(
    ("how", "message"),
    [(0, r"Bad.advantages gave an array"), (1, "not finite"), (2, "other lengths than the responses'")],
)
def test_what_is_no_advantage_is_refused_by_name(trainer: Any, batch: Batch, how: int, message: str) -> None:
    engine = trainer(algorithm=Bad(discount=how))
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}

    with pytest.raises(EngineError, match=message):
        engine.train_step(batch)

    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_weights())


def test_a_column_that_is_not_there_or_has_another_form_is_refused(trainer: Any, batch: Batch) -> None:
    engine = trainer(algorithm=Reinforce())

    with pytest.raises(SchemaError, match="needs column 'ref_logprobs', which the batch lacks; say needs="):
        engine.train_step(batch)
    with pytest.raises(SchemaError, match="'ref_logprobs' is .*; an algorithm is given columns with a number a row"):
        engine.train_step(with_columns(batch, ref_logprobs=[[1.0]] * batch.rows))
    per_row = with_columns(batch, ref_logprobs=np.full(batch.rows, -1.0, np.float32))
    assert engine.train_step(per_row).metrics["penalty"] > 0


def test_truncated_responses_are_left_out_of_the_loss(trainer: Any, batch: Batch) -> None:
    cut = np.arange(batch.rows) % 3 == 0
    given = with_columns(batch, finish_reason=["length" if each else "stop" for each in cut])
    algorithm = af.DAPO(overlong=af.Overlong(mask_truncated=True))
    whole: Any = af.DAPO().advantages(given)

    result = trainer(algorithm=algorithm).train_step(given)

    np.testing.assert_array_equal(algorithm.advantages(given), np.where(cut, 0, whole))
    trained = ~cut & (whole != 0)
    assert trained.any() and result.filtered is not None
    np.testing.assert_array_equal(result.filtered, ~trained)
    assert result.metrics["tokens"] == given.ragged("response_ids").lengths[trained].sum()
