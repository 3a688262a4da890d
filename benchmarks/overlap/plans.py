"""Which plans are run: the paper's ablation, then one thing varied at a time."""

from __future__ import annotations

from typing import Any

from .plan import Mode, Plan

MEASURED = 6
QUICK_MEASURED = 3
PAPER = {"synchronous": 1.0, "streaming": 2.01, "streaming and asynchronous": 2.74}
"""Throughput of Qwen2.5 7B on 512 devices: without its queue, with it, and asynchronous, too (arXiv 2507.01663)."""
MODES: tuple[Mode, ...] = (
    "synchronous", "streaming", "asynchronous", "streaming and asynchronous", "staggered", "in flight",
)  # fmt: skip
ASYNCHRONOUS = MODES[2:]


def plan(mode: Mode, max_staleness: int = 1, *, quick: bool = False, **options: Any) -> Plan:
    """Steps are measured once as many are trained as could be filled ahead."""
    late = 0 if mode in ("synchronous", "streaming") else max_staleness
    warm = late + 1
    measured = QUICK_MEASURED if quick else MEASURED
    return Plan(mode=mode, max_staleness=late, warm=warm, steps=warm + measured, **options)


def ablation(*, quick: bool = False, **options: Any) -> list[Plan]:
    return [plan(mode, quick=quick, **options) for mode in MODES]


def quick_plans() -> list[Plan]:
    return [*ablation(quick=True), plan("in flight", 4, quick=True), plan("in flight", 2, policy="count", quick=True)]


def all_plans() -> list[Plan]:
    plans = [*ablation(), *ablation(shape="32B")]
    for late in (2, 4):
        plans += [plan(mode, late) for mode in ASYNCHRONOUS]
    for late in (1, 2, 4):
        plans += [plan(mode, late, policy="count") for mode in ("asynchronous", "in flight")]
    for policy in ("wait", "count"):
        plans.append(plan("in flight", 4, shape="32B", policy=policy))
    for ratio in (1 / 3, 3.0):
        plans += [plan(mode, ratio=ratio) for mode in MODES[:4]]
    plans += [plan("in flight", 4, ratio=ratio) for ratio in (1 / 3, 3.0)]
    plans += [plan(mode, replicas=32) for mode in ("synchronous", "asynchronous")]
    plans += [plan("in flight", 4, replicas=replicas) for replicas in (4, 16, 32)]
    return plans
