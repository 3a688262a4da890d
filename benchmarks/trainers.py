"""``make bench-trainers``: the engines that train, beside each other on the demo task: do they learn alike?

python -m benchmarks.trainers [--steps N] [--seeds 0,1,2] [--staleness 1] [--engines torch,fsdp] [--python deepspeed=PATH]
                              [--picture PATH] [--markdown] [--json PATH]
python -m benchmarks.trainers --memory 4096,16384        # of one response of so many tokens, and nothing else

The same start, prompts and learning rate for each seed, and the same engine that generates: only which engine trains
differs. Runs are asynchronous, so that two runs of one engine and one seed differ, too; the measure of alike is how
far the plain engine's seeds lie apart."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from .demo import run
from .demo_seeds import WINDOW, curve
from .fidelity import spread
from .pairs import TRAINS, Engine, Environments

HEADINGS = [
    "train engine",
    "first steps",
    f"last {WINDOW} steps",
    "all steps",
    "distance from the plain engine's mean curve: mean, largest",
    "steps within the plain engine's seeds",
]
VOCABULARY = 32_768
COLOURS = ("#8b949e", "#3b75af", "#c9582a")
Results = dict[str, list[dict[str, Any]]]
"""By the engine's title, one for each seed; the plain engine is the first."""


def measure(
    engines: Sequence[Engine], seeds: Sequence[int], steps: int, staleness: int, environments: Environments,
    console: Console,
) -> Results:  # fmt: skip
    from asyncflow_torch.demo.model import warm_up

    results: Results = {engine.title: [] for engine in engines}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            model = Path(folder) / f"start-{seed}"
            warm_up(model, seed=seed)
            for engine in engines:
                trainer = {
                    "engine": engine.name, "world_size": engine.world_size, "options": dict(engine.options),
                    "python": environments.of(engine),
                }  # fmt: skip
                command = [sys.executable, "-m", "benchmarks.async_run", str(model), str(steps), str(seed)]
                found = run([*command, str(staleness), "--train", json.dumps(trainer)])
                results[engine.title].append(found)
                console.print(f"seed {seed}, {engine.title}: {curve(found)[-1]:.3f} at the end", style="dim")
    return results


def curves(found: list[dict[str, Any]]) -> npt.NDArray[np.float64]:
    return np.stack([curve(result) for result in found])


def cells(results: Results) -> list[list[str]]:
    """Rewards are means over seeds ± their standard deviation. In the row of the plain engine the distance is that of
    its own seeds from each other: highest less lowest."""
    plain = curves(next(iter(results.values())))
    low, high = plain.min(0), plain.max(0)
    rows = []
    for number, (name, found) in enumerate(results.items()):
        mine = curves(found)
        mean = mine.mean(0)
        apart = np.abs(mean - plain.mean(0)) if number else high - low
        said = f"{apart.mean():.3f}, {apart.max():.3f}"
        within = f"{((low <= mean) & (mean <= high)).mean():.0%}"
        rows.append([
            name, *(spread(list(values)) for values in (mine[:, 0], mine[:, -1], mine.mean(1))),
            *((said, within) if number else (f"between its seeds: {said}", "")),
        ])  # fmt: skip
    return rows


def draw(results: Results, path: Path) -> None:
    """Thin for each seed, thick for their mean."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, panel = plt.subplots(figsize=(8, 4.4))
    for (name, found), colour in zip(results.items(), COLOURS, strict=False):
        lines = curves(found)
        steps = np.arange(len(found[0]["steps"]) - lines.shape[1] + 1, len(found[0]["steps"]) + 1)
        for line in lines:
            panel.plot(steps, line, color=colour, linewidth=0.7, alpha=0.6)
        panel.plot(steps, lines.mean(0), color=colour, linewidth=2.2, label=name)
    panel.set_xlabel("steps")
    panel.set_ylabel(f"mean reward of {WINDOW} steps")
    panel.legend(frameon=False, fontsize=9, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def peak(tokens: int, way: str) -> tuple[float, float]:
    """Return MiB above the peak before a forward and backward pass of one response, and its processor time in
    seconds. ``way``: "own" is the model without its output layer, "chunks" as the engines compute log-probs, "full"
    with all logits."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from asyncflow_sdk.types import Batch
    from asyncflow_torch.chunked_head import chunked_head
    from asyncflow_torch.collate import collate
    from asyncflow_torch.logprobs import response_logprobs

    torch.set_num_threads(1)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=tokens + 8, **sizes)).eval()
    ids = np.random.default_rng(0).integers(3, VOCABULARY, tokens + 8)
    part = collate(Batch.of({"prompt_ids": [ids[:8]], "response_ids": [ids[8:]]}), np.arange(1), device="cpu")
    head = chunked_head(model, "cpu") if way == "chunks" else None
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    if way == "own":
        model.base_model(input_ids=part.input_ids, use_cache=False).last_hidden_state.sum().backward()
    else:
        found = response_logprobs(model, part, head=head, temperature=0.7, entropy_gradient=True)
        ratio = (found.logprobs - found.logprobs.detach()).exp().clamp(0.8, 1.2)
        (-ratio.mean() - 0.01 * found.entropy.mean()).backward()
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return mib, time.process_time() - began


def memory(lengths: Sequence[int], full: int) -> None:
    """Print the memory of one long response, each number by a process of its own. ``full``: maximum of tokens with
    full logits."""
    print("| tokens | the model's own MiB | with log-probs in chunks | with full logits |\n|---|---|---|---|")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        for tokens in lengths:
            ways = ("own", "chunks", "full") if tokens <= full else ("own", "chunks")
            found = [processes.apply(peak, (tokens, way)) for way in ways]
            cells = [f"{mib:,.0f} ({seconds:.1f} s)" for mib, seconds in found]
            print(f"| {tokens:,} | " + " | ".join(cells + [""] * (3 - len(cells))) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--engines", default=",".join(engine.name for engine in TRAINS))
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", metavar="TOKENS")
    arguments = parser.parse_args()
    if arguments.memory is not None:
        memory([int(tokens) for tokens in arguments.memory.split(",")], full=4096)
        return
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    engines = [engine for engine in TRAINS if engine.name in arguments.engines.split(",")]
    if arguments.steps < WINDOW or TRAINS[0] not in engines:
        parser.error(
            f"--steps is at least {WINDOW}, over which rewards are averaged, and {TRAINS[0].name} one of --engines"
        )
    environments = Environments(dict(each.split("=", 1) for each in arguments.python))
    results = measure(engines, seeds, arguments.steps, arguments.staleness, environments, Console(stderr=True))
    if arguments.json is not None:
        kept = [
            {"trains": name, "seed": seed, "rewards": [step["reward"] for step in result["steps"]]}
            for name, found in results.items()
            for seed, result in zip(seeds, found, strict=True)
        ]
        arguments.json.write_text(json.dumps(kept))
    if arguments.picture is not None:
        draw(results, arguments.picture)
    rows = cells(results)
    if arguments.markdown:
        print("| " + " | ".join(HEADINGS) + " |\n" + "|---" * len(HEADINGS) + "|")
        print("\n".join("| " + " | ".join(row) + " |" for row in rows))
    table = Table(
        *HEADINGS,
        title=f"demo task, {arguments.steps} steps, max_staleness {arguments.staleness}, seeds {arguments.seeds}",
    )
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
