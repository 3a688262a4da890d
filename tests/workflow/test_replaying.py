"""The journal of a run says all that happened: carried out again, offline, it leads to the same ledger."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from children import Child, hear, say
from echo_runs import echo_workflow
from gates import Killer
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.queue import Connection, open_queue, recovery
from asyncflow_sdk.queue.journal import JournalReader


def take_and_wait(address: str) -> None:
    """In a process of its own: hold rows until it is killed."""
    queue = open_queue(Connection(address, "taker"))
    assert queue.get("work", 1).rows == 1
    say("has rows")
    hear()


def test_a_live_ledger_and_the_replay_of_its_journal_are_the_same(tmp_path: Path) -> None:
    # given a run of which workers were killed with rows in hand, and a trainer that went on
    with af.serve(tmp_path / "run", durability="process", checkpoints=True) as run:
        run.queue.declare("work", needs=["x"], gives=["y"], max_attempts=2)
        run.queue.declare("train", needs=["x", "y"], batch_rows=4)
        run.queue.put({"x": np.arange(12.0)}, group_size=2, key="all")
        for _ in range(2):
            with Child(take_and_wait, run.address) as child:
                assert child.hear() == "has rows"
                child.kill()
            until(lambda: run.queue.status().lease_count == 0, "the death being seen")
        run.queue.get("work", 10).complete({"y": np.zeros(10)})
        run.queue.get("train").ack()
        run.checkpoint(lambda path: None)
        run.queue.get("train").ack()
        assert run.resume().step == 1
        live = run.audit()
        # when
        found = af.replay(tmp_path / "run")
        # then
        assert found.audit == live
        assert (found.differing, found.torn_bytes) == (0, 0)
        assert found.audit.failed == 2
        said = [each.what for each in found.milestones]
        assert sum("is gone" in what for what in said) == 2
        assert "a trainer continues with step 1" in said
        assert all(each.audit.balanced for each in found.milestones)
        run.queue.put({"x": np.arange(1.0)}, group_size=2)
        later = af.replay(tmp_path / "run")
        assert (later.digest != found.digest, later.audit == run.audit()) == (True, True)
        run.queue.end(cancel=True)
        for step in run.consumer("train"):
            step.ack()
        run.checkpoint(lambda path: None, keep=1)


def test_a_replay_goes_on_while_the_server_replaces_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncflow_sdk.queue.journal_directory.LEAST_BYTES", 1 << 12)
    monkeypatch.setattr("asyncflow_sdk.queue.journal_directory.GROWTH", 0)
    with af.serve(tmp_path / "run", durability="process") as run:

        def read(path: Path, name: str) -> JournalReader:
            """Read a journal of which the server has just begun the next one."""
            monkeypatch.setattr(recovery, "JournalReader", JournalReader)
            while path.exists():
                run.queue.put({"x": [1.0]})
            return JournalReader(path, name)

        monkeypatch.setattr(recovery, "JournalReader", read)
        assert af.replay(tmp_path / "run").audit == run.audit()
        run.queue.end(cancel=True)


def test_a_replay_of_a_live_history_ends_at_its_newest_journal_and_leaves_nothing_out_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncflow_sdk.queue.journal_directory.LEAST_BYTES", 1 << 12)
    monkeypatch.setattr("asyncflow_sdk.queue.journal_directory.GROWTH", 0)
    with af.serve(tmp_path / "run", durability="process", history=True) as run:
        run.queue.put({"x": [1.0]})

        def go_on(milestone: recovery.Milestone) -> None:
            """Let the server end its first journal, after a new session in it."""
            if milestone.what == "begins":
                af.connect(run.address, name="late").close()
                while (tmp_path / "run" / "journal" / "journal-000001").exists():
                    run.queue.put({"x": [1.0]})

        # when replayed while it goes on, then up to where it was, and later from its beginning
        assert af.replay(tmp_path / "run", go_on).audit.put == 1
        later = af.replay(tmp_path / "run")
        assert later.audit == run.audit()
        assert any("late opens session" in each.what for each in later.milestones)
        run.queue.end(cancel=True)


def test_a_whole_run_with_killed_workers_is_replayed_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a run of many short journals, of which workers were killed
    monkeypatch.setattr("asyncflow_sdk.queue.journal_directory.LEAST_BYTES", 1 << 12)
    monkeypatch.setattr("asyncflow_sdk.queue.journal_directory.GROWTH", 0)
    killer = Killer(tmp_path / "gates", {2: "rollout-0"})
    workflow = echo_workflow(
        steps=12,
        rollout={"launcher": "process"},
        train=killer.trainer(),
        checkpoint=af.Checkpoint(every=5, history=True),
    )
    result = workflow.run(tmp_path / "run", on_event=killer)
    assert killer.killed == ["rollout-0"]
    assert len(list((tmp_path / "run" / "journal" / "history").glob("*/journal-*"))) > 1
    # when
    found = af.replay(tmp_path / "run")
    # then
    assert found.differing == 0
    assert found.audit.terminal == result.summary["rows"]
    assert (found.audit.put, found.audit.live) == (result.summary["rows_put"], 0)
    assert (found.milestones[0].audit.put, found.milestones[0].time_s) == (0, 0.0)
    assert max(each.step for each in found.milestones) == 12
    assert any("a checkpoint of step 10 covers" in each.what for each in found.milestones)


def test_each_run_of_a_directory_has_a_history_of_its_own(tmp_path: Path) -> None:
    for rows in (1, 2):
        with af.serve(tmp_path / "run", durability="process", history=True) as run:
            run.queue.put({"x": np.arange(rows)})
            run.queue.end(cancel=True)

    assert af.replay(tmp_path / "run").audit.put == 2
    histories = (tmp_path / "run" / "journal" / "history").iterdir()
    assert sorted(af.replay(history).audit.put for history in histories) == [1, 2]


def test_what_cannot_be_replayed_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no journal"):
        af.replay(tmp_path)
    with af.serve(tmp_path / "run", durability="process") as run:
        run.queue.put({"x": [1]})
        shutil.copytree(tmp_path / "run" / "journal", tmp_path / "copy")
        run.queue.end(cancel=True)
    (whole,) = (tmp_path / "copy").glob("snapshot-*")
    data = bytearray(whole.read_bytes())
    data[len(data) // 2] ^= 1
    whole.write_bytes(data)
    with pytest.raises(ConfigError, match="is damaged"):
        af.replay(tmp_path / "copy")
