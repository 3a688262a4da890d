"""Trackers: they hear of every step, off the hot path, and whatever they do the run goes on."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from echo_runs import TOML, echo_workflow, events_of
from plugin_packages import install_plugin
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, PluginError
from asyncflow_sdk.interfaces import TrackedRun, Tracker
from asyncflow_sdk.types import events as ev


class Lines(Tracker):
    """Writes what it hears into the run's directory."""

    def __init__(self, file: str = "lines", fails: str = "") -> None:
        if not file:
            raise af.ConfigError("file is the name of a file")
        self.file, self.fails = file, fails

    def open(self, run: TrackedRun) -> None:
        self.out = (run.directory / self.file).open("a")
        self._do("open", run.resumed, run.description.get("steps"), run.description.get("batch_size"))

    def log(self, step: int, version: int, metrics: Any) -> None:
        self._do("log", step, version, sorted(metrics), metrics["reward"])

    def event(self, event: ev.Event) -> None:
        if isinstance(event, ev.Published):
            self._do("published", event.version)

    def close(self) -> None:
        self._do("close")
        self.out.close()

    def _do(self, what: str, *said: Any) -> None:
        self.out.write(json.dumps([what, *said]) + "\n")
        self.out.flush()
        if what == self.fails:
            raise OSError(f"no room to {what}")


class Samples(Lines):
    sample_every = 2

    def samples(self, step: int, rows: Any) -> None:
        self._do("samples", step, rows)


class Exits(Lines):
    def log(self, step: int, version: int, metrics: Any) -> None:
        raise SystemExit("enough")


hang = threading.Event()


class Hangs(Lines):
    """Waits where ``at`` says."""

    def __init__(self, at: str, **options: Any) -> None:
        super().__init__(**options)
        self.at = at

    def open(self, run: TrackedRun) -> None:
        super().open(run)
        assert self.at != "open" or hang.wait(60)

    def close(self) -> None:
        assert self.at != "close" or hang.wait(60)
        super().close()


