"""What the torch engine computes for algorithms that ask: entropy, proximal log-probs, values of a critic; and the drift of a step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from step_parts import Faulty, FaultyPPO
from test_torch_algorithms import drifted, norm_of, row_logprobs, with_columns
from transformers import AutoModelForCausalLM

import asyncflow_sdk as af
from asyncflow_sdk.algorithms import gae
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.types import Batch, Ragged

TorchEngine: Any = registry().get("train", "torch").load()


@dataclass(frozen=True)
class Noting(af.Algorithm):
    """Asks for everything an engine computes, gives a column beside its advantages, and notes what its loss was given."""

    given: list = field(default_factory=list, compare=False)
    asks = ("proximal_logprobs", "entropy", "values")

    def advantages(self, batch):
        return {
            "advantages": batch.array("reward"),
            "twice": af.Ragged(2 * batch.ragged("values").values, batch.ragged("values").offsets),
        }

    def loss(self, tokens):
        self.given.append(tokens)
        each = tokens.logprobs * tokens.advantages + 0.1 * tokens.entropy + (tokens.values - 1).square()
        return each.sum() / tokens.total_tokens, {}


@pytest.fixture
def stale(batch: Batch) -> Batch:
    """Rows that other weights drew, with log-probs of a reference; some tokens were observed."""
    offsets = batch.ragged("logprobs").offsets
    mask = np.random.default_rng(1).random(offsets[-1]) < 0.7
    mask[offsets[:-1]] = True
    return with_columns(
        batch, logprobs=drifted(batch, 5), ref_logprobs=drifted(batch, 6), loss_mask=Ragged(mask, offsets)
    )


def entropies(model: Any, batch: Batch) -> list[Any]:
    """Of each row's tokens, with gradient."""
    found = []
    for row in range(batch.rows):
        prompt, response = (batch.ragged(name)[row].astype(np.int64) for name in ("prompt_ids", "response_ids"))
        table = model(torch.tensor(np.concatenate([prompt, response]))[None]).logits[0].log_softmax(-1)
        found.append(-(table.exp() * table).sum(-1)[len(prompt) - 1 : -1])
    return found


def give_head(engine: Any, path: Path) -> Any:
    """Let the engine's critic expect something: put a random head into its checkpoint. Returns the head, float32 (64,)."""
    engine.save(path)
    weights = load_file(path / "critic" / "weights.safetensors")
    (name,) = (name for name, tensor in weights.items() if tensor.shape == (1, 64))
    weights[name] = 0.1 * torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    save_file(weights, path / "critic" / "weights.safetensors")
    engine.load(path)
    return weights[name][0]


def steps_of(engine: Any, path: Path) -> set[float]:
    """How many steps the optimizer has made, of each weight."""
    engine.save(path)
    saved = load_file(path / "optimizer.safetensors")
    return {float(step) for name, step in saved.items() if name.startswith("step/")}


def row_values(folder: str, head: Any, batch: Batch) -> tuple[Any, list[Any]]:
    """The layers below the output layer, and with gradient what a head says before each token of each row."""
    body, rows = AutoModelForCausalLM.from_pretrained(folder).eval().model, []
    for prompt, response in zip(batch.ragged("prompt_ids"), batch.ragged("response_ids"), strict=True):
        ids = torch.tensor(np.concatenate([prompt, response]).astype(np.int64))
        rows.append((body(ids[None]).last_hidden_state[0] @ head)[len(prompt) - 1 : -1])
    return body, rows


@pytest.mark.parametrize("budget", [None, 60])
def test_an_entropy_bonus_and_a_kl_have_the_gradients_of_their_formulas(
    tiny: str, trainer: Any, stale: Batch, budget: int | None
) -> None:
    algorithm = af.GRPO(entropy=0.3, kl=af.KL(coef=0.2, estimator="k2"), drop_zero_advantage=False)
    engine = trainer(algorithm=algorithm, micro_batch_tokens=budget, learning_rate=1e-9, max_grad_norm=1e9)

    metrics = engine.train_step(stale).metrics

    model, rows = row_logprobs(tiny, stale)
    advantages, each = algorithm.advantages(stale), entropies(model, stale)
    total = int(stale.ragged("loss_mask").values.sum())
    loss = torch.tensor(0.0)
    for row, logprobs in enumerate(rows):
        drawn = torch.tensor(stale.ragged("loss_mask")[row])
        old, ref = (torch.tensor(stale.ragged(name)[row]) for name in ("logprobs", "ref_logprobs"))
        ratio, a = (logprobs - old).exp(), float(advantages[row])
        gain = torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
        terms = -gain + 0.2 * (logprobs - ref).square() / 2 - 0.3 * each[row]
        loss = loss + terms[drawn].sum() / total
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm_of(model), rel=1e-3)
    assert metrics["kl"] > 0


