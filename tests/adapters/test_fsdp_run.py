"""Runs whose trainer is FSDP2 on two ranks: one of them is killed; torchrun starts them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rank_runs import run_under_a_launcher, run_with_a_rank_killed_in_a_collective

pytestmark = pytest.mark.usefixtures("warm")


def test_ranks_of_which_one_is_killed_go_on_together_with_each_row_trained_once(tiny: str, tmp_path: Path) -> None:
    run_with_a_rank_killed_in_a_collective("fsdp", tiny, tmp_path)


@pytest.mark.starts("train fsdp")
def test_under_torchrun_each_process_is_the_rank_that_it_says(tiny: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]

    run_under_a_launcher(
        [*torchrun, "--rdzv-endpoint", "127.0.0.1:0", "--no-python"], "fsdp", tiny, tmp_path, collective_timeout_s=60
    )
