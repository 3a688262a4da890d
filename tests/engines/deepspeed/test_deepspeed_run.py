"""Runs with DeepSpeed's stage 3 on two ranks, a trainer's and a reference's: one of them is killed, and DeepSpeed's own launcher
starts them."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from rank_runs import (
    run_under_a_launcher,
    run_with_a_rank_killed_in_a_collective,
    run_with_a_sharded_reference,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from asyncflow_torch.reference import tiny_model

    return str(tiny_model(tmp_path_factory.mktemp("model")))


def test_ranks_of_which_one_is_killed_go_on_together_with_each_row_trained_once(model: str, tmp_path: Path) -> None:
    run_with_a_rank_killed_in_a_collective("deepspeed", model, tmp_path, stage=3, device="cpu")


def test_a_reference_in_shards_gives_one_processs_numbers_though_a_rank_is_killed(model: str, tmp_path: Path) -> None:
    run_with_a_sharded_reference("deepspeed", model, tmp_path, stage=3, device="cpu")


@pytest.mark.starts("train deepspeed")
def test_under_deepspeeds_launcher_each_process_is_the_rank_that_it_says(model: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [
        sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port), "--no_python",
        "--no_local_rank",
    ]  # fmt: skip

    run_under_a_launcher(launcher, "deepspeed", model, tmp_path, device="cpu")
