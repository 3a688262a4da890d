"""Every algorithm that comes with the SDK: its loss, its gradients and its advantages against independent float64 formulas."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from typing import Any

import numpy as np
import pytest
import torch

import asyncflow_sdk as af
from asyncflow_sdk.algorithms import gae
from asyncflow_sdk.interfaces import PackedTokens

Rows = list[list[dict[str, float]]]


def bounded(x: Any) -> Any:
    return x.clamp(-20.0, 20.0)


def penalty(log_p: Any, log_ref: Any, estimator: str) -> Any:
    d = bounded(log_p - log_ref)
    return {"k1": d, "k2": d * d / 2, "k3": (-d).exp() + d - 1}[estimator]


def expected_loss(lengths: list[int], t: dict[str, Any], said: dict[str, Any]) -> Any:
    """The papers' formulas, in float64 and row by row; gradients are torch's. ``said``: the fields of an algorithm."""
    correction, versions = said.get("off_policy"), t["late"] + 1

    def mean(terms: Any) -> Any:
        sums = [row.sum() for row in terms.split(lengths)]
        if said["mean"] == "tokens":
            return sum(sums) / sum(lengths)
        each = [row / n for row, n in zip(sums, lengths, strict=True)] if said["mean"] == "rows" else sums
        return sum(each) / len(lengths) / (said["length"] if said["mean"] == "length" else 1)

    old = t["behaviour"]
    if correction:  # by the policy between the one that drew a token and the one being trained
        between = t["new"].detach() * (versions - 1) / versions + t["behaviour"] / versions
        old = t["prox"] if correction["proximal"] == "computed" else between
    apart = t["new"] - old
    if said["ratio"] == "sequence":
        apart = torch.cat([row.mean().expand(len(row)) for row in apart.split(lengths)])
    ratio, low, high, a = bounded(apart).exp(), 1 - said["clip_low"], 1 + said["clip_high"], t["advantage"]
    if said["surrogate"] == "clip":
        gain = torch.minimum(ratio * a, ratio.clamp(low, high) * a)
        if said.get("dual_clip"):
            gain = torch.where(a < 0, torch.maximum(gain, said["dual_clip"] * a), gain)
    else:
        gain = ratio.detach().clamp(low, high) * a * t["new"].clamp(min=-1e4)
    if correction:
        weight = bounded(old - t["behaviour"]).exp()
        if correction["weight"] == "truncate":
            weight = weight.clamp(max=correction["high"])
        if correction["weight"] == "mask":
            weight = weight * ((weight >= correction["low"]) & (weight <= correction["high"]))
        gain = gain * weight.detach()
    total = -mean(gain)
    if (kl := said.get("kl")) and kl["where"] == "loss":
        total = total + kl["coef"] * mean(penalty(t["new"], t["ref"], kl["estimator"]))
    if said.get("entropy"):
        total = total - said["entropy"] * mean(t["entropy"])
    if critic := said.get("critic"):
        near = torch.minimum(torch.maximum(t["value"], t["before"] - critic["clip"]), t["before"] + critic["clip"])
        errors = torch.maximum((t["value"] - t["return"]) ** 2, (near - t["return"]) ** 2)
        total = total + critic["coef"] * mean(errors / 2)
    return total


def group_relative(rewards: list[float], groups: list[int], divide: bool) -> list[float]:
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        spread = statistics.stdev(mine) if len(mine) > 1 else 0.0
        found.append(
            (reward - statistics.mean(mine)) / (spread + 1e-4 if divide else 1.0) if len(set(mine)) > 1 else 0.0
        )
    return found


def estimated(rewards: list[float], values: list[float], discount: float, decay: float) -> list[float]:
    """GAE as the sum that it is, of every later temporal difference: arXiv 1506.02438, eq. 16."""
    deltas = [r + discount * v1 - v0 for r, v1, v0 in zip(rewards, [*values[1:], 0.0], values, strict=False)]
    return [sum((discount * decay) ** n * d for n, d in enumerate(deltas[t:])) for t in range(len(values))]


CORRECTIONS = [
    af.OffPolicy(weight="plain"), af.OffPolicy(weight="truncate", high=1.2), af.OffPolicy(weight="mask", low=0.8, high=1.3)
]  # fmt: skip
ALGORITHMS: list[af.PolicyGradient] = [
    af.GRPO(),
    af.GRPO(mean="rows", clip_high=0.2, kl=af.KL(coef=0.04)),
    af.DrGRPO(length=7),
    af.DAPO(dual_clip=3.0, entropy=0.01),
    af.GSPO(clip_low=0.05, clip_high=0.1),
    af.GSPO(clip_low=0.05, clip_high=0.1, mean="tokens"),
    af.CISPO(),
    af.CISPO(clip_low=0.1, clip_high=0.2),
    af.PPO(),
    af.PPO(kl=af.KL(coef=0.1, estimator="k1"), critic=af.Critic(clip=0.1, coef=1.5), entropy=0.1, mean="rows"),
    *(af.GRPO(kl=af.KL(coef=0.3, estimator=each), mean="length", length=3) for each in ("k1", "k2", "k3")),
    *(dataclasses.replace(kind, off_policy=each) for kind in (af.DAPO(), af.CISPO()) for each in CORRECTIONS),
    af.GSPO(clip_low=0.05, clip_high=0.1, off_policy=CORRECTIONS[1]),
    af.PPO(off_policy=CORRECTIONS[2], dual_clip=2.0),
    af.DAPO(off_policy=af.OffPolicy(weight="plain", proximal="interpolated")),
    af.GSPO(clip_low=0.05, clip_high=0.1, off_policy=af.OffPolicy(proximal="interpolated", high=1.1)),
]
IDS = [f"{type(each).__name__}-{number}" for number, each in enumerate(ALGORITHMS)]


def ragged(seed: int) -> Rows:
    """Rows of 1 to 9 tokens, one-token rows among them, of which some are clipped on either side."""
    rng = np.random.default_rng(seed)
    rows: Rows = []
    for length in [1, *rng.integers(1, 10, 11), 1]:
        worth = rng.normal()
        rows.append([])
        for _ in range(length):
            behaviour = -rng.exponential()
            before, proximal = rng.normal(), behaviour + rng.normal(0, 0.25)
            rows[-1].append({
                "behaviour": behaviour, "prox": proximal, "new": min(proximal + rng.normal(0, 0.3), -1e-3),
                "ref": behaviour + rng.normal(0, 0.5), "advantage": worth, "entropy": rng.exponential(), "late": float(rng.integers(0, 4)),
                "value": before + rng.normal(0, 0.3), "before": before, "return": rng.normal(),
            })  # fmt: skip
    return rows


def packed(rows: Rows, names: dict[str, Any], first: int = 0, count: int | None = None) -> PackedTokens:
    """Some of the rows as an engine gives them; ``names``: tensors by name, of all tokens."""
    lengths = [len(row) for row in rows]
    count = len(rows) - first if count is None else count
    part = slice(sum(lengths[:first]), sum(lengths[: first + count]))
    row = torch.tensor(np.repeat(np.arange(count), lengths[first : first + count]))
    each = {name: tensor[part] for name, tensor in names.items()}
    return PackedTokens(
        logprobs=each["new"], behaviour=each["behaviour"], advantages=each["advantage"], rows=row, row_count=count,
        total_tokens=sum(lengths), total_rows=len(rows), entropy=each["entropy"], values=each["value"],
        columns={
            "ref_logprobs": each["ref"], "proximal_logprobs": each["prox"], "values": each["before"],
            "returns": each["return"], "staleness": each["late"],
        },
    )  # fmt: skip


def tensors(rows: Rows) -> dict[str, Any]:
    flat = [token for row in rows for token in row]
    made = {name: torch.tensor([t[name] for t in flat], dtype=torch.float64) for name in flat[0]}
    for name in ("new", "entropy", "value"):
        made[name].requires_grad_(True)
    return made


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_loss_and_gradients_are_the_formulas(algorithm: af.PolicyGradient) -> None:
    # given
    rows, said = ragged(0), dataclasses.asdict(algorithm)
    given = tensors(rows)

    # when
    loss, metrics = algorithm.loss(packed(rows, given))
    loss.backward()

    # then
    twin = tensors(rows)
    wanted = expected_loss([len(row) for row in rows], twin, said)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-9, abs=1e-12)
    for name, asked in (("new", True), ("entropy", algorithm.entropy), ("value", algorithm.critic)):
        if asked:
            np.testing.assert_allclose(given[name].grad, twin[name].grad, rtol=1e-9, atol=1e-12)
        else:
            assert given[name].grad is None
    assert not any(getattr(value, "requires_grad", False) for value in metrics.values())
    assert all(np.isfinite(float(value)) for value in metrics.values())


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_losses_gradients_and_metrics_of_parts_add_up(algorithm: af.PolicyGradient) -> None:
    rows = ragged(2)
    whole, parts = tensors(rows), tensors(rows)
    loss, metrics = algorithm.loss(packed(rows, whole))
    loss.backward()

    sums: dict[str, float] = {"loss": 0.0}
    for first, count in ((0, 1), (1, 7), (8, 5)):
        some, measured = algorithm.loss(packed(rows, parts, first, count))
        some.backward()
        for name, value in {**measured, "loss": some.detach()}.items():
            sums[name] = sums.get(name, 0.0) + float(value)

    assert sums == pytest.approx(
        {name: float(v) for name, v in {**metrics, "loss": loss.detach()}.items()}, rel=1e-6, abs=1e-9
    )
    torch.testing.assert_close(parts["new"].grad, whole["new"].grad)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_whatever_the_ratios_loss_and_gradients_are_numbers(algorithm: af.PolicyGradient) -> None:
    # given rows of one token and more of which one is beyond all bounds, of either advantage
    for drift, worth in itertools.product((1e30, -300.0, -np.inf), (1.0, -1.0, 0.0)):
        rows = ragged(3)
        for row in (0, 4):
            rows[row][0] |= {"new": drift, "advantage": worth}
        given = tensors(rows)

        loss, _ = algorithm.loss(packed(rows, given))
        loss.backward()

        assert torch.isfinite(loss)
        assert torch.isfinite(given["new"].grad).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_a_part_that_has_no_tokens_costs_nothing(algorithm: af.PolicyGradient) -> None:
    rows = ragged(4)
    given = tensors(rows)

    loss, metrics = algorithm.loss(packed(rows, given, 3, 0))
    loss.backward()
    none = dataclasses.replace(packed(rows, given, 3, 0), total_tokens=0, total_rows=0)

    assert loss.item() == 0
    assert all(float(value) == 0 for value in metrics.values())
    assert algorithm.loss(none)[0].item() == 0


def test_what_the_clip_cuts_has_no_gradient_and_is_counted() -> None:
    rows = ragged(5)
    for algorithm in (af.DAPO(dual_clip=1.5), af.GSPO(clip_low=0.01, clip_high=0.02)):
        given = tensors(rows)
        loss, metrics = algorithm.loss(packed(rows, given))
        loss.backward()
        share = (given["new"].grad == 0).double().mean().item()
        assert 0.05 < share < 0.95
        assert float(metrics["clip_fraction"]) == pytest.approx(share)
    given = tensors(rows)
    loss, metrics = af.CISPO(clip_low=0.1, clip_high=0.1).loss(packed(rows, given))
    loss.backward()
    assert float(metrics["clip_fraction"]) > 0.1
    assert (given["new"].grad != 0).all()


# ---- advantages


def step(seed: int = 0, **more: Any) -> tuple[af.Batch, list[list[float]], np.ndarray]:
    """A batch of groups of 1 to 5 rows in any order, its log-probs by row, and which tokens were drawn."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat([5, 2, 9, 7], [1, 4, 5, 3]))
    lengths = rng.integers(1, 8, len(groups))
    tokens = int(lengths.sum())
    drawn = rng.random(tokens) < 0.7
    drawn[np.cumsum(lengths) - 1] = False  # a row's last token was observed
    drawn[np.cumsum(lengths) - lengths] = True
    columns = {
        "logprobs": -rng.exponential(size=tokens), "ref_logprobs": -rng.exponential(size=tokens),
        "values": rng.normal(size=tokens),
    }  # fmt: skip
    made = {name: af.Ragged.from_lengths(values.astype(np.float32), lengths) for name, values in columns.items()}
    batch = af.Batch.of(
        made | {
            "response_ids": af.Ragged.from_lengths(np.ones(tokens, np.int32), lengths),
            "reward": rng.normal(size=len(groups)).astype(np.float32),
        } | ({"loss_mask": af.Ragged.from_lengths(drawn, lengths)} if more.get("masked") else {}),
        groups=groups,
    )  # fmt: skip
    return batch, [row.tolist() for row in batch.ragged("logprobs")], drawn if more.get("masked") else drawn | True


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("estimator", [None, "k1", "k2", "k3"])
@pytest.mark.parametrize("divide", [True, False])
def test_advantages_of_groups(masked: bool, estimator: Any, divide: bool) -> None:
    # given a penalty for being unlike the reference, and one for length
    batch, logprobs, drawn = step(masked=masked)
    kl = None if estimator is None else af.KL(coef=0.2, estimator=estimator, where="reward")
    algorithm = af.DAPO(normalize_std=divide, overlong=af.Overlong(max_tokens=6, buffer=4), kl=kl)

    # when
    advantages = algorithm.advantages(batch)

    # then
    marks, rewards = np.split(drawn, batch.ragged("logprobs").offsets[1:-1]), []
    for row, (mine, ref) in enumerate(zip(logprobs, batch.ragged("ref_logprobs").tolist(), strict=True)):
        over = len(mine) - 2  # buffer: 3 to 6 tokens
        reward = float(batch.array("reward")[row]) + (0 if over <= 0 else -1 if over > 4 else -over / 4)
        if estimator is not None:
            costs = penalty(*(torch.tensor(each, dtype=torch.float64) for each in (mine, ref)), estimator).tolist()
            reward -= 0.2 * sum(c for c, d in zip(costs, marks[row], strict=True) if d)
        rewards.append(reward)
    wanted = group_relative(rewards, batch.groups.tolist(), divide)
    np.testing.assert_allclose(advantages, wanted, rtol=1e-6, atol=1e-7)
    assert advantages[batch.groups == 5] == 0, "a group of one"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize("divide", [True, False])
