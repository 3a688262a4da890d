"""Checkpoints of one's own loop: whole or not there, whatever happens to who writes them; the newest that is whole counts."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from children import Child, hear, say
from echo_runs import check_whole, echo_workflow, events_of
from flaky_proxy import FlakyProxy
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, LeaseLost, MemoryFull
from asyncflow_sdk.testing.echo_ranks import EchoRanks
from asyncflow_sdk.types.events import Note
from asyncflow_sdk.workflow.model_folder import StepFolders

# ---- trainers in processes of their own


def write_slowly(address: str, key: str, directory: str) -> None:
    """Say when half of a checkpoint is written; write the rest when told to."""

    def save(path: Path) -> None:
        (path / "weights").write_text("8")
        say("writes")
        hear()

    with af.connect(address, key=key) as run:
        run.checkpoint(save, directory=directory)


def write_on_a_full_disk(directory: str) -> None:
    """No file may be longer than a megabyte. Say what came of a checkpoint, and what is left of it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def save(path: Path) -> None:
        (path / "small").write_bytes(b"s" * 1000)
        (path / "weights").write_bytes(bytes(4 << 20))

    with af.connect(directory) as run:
        try:
            run.checkpoint(save, directory=Path(directory) / "checkpoints")
        except MemoryFull as full:
            say(str(full))
        hear()


def serve_until_killed(directory: str, rows: int) -> None:
    """Serve a run with rows for a trainer; or the same once more."""
    with af.serve(directory, durability="process", checkpoints=True) as run:
        if run.recovered is None:
            run.queue.declare("train", needs=["x"], batch_rows=4)
            run.queue.put({"x": np.arange(float(rows))}, key="all")
            run.queue.end()
        say("serves")
        hear()


def train_until_killed(directory: str) -> None:
    """One's own loop: weights are the numbers they were trained with, in order. Says each step, and makes as many as it is told to."""
    seen: list[float] = []
    with af.connect(directory, name="trainer") as run:
        where = Path(directory) / "checkpoints"
        point = run.resume(directory=where)
        if point.path is not None:
            seen = [float(line) for line in (point.path / "seen").read_text().split()]
        assert len(seen) == 4 * point.step

        def save(path: Path) -> None:
            (path / "seen").write_text("\n".join(map(str, seen)))

        for step in run.consumer("train"):
            say(["step", step.index])
            hear()
            seen += step.array("x").tolist()
            step.ack()
            if step.index % 2:
                run.checkpoint(save, directory=where)
        run.checkpoint(save, directory=where, keep=1)
        say(["done", seen])
        hear()


class Loop:
    """A run and its trainer, whose weights are how many steps they were trained with."""

    def __init__(self, directory: Path) -> None:
        self.notes: list[str] = []
        self.run = af.serve(directory, checkpoints=True, on_event=self.hear, address="tcp://127.0.0.1:0")
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
            with self.run.queue.get("train", timeout_s=100) as step:
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


def test_folders_of_others_beside_the_checkpoints_are_left_alone(loop: Loop) -> None:
    # given folders whose names begin as those of checkpoints and of model folders
    others = [loop.directory / f"step-{name}" for name in ("²³", "best", "³00001", "7", "٠٠٠٠٠٩")]
    for other in others:
        other.mkdir(parents=True)
    # when checkpoints are written, and older ones removed
    loop.train(8, every=2)
    StepFolders(loop.directory, every=2, limit=1).trim()
    # then training goes on from the newest, and the folders are there
    assert loop.resume() == 8
    assert sorted(loop.directory.iterdir()) == sorted([*others, loop.directory / "step-000008"])


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


def test_a_full_disk_costs_the_checkpoint_and_nothing_else(loop: Loop) -> None:
    loop.train(5, every=2)
    assert loop.run.directory is not None
    with Child(write_on_a_full_disk, str(loop.run.directory)) as child:
        assert "no room for a checkpoint" in child.hear()
    assert sorted(path.name for path in loop.directory.iterdir()) == ["step-000002", "step-000004"]

    def save(path: Path) -> None:
        raise RuntimeError(f"I/O error: {os.strerror(errno.ENOSPC)} (os error 28)")

    with pytest.raises(MemoryFull, match="no room for a checkpoint"):
        loop.run.checkpoint(save)
    assert loop.resume() == 4


