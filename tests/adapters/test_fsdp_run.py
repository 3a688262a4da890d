"""Runs whose trainer is FSDP2 on two ranks: PPO with a critic; and one of which a rank is killed: it goes on from the last checkpoint,
and no row is trained twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import asyncflow_sdk as af
from asyncflow_sdk.types.events import Event, Note, StepTrained, WorkerState

STEPS, ROWS = 6, 16


def odd_tokens(response_ids: Any) -> list[float]:
    return [sum(int(token) % 2 for token in row) / max(len(row), 1) for row in response_ids]


def test_ppo_trains_policy_and_critic_on_two_ranks(tiny: str, tmp_path: Path) -> None:
    """By groups of one, which only a critic can train."""
    events: list[Event] = []
    workflow = af.Workflow(
        prompts={"prompt_ids": [[3 + n, 4 + n, 14] for n in range(16)]},
        rollout=af.Rollout(
            "transformers", model=tiny, prompt="prompt_ids", group_size=1, sampling=af.Sampling(max_tokens=6), threads=1
        ),
        reward=odd_tokens,
        train=af.Train(
            "fsdp", model=tiny, algorithm=af.PPO(), lr=1e-3, critic_lr=3e-3, updates=2, threads=1, world_size=2,
        ),
        batch_size=ROWS, steps=3, checkpoint=af.Checkpoint(every=2), staleness=af.Staleness(max_staleness=1),
    )  # fmt: skip

    summary = workflow.run(tmp_path / "run", on_event=events.append).summary

    assert (summary["status"], summary["steps"], summary["balanced"]) == ("completed", 3, True)
    steps = [event.metrics for event in events if isinstance(event, StepTrained)]
    assert len(steps) == 3
    for metrics in steps:
        assert (metrics["rows_used"], metrics["updates_skipped"]) == (ROWS, 0)
        assert min(metrics[name] for name in ("value_loss", "critic_grad_norm", "grad_norm")) > 0
    assert list((tmp_path / "run").rglob("critic/optimizer.safetensors"))


def test_ranks_of_which_one_is_killed_go_on_together_with_each_row_trained_once(tiny: str, tmp_path: Path) -> None:
    pids: list[int] = []
    events: list[Event] = []
    killed = tmp_path / "killed"

    def kill_once(event: Event) -> None:
        events.append(event)
        if isinstance(event, WorkerState) and (event.worker, event.state) == ("train-0 rank 1", "ready"):
            pids.append(event.pid)
        trained = any(isinstance(each, StepTrained) and each.step == 3 for each in events)
        if trained and pids and not killed.exists():
            os.kill(pids[0], signal.SIGKILL)
            killed.touch()

    probe = af.Probe(((5, 6, 7, 14), (8, 9, 14)), ((10, 11, 12), (13, 2)), tolerance=1e-4)
    workflow = af.Workflow(
        prompts={"prompt_ids": [[3 + n, 4 + n, 14] for n in range(10)]},
        rollout=af.Rollout(
            "transformers", model=tiny, prompt="prompt_ids", group_size=4, sampling=af.Sampling(max_tokens=6), threads=1
        ),
        reward=odd_tokens,
        train=af.Train(
            "fsdp_parts:Waiting", model=tiny, lr=1e-3, threads=1, world_size=2, max_restarts=1, env={"KILLED": str(killed)}
        ),
        weights=af.Weights(probe=probe, verify=["probe"]),
        batch_size=ROWS, steps=STEPS, checkpoint=af.Checkpoint(every=2), staleness=af.Staleness(max_staleness=0),
    )  # fmt: skip

    summary = workflow.run(tmp_path / "run", on_event=kill_once).summary

    rows = [row for _, batch in af.read_steps(tmp_path / "run") for row in batch.ids.tolist()]
    assert len(rows) == len(set(rows)) == STEPS * ROWS
    assert (summary["status"], summary["steps"], summary["balanced"]) == ("completed", STEPS, True)
    assert summary["rows"]["consumed"] + summary["rows"]["filtered"] == STEPS * ROWS
    restarts = [e for e in events if isinstance(e, WorkerState) and e.state == "restarting"]
    assert [e.worker for e in restarts] == ["train-0 rank 0", "train-0 rank 1"]
    assert "rank 1 was killed by SIGKILL" in restarts[0].detail
    assert any("training goes on with step" in e.text for e in events if isinstance(e, Note))
    trained = [e.step for e in events if isinstance(e, StepTrained)]
    assert sorted(set(trained)) == list(range(STEPS))
    drifts = [e.metrics["logprob_drift"] for e in events if isinstance(e, StepTrained)]
    assert max(drifts) < 1e-4, (
        "steps trained again come to the weights that generated the rows of the steps after them"
    )
