"""Sums of an optimizer step over its passes, and the state of a step trained in parts.

update = StepSums(Totals(tokens=812, rows=32, groups=4))     # losses are divided in each pass
update = StepSums(UNDIVIDED)                                  # losses are sums, divided at the end of the step
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.interfaces import Algorithm

from .drift import Drift


class Totals(NamedTuple):
    """Trained tokens, rows and groups of a step, on all ranks."""

    tokens: int
    rows: int
    groups: int

    def of(self, normaliser: str) -> int:
        """Return the number that a sum is divided by. ``normaliser``: of NORMALISERS."""
        return 1 if normaliser == "constant" else max(1, int(getattr(self, normaliser)))


UNDIVIDED = Totals(1, 1, 1)


class StepSums:
    """Sums of one optimizer step on this rank. ``totals``: passed to the loss."""

    def __init__(self, totals: Totals) -> None:
        self.totals, self.drift = totals, Drift()
        self._sums: dict[str, Any] = defaultdict(float)

    def add(self, measured: Mapping[str, Any]) -> None:
        """Add the metrics of a pass."""
        for name, value in measured.items():
            self._sums[name] += value

    @property
    def counts(self) -> dict[str, Any]:
        """Sums as JSON, for the other ranks."""
        return {"sums": {name: float(value) for name, value in self._sums.items()}, "drift": self.drift.counts}

    @staticmethod
    def metrics(counts: Sequence[Mapping[str, Any]], divisor: Callable[[str], int]) -> dict[str, float]:
        """Return the metrics of all ranks, sums divided by ``divisor(name)``; a rank without rows
        has none."""
        each = [one["sums"] for one in counts]
        names = sorted({name for one in each for name in one})
        added = {name: sum(one.get(name, 0.0) for one in each) / divisor(name) for name in names}
        return added | Drift.metrics([one["drift"] for one in counts])


class OpenStep:
    """A step trained in parts. ``random_state``: torch's before the step. ``counts``: of each part
    and rank. ``used``: bool (rows,) of each part on this rank. ``update``: sums so far."""

    def __init__(self, number: int) -> None:
        self.number, self.random_state = number, torch.get_rng_state()
        self.counts: list[Mapping[str, Any]] = []
        self.used: list[npt.NDArray[np.bool_]] = []
        self.update = StepSums(UNDIVIDED)

    def add(self, used: npt.NDArray[np.bool_], counts: Sequence[Mapping[str, Any]]) -> None:
        """Add a part: trained rows of this rank, and the counts of all ranks."""
        self.used.append(used)
        self.counts += counts

    def check(self) -> None:
        """Raise EngineError for a step without rows."""
        if not any(each["rows"] for each in self.counts):
            raise EngineError(f"step {self.number} has no rows: call accumulate() before end_step()")

    @property
    def filtered(self) -> npt.NDArray[np.bool_] | None:
        """True for rows of this rank that were not trained, in order; None if all were."""
        used = np.concatenate(self.used)
        return None if used.all() else ~used


def divisor_of(metric: str, totals: Totals, algorithm: Algorithm) -> int:
    """Return the number by which the sums of a metric are divided at the end of a step in parts."""
    own = {"loss": algorithm.normaliser, "entropy": "tokens"}
    return totals.of(own.get(metric) or algorithm.metric_normalisers.get(metric, "tokens"))
