"""Train engines of two ranks: what it takes to give weights away, and runs in which one rank is killed in a collective, or a launcher
of the field starts both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM
from waiting import kill_at, until, wait_at

import asyncflow_sdk as af
from asyncflow_sdk.cli.run_command import export_model
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.types import Shard
from asyncflow_sdk.types.events import Event, Note, Span, StepTrained, WorkerState
from asyncflow_torch import chunked_head

STEPS, ROWS = 4, 16


def odd_tokens(response_ids: Any) -> list[float]:
    return [sum(int(token) % 2 for token in row) / max(len(row), 1) for row in response_ids]


def engine_of(*, of: str, **options: Any) -> Any:
    """``of``: the name of a train engine."""
    make: Any = registry().get("train", of).load()
    return make(**options)


def chunked(**options: Any) -> Any:
    """An engine that computes log-probs in chunks of a few tokens."""
    with mock.patch.object(chunked_head, "CHUNK_LOGITS", 1):
        return engine_of(**options)


def held(*, gates: str, **options: Any) -> Any:
    """An engine of which rank 1 waits at gates in the backward pass of steps: the others are in collectives, or come
    to them."""
    engine = engine_of(**options)
    step, backward, index = engine.train_step, engine.backward, -1

    def train_step(batch: Any) -> Any:
        nonlocal index
        index = batch.index
        return step(batch)

    def backward_held(loss: Any, *, last: bool) -> None:
        if os.environ["RANK"] == "1":
            wait_at(Path(gates, str(index)))
        backward(loss, last=last)

    engine.train_step, engine.backward = train_step, backward_held
    return engine


def counting(**options: Any) -> Any:
    """An engine whose `export` only counts. The metrics of a step say how many modules are in shards of their own."""
    engine = engine_of(**options)
    step = engine.train_step

    def train_step(batch: Any) -> Any:
        wrapped: set[int] = set()
        hook = torch.nn.modules.module.register_module_forward_pre_hook(
            lambda module, _: wrapped.add(id(module)) if isinstance(module, FSDPModule) else None
        )
        result = step(batch)
        hook.remove()
        return replace(result, metrics={**result.metrics, "wrapped": float(len(wrapped))})

    engine.train_step, engine.export = train_step, partial(count_giving, engine, engine.export)
    return engine


def count_giving(engine: Any, export: Callable[[Path], None], path: Path) -> None:
    """Note into a folder what each way of giving an engine's weights away takes, and which collectives it calls."""
    path.mkdir(exist_ok=True)
    said: dict[str, Any] = {"given": 0}

    def give() -> None:
        for _, tensor in engine.named_weights():
            piece = tensor.tensor if isinstance(tensor, Shard) else tensor
            said["given"] += piece.numel() * piece.element_size()
            del tensor, piece  # as a publisher does

    state = path / "state"
    calls = {"named_weights": give, "export": lambda: export(path / "model"), "save": lambda: engine.save(state)}
    for name, call in {**calls, "load": lambda: engine.load(state)}.items():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            call()
        collectives = [e.key for e in prof.key_averages() if "gloo" in e.key or "c10d" in e.key]
        said[name] = {"peak": peak_bytes(prof), "collectives": collectives}
    (path / f"{os.environ['RANK']}.json").write_text(json.dumps(said))


def peak_bytes(prof: Any) -> int:
    """The most memory that torch had beyond that of the beginning."""
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate((e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())), initial=0))


def check_giving(folder: Path, elements: int, largest: int, bucket_bytes: int) -> None:
    """By what two ranks noted: they gave each of ``elements`` once, in bfloat16, asked no other rank, and no way took more than
    buckets, beside which the largest weight is large."""
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert sum(said["given"] for said in found) == 2 * elements
    assert 4 * largest > 16 * bucket_bytes
    for said in found:
        assert said["named_weights"]["collectives"] == []
        assert said["load"]["collectives"] != []  # so that these would be seen
        assert said["named_weights"]["peak"] <= bucket_bytes, said
        # float32, and what ranks say to each other; the optimizer has no state yet
        for call in ("export", "save", "load"):
            assert said[call]["peak"] <= 2 * bucket_bytes + 16384, (call, said)


def rollout(model: str, **place: Any) -> af.Rollout:
    """In a thread of the test's process, which has torch already, unless another place is given."""
    place = {"group_size": 4, "launcher": "thread"} | place
    return af.Rollout("transformers", model=model, prompt="prompt_ids", sampling=af.Sampling(max_tokens=6), **place)


