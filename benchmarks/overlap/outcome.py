"""What came of a plan, and the tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from .plan import Plan
from .plans import ASYNCHRONOUS, MODES, PAPER

COLUMNS = (
    "shape", "rollout:train", "replicas", "mode", "policy", "max staleness", "rows/s", "simulated", "of simulated",
    "of slowest", "slowest", "staleness",
)  # fmt: skip
BOUNDS = {
    "synchronous": "rows / (longest replica + reward + reference + training + copy + load)",
    "streaming": "rows / (max(longest replica + last part through stages and training, each of them) + copy + load)",
    **dict.fromkeys(ASYNCHRONOUS, "rows / max(rollout, training + copy, reward, reference)"),
}
"""What each mode comes to at best. Rollout: rows · (mean length · (step_s / max_rows + step_row_s) + prefill) / replicas."""


@dataclass(frozen=True)
class Measured:
    """Rows in a second of the model's: measured, simulated, and what the slowest resource could do."""

    plan: Plan
    rate: float
    simulated: float
    slowest: float
    slowest_name: str
    staleness: float
    cpu: float

    @staticmethod
    def step_s(plan: Plan, trained_s: list[float]) -> float:
        """Of the steps that are measured."""
        return (trained_s[plan.steps - 1] - trained_s[plan.warm - 1]) / (plan.steps - plan.warm)

    @classmethod
    def of(cls, plan: Plan, simulated_s: list[float], real: dict[str, Any]) -> Measured:
        if not real["balanced"]:
            raise SystemExit(f"{plan.name}: the books do not balance: {real}")
        name, seconds = plan.slowest()
        return cls(
            plan, plan.rows / cls.step_s(plan, real["trained_s"]), plan.rows / cls.step_s(plan, simulated_s),
            plan.rows / seconds, name, sum(real["staleness"]) / len(real["staleness"]), real["driver_cpu"],
        )  # fmt: skip

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def of_simulation(self) -> float:
        return self.rate / self.simulated

    @property
    def of_slowest(self) -> float:
        return self.rate / self.slowest

    def cells(self) -> list[str]:
        plan = self.plan
        parts = f"{plan.ratio:g}:1" if plan.ratio >= 1 else f"1:{1 / plan.ratio:g}"
        return [
            plan.shape, parts, str(plan.replicas), plan.mode, plan.policy, str(plan.max_staleness), f"{self.rate:.2f}",
            f"{self.simulated:.2f}", f"{self.of_simulation:.3f}", f"{self.of_slowest:.3f}", self.slowest_name,
            f"{self.staleness:.2f}",
        ]  # fmt: skip

    def plain(self) -> dict[str, Any]:
        more = {"of_simulation": self.of_simulation, "of_slowest": self.of_slowest}
        plan = {name: getattr(self.plan, name) for name in self.plan.__struct_fields__}
        return {**asdict(self), **more, "plan": plan}


def show(found: list[Measured], markdown: bool) -> None:
    print_table("Overlap: timed engines in real processes", COLUMNS, [each.cells() for each in found], markdown)


def ablation_table(found: list[Measured], markdown: bool) -> None:
    """What each part adds, beside the paper."""
    for shape in ("7B", "32B"):
        base = [m for m in found if m.plan == _base(m.plan, shape)]
        rates = {m.plan.mode: m for m in base}
        if "synchronous" not in rates:
            continue
        first = rates["synchronous"]
        rows = [
            [
                mode, f"{rates[mode].rate / first.rate:.2f}", f"{rates[mode].simulated / first.simulated:.2f}",
                f"{PAPER[mode]:.2f}" if mode in PAPER and shape == "7B" else "", BOUNDS[mode],
            ]
            for mode in MODES
            if mode in rates
        ]  # fmt: skip
        title = f"Ablation, {shape}-like, 8 replicas, rollout : training 1:1, max_staleness 1"
        print_table(title, ("mode", "measured", "simulated", "paper", "at best"), rows, markdown)


def _base(plan: Plan, shape: str) -> Plan:
    """The plan of the ablation that has this one's mode."""
    late = 0 if plan.mode in ("synchronous", "streaming") else 1
    return Plan(shape=shape, mode=plan.mode, max_staleness=late, warm=plan.warm, steps=plan.steps)


def print_table(title: str, columns: tuple[str, ...], rows: list[list[str]], markdown: bool) -> None:
    if markdown:
        lines = [columns, ["---"] * len(columns), *rows]
        print("\n".join(f"| {' | '.join(line)} |" for line in lines), end="\n\n")
    table = Table(title=title)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)