class FailsToSave(EchoRanks):
    """Rank 1 cannot write the second checkpoint."""

    def save(self, path: Path) -> None:
        super().save(path)
        if self.steps == 2 and self.rank == 1:
            raise RuntimeError("no more room for rank 1")


def test_a_checkpoint_that_a_rank_cannot_write_is_none_for_all_of_them(tmp_path: Path) -> None:
    train = af.Train("test_checkpoints:FailsToSave", world_size=2)
    result = echo_workflow(train=train, checkpoint=af.Checkpoint(every=1, keep=9), steps=4).run(tmp_path / "run")

    check_whole(result, 4)
    made = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [path.name for path in made] == ["step-000001", "step-000003", "step-000004"]
    assert all({file.name for file in (path / "engine").iterdir()} == {"rank-0.json", "rank-1.json"} for path in made)
    (failed,) = [note for note in events_of(tmp_path / "run", "note") if "no checkpoint was made" in note["text"]]
    assert (failed["worker"], "no more room for rank 1" in failed["text"]) == ("train-0 rank 0", True)


def test_a_trainer_killed_in_a_checkpoint_leaves_it_whole_or_not_there(loop: Loop) -> None:
    """Half written it is removed; whole it counts, also if nobody was told of it."""
    loop.train(8, every=3)
    proxy = FlakyProxy(int(loop.run.address.rpartition(":")[2]))
    proxy.steady = True
    for told, goes_on_with in ((False, 6), (True, 8)):
        with Child(write_slowly, proxy.address, str(loop.run.directory / "run.key"), str(loop.directory)) as child:  # type: ignore[operator]
            assert child.hear() == "writes"
            assert any(path.name.startswith(".step-000008-") for path in loop.directory.iterdir())
            if told:  # the rest is written, and no word of it arrives
                proxy.halt()
                child.say("go on")
                until((loop.directory / "step-000008").exists, "the whole checkpoint")
            child.kill()
        proxy.resume()
        assert loop.resume() == goes_on_with
        assert not any(path.name.startswith(".step") for path in loop.directory.iterdir())
        loop.train(8 - goes_on_with)
    proxy.close()
    loop.train(12)
    assert loop.weights == 20


def test_server_and_trainer_of_ones_own_loop_are_killed_in_turns(tmp_path: Path) -> None:
    directory, steps = str(tmp_path / "run"), 10
    server = Child(serve_until_killed, directory, 4 * steps)
    assert server.hear() == "serves"
    for steps_made, kills_server in ((0, False), (3, True), (2, False), (1, True)):
        with Child(train_until_killed, directory) as trainer:
            for _ in range(steps_made):
                assert trainer.hear()[0] == "step"
                trainer.say("go on")
            if kills_server:
                trainer.hear()
                server.kill()
                server.__exit__()
                server = Child(serve_until_killed, directory, 4 * steps)
                assert server.hear() == "serves"
                trainer.say("go on")
    with Child(train_until_killed, directory) as trainer:
        while (said := trainer.hear())[0] == "step":
            trainer.say("go on")
        assert said[1] == [float(n) for n in range(4 * steps)], "each once, in order, in what survives"
        trainer.say("end")
        assert trainer.wait() == 0
    server.say("close")
    assert server.wait() == 0
    server.__exit__()


def test_a_trainer_that_resumes_before_its_first_step_publishes_nothing_again(loop: Loop) -> None:
    # given a checkpoint of the weights that were published first
    with loop.run.weight_publisher("shm") as publisher:
        publisher.publish(0, {"w": np.zeros(3)}).wait()
        loop.run.checkpoint(loop.save)
        # then version 0 is current, and need not be published by the next trainer
        point = loop.run.resume()
    assert (point.step, point.version) == (0, None)