def restarted(events: list[Event]) -> list[WorkerState]:
    return [event for event in events if isinstance(event, WorkerState) and event.state == "restarting"]


def run_with_a_rank_killed_in_a_collective(
    engine: str, model: str, directory: Path, *, rollouts: dict[str, Any] | None = None, address: str | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Rank 1 is killed in the last step; the checkpoint is of the one before. ``rollouts``: their place.
    It is PPO with a critic, and versions go by files, of which each is a folder that transformers loads."""
    gates, events, versions = directory / "gates", list[Event](), directory / "versions"
    killed = kill_at(gates / str(STEPS - 1))
    probe = af.Probe(((5, 6, 7, 14), (8, 9, 14)), ((10, 11, 12), (13, 2)), tolerance=1e-4)
    workflow = af.Workflow(
        prompts={"prompt_ids": [[3 + n, 4 + n, 14] for n in range(10)]},
        rollout=rollout(model, **rollouts or {}), reward=odd_tokens, address=address,
        train=af.Train(
            "rank_runs:held", model=model, algorithm=af.PPO(), learning_rate=1e-3, critic_learning_rate=3e-3, threads=1, world_size=2,
            max_restarts=1, of=engine, gates=str(gates), **options,
        ),
        weights=af.Weights(probe=probe, verify=["probe"], transport="file", options={"path": str(versions)}),
        batch_size=ROWS, steps=STEPS, save_steps=2, save_total_limit=1, checkpoint=af.Checkpoint(every=2),
        staleness=af.Staleness(max_staleness=0),
    )  # fmt: skip

    summary = workflow.run(directory / "run", on_event=events.append).summary

    assert killed() is None
    rows = [row for _, batch in af.read_steps(directory / "run") for row in batch.ids.tolist()]
    assert len(rows) == len(set(rows)) == STEPS * ROWS
    assert (summary["status"], summary["steps"], summary["balanced"]) == ("completed", STEPS, True)
    assert summary["rows"]["consumed"] + summary["rows"]["filtered"] == STEPS * ROWS
    assert [e.worker for e in restarted(events)] == ["train-0 rank 0", "train-0 rank 1"]
    assert "rank 1 was killed by SIGKILL" in restarted(events)[0].detail
    assert any(f"training goes on with step {STEPS - 2}" in e.text for e in events if isinstance(e, Note))
    steps = [e for e in events if isinstance(e, StepTrained)]
    assert [e.step for e in steps] == [*range(STEPS - 1), STEPS - 2, STEPS - 1]
    assert max(e.metrics["logprob_drift"] for e in steps) < 1e-4  # trained again, steps come to the same weights
    for name in ("value_loss", "critic_grad_norm", "grad_norm"):
        assert min(e.metrics[name] for e in steps) > 0
    assert list((directory / "run").rglob("critic/optimizer.safetensors"))
    (saved,) = (directory / "run" / "models").iterdir()
    assert saved.name == f"step-{STEPS:06d}", "the older one was removed"
    check_version_folders(versions, model, saved, directory / "run" / "model")
    export_model(
        directory / "run", directory / "exported", STEPS - 2, best=False
    )  # by one process, from what two have saved
    exported = AutoModelForCausalLM.from_pretrained(directory / "exported").state_dict()
    masters = load_file(
        directory / "run" / "checkpoints" / f"step-{STEPS - 2:06d}" / "engine" / "weights.safetensors"
    )
    assert all(torch.equal(exported[name], tensor) for name, tensor in masters.items())


def check_version_folders(versions: Path, model: str, *exported: Path) -> None:
    """The newest version is a Hugging Face model folder, of the weights that were exported in the end."""
    newest = max(each for each in versions.iterdir() if each.is_dir())
    published = AutoModelForCausalLM.from_pretrained(newest).state_dict()
    for folder in (newest, *exported):
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert loaded.keys() == published.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in published.items())
        names = {"config.json", "generation_config.json", *(each.name for each in Path(model).glob("tokenizer*"))}
        assert names <= {each.name for each in folder.iterdir()}


def run_under_a_launcher(launcher: list[str], engine: str, model: str, directory: Path, **options: Any) -> None:
    """``launcher``: the command that starts the command of each rank."""
    events: list[Event] = []
    with af.serve(directory / "run", steps=2, on_event=events.append) as run:
        run.start(rollout(model))
        run.start(af.Stage(odd_tokens, task="reward", launcher="thread"))
        run.feed({"prompt_ids": [[3 + n, 4 + n, 14] for n in range(10)]}, group_size=4, column="prompt_ids")
        command = [*launcher, sys.executable, "-m", "asyncflow_sdk.cli", "worker", str(directory / "run"), "train"]
        given = {"engine": engine, "model": model, "batch-size": ROWS, "export": directory / "model"}
        sets = {"learning_rate": 1e-3, "threads": 1, **options}
        command += [f"--{name}={value}" for name, value in given.items()]
        command += [f"--set={name}={value}" for name, value in sets.items()]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [f"rank {rank} joins" in done.stdout for rank in (0, 1)] == [True, True], done.stdout
        until(lambda: run.audit().live == 0, "the end of all rows")
        assert run.audit().consumed + run.audit().filtered == 2 * ROWS
    spans = [e for e in events if isinstance(e, Span) and e.kind == "train"]
    assert Counter(e.worker.partition(" ")[2] for e in spans) == {"rank 0": 2, "rank 1": 2}
    assert sum(e.rows for e in spans) == 2 * ROWS
    assert [e.step for e in events if isinstance(e, StepTrained)] == [0, 1]
    assert (directory / "model" / "model.safetensors").is_file()


def held_scoring(*, notes: str, **options: Any) -> Any:
    """An engine of which rank 1 waits before its second scoring. Each rank notes the rows of each
    scoring, and how much of the weights it holds."""
    engine = engine_of(**options)
    scores, calls = engine.logprobs, list[list[int]]()

    def logprobs(batch: Any) -> Any:
        if len(calls) == 1 and os.environ["RANK"] == "1":
            wait_at(Path(notes, "hold"))
        found = scores(batch)
        calls.append(batch.ids.tolist())
        pieces = [each.tensor if isinstance(each, Shard) else each for _, each in engine.named_weights()]
        said = {"rank": int(os.environ["RANK"]), "calls": calls, "elements": sum(piece.numel() for piece in pieces)}
        Path(notes, f"{os.getpid()}.json").write_text(json.dumps(said))
        return found

    engine.logprobs = logprobs
    return engine


def run_with_a_sharded_reference(engine: str, model: str, directory: Path, **options: Any) -> None:
    """Rank 1 of two is killed while the other is in a scoring. A reference of one process scores the same rows."""
    notes, events = directory / "notes", list[Event]()
    killed = kill_at(notes / "hold")
    sharded = af.Logprobs(
        "rank_runs:held_scoring", model=model, world_size=2, threads=1, frozen=True, of=engine,
        notes=str(notes), **options,
    )  # fmt: skip
    workflow = af.Workflow(
        prompts={"prompt_ids": [[3 + n, 4 + n, 14] for n in range(10)]},
        rollout=rollout(model, group_size=3),
        stages=[
            af.Stage(sharded, gives=["sharded"], batch=7),
            af.Stage(af.Logprobs("torch", model=model), gives=["plain"], launcher="thread"),
        ],
        reward=odd_tokens, train=af.Train("torch", model=model, learning_rate=1e-3, needs=["sharded", "plain"], launcher="thread"),
        batch_size=15, steps=2, staleness=af.Staleness(max_staleness=0),
    )  # fmt: skip

    summary = workflow.run(directory / "run", on_event=events.append).summary

    assert killed() is None
    steps = [batch for _, batch in af.read_steps(directory / "run")]
    rows = [row for batch in steps for row in batch.ids.tolist()]
    assert len(rows) == len(set(rows)) == 2 * 15
    assert (summary["status"], summary["balanced"], summary["rows"]["failed"]) == ("completed", True, 0)
    assert [e.worker for e in restarted(events)] == ["sharded-0 rank 0", "sharded-0 rank 1"]
    for batch in steps:
        found, wanted = batch.ragged("sharded"), batch.ragged("plain")
        assert found.lengths.tolist() == wanted.lengths.tolist() == batch.ragged("response_ids").lengths.tolist()
        np.testing.assert_allclose(found.values, wanted.values, rtol=0, atol=1e-5)
        assert np.ptp(wanted.values) > 0.1
    said = [json.loads(file.read_text()) for file in notes.glob("*.json")]
    one, two = sorted((each for each in said if len(each["calls"]) > 1), key=lambda each: each["rank"])
    assert len(one["calls"]) == len(two["calls"])
    assert {row for each in (one, two) for call in each["calls"] for row in call} <= set(rows)
    assert max(one["elements"], two["elements"]) < 0.6 * (one["elements"] + two["elements"]), "each has its shards"