def test_advantages_of_a_critic(masked: bool, penalised: bool, divide: bool) -> None:
    batch, logprobs, drawn = step(1, masked=masked)
    kl = af.KL(coef=0.2, estimator="k1", where="reward") if penalised else None
    algorithm = af.PPO(kl=kl, critic=af.Critic(discount=0.97, decay=0.8), normalize_std=divide)

    found: Any = algorithm.advantages(batch)

    offsets, advantages, returns = batch.ragged("logprobs").offsets, [], []
    for row, marks in enumerate(np.split(drawn, offsets[1:-1])):
        value, ref = batch.ragged("values").tolist()[row], batch.ragged("ref_logprobs").tolist()[row]
        kept = [t for t in range(len(marks)) if marks[t]]
        rewards = [-0.2 * (logprobs[row][t] - ref[t]) if penalised else 0.0 for t in kept]
        rewards[-1] += float(batch.array("reward")[row])
        mine = estimated(rewards, [value[t] for t in kept], 0.97, 0.8)
        advantages += mine
        returns += [a + value[t] for a, t in zip(mine, kept, strict=True)]
    if divide:
        middle = sum(advantages) / len(advantages)
        spread = (sum((a - middle) ** 2 for a in advantages) / len(advantages)) ** 0.5
        advantages = [(a - middle) / (spread + 1e-4) for a in advantages]
    np.testing.assert_allclose(found["advantages"].values[drawn], advantages, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found["returns"].values[drawn], returns, rtol=1e-6, atol=1e-6)
    assert not found["advantages"].values[~drawn].any()
    assert found["advantages"].lengths.tolist() == batch.ragged("logprobs").lengths.tolist()


