"""TorchEngine: the step, what it refuses, and continuing from disk to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncflow_sdk.algorithms import GRPO
from asyncflow_sdk.errors import ConfigError, EngineError
from asyncflow_sdk.types import Batch


def _weights(engine: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def _equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(t, right[n]) for n, t in left.items())


def test_a_step_makes_rewarded_responses_likelier(trainer: Any, batch: Batch) -> None:
    # given groups with and without spread
    engine = trainer()
    before = engine.logprobs(batch)

    # when
    result = engine.train_step(batch)

    # then the log-probs weighted by advantage rise
    assert result.filtered is not None
    gain = np.add.reduceat(engine.logprobs(batch).values - before.values, before.offsets[:-1])
    reward = batch.array("reward")
    spread = np.array([len(set(reward[batch.groups == g])) > 1 for g in batch.groups])
    assert spread.any()
    assert gain[spread & (reward == 1)].mean() > gain[spread & (reward == 0)].mean()

    # and the result says what was done
    assert (result.filtered == ~spread).all()
    metrics = result.metrics
    assert metrics["reward"] == pytest.approx(reward.mean())
    assert metrics["reward_std"] == pytest.approx(reward.std())
    assert metrics["rows_used"] == spread.sum()
    lengths = batch.ragged("response_ids").lengths
    assert metrics["tokens"] == lengths[spread].sum()
    assert metrics["response_tokens"] == pytest.approx(lengths.mean())
    assert metrics["logprob_drift"] < 1e-5
    assert metrics["clip_fraction"] == 0
    assert metrics["entropy"] > 0.1
    assert metrics["grad_norm"] > 0
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize("budget", [1, 50])
def test_micro_batches_make_the_step_of_the_whole_batch(trainer: Any, batch: Batch, budget: int) -> None:
    # given two engines that differ in their micro-batches, and rows whose policy is not the present one
    whole, parts = trainer(learning_rate=1e-5), trainer(learning_rate=1e-5, micro_batch_tokens=budget)
    drifted = (
        batch.ragged("logprobs").values
        + np.random.default_rng(2).normal(0, 0.3, 9999)[: len(batch.ragged("logprobs").values)]
    )
    columns = {name: batch[name] for name in batch} | {
        "logprobs": type(batch.ragged("logprobs"))(drifted.astype(np.float32), batch.ragged("logprobs").offsets)
    }
    batch = Batch.of(columns, groups=batch.groups)

    # when
    one, many = whole.train_step(batch), parts.train_step(batch)

    # then metrics agree, and so do the weights
    assert one.metrics["clip_fraction"] > 0
    for name, value in one.metrics.items():
        assert many.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6)
    for (name, p), (_, q) in zip(whole.named_weights(), parts.named_weights(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6, msg=name)


def test_rows_without_advantage_change_nothing_but_the_token_count(trainer: Any, batch: Batch) -> None:
    # given one engine that drops them and one that does not
    dropping, keeping = trainer(), trainer(algorithm=GRPO(drop_zero_advantage=False))

    # when
    dropped, kept = dropping.train_step(batch), keeping.train_step(batch)

    # then the gradients differ by the tokens they were divided by
    assert kept.filtered is None
    assert kept.metrics["rows_used"] == batch.rows > dropped.metrics["rows_used"]
    share = dropped.metrics["tokens"] / kept.metrics["tokens"]
    assert kept.metrics["grad_norm"] == pytest.approx(dropped.metrics["grad_norm"] * share, rel=1e-4)


def test_a_batch_without_any_advantage_makes_no_step(trainer: Any, batch: Batch) -> None:
    engine = trainer()
    before = _weights(engine)
    same = Batch.of({n: batch[n] for n in batch} | {"reward": np.ones(batch.rows)}, groups=batch.groups)

    result = engine.train_step(same)

    assert result.filtered is not None
    assert result.filtered.all()
    assert (result.metrics["rows_used"], result.metrics["tokens"]) == (0.0, 0.0)
    assert _equal(_weights(engine), before)


def test_a_gradient_that_is_not_finite_makes_no_step(trainer: Any, batch: Batch) -> None:
    # given a model that gives nonsense for one token
    engine = trainer()
    dict(engine.named_weights())["lm_head.weight"][7] = float("inf")
    before = _weights(engine)

    # when / then
    with pytest.raises(EngineError, match="no step was made"):
        engine.train_step(batch)
    assert _equal(_weights(engine), before)


def test_a_saved_engine_goes_on_as_if_it_had_not_stopped(trainer: Any, batch: Batch, tmp_path: Path) -> None:
    # given two steps, a save, and two more
    engine = trainer()
    for _ in range(2):
        engine.train_step(batch)
    engine.save(tmp_path)
    drawn = torch.rand(3)
    wanted = [engine.train_step(batch).metrics for _ in range(2)]

    # when another engine loads it, which had trained something else
    other = trainer(seed=9)
    other.train_step(batch.take(np.arange(12)))
    other.load(tmp_path)

    # then the random state, both steps and the weights are the same to the bit
    assert torch.equal(torch.rand(3), drawn)
    assert [other.train_step(batch).metrics for _ in range(2)] == wanted
    assert _equal(_weights(other), _weights(engine))
    assert {file.name for file in tmp_path.iterdir()} == {
        "weights.safetensors",
        "optimizer.safetensors",
        "state.json",
    }


def test_in_bfloat16_the_optimizer_steps_on_float32_which_is_saved_too(
    trainer: Any, batch: Batch, tmp_path: Path
) -> None:
    # given steps that are smaller than what bfloat16 tells apart
    engine = trainer(dtype="bfloat16", learning_rate=1e-5)
    before = _weights(engine)
    for _ in range(2):
        engine.train_step(batch)
    engine.save(tmp_path)

    # then little of what is published has changed yet, and the saved weights have what is to come
    after, saved = _weights(engine), load_file(tmp_path / "weights.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    name = "lm_head.weight"
    assert (after[name] != before[name]).float().mean() < 0.2
    assert (saved[name] != before[name].float()).float().mean() > 0.8
    assert torch.equal(saved[name].bfloat16(), after[name])

    # when another engine goes on from there, it is the same to the bit
    other = trainer(dtype="bfloat16", learning_rate=1e-5)
    other.load(tmp_path)
    for _ in range(3):
        assert other.train_step(batch).metrics == engine.train_step(batch).metrics
    assert _equal(_weights(other), _weights(engine))


def test_an_engine_saved_before_its_first_step_can_be_loaded(trainer: Any, batch: Batch, tmp_path: Path) -> None:
    engine = trainer()
    engine.save(tmp_path)
    engine.train_step(batch)
    wanted = _weights(engine)
    engine.load(tmp_path)
    engine.train_step(batch)
    assert _equal(_weights(engine), wanted)


def test_what_is_no_checkpoint_of_this_model_is_refused(trainer: Any, tied: str, tmp_path: Path) -> None:
    engine = trainer()
    before = _weights(engine)
    with pytest.raises(ConfigError, match=r"state\.json is missing"):
        engine.load(tmp_path)
    trainer(tied).save(tmp_path)
    with pytest.raises(ConfigError, match=r"another model; these differ: lm_head\.weight"):
        engine.load(tmp_path)
    (tmp_path / "state.json").write_text('{"format": 99}')
    with pytest.raises(ConfigError, match="format 99"):
        engine.load(tmp_path)
    assert _equal(_weights(engine), before)


def test_tied_weights_are_trained_saved_and_given_out_once(
    trainer: Any, tied: str, batch: Batch, tmp_path: Path
) -> None:
    engine = trainer(tied)
    names = [name for name, _ in engine.named_weights()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    engine.train_step(batch)
    engine.save(tmp_path)
    other = trainer(tied)
    other.load(tmp_path)
    assert other.train_step(batch).metrics == engine.train_step(batch).metrics


def test_named_weights_are_the_living_ones(trainer: Any, batch: Batch) -> None:
    engine = trainer()
    held = dict(engine.named_weights())
    before = {name: tensor.clone() for name, tensor in held.items()}
    engine.train_step(batch)
    assert not _equal(held, before)
    assert _equal(held, _weights(engine))
    assert not any(tensor.requires_grad for tensor in held.values())


def test_an_exported_policy_is_a_folder_like_the_one_it_came_from(
    trainer: Any, tiny: str, batch: Batch, tmp_path: Path
) -> None:
    # given
    engine = trainer()
    engine.train_step(batch)

    # when
    engine.export(tmp_path / "out")

    # then transformers loads the trained weights and the tokenizer from it
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(model.state_dict()[name], t) for name, t in engine.named_weights())
    tokens = [AutoTokenizer.from_pretrained(folder)("31425=")["input_ids"] for folder in (tiny, tmp_path / "out")]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    "option",
    [{"learning_rate": 0}, {"temperature": 0}, {"max_grad_norm": -1}, {"micro_batch_tokens": 0}, {"threads": 0}],
)
def test_options_that_cannot_work_are_refused(trainer: Any, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(option))} must be above 0"):
        trainer(**option)