def test_a_critic_and_the_policy_learn_what_ppo_says(tiny: str, trainer: Any, stale: Batch, tmp_path: Path) -> None:
    # given a critic that expects something already
    algorithm = af.PPO(critic=af.Critic(decay=0.9, clip=0.05), normalize_std=False)
    engine = trainer(algorithm=algorithm, micro_batch_tokens=60, learning_rate=1e-9, max_grad_norm=1e9)
    head = give_head(engine, tmp_path).requires_grad_(True)

    # when
    metrics = engine.train_step(stale).metrics

    # then both have the gradients of a loss that is computed row by row
    model, rows = row_logprobs(tiny, stale)
    body, expected = row_values(tiny, head, stale)
    total = int(stale.ragged("loss_mask").values.sum())
    loss, value_loss = torch.tensor(0.0), torch.tensor(0.0)
    for row, logprobs in enumerate(rows):
        drawn = torch.tensor(stale.ragged("loss_mask")[row])
        values = expected[row][drawn]
        rewards = np.zeros(int(drawn.sum()))
        rewards[-1] = stale.array("reward")[row]
        before = values.detach().double().numpy()
        advantages = gae(rewards, before, np.array([len(rewards)]), discount=1.0, decay=0.9)
        returns, a = torch.tensor(advantages + before).float(), torch.tensor(advantages).float()
        ratio = (logprobs - torch.tensor(stale.ragged("logprobs")[row]))[drawn].exp()
        loss = loss - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum() / total
        value_loss = value_loss + ((values - returns) ** 2 / 2).sum() / total
    (loss + 0.5 * value_loss).backward()
    assert metrics["value_loss"] == pytest.approx(float(value_loss.detach()), rel=1e-4)
    assert metrics["loss"] == pytest.approx(float((loss + 0.5 * value_loss).detach()), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm_of(model), rel=1e-3)
    norms = [p.grad.norm() for p in (*body.parameters(), head) if p.grad is not None]
    assert metrics["critic_grad_norm"] == pytest.approx(float(torch.stack(norms).norm()), rel=1e-3)


def test_a_critic_learns_what_rewards_to_expect_and_is_no_part_of_the_policy(trainer: Any, batch: Batch) -> None:
    engine = trainer(algorithm=af.PPO(), critic_learning_rate=3e-3)
    names = [name for name, _ in engine.named_weights()]

    losses = [engine.train_step(batch).metrics["value_loss"] for _ in range(12)]

    assert losses[-1] < 0.5 * losses[0]
    assert names == [name for name, _ in trainer().named_weights()]


def test_a_policy_and_its_critic_go_on_to_the_bit(trainer: Any, batch: Batch, tmp_path: Path) -> None:
    engine = trainer(algorithm=af.PPO(), updates=2)
    engine.train_step(batch)
    engine.save(tmp_path)
    wanted = [engine.train_step(batch).metrics for _ in range(2)]

    other = trainer(algorithm=af.PPO(), updates=2, seed=4)
    other.train_step(batch)
    other.load(tmp_path)

    assert [other.train_step(batch).metrics for _ in range(2)] == wanted
    without = tmp_path / "without"
    trainer().save(without)
    with pytest.raises(af.ConfigError, match="critic holds no complete checkpoint"):
        other.load(without)


