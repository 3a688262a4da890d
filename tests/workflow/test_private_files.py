"""What a run writes is its owner's alone, whatever the umask; a directory that was there keeps its mode."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from echo_runs import echo_workflow
from functions import length

import asyncflow_sdk as af
from asyncflow_sdk.memory import make_private_directory


@pytest.fixture(params=[0o000, 0o022, 0o277], ids=oct)
def umask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """An umask of the test, not of its folder: only root could use one that its owner may not write."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_to_others(directory: Path) -> list[str]:
    """What lies directly in a directory and others than its owner may use."""
    return sorted(each.name for each in directory.iterdir() if mode(each) & 0o077)


def test_a_directory_that_is_made_is_its_owners_alone(umask: int, tmp_path: Path) -> None:
    make_private_directory(tmp_path / "made")
    assert mode(tmp_path / "made") == 0o700
    # and one that is there keeps its mode, and what is no directory is refused
    (tmp_path / "made").chmod(0o755)
    make_private_directory(tmp_path / "made")
    assert mode(tmp_path / "made") == 0o755
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_private_directory(tmp_path / "file")


def test_a_run_keeps_its_record_to_its_owner(tmp_path: Path) -> None:
    # given a umask that takes nothing from anybody
    before, out = os.umask(0), tmp_path / "runs" / "mine"
    try:
        # when a workflow writes all that a workflow writes
        transport = af.Weights(transport="file", options={"path": str(out / "weights")})
        reward = af.Stage(length, task="reward", gives=["reward"])
        echo_workflow(steps=2, reward=reward, weights=transport, checkpoint=af.Checkpoint(every=1)).run(out)
        af.write_report(out)
        # and another into a directory that was there
        (tmp_path / "there").mkdir(mode=0o755)
        echo_workflow(steps=1).run(tmp_path / "there")
    finally:
        os.umask(before)
    # then nobody else reads it
    assert (mode(out), mode(tmp_path / "there")) == (0o700, 0o755)
    names = {each.name for each in out.iterdir()}
    record = {
        "events.jsonl",
        "workflow.json",
        "summary.json",
        "report.html",
        "logs",
        "steps",
        "checkpoints",
        "model",
        "weights",
    }
    assert names >= record
    assert open_to_others(out) == open_to_others(tmp_path / "there") == []


@pytest.mark.parametrize("there", [False, True], ids=["made by the run", "made by the user"])
def test_a_served_run_keeps_its_journal_and_keys_to_its_owner(there: bool, tmp_path: Path) -> None:
    before, out = os.umask(0), tmp_path / "run"
    try:
        if there:
            out.mkdir(mode=0o755)
        with af.serve(out, address="tcp://127.0.0.1:0", durability="process") as run:
            run.queue.declare("train", needs=["x"])
            run.queue.put({"x": [1.0]})
            run.queue.get("train", timeout_s=30).ack()
            run.queue.end()
            # then
            assert mode(out) == (0o755 if there else 0o700)
            assert {each.name for each in out.iterdir()} >= {"address", "journal", "run.key", "server.key"}
            assert open_to_others(out) == []
    finally:
        os.umask(before)


def test_who_may_read_a_folder_of_weights_that_was_there_is_its_owners_to_say(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        (tmp_path / "shared").mkdir(mode=0o755)
        for name in ("made", "shared"):
            with af.serve() as run, run.weight_publisher("file", path=tmp_path / name) as publisher:
                publisher.publish(1, {"w": [1.0]}).wait(30)
        # one that the publisher made keeps the versions in it, and one of the user's goes by the umask, as other users' replicas need
        assert mode(tmp_path / "made") == 0o700
        assert mode(tmp_path / "shared") == mode(next((tmp_path / "shared").glob("version-*"))) == 0o755
    finally:
        os.umask(before)
