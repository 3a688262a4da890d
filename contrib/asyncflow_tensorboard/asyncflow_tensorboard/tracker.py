"""TensorBoardTracker: writes the metrics of a run for TensorBoard.

af.Workflow(..., track=["tensorboard"])               # then: tensorboard --logdir runs
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboardX import SummaryWriter

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import TrackedRun, Tracker


class TensorBoardTracker(Tracker):
    """``directory``: of the event files; default: "tensorboard" in the run's directory.
    ``flush_s``: seconds between two writes. ``sample_every``: steps from one table of samples to the
    next; 0: none.

    Metrics are named "train/reward" etc.; "version" is the trained version. The run's description
    is a text. A step trained again after a resume replaces its earlier metrics and those of later
    steps.
    """

    def __init__(self, directory: str | None = None, flush_s: float = 5.0, sample_every: int = 0) -> None:
        if flush_s <= 0:
            raise af.ConfigError(f"flush_s must be above 0, not {flush_s}")
        self._directory, self._flush_s, self._last = directory, flush_s, -1
        self.sample_every = sample_every

    def open(self, run: TrackedRun) -> None:
        self._place = Path(self._directory) if self._directory else run.directory / "tensorboard"
        self._writer: SummaryWriter | None = None
        if not run.resumed:  # else it is there already
            text = json.dumps(run.description, indent=2, default=str)
            self._new(None).add_text("run", "\n".join(f"    {line}" for line in text.splitlines()))

    def log(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        writer = self._new(step) if self._writer is None or step <= self._last else self._writer
        self._last = step
        for name, value in metrics.items():
            writer.add_scalar(f"train/{name}", value, step)
        writer.add_scalar("version", version, step)

    def samples(self, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        assert self._writer is not None, "log() has made it"
        lines = [
            "|".join(["", *map(_cell, line), ""])
            for line in (rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows))
        ]
        self._writer.add_text("samples", "\n".join(lines), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _new(self, purge_step: int | None) -> SummaryWriter:
        """Begin another file. Its name has the time in seconds, so two of one second would be one
        file."""
        self.close()
        files = len(list(self._place.glob("*tfevents*")))
        self._writer = SummaryWriter(
            str(self._place), purge_step=purge_step, flush_secs=self._flush_s, filename_suffix=f".{files:04}"
        )
        return self._writer


def _cell(value: str | float) -> str:
    """Return a cell of a table in Markdown."""
    return str(value).replace("|", "\\|").replace("\n", "<br>")
