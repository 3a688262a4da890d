"""Trackers: they hear of every step, off the hot path, and whatever they do the run goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from echo_runs import echo_workflow
from tracker_parts import Exits, Hangs, Lines

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, PluginError
from asyncflow_sdk.plugins import finding
from asyncflow_sdk.types import Event
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.workflow import tracking
from asyncflow_sdk.workflow.tracking import Tracking, trackers_of


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tracker "lines" is installed."""
    info = tmp_path / "site" / "lining-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lining\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[asyncflow_sdk]\nlining = lining\n")
    (tmp_path / "site" / "lining.py").write_text(
        "import asyncflow_sdk as af\n@af.hookimpl\ndef asyncflow_adapters():\n"
        "    return [af.AdapterSpec(kind='tracker', name='lines', factory='tracker_parts:Lines')]\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    finding._registry.cache_clear()
    yield
    finding._registry.cache_clear()


def workflow(*trackers: Any, **changes: Any) -> af.Workflow:
    threads: dict[str, Any] = {
        "rollout": af.Rollout("echo", group_size=4, prompt="prompt_ids", launcher="thread"),
        "train": af.Train("echo", launcher="thread"),
    }
    return echo_workflow(steps=3, trackers=list(trackers), **(threads | changes))


def heard(file: Path) -> list[list[Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def notes(directory: Path) -> list[str]:
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return [e["text"] for e in events if e["event"] == "note" and e.get("level") == "warning"]


def test_all_of_a_workflow_is_heard_by_every_tracker(tmp_path: Path, plugin: None) -> None:
    flow = workflow("lines", ("lines", {"file": "second"}), (Lines, {"file": "third"}), "tracker_parts:Lines")

    flow.run(tmp_path / "run")

    said = heard(tmp_path / "run" / "second")
    assert said[0] == ["open", False, 3, 16]
    assert [each[:3] for each in said if each[0] == "log"] == [["log", 0, 0], ["log", 1, 1], ["log", 2, 2]]
    assert any("staleness_mean" in each[3] for each in said if each[0] == "log")
    assert [each[1] for each in said if each[0] == "published"][:3] == [0, 1, 2]
    assert said[-1] == ["close"]
    assert said == heard(tmp_path / "run" / "third")
    assert len(heard(tmp_path / "run" / "lines")) == 2 * len(said), "two write into that one"
    assert flow.describe()["trackers"] == ["lines", "lines", "Lines", "tracker_parts:Lines"]
    assert notes(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("fails", "after", "why"),
    [
        ("open", ["open"], "open: OSError: no room to open"),
        ("log", ["open", "log", "close"], "log of step 0: OSError: no room to log"),
        ("published", ["open", "published", "close"], "event Published: OSError: no room to published"),
        ("close", ["open", "log", "log", "log", "close"], "close: OSError: no room to close"),
    ],
)
def test_one_that_fails_is_told_once_and_stops_nothing(
    tmp_path: Path, fails: str, after: list[str], why: str
) -> None:
    result = workflow((Lines, {"file": "bad", "fails": fails}), (Lines, {"file": "good"})).run(tmp_path / "run")

    assert result.summary["steps"] == 3
    done = [each[0] for each in heard(tmp_path / "run" / "bad") if each[0] != "published" or fails == "published"]
    assert done == after
    assert heard(tmp_path / "run" / "good")[-1] == ["close"]
    assert notes(tmp_path / "run") == [f"tracker 'Lines' failed and is left out, the run goes on: {why}"]


def test_one_that_exits_does_not_end_the_run(tmp_path: Path) -> None:
    assert workflow((Exits, {})).run(tmp_path / "run").summary["steps"] == 3
    assert ["SystemExit: enough" in note for note in notes(tmp_path / "run")] == [True]


def test_one_that_never_closes_is_left_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "CLOSE_S", 2.0)  # which the other one must not take
    assert workflow((Hangs, {}), (Lines, {"file": "good"})).run(tmp_path / "run").summary["steps"] == 3
    assert ["has not closed in 2 s" in note for note in notes(tmp_path / "run")] == [True]
    assert heard(tmp_path / "run" / "good")[-1] == ["close"]


def test_a_slow_one_gets_every_step_and_not_every_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given: a tracker that is held, and more events than may wait
    monkeypatch.setattr(tracking, "MOST_WAITING", 5)
    said: list[Event] = []
    listening = Tracking(trackers_of([(Lines, {"file": "slow"})]))
    for number in range(20):
        listening(ev.Published(time_s=0.0, version=number, nbytes=1, root=""))
        listening(ev.StepTrained(time_s=0.0, step=number, version=number, metrics={"reward": 1.0}))

    listening.start(af.TrackedRun(directory=tmp_path, description={}), said.append)
    listening.close()

    done = [each[0] for each in heard(tmp_path / "slow")]
    assert done.count("log") == 20
    assert 0 < done.count("published") < 20
    (note,) = said
    assert isinstance(note, ev.Note)
    assert "tracker 'Lines' is slower than the run: events that are no steps are left out" in note.text


def test_a_served_run_has_them_too(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run", trackers=Lines(file="mine"), description={"steps": 7}) as run:
        run.queue.put({"prompt_ids": [[1], [2]]}, group_size=2)
        run.queue.end()
        run.start(af.Rollout("echo", prompt="prompt_ids", launcher="thread"))
        run.start(af.Stage(lambda response_ids: [1.0] * len(response_ids), task="reward"))
        train = af.Train("echo", launcher="thread")
        run.declare(train, 4)
        (worker,) = run.start(train)
        run.wait(worker, timeout_s=60)
    assert [each[:2] for each in heard(tmp_path / "run" / "mine") if each[0] != "published"] == [
        ["open", False], ["log", 0], ["close"],
    ]  # fmt: skip
    assert heard(tmp_path / "run" / "mine")[0][2] == 7
    with pytest.raises(ConfigError, match="this one has none: serve"):
        af.serve(trackers=Lines())


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        ("nowhere", "no tracker adapter is named 'nowhere'; installed: "),
        (
            (Lines, {"colour": 1}),
            "tracker 'Lines': got an unexpected keyword argument 'colour'; it takes: file='lines'",
        ),
        (3, "a tracker is a name, a class, or either with options, not 3"),
        ("tracker_parts:Nothing", "importing 'tracker_parts:Nothing' failed"),
    ],
)
def test_what_cannot_be_made_is_told_before_anything_starts(tmp_path: Path, tracker: Any, message: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=message):
        workflow(tracker)
    with pytest.raises((ConfigError, PluginError), match=message):
        af.serve(tmp_path / "run", trackers=[tracker])


def test_what_is_made_and_is_none_or_refuses_its_options_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="is a NoTracker, which is no asyncflow_sdk.Tracker"):
        workflow("tracker_parts:NoTracker").run(tmp_path / "a")
    with pytest.raises(ConfigError, match="file is the name of a file"):
        workflow((Lines, {"file": ""})).run(tmp_path / "b")


