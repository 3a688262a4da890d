"""A step that the trainer's own weights drew, with log-probs that are not theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
from echo_runs import echo_workflow, events_of

import asyncflow_sdk as af
from asyncflow_sdk.cli.report.page import write_report
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.types import Batch
from asyncflow_sdk.workflow.loops.recorder import Recorder

DRIFT = "the log-probs of rollout and trainer differ"


class Drifting(EchoTrain):
    """Its log-probs are 0.3 away from the rollouts'."""

    def train_step(self, batch: Batch) -> af.StepResult:
        return af.StepResult({**super().train_step(batch).metrics, "logprob_drift": 0.3})


def run(directory: Path, **train: float) -> tuple[af.Result, list[str]]:
    """A run whose steps are all drawn by the trained weights, and its warnings of a drift."""
    trainer = af.Train(Drifting, launcher="thread", **train)
    result = echo_workflow(train=trainer, staleness=af.Staleness(max_staleness=0)).run(directory)
    return result, [note["text"] for note in events_of(directory, "note") if note["text"].startswith(DRIFT)]


def test_a_drift_on_policy_is_a_warning_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result, warned = run(tmp_path / "run")

    (said,) = warned
    assert f"{DRIFT}: 0.3 a token on average in step 0, where drift_limit=0.05 is allowed" in said
    assert all(cause in said for cause in ("packed=False", "lm_head", "temperature or dtype", "af.Weights(probe="))
    assert result.summary["warnings"] == [said]
    assert sum(said in line for line in caplog.messages) == 1
    assert DRIFT in write_report(tmp_path / "run").read_text()

    # and a process that continues the run knows it
    again = Recorder(tmp_path / "run", again=True)
    again.close()
    assert again.errors == [said]


def test_a_drift_within_the_limit_is_none(tmp_path: Path) -> None:
    result, warned = run(tmp_path / "run", drift_limit=0.31)

    assert (warned, result.summary["warnings"]) == ([], [])
    with pytest.raises(ConfigError, match="drift_limit must be above 0, not 0"):
        af.Train("echo", drift_limit=0.0)
