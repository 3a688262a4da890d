"""Ages: how stale each trained token is, and where its versions passed: while its row was generated, or in the queue.

ages = batch.ages(step)                  # of a step that was leased or recorded
ages.in_flight + ages.in_queue == ages.total
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .ragged import Ragged
from .spans import steps_of, token_steps, token_versions


class TokenAges(NamedTuple):
    """Staleness of every token, in versions: int64 (tokens,) each.

    ``in_flight``: published after the weights that drew it and before its row was completed. ``in_queue``: published after that
    and before its step was trained.
    """

    in_flight: npt.NDArray[np.int64]
    in_queue: npt.NDArray[np.int64]

    @property
    def total(self) -> npt.NDArray[np.int64]:
        """The step trained less that of the token's version."""
        return self.in_flight + self.in_queue

    def metrics(self) -> dict[str, float]:
        """What a step says of them: mean and most, of all and of both parts."""
        parts = {"staleness": self.total, "staleness_in_flight": self.in_flight, "staleness_in_queue": self.in_queue}
        return {
            f"{name}_{what}": float(value)
            for name, ages in parts.items()
            if len(ages)
            for what, value in (("mean", ages.mean()), ("max", ages.max()))
        }


def token_ages(
    spans: Ragged,
    step: int,
    completed_at: npt.NDArray[np.int64] | None,
    stretches: tuple[tuple[int, int], ...] = (),
    mask: Ragged | None = None,
) -> TokenAges:
    """The ages of the tokens of ``step`` (that ``mask`` has), in steps of the lineage, as ``token_steps`` counts them. ``completed_at``: int64 (rows,),
    the version that was current when each row was completed; -1, or None for all: not known, and then all of it counts as in
    the queue."""
    drawn = token_steps(spans, stretches)
    completed = drawn
    if completed_at is not None:
        completed = np.repeat(steps_of(completed_at, stretches), token_versions(spans).lengths)
        completed = np.clip(completed, drawn, np.maximum(drawn, step))
    chosen = slice(None) if mask is None else mask.values.astype(np.bool_)
    return TokenAges((completed - drawn)[chosen], (step - completed)[chosen])