@pytest.mark.parametrize("updates", [1, 3])
def test_an_algorithm_gets_what_it_asks_for_of_each_token_once(
    tiny: str, trainer: Any, stale: Batch, updates: int, tmp_path: Path
) -> None:
    # given
    algorithm = Noting()
    engine = trainer(algorithm=algorithm, micro_batch_tokens=60, updates=updates)
    _, expected = row_values(tiny, give_head(engine, tmp_path), stale)
    before, values = engine.logprobs(stale).values, torch.cat(expected).detach().numpy()
    weights = [tensor.clone() for _, tensor in engine.named_weights()]

    # when
    engine.train_step(stale)

    # then every token came once, with what was computed under the weights that the step began with
    drawn = stale.ragged("loss_mask").values
    behaviour = np.concatenate([t.behaviour.numpy() for t in algorithm.given])
    place = np.searchsorted(np.sort(stale.ragged("logprobs").values[drawn]), behaviour)
    order = np.argsort(stale.ragged("logprobs").values[drawn])[place]
    assert sorted(order) == list(range(int(drawn.sum())))
    for name, column, times in (("proximal_logprobs", before, 1), ("values", values, 1), ("twice", values, 2)):
        found = np.concatenate([t.columns[name].detach().numpy() for t in algorithm.given])
        np.testing.assert_allclose(found, times * column[drawn][order], atol=2e-5, err_msg=name)
    assert not any(t.columns["proximal_logprobs"].requires_grad for t in algorithm.given)
    assert all(t.entropy.requires_grad and t.values.requires_grad for t in algorithm.given)

    # and where there are several updates, the later ones are of new weights
    apart = [float((t.logprobs.detach() - t.columns["proximal_logprobs"]).abs().max()) for t in algorithm.given]
    assert (max(apart) > 1e-3) == (updates > 1)
    assert len({t.total_tokens for t in algorithm.given}) <= updates
    assert steps_of(engine, tmp_path) == {updates}
    assert not torch.equal(weights[0], next(iter(engine.named_weights()))[1])


def test_updates_of_fewer_rows_than_there_are_updates(trainer: Any, batch: Batch) -> None:
    engine = trainer(algorithm=af.GRPO(off_policy=af.OffPolicy()), updates=50)

    metrics = engine.train_step(batch).metrics

    assert metrics["rows_used"] < 50
    assert np.isfinite(list(metrics.values())).all()


def test_of_several_updates_those_whose_gradient_is_not_finite_are_left_out(
    trainer: Any, batch: Batch, tmp_path: Path
) -> None:
    # given updates of which the second has an infinite gradient
    algorithm = Faulty(calls=(2,))
    engine = trainer(algorithm=algorithm, updates=3)
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}

    metrics = engine.train_step(batch).metrics

    # then the others are made, and the step says so
    assert metrics["updates_skipped"] == 1
    assert np.isfinite(list(metrics.values())).all()
    assert steps_of(engine, tmp_path) == {2}
    trained = {name: tensor.clone() for name, tensor in engine.named_weights()}
    assert all(torch.isfinite(tensor).all() for tensor in trained.values())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trained.items())

    # and where none can be made the weights are as before, as of a single one
    algorithm.more.update({4, 5, 6})
    with pytest.raises(af.EngineError, match="grad_norm is (inf|nan); no step was made, the weights are as before"):
        engine.train_step(batch)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in engine.named_weights())
    assert engine.train_step(batch).metrics["updates_skipped"] == 0


def test_neither_makes_a_step_where_the_gradient_of_one_is_not_finite(
    trainer: Any, batch: Batch, tmp_path: Path
) -> None:
    engine = trainer(algorithm=FaultyPPO(calls=()))

    def weights() -> list[bytes]:
        engine.save(tmp_path)
        return [(tmp_path / each / "weights.safetensors").read_bytes() for each in (".", "critic")]

    before = weights()
    with pytest.raises(af.EngineError, match="critic_grad_norm is (inf|nan); no step was made"):
        engine.train_step(batch)
    assert weights() == before


