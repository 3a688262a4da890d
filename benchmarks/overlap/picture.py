"""The picture: what each part adds, and what staleness buys."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from .outcome import Measured
from .plans import ASYNCHRONOUS, MODES, PAPER

OURS, SIMULATED, PAPERS = "#3b75af", "#1f2328", "#c9a227"


def draw(found: list[Measured], path: Path) -> None:
    """Write the picture of the 7B-like runs with 8 replicas and as much rollout as training."""
    base = [m for m in found if (m.plan.shape, m.plan.replicas, m.plan.ratio) == ("7B", 8, 1.0)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    _ablation(left, [m for m in base if m.plan.policy == "wait" and m.plan.max_staleness <= 1])
    _staleness(right, base)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _ablation(axes: plt.Axes, found: list[Measured]) -> None:
    rates = {m.plan.mode: m for m in found}
    first = rates["synchronous"]
    modes = [mode for mode in MODES if mode in rates]
    at = range(len(modes))
    axes.bar(at, [rates[mode].rate / first.rate for mode in modes], 0.55, color=OURS, label="measured")
    simulated = [rates[mode].simulated / first.simulated for mode in modes]
    axes.plot(at, simulated, "_", color=SIMULATED, markersize=30, label="simulated, an SDK that costs nothing")
    papers = [i for i, mode in enumerate(modes) if mode in PAPER]
    axes.plot(papers, [PAPER[modes[i]] for i in papers], "D", color=PAPERS, label="the paper's ablation")
    axes.set_xticks(at, modes)
    axes.set_title("Throughput by part, synchronous = 1 (max_staleness 1)", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _staleness(axes: plt.Axes, found: list[Measured]) -> None:
    for mode in ASYNCHRONOUS:
        for policy, style in (("wait", "-"), ("count", "--")):
            line = sorted((m for m in found if (m.plan.mode, m.plan.policy) == (mode, policy)), key=_late)
            if len(line) > 1:
                shown = axes.plot(
                    [_late(m) for m in line],
                    [m.simulated / m.slowest for m in line],
                    style,
                    label=f"{mode}, {policy}",
                )
                axes.plot([_late(m) for m in line], [m.of_slowest for m in line], "o", color=shown[0].get_color())
    axes.axhline(1.0, color="#8b949e", linewidth=0.8)
    axes.set_ylim(0, 1.1)
    axes.set_xlabel("max_staleness")
    axes.set_title("Of the slowest resource's rate: simulated (lines), measured (dots)", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _late(measured: Measured) -> int:
    return measured.plan.max_staleness
