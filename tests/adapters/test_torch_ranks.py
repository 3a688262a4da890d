"""Ranks of a train engine: what they say, and how a call ends for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from children import Child
from ranks_children import one_of_two

from asyncflow_sdk.errors import ConfigError, EngineError
from asyncflow_sdk.workflow.processes.ranks import free_port
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.schedules import go_to, make_schedule


@contextlib.contextmanager
def started(folder: Path, dies: int) -> Iterator[list[Child]]:
    """Two processes, as a launcher starts them. The rank ``dies`` ends in the last call."""
    ports = [free_port() for _ in range(4)]
    with (
        Child(one_of_two, str(folder), 0, dies, ports) as first,
        Child(one_of_two, str(folder), 1, dies, ports) as second,
    ):
        yield [first, second]


def test_ranks_go_on_together_or_end_together_and_say_who_it_was(tmp_path: Path) -> None:
    with started(tmp_path, dies=1) as ranks:
        first, second = ([rank.hear() for _ in range(count)] for rank, count in zip(ranks, (7, 6), strict=True))
        assert [rank.wait() for rank in ranks] == [0, 3]

    # what each says, all hear; what one refuses, all refuse and go on; a file is whole when every rank has written
    words = [{"rank": r, "text": "ü" * r, "odd": [None, float("inf")]} for r in range(2)]
    assert first[0] == second[0] == [words, "went on"]
    assert first[1] == ["SchemaError: rank 1: rows 7 are odd", "went on"]
    assert second[1] == ["SchemaError: rows 7 are odd", "went on"]
    assert first[2] == second[2] == [[[0.0], [1.0]], "went on"]

    # what fails on one ends the call on all with its traceback, and so the write of a file
    for found, again in (first[3], second[3]):
        assert found.startswith("EngineError: rank 1 of 2 failed in failed():")
        assert "Traceback" in found
        assert "MemoryError: no room for gradients" in found
        assert again.startswith("EngineError: another() is not possible: rank 1 of 2 failed in failed()")
    assert ["no space left" in said[4][0] for said in (first, second)] == [True, True], (first[4], second[4])

    # one that hangs is named when the time is out, and one that dies at once
    assert first[5][0].startswith("EngineError: rank 1 of 2 has ended or hangs; rank 0 waited for it in hangs()")
    assert "rank 1 of 2" in first[6][0]
    assert "in dies()" in first[6][0]


def test_the_first_rank_which_holds_the_store_is_named_too_when_it_dies(tmp_path: Path) -> None:
    with started(tmp_path, dies=0) as ranks:
        found, _ = ranks[1].hear()
        assert ranks[0].wait() == 3
    assert "rank 0 of 2" in found
    assert "in dies()" in found


def test_half_an_environment_is_refused_and_ranks_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="has RANK, WORLD_SIZE and not MASTER_ADDR, MASTER_PORT"):
        Ranks.join("cpu", timeout_s=5)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    port = free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(EngineError, match=f"rank 0 of 2 has not met the others at 127.0.0.1:{port} within 0.5 s"):
        Ranks.join("cpu", timeout_s=0.5)


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
    assert rates("linear", 7, warmup_ratio=0.25, max_steps=6) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0]
    assert rates("cosine", 5, max_steps=4) == pytest.approx([8.0, 4 + 8**0.5 * 1.0, 4.0, 4 - 8**0.5, 0.0])
    assert rates("linear", 3, begin=3, warmup_steps=2, max_steps=6) == [6.0, 4.0, 2.0]
    for wrong in (
        {"name": "step"},
        {"name": "linear"},
        {"name": "linear", "warmup_steps": 3, "max_steps": 3},
        {"name": "constant", "warmup_steps": -1},
    ):
        with pytest.raises(ConfigError):
            make_schedule(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), **wrong)
