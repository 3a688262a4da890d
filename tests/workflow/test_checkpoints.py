"""Checkpoints of one's own loop: whole or not there, whatever happens to who writes them; the newest that is whole counts."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_children import (
    serve_until_killed,
    train_until_killed,
    write_and_be_killed_at_the_end,
    write_and_hang,
    write_on_a_full_disk,
)
from children import Child
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import AsyncFlowError, ConfigError, LeaseLost
from asyncflow_sdk.types.events import Note
from asyncflow_sdk.workflow.checkpoint import Checkpoints
from asyncflow_sdk.workflow.meeting import Meeting

KILLS = int(os.environ.get("ASYNCFLOW_KILLS", "2"))


class Loop:
    """A run and its trainer, whose weights are how many steps they were trained with."""

    def __init__(self, directory: Path) -> None:
        self.notes: list[str] = []
        self.run = af.serve(directory, checkpoints=True, on_event=self.hear)
        self.directory = directory / "checkpoints"
        self.run.queue.declare("train", needs=["x"], batch_rows=4)
        self.run.queue.put({"x": np.arange(80.0)})
        self.weights = 0
        self.given: dict[int, list[int]] = {}

    def hear(self, event: object) -> None:
        if isinstance(event, Note):
            self.notes.append(event.text)

    def save(self, path: Path) -> None:
        (path / "weights").write_text(str(self.weights))
        (path / "more").mkdir()
        (path / "more" / "moments").write_bytes(bytes(10_000))

    def train(self, steps: int, every: int = 0) -> None:
        for _ in range(steps):
            with self.run.queue.get("train", timeout_s=10) as step:
                assert step.index == self.weights
                assert self.given.setdefault(step.index, step.ids.tolist()) == step.ids.tolist()
                self.weights += 1
                step.ack()
            if every and self.weights % every == 0:
                self.run.checkpoint(self.save)

    def resume(self) -> int:
        point = self.run.resume()
        self.weights = int((point.path / "weights").read_text()) if point.path is not None else 0
        assert self.weights == point.step
        self.run.queue.flush()
        return point.step


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(tmp_path / "run")
    yield loop
    loop.run.close()


def test_a_trainer_goes_on_from_the_newest_checkpoint_with_the_same_rows(loop: Loop) -> None:
    assert loop.resume() == 0
    loop.train(7, every=2)
    held = loop.run.queue.get("train")  # by a trainer that hangs

    assert loop.resume() == 6

    with pytest.raises(LeaseLost):
        held.ack()
    loop.train(14)
    audit = loop.run.audit()
    assert audit.balanced
    assert (audit.consumed, audit.live) == (4 * 4, 80 - 4 * 4)  # until a checkpoint covers them
    assert loop.run.queue.status().held == 80 - 4 * 4
    loop.run.checkpoint(loop.save, keep=1)
    assert (loop.run.audit().consumed, loop.run.audit().live) == (80, 0)
    assert [path.name for path in loop.directory.iterdir()] == ["step-000020"]


def truncated(path: Path) -> None:
    with (path / "engine" / "more" / "moments").open("r+b") as file:
        file.truncate(9_999)


def flipped(name: str) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 4
        (path / name).write_bytes(data)

    return flip


def gone(path: Path) -> None:
    (path / "engine" / "weights").unlink()


def renamed(path: Path) -> None:
    path.rename(path.with_name("step-000007"))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (truncated, "more/moments has 9999 of 10000 bytes"),
        (flipped("engine/more/moments"), "more/moments has other bytes than were written"),
        (flipped("manifest.json"), "manifest"),
        (gone, "weights cannot be read"),
        (renamed, "it is of step 6"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    loop: Loop, harm: Callable[[Path], None], said: str
) -> None:
    loop.train(8, every=3)
    harm(loop.directory / "step-000006")

    assert loop.resume() == 3

    assert any("cannot be gone on from" in note and said in note for note in loop.notes), loop.notes
    loop.train(17, every=3)
    assert loop.weights == 20
    assert sorted(path.name for path in loop.directory.iterdir()) == ["step-000015", "step-000018"]


def test_where_no_checkpoint_is_whole_and_rows_have_ended_nothing_is_begun(loop: Loop) -> None:
    loop.train(9, every=3)  # those of 6 and 9 are kept: steps before 6 are covered
    for name in ("step-000006", "step-000009"):
        truncated(loop.directory / name)

    with pytest.raises(ConfigError, match="no checkpoint that is whole and goes on with step 6 or a later one"):
        loop.run.resume()


def test_a_step_is_acknowledged_before_a_checkpoint_of_what_it_trained(loop: Loop) -> None:
    for step in loop.run.consumer("train"):
        with pytest.raises(ConfigError, match="step 0 is not acknowledged"):
            loop.run.checkpoint(loop.save)
        step.ack()
        loop.run.checkpoint(loop.save)
        break
    assert [path.name for path in loop.directory.iterdir()] == ["step-000001"]


def test_without_checkpoints_a_run_keeps_nothing_to_go_on_with(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run") as run:
        run.queue.declare("train", needs=["x"], batch_rows=4)
        for ask in (run.resume, lambda: run.checkpoint(lambda path: None)):
            with pytest.raises(ConfigError, match="serve it with checkpoints=True"):
                ask()


@pytest.mark.parametrize("in_words", [False, True])
def test_a_full_disk_costs_the_checkpoint_and_nothing_else(loop: Loop, in_words: bool) -> None:
    loop.train(5, every=2)
    with Child(write_on_a_full_disk, str(loop.run.directory), in_words) as child:
        text, left = child.hear()
    assert "no room for a checkpoint" in text
    assert left == ["step-000002", "step-000004"]
    assert loop.resume() == 4


def test_two_ranks_make_one_checkpoint_of_the_step_that_both_have_acknowledged_or_none(loop: Loop) -> None:
    def step_of(rank: int) -> Callable[[], Any]:
        asked: dict[str, Any] = {"team": "train", "rank": rank, "world_size": 2, "timeout_s": 30.0}
        return in_thread(clients[rank].queue.get, "train", **asked)

    def saved_by(rank: int, error: Exception | None = None) -> Callable[[], Any]:
        def save(path: Path) -> None:
            (path / f"rank-{rank}").touch()
            if error is not None:
                raise error

        return in_thread(checkpoints[rank].save, save)

    with af.connect(loop.run.directory) as one, af.connect(loop.run.directory) as other:
        clients = [one, other]
        checkpoints = [
            Checkpoints(client.queue, loop.directory, ranks=Meeting(client.queue, "train", rank, 2))
            for rank, client in enumerate(clients)
        ]
        # given a step of which one rank has not said yet that it is through
        first, second = [held() for held in [step_of(0), step_of(1)]]
        first.ack()
        saves = [saved_by(0)]
        until(lambda: "acknowledgement" in str(loop.run.queue.status().parked), "the first to wait for the second")
        # when it says so
        second.ack()
        saves.append(saved_by(1))
        paths = [path() for path in saves]
        # then the checkpoint is of what comes after it, and of both
        assert paths == [loop.directory / "step-000001" / "engine"] * 2
        assert sorted(path.name for path in paths[0].iterdir()) == ["rank-0", "rank-1"]

        # and one that a rank cannot write is none for all of them
        for batch in [held() for held in [step_of(0), step_of(1)]]:
            batch.ack()
        saves = [saved_by(1, AsyncFlowError("no more room")), saved_by(0)]
        failed = [error() for error in saves]
        assert [type(error) for error in failed] == [AsyncFlowError] * 2, failed
        assert [str(error) for error in failed] == ["no more room", "rank 1: no more room"]
        (loop.directory / f".step-000002-{os.getpid()}").touch()  # where the first would make the folder for both
        saves = [saved_by(0), saved_by(1)]
        failed = [error() for error in saves]
        assert ["File exists" in str(error) for error in failed] == [True, True], failed
        assert "rank 0: " in str(failed[1])
        (loop.directory / f".step-000002-{os.getpid()}").unlink()
        assert [path.name for path in loop.directory.iterdir()] == ["step-000001"]


def test_what_a_killed_trainer_left_half_written_is_removed(loop: Loop) -> None:
    loop.train(5, every=2)
    with Child(write_and_hang, str(loop.run.directory)) as child:
        assert child.hear() == "writes"
        child.kill()
    assert any(path.name.startswith(".step-000005-") for path in loop.directory.iterdir())

    assert loop.resume() == 4

    assert sorted(path.name for path in loop.directory.iterdir()) == ["step-000002", "step-000004"]


def test_a_checkpoint_of_which_nobody_was_told_counts(loop: Loop) -> None:
    loop.train(8, every=3)
    with Child(write_and_be_killed_at_the_end, str(loop.run.directory)) as child:
        child.wait()

    assert loop.resume() == 8
    loop.train(12)
    assert loop.weights == 20


@pytest.mark.timeout(180 + 60 * KILLS)
@pytest.mark.parametrize("seed", range(KILLS))
def test_server_and_trainer_of_ones_own_loop_are_killed_at_random(seed: int, tmp_path: Path) -> None:
    chance, steps, directory = random.Random(seed), 30, str(tmp_path / "run")
    said: list[Any] = []
    server = Child(serve_until_killed, directory, 4 * steps)
    server.hear()
    deaths = 0
    while not said or said[-1][0] != "done":
        trainer = Child(train_until_killed, directory, 4)
        over = threading.Event()

        def listen(trainer: Child = trainer, over: threading.Event = over) -> None:
            for line in trainer._out:
                said.append(json.loads(line))
                if said[-1][0] == "done":
                    break
            over.set()

        threading.Thread(target=listen, daemon=True).start()
        more = chance.randint(1, 6)
        until = len(said) + more
        for _ in range(more + 4 if deaths <= 5 else steps):  # it cannot be through before it is killed
            trainer.say("go on")
        while not over.wait(0.01) and (deaths > 5 or len(said) < until):
            pass
        if not over.is_set() and chance.random() < 0.5:
            server.kill()
            server.__exit__()
            server = Child(serve_until_killed, directory, 4 * steps)
            server.hear()
            deaths += 1
            over.wait(0.3 * chance.random())
        if not over.is_set():
            trainer.kill()
            deaths += 1
            assert over.wait(30)
        trainer.__exit__()
    server.say("close")
    assert server.wait() == 0
    server.__exit__()
    assert deaths > 1
    assert said[-1][2] == [float(n) for n in range(4 * steps)], "each once, in order, in what survives"
    resumed = [each for each in said if each[0] == "resumed"]
    assert all(step * 4 == seen for _, step, seen in resumed)