def test_a_file_names_them(tmp_path: Path, plugin: None) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'steps = 1\nbatch_size = 4\nreward = "functions:length"\nprompts = { prompt_ids = [[1], [2]] }\n'
        'trackers = ["lines", { name = "lines", file = "second" }]\n'
        'rollout = { engine = "echo", prompt = "prompt_ids", group_size = 4 }\ntrain = { engine = "echo" }\n'
    )
    assert af.load_workflow(file).trackers == ["lines", ("lines", {"file": "second"})]
    assert af.load_workflow(file, {"trackers": "lines"}).trackers == ["lines"]
    with pytest.raises(ConfigError, match=r"trackers=line: no tracker adapter is named 'line'"):
        af.load_workflow(file, {"trackers": "line"})
    file.write_text(file.read_text().replace('name = "lines"', "names = 1"))
    with pytest.raises(ConfigError, match=r"run.toml:5:22: trackers.1 is a name, or a table with a name and options"):
        af.load_workflow(file)


def test_a_run_that_is_resumed_has_them_again(tmp_path: Path) -> None:
    from asyncflow_sdk.workflow.resuming import again, write_description

    flow = workflow("tracker_parts:Lines", (Lines, {"file": "b"}), checkpoint=af.Checkpoint())
    write_description(flow, tmp_path)
    assert [name for name, _ in trackers_of(again(tmp_path).trackers)] == ["tracker_parts:Lines", "Lines"]
    assert sys.modules["tracker_parts"].Lines is Lines
