"""A step trained in parts is the whole step, and one that is given up leaves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_parts import Faulty, OfConstant, OfGroups, apart, gradients, groups_of, in_parts, state, step_rows, weights

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, EngineError, SchemaError
from asyncflow_sdk.types import Batch

EXACT = 1e-6
SPLITS: list[list[list[int]]] = [[[0], [3, 1], [5, 4, 2]], [[5], [4], [3], [2], [1], [0]], [[2, 0, 1, 4, 3, 5]]]
"""Groups of each part. The rows of group 0 have equal rewards."""
ALGORITHMS: dict[str, af.Algorithm] = {
    "grpo": af.GRPO(), "grpo, rows, kl": af.GRPO(mean="rows", clip_high=0.2, kl=af.KL(coef=0.1)),
    "kl in the reward": af.GRPO(kl=af.KL(coef=0.1, estimator="k1", where="reward"), dual_clip=3.0),
    "dr_grpo": af.DrGRPO(length=9), "dapo": af.DAPO(overlong=af.Overlong(max_tokens=9, buffer=4)),
    "gspo": af.GSPO(clip_low=0.1, clip_high=0.1), "cispo, entropy": af.CISPO(entropy=0.1),
    "off-policy": af.GRPO(off_policy=af.OffPolicy()),
    "off-policy, interpolated": af.GRPO(off_policy=af.OffPolicy(weight="mask", proximal="interpolated")),
    "ppo": af.PPO(normalize_std=False, critic=af.Critic(decay=0.9)), "own, groups": OfGroups(), "own, constant": OfConstant(),
}  # fmt: skip


@pytest.fixture(scope="session")
def rows(batch: Batch) -> Batch:
    return step_rows(batch)


def filtered(result: af.StepResult, count: int) -> Any:
    return np.zeros(count, bool) if result.filtered is None else result.filtered


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("norm", [0.01, 1e6], ids=["clipped", "free"])
def test_gradients_weights_and_metrics_are_those_of_the_whole_step(
    name: str, norm: float, trainer: Any, rows: Batch, tmp_path: Path
) -> None:
    options = {"dtype": "float64", "algorithm": ALGORITHMS[name], "max_grad_norm": norm, "micro_batch_tokens": 60}
    whole = trainer(**options)
    wanted = whole.train_step(rows)
    saved = state(whole, tmp_path / "whole")
    split = SPLITS[list(ALGORITHMS).index(name) % 3] if norm > 1 else SPLITS[0]
    engine = trainer(**options)

    found = in_parts(engine, rows, split)

    have = state(engine, tmp_path / "parts")
    assert np.linalg.norm(gradients(saved)) > 1e-4
    assert apart(gradients(have), gradients(saved)) < EXACT
    assert apart(weights(have), weights(saved)) < EXACT
    assert (have["optimizer.safetensors/random_state"] == saved["optimizer.safetensors/random_state"]).all()
    assert found.metrics == pytest.approx(wanted.metrics, rel=1e-5, abs=1e-9)
    order = np.concatenate([np.flatnonzero(rows.groups == group) for part in split for group in part])
    assert filtered(found, rows.rows).tolist() == filtered(wanted, rows.rows)[order].tolist()


@pytest.fixture(scope="module")
def slow(tiny: str, rows: Batch) -> tuple[Any, dict[str, float]]:
    """An engine whose steps change nothing that is measured, and the metrics of the whole step."""
    from asyncflow_torch.train import TorchEngine

    engine = TorchEngine(
        tiny,
        learning_rate=1e-13,
        dtype="float64",
        micro_batch_tokens=40,
        algorithm=af.GRPO(mean="rows", kl=af.KL(coef=0.1)),
    )
    return engine, engine.train_step(rows).metrics


@settings(max_examples=15)
@given(owner=st.lists(st.integers(0, 3), min_size=6, max_size=6), order=st.permutations(range(6)))
def test_any_split_of_the_groups_makes_the_same_step(
    slow: Any, rows: Batch, owner: list[int], order: list[int]
) -> None:
    engine, wanted = slow
    parts = [[group for group in order if owner[group] == part] for part in range(4)]

    found = in_parts(engine, rows, parts)

    assert found.metrics == pytest.approx(wanted, rel=EXACT, abs=1e-7)


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_in_lower_precision_it_is_the_whole_step_up_to_rounding(
    dtype: str, near: float, trainer: Any, rows: Batch, tmp_path: Path
) -> None:
    algorithm = OfGroups(factor=1e4)
    saved = []
    for number, split in enumerate([None, SPLITS[0]]):
        engine = trainer(dtype=dtype, algorithm=algorithm, micro_batch_tokens=60)
        _ = engine.train_step(rows) if split is None else in_parts(engine, rows, split)
        saved.append(state(engine, tmp_path / str(number)))

    assert apart(gradients(saved[1]), gradients(saved[0])) < near


def test_parts_without_a_gradient_are_counted_and_a_step_of_them_alone_is_none(trainer: Any, rows: Batch) -> None:
    engine = trainer()
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}

    result = in_parts(engine, rows, [[0], [], [0]])

    assert (result.metrics["rows_used"], result.metrics["reward"], result.metrics["reward_std"]) == (0.0, 1.0, 0.0)
    assert result.filtered.tolist() == [True] * 8
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_weights())
    assert in_parts(engine, rows, [[1], [0]]).filtered.tolist() == [False] * 4 + [True] * 4


def aborts(engine: Any, rows: Batch) -> None:
    engine.abort_step()


def has_a_bad_part(engine: Any, rows: Batch) -> None:
    bad = groups_of(rows, [2])
    ids = bad.ragged("response_ids")
    columns = {name: bad[name] for name in bad} | {"response_ids": af.Ragged(ids.values + 1000, ids.offsets)}
    with pytest.raises(SchemaError, match="have response_ids outside the vocabulary"):
        engine.accumulate(Batch.of(columns, groups=bad.groups))


def fails_in_the_loss(engine: Any, rows: Batch) -> None:
    with pytest.raises(KeyError, match="told to fail"):
        engine.accumulate(groups_of(rows, [2, 3]))


def has_an_infinite_gradient(engine: Any, rows: Batch) -> None:
    engine.accumulate(groups_of(rows, [2, 3]))
    with pytest.raises(EngineError, match=r"grad_norm is (inf|nan); no step was made, the weights are as before"):
        engine.end_step()


@pytest.mark.parametrize("gives_up", [aborts, has_a_bad_part, fails_in_the_loss, has_an_infinite_gradient])
def test_a_step_that_is_given_up_leaves_weights_optimizer_and_random_state(
    gives_up: Any, trainer: Any, rows: Batch, tmp_path: Path
) -> None:
    # given: an engine after a step, and another that never makes the one that is given up
    fails = gives_up in (fails_in_the_loss, has_an_infinite_gradient)
    engine = trainer(algorithm=Faulty(calls=(4,) if fails else (), raises=gives_up is fails_in_the_loss))
    other = trainer()
    for each in (engine, other):
        in_parts(each, rows, SPLITS[0])  # two calls of the loss: a part has no gradient
    before = state(engine, tmp_path / "before")

    engine.begin_step(1)
    engine.accumulate(groups_of(rows, [1]))
    torch.rand(3)
    gives_up(engine, rows)
    engine.abort_step()  # no step is open any more

    after = state(engine, tmp_path / "after")
    assert all(np.array_equal(after[name], array) for name, array in before.items())
    assert in_parts(engine, rows, SPLITS[1]).metrics == in_parts(other, rows, SPLITS[1]).metrics
    assert apart(weights(state(engine, tmp_path / "1")), weights(state(other, tmp_path / "2"))) == 0


def test_calls_out_of_order_are_refused_with_the_reason(trainer: Any, rows: Batch, tmp_path: Path) -> None:
    engine = trainer()
    part = groups_of(rows, [1])
    for call in (lambda: engine.accumulate(part), engine.end_step):
        with pytest.raises(EngineError, match=r"no step is open, call begin_step\(\) first"):
            call()
    engine.save(tmp_path)
    engine.begin_step(4)
    for call in (lambda: engine.begin_step(5), lambda: engine.train_step(part), lambda: engine.load(tmp_path)):
        with pytest.raises(EngineError, match=r"step 4 is open, call end_step\(\) or abort_step\(\) first"):
            call()
    with pytest.raises(EngineError, match=r"step 4 has no rows: call accumulate\(\) before end_step\(\)"):
        engine.end_step()
    engine.begin_step(5)  # the step without rows is over
    engine.accumulate(part)
    assert engine.end_step().metrics["rows_used"] == 4


class Undeclared(OfGroups):
    normaliser = None  # type: ignore[assignment]


class Misspelt(OfGroups):
    normaliser = "group"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"updates": 2}, "updates=2: each optimizer step takes random rows of the whole batch"),
        ({"algorithm": af.PPO()}, "PPO scales advantages by their mean and spread over the whole step"),
        ({"algorithm": Undeclared()}, "Undeclared declares no normaliser"),
    ],
    ids=["updates", "standardised", "no normaliser"],
)
def test_what_needs_the_whole_step_says_so(options: dict[str, Any], reason: str, trainer: Any) -> None:
    engine = trainer(**options)

    assert engine.whole_step.startswith(reason)
    with pytest.raises(EngineError, match=rf"begin_step\(\) is not possible: {reason}.*use train_step\(\)"):
        engine.begin_step(0)
    assert trainer().whole_step == ""


def test_an_unknown_normaliser_is_refused_when_the_engine_is_made(trainer: Any) -> None:
    with pytest.raises(ConfigError, match="Misspelt: normaliser 'group' is none of tokens, rows, groups, constant"):
        trainer(algorithm=Misspelt())
