"""Runs whose trainer is FSDP2 on two ranks: PPO with a critic; one of them is killed; torchrun starts them."""

from __future__ import annotations

import sys
from pathlib import Path

from rank_runs import ROWS, odd_tokens, run_under_a_launcher, run_with_a_rank_killed_in_a_collective

import asyncflow_sdk as af
from asyncflow_sdk.types.events import Event, StepTrained


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
    run_with_a_rank_killed_in_a_collective("fsdp_parts:Held", tiny, tmp_path)


def test_under_torchrun_each_process_is_the_rank_that_it_says(tiny: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]

    run_under_a_launcher(
        [*torchrun, "--rdzv-endpoint", "127.0.0.1:0", "--no-python"], "fsdp", tiny, tmp_path, collective_timeout_s=60
    )
