"""A run from Python: its line of progress, its notes in the log, and short texts of its objects."""

import io
import logging
import sys
from pathlib import Path

import pytest
from echo_runs import echo_workflow
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.types.events import Note, WorkerState

pytestmark = pytest.mark.fast


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("progress", [None, False])
def test_terminal_shows_one_line_unless_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], progress: bool | None
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())

    echo_workflow().run(tmp_path / "run", progress=progress)

    lines = [line.strip() for line in terminal.getvalue().split("\r\x1b[K")]
    assert [
        each for each in ("step 0 of 3", "step 2 of 3: reward") if any(line.startswith(each) for line in lines)
    ] == ([] if progress is False else ["step 0 of 3", "step 2 of 3: reward"])
    assert terminal.getvalue().count("\n") == (progress is None)
    assert capsys.readouterr().out == ""


def test_log_has_notes_and_progress(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notes = [
        Note(time_s=0.0, text="look here", worker="reward-0"),
        Note(time_s=0.0, text="beware", level="warning"),
        WorkerState(time_s=0.0, worker="reward-0", state="restarting", pid=1, detail="was killed"),
    ]

    with caplog.at_level(logging.INFO, "asyncflow"):
        echo_workflow().run(tmp_path / "run", on_event=lambda event: None, progress=True)
        with af.serve() as run:
            for note in notes:
                run.report(note)
            until(lambda: "was killed" in caplog.text, "the last note")

    said = [(level, text) for name, level, text in caplog.record_tuples if name == "asyncflow"]
    assert (logging.INFO, "step 0 of 3: workers start") in said
    assert any(text.startswith("step 3 of 3: reward") for _, text in said)
    assert said[-3:] == [
        (logging.INFO, "look here (reward-0)"),
        (logging.WARNING, "beware"),
        (logging.WARNING, "worker reward-0 was killed"),
    ]


def test_workflow_and_result_have_a_short_repr(tmp_path: Path) -> None:
    workflow = echo_workflow()

    result = workflow.run(tmp_path / "run")

    assert repr(workflow) == "Workflow(echo, echo: 3 steps of 16 rows)"
    first, last = result.rewards
    assert repr(result) == f"Result('{tmp_path / 'run'}': completed, 3 of 3 steps, reward {first:.3f} to {last:.3f})"
