"""A made-up run: 300 steps, three workers, one restart, every kind of event; and how it lies on disk."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from asyncflow_sdk.types import events as ev

START_S = 5_000.0
BATCH = 64
WORKERS = ("rollout-0", "train-0", "reward-0")


def synthetic_run(steps: int = 300, restart_at: int | None = 140) -> list[ev.Event]:
    """Events of a run in the order in which a driver would see them."""
    rng, events, now, train = random.Random(0), list[ev.Event](), START_S + 2.0, START_S + 2.25

    def span(worker: str, kind: str, start: float, end: float, **more: Any) -> float:
        events.append(ev.Span(time_s=start, worker=worker, kind=kind, seconds=end - start, **more))
        return end

    for i, worker in enumerate(WORKERS):
        for after_s, state in ((0.0, "starting"), (2 + i / 4, "ready")):
            events.append(ev.WorkerState(time_s=START_S + after_s, worker=worker, state=state, pid=100 + i))
    events.append(ev.Note(time_s=START_S + 0.1, text="weights: transport shm, because all workers share a host"))
    events.append(ev.Loaded(time_s=now, worker="rollout-0", version=0, lag=0))
    for k in range(steps):
        if k == restart_at:
            events += restart(now)
            now += 6.0
            events.append(ev.Loaded(time_s=now, worker="rollout-0", version=k, lag=0))
        generated = now + rng.uniform(0.62, 0.78) + 0.35 * (rng.random() < 0.05)
        span("rollout-0", "generate", now, generated, rows=BATCH, tokens=rng.randint(5_000, 7_000), version=k)
        rewarded = span("reward-0", "reward", generated, generated + rng.uniform(0.02, 0.04), rows=BATCH)
        span("reward-0", "wait", rewarded, rewarded + 0.6, detail="rows of task reward")
        if rewarded > train:
            train = span("train-0", "wait", train, rewarded, detail="rows of task train")
        trained = span("train-0", "train", train, train + rng.uniform(0.50, 0.60), rows=BATCH, version=k)
        events.append(ev.StepTrained(time_s=trained, worker="train-0", step=k, version=k, metrics=metrics(k, rng)))
        events.append(ev.RowsEnded(time_s=trained, state="consumed", count=BATCH - 2))
        events.append(ev.RowsEnded(time_s=trained, state="filtered", count=2, reason="no gradient"))
        train = span("train-0", "publish", trained, trained + rng.uniform(0.03, 0.05), version=k + 1)
        events.append(ev.Published(time_s=train, worker="train-0", version=k + 1, nbytes=4 << 20, root="ab12"))
        now = span("rollout-0", "load", generated, generated + rng.uniform(0.02, 0.05), version=k)
        events.append(ev.Loaded(time_s=now, worker="rollout-0", version=k, lag=1))
        if k % 2 == 0:
            events.append(status(train, k, rng.randint(8, 40)))
    end = train + 0.2
    events.append(ev.RowsEnded(time_s=end, state="cancelled", count=BATCH, reason="over-supply at the end"))
    return events + [ev.WorkerState(time_s=end, worker=worker, state="stopped") for worker in WORKERS]


def restart(now: float) -> list[ev.Event]:
    return [
        ev.WorkerState(time_s=now, worker="rollout-0", state="failed", detail="killed by signal 9"),
        ev.LeaseReturned(time_s=now + 0.1, task="rollout", count=BATCH, reason="rollout-0 died"),
        ev.Note(time_s=now + 0.1, text="64 rows of rollout-0 went back to task rollout", level="warning"),
        ev.WorkerState(time_s=now + 0.5, worker="rollout-0", state="restarting", detail="attempt 1 of 3"),
        ev.WorkerState(time_s=now + 5.8, worker="rollout-0", state="ready", pid=200),
    ]


def metrics(k: int, rng: random.Random) -> dict[str, float]:
    reward = 0.1 + 0.78 / (1 + math.exp(-(k - 110) / 32)) + rng.gauss(0, 0.035)
    return {
        "reward": min(max(reward, 0.0), 1.0), "loss": 0.02 + 0.03 * math.exp(-k / 90), "logprob_drift": 0.004,
        "staleness_mean": 0.55 * (k > 0), "staleness_max": float(k > 0), "tokens": 6_000, "grad_norm": 0.6,
    }  # fmt: skip


def status(now: float, k: int, ready: int) -> ev.Status:
    counts = {
        "rollout": {"ready": 128, "leased": BATCH, "done": BATCH},
        "reward": {"waiting": BATCH, "ready": 4, "leased": 8, "done": BATCH},
        "train": {"waiting": 16, "ready": ready, "selected": BATCH - ready, "leased": BATCH},
    }
    zeros = dict.fromkeys(("waiting", "ready", "selected", "leased", "done"), 0)
    waiting = {
        "reward-0": "after 2.6 s: task 'reward' has nothing to give; 64 rows are leased in task 'rollout', the oldest by"
        " rollout-0 for 0.6 s",
        "train-0": f"after 0.2 s: task 'train' has nothing to give; step {k + 1} lacks {BATCH - ready} rows",
    }
    ended = {"consumed": (k + 1) * (BATCH - 2), "filtered": (k + 1) * 2, "expired": 0, "failed": 0, "cancelled": 0}
    rows = {task: zeros | states for task, states in counts.items()}
    return ev.Status(time_s=now, rows=rows, ended=ended, waiting=waiting, bytes=3 << 20)


def synthetic_summary(steps: int = 300) -> dict[str, object]:
    """What a completed run writes."""
    rows = {"consumed": steps * (BATCH - 2), "filtered": steps * 2, "cancelled": BATCH}
    return {
        "status": "completed", "steps": steps, "steps_wanted": steps, "reward_first": 0.1042, "reward_last": 0.8713,
        "rows": rows, "rows_put": sum(rows.values()), "balanced": True, "staleness_max": 1, "wall_s": 251.4,
        "report": "report.html", "model": "runs/demo/model", "seed": 0,
    }  # fmt: skip


def write_run(directory: Path, events: Iterable[ev.Event], summary: object = None, tail: bytes = b"") -> Path:
    """A run directory; ``tail``: bytes after the last event, such as a torn line."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "events.jsonl").write_bytes(b"\n".join([*map(msgspec.json.encode, events), tail]))
    if summary is not None:
        (directory / "summary.json").write_bytes(msgspec.json.encode(summary))
    return directory
