"""A made-up run: 300 steps, three workers, one restart, every kind of event; and how it lies on disk."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from pathlib import Path

import msgspec

from asyncflow_sdk.types.events import (
    Event,
    LeaseReturned,
    Loaded,
    Note,
    Published,
    RowsEnded,
    Span,
    Status,
    StepTrained,
    WorkerState,
)

START_S = 5_000.0
BATCH = 64
TASKS = ("rollout", "reward", "train")


def synthetic_run(steps: int = 300, restart_at: int | None = 140, seed: int = 0) -> list[Event]:
    """Events of a run in the order in which a driver would see them."""
    rng = random.Random(seed)
    events: list[Event] = []
    now = START_S
    for i, name in enumerate(("rollout-0", "train-0", "reward-0")):
        events.append(WorkerState(time_s=now, worker=name, state="starting", pid=100 + i))
        events.append(WorkerState(time_s=now + 2 + i / 4, worker=name, state="ready", pid=100 + i))
    events.append(Note(time_s=now + 0.1, text="weights: transport shm, because all workers share a host"))
    rollout = now + 2.0
    train = now + 2.25
    events.append(Loaded(time_s=rollout, worker="rollout-0", version=0, lag=0))
    for k in range(steps):
        if k == restart_at:
            events += _restart(rollout)
            rollout += 6.0
            events.append(Loaded(time_s=rollout, worker="rollout-0", version=k, lag=0))
        generated = rollout + rng.uniform(0.62, 0.78) + (0.35 if rng.random() < 0.05 else 0.0)
        tokens = rng.randint(5_000, 7_000)
        events.append(_span("rollout-0", "generate", rollout, generated, rows=BATCH, tokens=tokens, version=k))
        rewarded = generated + rng.uniform(0.02, 0.04)
        events.append(_span("reward-0", "reward", generated, rewarded, rows=BATCH))
        events.append(_span("reward-0", "wait", rewarded, rewarded + 0.6, detail="rows of task reward"))
        if rewarded > train:
            events.append(_span("train-0", "wait", train, rewarded, detail="rows of task train"))
        trained = max(rewarded, train) + rng.uniform(0.50, 0.60)
        events.append(_span("train-0", "train", max(rewarded, train), trained, rows=BATCH, version=k))
        events.append(StepTrained(time_s=trained, worker="train-0", step=k, version=k, metrics=_metrics(k, rng)))
        events.append(RowsEnded(time_s=trained, state="consumed", count=BATCH - 2))
        events.append(RowsEnded(time_s=trained, state="filtered", count=2, reason="no gradient"))
        train = trained + rng.uniform(0.03, 0.05)
        events.append(_span("train-0", "publish", trained, train, version=k + 1))
        events.append(Published(time_s=train, worker="train-0", version=k + 1, nbytes=4 << 20, root="ab12"))
        loaded = generated + rng.uniform(0.02, 0.05)
        events.append(_span("rollout-0", "load", generated, loaded, version=k))
        events.append(Loaded(time_s=loaded, worker="rollout-0", version=k, lag=1))
        rollout = loaded
        if k % 2 == 0:
            events.append(_status(train, k, rng))
    end = train + 0.2
    events.append(RowsEnded(time_s=end, state="cancelled", count=BATCH, reason="over-supply at the end"))
    events += [WorkerState(time_s=end, worker=name, state="stopped") for name in ("rollout-0", "train-0", "reward-0")]
    return events


def synthetic_summary(steps: int = 300) -> dict[str, object]:
    """What a completed run writes."""
    rows = {"consumed": steps * (BATCH - 2), "filtered": steps * 2, "cancelled": BATCH}
    return {
        "status": "completed",
        "steps": steps,
        "steps_wanted": steps,
        "reward_first": 0.1042,
        "reward_last": 0.8713,
        "rows": rows,
        "rows_put": sum(rows.values()),
        "balanced": True,
        "staleness_max": 1,
        "wall_s": 251.4,
        "report": "report.html",
        "model": "runs/demo/model",
        "seed": 0,
    }


def write_run(
    directory: Path, events: Iterable[Event], summary: dict[str, object] | None = None, tail: bytes = b""
) -> Path:
    """A run directory; ``tail``: bytes after the last event, such as a torn line."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [msgspec.json.encode(event) + b"\n" for event in events]
    (directory / "events.jsonl").write_bytes(b"".join(lines) + tail)
    if summary is not None:
        (directory / "summary.json").write_bytes(msgspec.json.encode(summary))
    return directory


def _span(worker: str, kind: str, start: float, end: float, **more: object) -> Span:
    return msgspec.convert(
        {"event": "span", "time_s": start, "worker": worker, "kind": kind, "seconds": end - start, **more}, Span
    )


def _metrics(k: int, rng: random.Random) -> dict[str, float]:
    reward = 0.1 + 0.78 / (1 + math.exp(-(k - 110) / 32)) + rng.gauss(0, 0.035)
    return {
        "reward": min(max(reward, 0.0), 1.0),
        "loss": 0.02 + 0.03 * math.exp(-k / 90) + rng.gauss(0, 0.006),
        "staleness_mean": min(max(0.55 + rng.gauss(0, 0.18), 0.0), 1.0) if k else 0.0,
        "staleness_max": 1.0 if k else 0.0,
        "tokens": rng.randint(5_000, 7_000),
        "logprob_drift": 0.004 + 0.002 * rng.random(),
        "grad_norm": 0.6 + 0.5 * math.exp(-k / 60) + abs(rng.gauss(0, 0.09)),
    }


def _status(now: float, k: int, rng: random.Random) -> Status:
    ready = rng.randint(8, 40)
    rows = {
        "rollout": _counts(ready=128, leased=BATCH, done=BATCH),
        "reward": _counts(waiting=BATCH, ready=rng.randint(0, 8), leased=8, done=BATCH),
        "train": _counts(waiting=16, ready=ready, selected=BATCH - ready, leased=BATCH),
    }
    return Status(
        time_s=now,
        rows=rows,
        ended={"consumed": (k + 1) * (BATCH - 2), "filtered": (k + 1) * 2, "expired": 0, "failed": 0, "cancelled": 0},
        waiting={
            "reward-0": f"after {rng.uniform(0.1, 3):.1f} s: task 'reward' has nothing to give; 64 rows are leased in"
            " task 'rollout', the oldest by rollout-0 for 0.6 s",
            "train-0": f"after 0.2 s: task 'train' has nothing to give; step {k + 1} lacks {BATCH - ready} rows",
        },
        bytes=3 << 20,
    )


def _counts(**states: int) -> dict[str, int]:
    return dict.fromkeys(("waiting", "ready", "selected", "leased", "done"), 0) | states


def _restart(now: float) -> list[Event]:
    return [
        WorkerState(time_s=now, worker="rollout-0", state="failed", detail="killed by signal 9"),
        LeaseReturned(time_s=now + 0.1, task="rollout", count=BATCH, reason="rollout-0 died"),
        Note(time_s=now + 0.1, text="64 rows of rollout-0 went back to task rollout", level="warning"),
        WorkerState(time_s=now + 0.5, worker="rollout-0", state="restarting", detail="attempt 1 of 3"),
        WorkerState(time_s=now + 5.8, worker="rollout-0", state="ready", pid=200),
    ]
