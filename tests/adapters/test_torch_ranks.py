"""Ranks of a train engine: what they say, and how a call ends for all of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncflow_sdk.errors import ConfigError, EngineError
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.schedules import go_to, make_schedule

_CHILD = Path(__file__).with_name("ranks_children.py")


class Started:
    """So many processes, as a launcher starts them; they begin when all of them are there."""

    def __init__(self, what: str, size: int, **env: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(_CHILD), what], stdout=subprocess.PIPE, text=True,
                env={**os.environ, **place, "RANK": str(rank), **env},
            )
            for rank in range(size)
        ]  # fmt: skip

    def said(self, rank: int) -> Any:
        text, _ = self.processes[rank].communicate(timeout=100)  # only ends a test that would hang
        return json.loads(text.splitlines()[-1]) if text else None

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    made: list[Started] = []

    def begin(what: str, size: int = 2, **env: str) -> Started:
        met = tmp_path / f"met-{len(made)}"
        met.mkdir()
        made.append(Started(what, size, MET=str(met), **env))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def test_all_hear_what_each_says(start: Any) -> None:
    ranks = start("words", 3)

    heard = [ranks.said(rank)[0] for rank in range(3)]

    assert heard == [[{"rank": r, "text": "ü" * r, "odd": [None, float("inf")]} for r in range(3)]] * 3


def test_what_one_refuses_all_refuse_and_go_on(start: Any) -> None:
    ranks = start("one_refuses")

    assert [ranks.said(rank)[0] for rank in (0, 1)] == [["rank 1: rows 7 are odd", 0], ["rows 7 are odd", 1]]


def test_what_fails_on_one_rank_ends_the_call_on_all_with_its_traceback(start: Any, tmp_path: Path) -> None:
    # neither its end nor the time of a collective does: it lives on
    ranks = start("one_fails", TIMEOUT_S="600", TOLD=str(tmp_path / "told"))

    for rank in (0, 1):
        found, again = ranks.said(rank)
        assert found.startswith("EngineError: rank 1 of 2 failed in third():")
        assert "Traceback" in found
        assert "MemoryError: no room for gradients" in found
        assert again.startswith("another() is not possible: rank 1 of 2 failed in third()")


@pytest.mark.parametrize("folder", ["whole", "full"])
def test_a_file_is_whole_when_every_rank_has_written_or_it_fails_on_all(
    start: Any, folder: str, tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir()
    ranks = start("one_cannot_write", FOLDER=str(tmp_path / folder))

    found = [ranks.said(rank)[0] for rank in (0, 1)]

    if folder == "whole":
        assert found == [[[0.0], [1.0]]] * 2
    else:
        assert ["no space left" in words for words in found] == [True, True], found


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_is_named(start: Any, dies: int) -> None:
    ranks = start("one_dies", DIES=str(dies))

    found, _ = ranks.said(1 - dies)

    assert f"rank {dies} of 2" in found
    assert "in fourth()" in found
    assert ranks.processes[dies].wait(10) == 3


def test_a_rank_that_hangs_is_named_when_the_time_is_out(start: Any) -> None:
    ranks = start("one_hangs", TIMEOUT_S="3")

    found, _ = ranks.said(0)

    assert found.startswith("EngineError: rank 1 of 2 has ended or hangs; rank 0 waited for it in fifth()")


def test_half_an_environment_is_refused_and_ranks_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="has RANK, WORLD_SIZE and not MASTER_ADDR, MASTER_PORT"):
        Ranks.join("cpu", timeout_s=5)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(EngineError, match=f"rank 0 of 2 has not met the others at 127.0.0.1:{port} within 2 s"):
        Ranks.join("cpu", timeout_s=2)


def test_rates_rise_and_fall_and_go_on_where_they_were() -> None:
    def rates(name: str, steps: int, begin: int = 0, **options: Any) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=8.0)
        schedule = make_schedule(optimizer, name, **options)
        go_to(schedule, begin)
        found = []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found

    assert rates("constant", 4, warmup_steps=2) == [4.0, 8.0, 8.0, 8.0]
    assert rates("linear", 7, warmup_steps=2, decay_steps=4) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0]
    assert rates("cosine", 5, decay_steps=4) == pytest.approx([8.0, 4 + 8**0.5 * 1.0, 4.0, 4 - 8**0.5, 0.0])
    assert rates("linear", 3, begin=3, warmup_steps=2, decay_steps=4) == [6.0, 4.0, 2.0]
    for wrong in (
        {"name": "step"},
        {"name": "linear"},
        {"name": "constant", "decay_steps": 3},
        {"name": "constant", "warmup_steps": -1},
    ):
        with pytest.raises(ConfigError):
            make_schedule(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), **wrong)
