"""What came of a number of replicas, the table, and where the processors end it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..overlap.outcome import Measured
from .plan import PAPER, ScalePlan

COLUMNS = (
    "replicas", "rows/s", "of linear", "simulated", "of linear, simulated", "of simulated", "server ms/row",
    "server ms/step", "server, cores", "ours, cores", "machine, cores", "lease p50 ms", "lease p99 ms",
)  # fmt: skip
OURS = ("server", "replicas", "others")
FULL = 0.95
"""Processors that are busy for this part of the time have no more to give."""


@dataclass(frozen=True)
class Scale:
    """Rows in a second of the model's, measured and simulated. ``used``: processor seconds, by process, in the ``time`` of the
    measured steps. ``leases``: seconds that each lease took. Empty where nothing was measured."""

    plan: ScalePlan
    rate: float
    simulated: float
    used: dict[str, float]
    leases: tuple[float, ...]

    @classmethod
    def of(cls, plan: ScalePlan, simulated_s: list[float], real: dict[str, Any]) -> Scale:
        if not real["balanced"]:
            raise SystemExit(f"{plan.replicas} replicas: the books do not balance: {real}")
        used = real["used"]
        rate = plan.rows * (plan.steps - plan.warm) / (used["time"] * plan.time_scale)
        return cls(plan, rate, plan.rows / Measured.step_s(plan, simulated_s), used, tuple(real["leases"]))

    @classmethod
    def simulated_only(cls, plan: ScalePlan, simulated_s: list[float]) -> Scale:
        return cls(plan, 0.0, plan.rows / Measured.step_s(plan, simulated_s), {}, ())

    @property
    def measured(self) -> bool:
        return bool(self.used)

    @property
    def server_row_s(self) -> float:
        """Processor seconds of the server for a row."""
        return self.used["server"] / (self.plan.rows * (self.plan.steps - self.plan.warm))

    def cores(self, *roles: str) -> float:
        """Processors that were busy with these, on average."""
        return sum(self.used[role] for role in roles) / self.used["time"]

    @property
    def exhausted(self) -> bool:
        """True if the machine's processors had no more to give."""
        return self.measured and self.cores("machine") >= FULL * (os.cpu_count() or 1)

    def lease_ms(self, percent: float) -> float:
        return float(np.percentile(self.leases, percent)) * 1e3 if self.leases else float("nan")

    def numbers(self, found: Sequence[Scale]) -> dict[str, float | None]:
        """By column. A line through nothing and the first measured or simulated size is linear."""
        first = found[0]
        times = self.plan.replicas / first.plan.replicas
        simulated = self.simulated / (first.simulated * times)
        if not self.measured:
            values: list[float | None] = [None, None, self.simulated, simulated, *[None] * 8]
        else:
            linear = self.rate / (first.rate * times) if first.measured else None
            row_ms = self.server_row_s * 1e3
            values = [
                self.rate, linear, self.simulated, simulated, self.rate / self.simulated, row_ms, row_ms * self.plan.rows,
                self.cores("server"), self.cores(*OURS), self.cores("machine"),
                self.lease_ms(50), self.lease_ms(99),
            ]  # fmt: skip
        return dict(zip(COLUMNS, [self.plan.replicas, *values], strict=True))

    def cells(self, found: Sequence[Scale]) -> list[str]:
        replicas, *values = self.numbers(found).values()
        return [f"{replicas:g}", *("" if value is None else f"{value:,.4g}" for value in values)]

    def plain(self, found: Sequence[Scale]) -> dict[str, Any]:
        plan = {name: getattr(self.plan, name) for name in self.plan.__struct_fields__}
        return self.numbers(found) | {"used_s": self.used, "processors_ended_it": self.exhausted, "plan": plan}


def conclusion(found: Sequence[Scale]) -> str:
    """In words: where the processors end it, what the server alone could do, and what the simulation says from there on."""
    measured = [each for each in found if each.measured]
    lines = [_processors(measured), _server(measured)] if measured else []
    first, last = found[0], found[-1]
    linear, paper = (
        last.numbers(found)["of linear, simulated"],
        ", ".join(f"{name}: {part}" for name, part in PAPER.items()),
    )
    lines.append(
        f"With a server that costs nothing (simulated), {last.plan.replicas} replicas reach {linear:.3f} of linear from"
        f" {first.plan.replicas}; {paper}, from 32 to 1,024 devices."
    )
    return "\n".join(lines)


def _processors(measured: Sequence[Scale]) -> str:
    there = os.cpu_count() or 1
    ended = next((each for each in measured if each.exhausted), None)
    if ended is None:
        return f"The {there} processors of this machine were not full at any of the sizes that were run."
    foreign = ended.cores("machine") - ended.cores(*OURS)
    text = (
        f"The {there} processors of this machine end it at {ended.plan.replicas} replicas: of {ended.cores('machine'):.2f} busy"
        f" ones the server has {ended.cores('server'):.2f}, the replicas' processes {ended.cores('replicas'):.2f}, the run's"
        f" other processes {ended.cores('others'):.2f}, other programs {foreign:.2f}. From there on, the measured rates are the"
        " machine's, not the server's."
    )
    if foreign > (1 - FULL) * there:
        text += " Other programs were at work, so even this is no measure of the SDK: run it on an idle machine."
    return text


def _server(measured: Sequence[Scale]) -> str:
    """By the largest size at which there were processors left."""
    free = [each for each in measured if not each.exhausted]
    at = free[-1] if free else measured[0]
    most, a_replica = 1 / at.server_row_s, at.simulated / at.plan.replicas
    return (
        f"The server needs {at.server_row_s * 1e3:.3g} ms of processor time a row, at {at.plan.replicas} replicas. One core of"
        f" its own would be full at {most:,.0f} rows/s, of {most / a_replica:,.0f} such replicas."
    )