@pytest.mark.parametrize("lengths", [[1], [3, 1, 2], [1, 1], [0, 2, 0], [], [0]])
def test_estimates_of_rows_of_any_length(lengths: list[int]) -> None:
    rng = np.random.default_rng(6)
    rewards, values = rng.normal(size=(2, sum(lengths)))
    given = np.array(lengths, np.int64)

    found = gae(rewards, values, given, discount=0.9, decay=0.7)

    parts = [np.split(each, np.cumsum(given)[:-1]) if len(given) else [] for each in (rewards, values)]
    wanted = [estimated(r.tolist(), v.tolist(), 0.9, 0.7) for r, v in zip(*parts, strict=True)]
    np.testing.assert_allclose(found, [a for row in wanted for a in row], rtol=1e-12)


@pytest.mark.parametrize("algorithm", [af.GRPO(), af.DrGRPO(), af.GSPO(), af.CISPO(), af.DAPO()])
def test_equal_rewards_are_worth_exactly_nothing(algorithm: af.PolicyGradient) -> None:
    batch, _, _ = step()
    same = af.Batch.of(
        {name: batch[name] for name in batch} | {"reward": np.full(batch.rows, 0.1)}, groups=batch.groups
    )

    assert not np.any(algorithm.advantages(same))


def test_groups_that_teach_nothing_are_filtered_as_they_are_scored() -> None:
    found = af.dynamic_sampling(np.array([1, 0, 2, 2, 3]), np.array([7, 7, 4, 4, 9]))

    assert found["filtered"].tolist() == [False, False, True, True, True]
    assert found["reward"].tolist() == [1, 0, 2, 2, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: af.GRPO(ratio="row"), "ratio must be 'token' or 'sequence'"),
        (lambda: af.GRPO(clip_low=1.0), "clip range"),
        (lambda: af.GRPO(dual_clip=1.1), "dual_clip=1.1 must be above"),
        (lambda: af.GRPO(entropy=-1.0), "entropy must be 0 or more"),
        (lambda: af.DrGRPO(length=0), "length must be 1 or more"),
        (lambda: af.KL(estimator="k4"), "estimator must be 'k1' or 'k2' or 'k3'"),
        (lambda: af.KL(where="both"), "where must be"),
        (lambda: af.OffPolicy(low=2.0), "low=2.0 must be 0 or more and below"),
        (lambda: af.OffPolicy(weight="clip"), "weight must be"),
        (lambda: af.OffPolicy(proximal="guessed"), "proximal must be"),
        (lambda: af.Critic(coef=0), "coef must be above 0"),
        (lambda: af.Overlong(max_tokens=4, buffer=5), "buffer=5 must be from 1"),
        (lambda: af.Overlong(), "buffer=0 must be from 1"),
        (lambda: af.PPO(overlong=af.Overlong(mask_truncated=True)), "mask_truncated leaves rows out .* no critic"),
        (lambda: af.GRPO().check(group_size=1), "group_size is 1"),
    ],
)
def test_what_cannot_be_is_told_when_it_is_made(make: Any, message: str) -> None:
    with pytest.raises(af.ConfigError, match=message):
        make()
    af.PPO().check(group_size=1)
