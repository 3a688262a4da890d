"""The picture: what each part adds, what staleness buys, and what more replicas bring."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from .outcome import Measured
from .plans import ASYNCHRONOUS, MODES, PAPER

OURS, SIMULATED, PAPERS = "#3b75af", "#1f2328", "#c9a227"


def draw(found: list[Measured], path: Path) -> None:
    """Write the picture of the 7B-like runs with as much rollout as training; the first two parts are of 8 replicas."""
    alike = [m for m in found if (m.plan.shape, m.plan.ratio) == ("7B", 1.0)]
    base = [m for m in alike if m.plan.replicas == 8]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.2))
    _ablation(left, [m for m in base if m.plan.policy == "wait" and m.plan.max_staleness <= 1])
    _staleness(middle, base)
    _replicas(right, [m for m in alike if m.plan.policy == "wait"])
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
    axes.set_xticks(at, [mode.replace(" and ", "\nand ") for mode in modes])
    axes.set_ylim(0, 3.6)
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


def _replicas(axes: plt.Axes, found: list[Measured]) -> None:
    """More replicas, and a trainer as much faster: rows a second, as far as each mode was run with several numbers of them."""
    for mode, late in (("synchronous", 0), ("asynchronous", 1), ("in flight", 4)):
        line = sorted((m for m in found if (m.plan.mode, _late(m)) == (mode, late)), key=lambda m: m.plan.replicas)
        if len(line) > 1:
            at = [m.plan.replicas for m in line]
            shown = axes.plot(at, [m.simulated for m in line], label=f"{mode}, max_staleness {late}")
            axes.plot(at, [m.rate for m in line], "o", color=shown[0].get_color())
    replicas = sorted({m.plan.replicas: m.slowest for m in found}.items())
    axes.plot(*zip(*replicas, strict=True), color="#8b949e", linewidth=0.8, label="the slowest resource")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks([number for number, _ in replicas], [str(number) for number, _ in replicas])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("replicas")
    axes.set_title("Rows a second: simulated (lines), measured (dots)", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _late(measured: Measured) -> int:
    return measured.plan.max_staleness