class NoTracker:
    pass


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker "lines" is installed."""
    install_plugin(
        tmp_path, monkeypatch, "lining", "import asyncflow_sdk as af\n@af.hookimpl\ndef asyncflow_adapters():\n"
        "    return [af.AdapterSpec(kind='tracker', name='lines', factory='test_trackers:Lines')]\n",
    )  # fmt: skip


def workflow(*trackers: Any, **changes: Any) -> af.Workflow:
    return echo_workflow(track=list(trackers), **changes)


def heard(file: Path) -> list[list[Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def notes(directory: Path) -> list[str]:
    return [e["text"] for e in events_of(directory, "note") if e.get("level") == "warning"]


def test_all_of_a_workflow_is_heard_by_every_tracker(tmp_path: Path, plugin: None) -> None:
    flow = workflow(
        "lines", ("lines", {"file": "second"}), (Lines, {"file": "third"}), "test_trackers:Lines",
        (Samples, {"file": "fourth"}),
    )  # fmt: skip

    flow.run(tmp_path / "run")

    said = heard(tmp_path / "run" / "second")
    assert said[0] == ["open", False, 3, 16]
    assert [each[:3] for each in said if each[0] == "log"] == [["log", 0, 0], ["log", 1, 1], ["log", 2, 2]]
    assert any("staleness_mean" in each[3] for each in said if each[0] == "log")
    assert [each[1] for each in said if each[0] == "published"][:3] == [0, 1, 2]
    assert said[-1] == ["close"]
    assert said == heard(tmp_path / "run" / "third")
    assert len(heard(tmp_path / "run" / "lines")) == 2 * len(said), "two write into that one"
    assert flow.describe()["track"] == ["lines", "lines", "Lines", "test_trackers:Lines", "Samples"]
    sampled = [each[1:] for each in heard(tmp_path / "run" / "fourth") if each[0] == "samples"]
    assert [step for step, _ in sampled] == [0, 2], "each second step, also the last of the run"
    assert {len(rows) for _, rows in sampled} == {8}, "of 16 rows the first"
    assert sampled[0][1][0].keys() >= {"group", "reward", "prompt_ids", "response_ids"}
    _, recorded = next(iter(af.read_steps(tmp_path / "run")))
    for name, ids in (
        ("prompt_ids", recorded.ragged("prompt_ids")),
        ("response_ids", recorded.ragged("response_ids")),
    ):
        assert [row[name] for row in sampled[0][1]] == [" ".join(map(str, row.tolist())) for row in list(ids)[:8]]
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
    monkeypatch.setattr("asyncflow_sdk.workflow.loops.trackers.CLOSE_S", 0.5)
    hang.clear()
    assert workflow((Hangs, {"at": "close"}), (Lines, {"file": "good"})).run(tmp_path / "run").summary["steps"] == 3
    until(lambda: heard(tmp_path / "run" / "good")[-1] == ["close"], "the other one's, late on a slow machine")
    (note,) = [each for each in notes(tmp_path / "run") if "tracker 'Lines' has not closed" not in each]
    assert "tracker 'Hangs' has not closed in 0.5 s" in note
    hang.set()


def test_a_slow_one_gets_every_step_and_not_every_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given: a tracker that is held until the last step, and more events than may wait
    monkeypatch.setattr("asyncflow_sdk.workflow.loops.trackers.MOST_WAITING", 5)
    hang.clear()
    heard_by_us: list[ev.Event] = []

    def listen(event: ev.Event) -> None:
        heard_by_us.append(event)
        if isinstance(event, ev.StepTrained) and event.step == 9:
            hang.set()

    workflow((Hangs, {"at": "open", "file": "slow"}), steps=10).run(tmp_path / "run", on_event=listen)

    done = [each[0] for each in heard(tmp_path / "run" / "slow")]
    assert done.count("log") == 10
    assert done.count("published") < sum(isinstance(event, ev.Published) for event in heard_by_us)
    (note,) = notes(tmp_path / "run")
    assert "tracker 'Hangs' is slower than the run: events that are no steps are left out" in note


def test_a_served_run_has_them_too(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run", track=Lines(file="mine"), description={"steps": 7}) as run:
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
        af.serve(track=Lines())


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        ("nowhere", "no tracker adapter is named 'nowhere'; installed: "),
        ("wandb", "It is a package of its own: pip install asyncflow-wandb"),
        (
            (Lines, {"colour": 1}),
            "tracker 'Lines': got an unexpected keyword argument 'colour'; it takes: file",
        ),
        (3, "a tracker is a name, a class, or either with options, not 3"),
        ("test_trackers:Nothing", "importing 'test_trackers:Nothing' failed"),
    ],
)
def test_what_cannot_be_made_is_told_before_anything_starts(tmp_path: Path, tracker: Any, message: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=message):
        workflow(tracker)
    with pytest.raises((ConfigError, PluginError), match=message):
        af.serve(tmp_path / "run", track=[tracker])


def test_what_is_made_and_is_none_or_refuses_its_options_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="is a NoTracker, no asyncflow_sdk.interfaces.Tracker"):
        workflow("test_trackers:NoTracker").run(tmp_path / "a")
    with pytest.raises(ConfigError, match="file is the name of a file"):
        workflow((Lines, {"file": ""})).run(tmp_path / "b")


def test_a_file_names_them(tmp_path: Path, plugin: None) -> None:
    file = tmp_path / "run.toml"
    file.write_text('track = ["lines", { name = "lines", file = "second" }]\n' + TOML)
    assert af.load_workflow(file).plan.trackers == ["lines", ("lines", {"file": "second"})]
    assert af.load_workflow(file, {"track": "lines"}).plan.trackers == ["lines"]
    with pytest.raises(ConfigError, match=r"track=line: no tracker adapter is named 'line'"):
        af.load_workflow(file, {"track": "line"})
    file.write_text(file.read_text().replace('name = "lines"', "names = 1"))
    with pytest.raises(
        ConfigError, match=r"run.toml: track.1: a name is expected, or a table with a name and options"
    ):
        af.load_workflow(file)
