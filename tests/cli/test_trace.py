"""asyncflow trace: all work of a run, in tracks that Chrome's format allows."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import synthetic_run, write_run

from asyncflow_sdk.cli.report.chrome_trace import write_trace
from asyncflow_sdk.cli.report.run_record import read_record
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types import events as ev

pytestmark = pytest.mark.fast


def traced(directory: Path, events: list[ev.Event]) -> list[dict[str, Any]]:
    """Write a run and its trace, and return the events of the trace."""
    found = json.loads(write_trace(write_run(directory / "run", events)).read_text())
    assert found.keys() == {"traceEvents", "displayTimeUnit"}
    return list(found["traceEvents"])


def test_all_work_is_there_and_no_slices_of_a_track_overlap(tmp_path: Path) -> None:
    run = synthetic_run(steps=20, restart_at=10)

    events = traced(tmp_path, run)

    spans = [event for event in run if isinstance(event, ev.Span)]
    slices = [event for event in events if event["ph"] == "X"]
    assert sorted(each["name"] for each in slices) == sorted(span.kind for span in spans)
    assert sum(each["dur"] for each in slices) == pytest.approx(sum(s.seconds for s in spans) * 1e6, abs=len(spans))
    tracks = defaultdict(list)
    for each in slices:
        tracks[each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    for track in tracks.values():
        assert all(before[1] <= after[0] + 1 for before, after in itertools.pairwise(sorted(track))), "but rounding"
    named = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert {span.worker for span in spans} <= set(named.values())
    assert tracks.keys() <= named.keys()
    rewards = [each["args"]["reward"] for each in events if each["ph"] == "C" and each["name"] == "reward"]
    assert rewards == [event.metrics["reward"] for event in run if isinstance(event, ev.StepTrained)]


def test_work_at_the_same_time_gets_tracks_of_its_own(tmp_path: Path) -> None:
    three = [ev.Span(time_s=start, worker="w", kind="generate", seconds=2.0, version=0) for start in (0.0, 1.0, 2.0)]

    events = traced(tmp_path, [*three])

    assert [each["tid"] for each in events if each["ph"] == "X"] == [1, 2, 1]
    assert [each["args"]["name"] for each in events if each["name"] == "thread_name"] == ["w", "w (2)"]
    assert {each["args"]["version"] for each in events if each["ph"] == "X"} == {0}


def test_lines_of_an_older_sdk_about_single_rows_are_no_damage(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", synthetic_run(steps=2))
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event":"traced","time_s":1.0,"group":6,"rows":[7],"state":"put"}\n')

    record = read_record(run)

    assert len(record.steps) == 2
    assert not record.skipped


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no events\.jsonl"):
        write_trace(tmp_path)
