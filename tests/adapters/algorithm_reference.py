"""Losses and advantages of the papers, token by token in float64: nothing of the SDK is used, and no array operation stands for a sum.

A case is a list of rows; a row is a list of tokens; a token is a dict of numbers. Gradients are central differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

BOUND = 20.0
Rows = list[list[dict[str, float]]]


def exp(x: float) -> float:
    return math.exp(min(max(x, -BOUND), BOUND))


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def mean(rows: Rows, term: Callable[[dict[str, float]], float], over: str, length: int) -> float:
    if over == "tokens":
        return sum(term(t) for row in rows for t in row) / sum(len(row) for row in rows)
    if over == "rows":
        return sum(sum(term(t) for t in row) / len(row) for row in rows) / len(rows)
    return sum(term(t) for row in rows for t in row) / len(rows) / length


def penalty(token: dict[str, float], estimator: str, log_p: str = "new") -> float:
    log_ratio = clamp(token[log_p] - token["ref"], -BOUND, BOUND)  # log π/ref
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    return math.exp(-log_ratio) + log_ratio - 1


def loss(rows: Rows, at: Rows, said: dict[str, Any]) -> float:
    """Of the tokens ``rows``; what has no gradient (weights, in CISPO the ratio) is taken from ``at``, the same before they were moved."""
    frozen = {id(t): u for row, other in zip(rows, at, strict=True) for t, u in zip(row, other, strict=True)}
    correction = said.get("off_policy")

    def old(t: dict[str, float]) -> float:
        if not correction:
            return t["behaviour"]
        if correction["proximal"] == "computed":
            return t["prox"]
        versions = t["late"] + 1  # between the policy that drew it and the one being trained
        before = frozen.get(id(t), t)
        return before["new"] / versions * (versions - 1) + before["behaviour"] / versions

    def ratios(of: Rows) -> dict[int, float]:
        found = {}
        for row in of:
            apart = [t["new"] - old(t) for t in row]
            for t, each in zip(row, apart, strict=True):
                found[id(t)] = exp(each if said["ratio"] == "token" else sum(apart) / len(row))
        return found

    ratio, still = ratios(rows), ratios(at)
    low, high = 1 - said["clip_low"], 1 + said["clip_high"]

    def gain(t: dict[str, float]) -> float:
        a = t["advantage"]
        if said["surrogate"] == "clip":
            value = min(ratio[id(t)] * a, clamp(ratio[id(t)], low, high) * a)
            if said.get("dual_clip") and a < 0:
                value = max(value, said["dual_clip"] * a)
        else:
            value = clamp(still[id(frozen[id(t)])], low, high) * a * max(t["new"], -1e4)
        if correction:
            weight = exp(old(t) - t["behaviour"])
            if correction["weight"] == "truncate":
                weight = min(weight, correction["high"])
            if correction["weight"] == "mask" and not correction["low"] <= weight <= correction["high"]:
                weight = 0.0
            value *= weight
        return value

    def over(term: Callable[[dict[str, float]], float]) -> float:
        return mean(rows, term, said["mean"], said.get("length", 1))

    total = -over(gain)
    if (kl := said.get("kl")) and kl["where"] == "loss":
        total += kl["coef"] * over(lambda t: penalty(t, kl["estimator"]))
    if said.get("entropy"):
        total -= said["entropy"] * over(lambda t: t["entropy"])
    if critic := said.get("critic"):

        def error(t: dict[str, float]) -> float:
            far = (t["value"] - t["return"]) ** 2
            near = clamp(t["value"], t["before"] - critic["clip"], t["before"] + critic["clip"])
            return 0.5 * max(far, (near - t["return"]) ** 2)

        total += critic["coef"] * over(error)
    return total


def gradient(rows: Rows, said: dict[str, Any], name: str, step: float = 1e-6) -> list[float]:
    """Of the loss by number ``name`` of each token."""
    found = []
    for row in range(len(rows)):
        for token in range(len(rows[row])):
            ends = []
            for sign in (1, -1):
                moved = [[dict(t) for t in each] for each in rows]
                moved[row][token][name] += sign * step
                ends.append(loss(moved, rows, said))
            found.append((ends[0] - ends[1]) / (2 * step))
    return found


def group_relative(rewards: list[float], groups: list[int], divide: bool, epsilon: float) -> list[float]:
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        middle = sum(mine) / len(mine)
        spread = math.sqrt(sum((r - middle) ** 2 for r in mine) / (len(mine) - 1)) if len(mine) > 1 else 0.0
        same = max(mine) == min(mine)
        found.append(0.0 if same else (reward - middle) / (spread + epsilon if divide else 1.0))
    return found


def estimated(rewards: list[float], values: list[float], discount: float, decay: float) -> list[float]:
    """GAE as the sum that it is, of every later temporal difference: arXiv 1506.02438, eq. 16."""
    ahead = [*values[1:], 0.0][: len(values)]
    deltas = [r + discount * v1 - v0 for r, v1, v0 in zip(rewards, ahead, values, strict=True)]
    return [sum((discount * decay) ** n * d for n, d in enumerate(deltas[t:])) for t in range(len(values))]
