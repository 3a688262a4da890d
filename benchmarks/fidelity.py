"""``make fidelity``: what staleness does to what is learned, with and without the off-policy correction.

python -m benchmarks.fidelity [--steps N] [--seeds 0,1,2,3,4] [--staleness 0,1,2,4] [--corrections none,truncated,masked]
    [--picture PATH] [--markdown] [--json PATH]

The demo task by the same SDK, the same start and prompts for each seed: only how old tokens may be differs, and whether the loss weighs
them by how likely the weights that the step begins with are to draw them (``af.OffPolicy``, truncated and masked). Long: some 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics as st
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .demo import run
from .demo_seeds import WINDOW, curve

WEIGHTS = {"none": [], "truncated": ["--weight", "truncate"], "masked": ["--weight", "mask"]}
HEADINGS = [
    "max_staleness",
    "correction",
    "mean staleness of tokens",
    f"last {WINDOW} steps",
    "all steps",
    "difference from synchronous",
    "cut",
    "effective sample",
]
Results = dict[tuple[int, str], list[dict[str, Any]]]
"""By max_staleness and correction, one for each seed."""


def measure(seeds: list[int], staleness: list[int], corrections: list[str], steps: int, console: Console) -> Results:
    from asyncflow_torch.demo.model import warm_up

    results: Results = {(most, name): [] for most in staleness for name in corrections}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            model = Path(folder) / f"start-{seed}"
            warm_up(model, seed=seed)
            for (most, name), found in results.items():
                command = [sys.executable, "-m", "benchmarks.async_run", str(model), str(steps), str(seed), str(most)]
                found.append(run(command + WEIGHTS[name]))
                last = curve(found[-1])[-1]
                console.print(
                    f"seed {seed}, max_staleness {most}, correction {name}: {last:.3f} at the end", style="dim"
                )
    return results


def cells(results: Results) -> list[list[str]]:
    """Rewards are means over seeds, ± their spread (standard deviation of the seeds). Apart: of the same seed with the least staleness and the first correction,
    the mean over steps of the curves' difference, its mean over seeds ± its spread. Cut: share of the tokens whose gradient the clip took away, or whose
    weight the correction changed. Effective sample: (Σ w)² / Σ w² as a share of a step's tokens, w = π / π_behaviour."""
    least = min(most for most, _ in results)
    base = [curve(result) for result in results[least, next(name for _, name in results)]]
    rows = []
    for (most, name), found in results.items():
        curves = [curve(result) for result in found]
        rows.append([
            str(most), name, f"{_mean(found, 'staleness_mean'):.2f}", spread([line[-1] for line in curves]), spread([line.mean() for line in curves]),
            spread([(line - other).mean() for line, other in zip(curves, base, strict=True)]),
            f"{_mean(found, 'off_policy_cut' if WEIGHTS[name] else 'clip_fraction') * 100:.1f} %", f"{_mean(found, 'importance_ess') * 100:.0f} %",
        ])  # fmt: skip
    return rows


def _mean(found: list[dict[str, Any]], name: str) -> float:
    """Of all steps of all seeds."""
    return st.mean(float(np.mean([step[name] for step in result["steps"]])) for result in found)


def spread(values: list[float]) -> str:
    return f"{st.mean(values):.3f} ± {st.stdev(values) if len(values) > 1 else 0.0:.3f}"


def draw(results: Results, path: Path) -> None:
    """A panel for each correction: the mean over seeds for each staleness, and how far seeds lie apart."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    corrections = list(dict.fromkeys(name for _, name in results))
    figure, panels = plt.subplots(
        1, len(corrections), figsize=(1 + 5 * len(corrections), 4.2), sharey=True, squeeze=False
    )
    colours = dict(
        zip(sorted({most for most, _ in results}), ("#3b75af", "#c9582a", "#4c9a52", "#8b5fa8"), strict=False)
    )
    for panel, name in zip(panels[0], corrections, strict=True):
        for (most, weight), found in results.items():
            if weight != name:
                continue
            curves = np.stack([curve(result) for result in found])
            steps = np.arange(len(found[0]["steps"]) - curves.shape[1] + 1, len(found[0]["steps"]) + 1)
            colour = colours.get(most, "#8b949e")
            panel.fill_between(steps, curves.min(0), curves.max(0), color=colour, alpha=0.12, linewidth=0)
            panel.plot(steps, curves.mean(0), color=colour, linewidth=1.8, label=f"max_staleness {most}")
        panel.set_title(f"correction: {name}", fontsize=10)
        panel.set_xlabel("steps")
        panel.legend(frameon=False, fontsize=8, loc="lower right")
    panels[0, 0].set_ylabel(f"mean reward of {WINDOW} steps; bands: all seeds")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--staleness", default="0,1,2,4")
    parser.add_argument(
        "--corrections", default="none,truncated", help="the first is compared with; none, truncated, masked"
    )
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seeds, staleness = ([int(each) for each in text.split(",")] for text in (arguments.seeds, arguments.staleness))
    corrections = arguments.corrections.split(",")
    if unknown := set(corrections) - set(WEIGHTS):
        parser.error(f"--corrections are of {', '.join(WEIGHTS)}, not {', '.join(sorted(unknown))}")
    if arguments.steps < WINDOW:
        parser.error(f"--steps is at least {WINDOW}, over which rewards are averaged")
    results = measure(seeds, staleness, corrections, arguments.steps, Console(stderr=True))
    rows = cells(results)
    if arguments.markdown:
        print("| " + " | ".join(HEADINGS) + " |\n" + "|---" * len(HEADINGS) + "|")
        print("\n".join("| " + " | ".join(row) + " |" for row in rows))
    table = Table(*HEADINGS, title=f"demo task, {arguments.steps} steps, seeds {arguments.seeds}")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
    if arguments.picture is not None:
        draw(results, arguments.picture)
    if arguments.json is not None:
        kept = [
            {
                "max_staleness": most,
                "correction": name,
                "seed": seed,
                "rewards": [step["reward"] for step in result["steps"]],
            }
            for (most, name), found in results.items()
            for seed, result in zip(seeds, found, strict=True)
        ]
        arguments.json.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