@pytest.mark.parametrize("weight", ["plain", "truncate", "mask"])
def test_corrections_of_a_single_update_cost_no_further_pass(
    trainer: Any, stale: Batch, weight: Any, passes: Any
) -> None:
    correction = af.OffPolicy(weight=weight, low=0.9, high=1.1)
    engine = trainer(algorithm=af.GRPO(off_policy=correction, drop_zero_advantage=False), learning_rate=1e-9)
    watched = passes()

    metrics = engine.train_step(stale).metrics

    drawn = stale.ragged("loss_mask").values
    w = np.exp((engine.logprobs(stale).values - stale.ragged("logprobs").values)[drawn].astype(np.float64))
    outside = (w < 0.9) | (w > 1.1)
    wanted = {"plain": w, "truncate": np.minimum(w, 1.1), "mask": np.where(outside, 0, w)}[weight]
    cut = {"plain": outside & False, "truncate": w > 1.1, "mask": outside}[weight]
    assert len(watched.shapes) == 2, "one of the step, one of this test"
    assert metrics["off_policy_weight"] == pytest.approx(wanted.mean(), rel=1e-4)
    assert metrics["off_policy_cut"] == pytest.approx(cut.mean())
    assert metrics["clip_fraction"] == 0


@pytest.mark.parametrize("budget", [None, 60])
def test_the_drift_between_rollout_and_training_is_told_of_each_step(
    trainer: Any, stale: Batch, budget: int | None
) -> None:
    engine = trainer(algorithm=af.GRPO(drop_zero_advantage=False), micro_batch_tokens=budget, learning_rate=1e-9)

    metrics = engine.train_step(stale).metrics

    drawn = stale.ragged("loss_mask").values
    d = (engine.logprobs(stale).values - stale.ragged("logprobs").values)[drawn].astype(np.float64)
    w = np.exp(d)
    wanted = {
        "logprob_drift": np.abs(d).mean(), "importance_mean": w.mean(), "importance_max": w.max(),
        "importance_ess": w.sum() ** 2 / (w**2).sum() / len(w), "behaviour_kl": (w - 1 - d).mean(),
    }  # fmt: skip
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)


def test_the_drift_of_several_updates_is_that_of_the_first(trainer: Any, stale: Batch) -> None:
    """Later updates move the weights, and the engines agree nevertheless."""
    plain = af.GRPO(drop_zero_advantage=False)
    drawn = with_columns(stale, logprobs=trainer(algorithm=plain).logprobs(stale))

    metrics = trainer(algorithm=plain, updates=3, learning_rate=1e-2).train_step(drawn).metrics

    assert metrics["logprob_drift"] < 1e-5
    assert metrics["importance_max"] == pytest.approx(1, abs=1e-4)


def test_staleness_is_of_each_token_by_the_version_that_drew_it(trainer: Any, stale: Batch) -> None:
    # given: step 9, which trains version 11 after a rollback took two numbers; each response was drawn by two versions
    lengths = stale.ragged("response_ids").lengths
    spans = [np.array([[7, 0, 1], [10, 1, n]] if n > 1 else [[10, 0, 1]]) for n in lengths]
    step = with_columns(stale, version_spans=Ragged.of([row.astype(np.int64) for row in spans]))
    step.version_step_offsets = ((0, 0), (8, 2))
    algorithm = dataclasses.replace(Noting(), given=[])
    object.__setattr__(algorithm, "asks", ("staleness", "entropy", "values"))
    engine = trainer(algorithm=algorithm, micro_batch_tokens=60)
    with pytest.raises(af.SchemaError, match="no step of a run"):
        engine.train_step(step)
    step.index = 9  # type: ignore[attr-defined]

    engine.train_step(step)

    first = np.zeros(int(lengths.sum()), np.bool_)
    first[(np.cumsum(lengths) - lengths)[lengths > 1]] = True
    wanted = np.where(first, 9 - 7, 9 - (10 - 2))[stale.ragged("loss_mask").values]
    found = np.concatenate([tokens.columns["staleness"].numpy() for tokens in algorithm.given])
    assert sorted(found) == sorted(wanted)
    assert set(found) == {1.0, 2.0}


class WithoutCritic(TorchEngine):
    computes = tuple(name for name in TorchEngine.computes if name != "values")


def test_what_an_engine_does_not_compute_is_refused(tiny: str) -> None:
    with pytest.raises(af.ConfigError, match="PPO asks for values, which WithoutCritic does not compute"):
        WithoutCritic(tiny, algorithm=af.PPO())
    with pytest.raises(af.ConfigError, match="updates must be above 0"):
        TorchEngine(tiny, updates=0)
