"""Token ages: the staleness of each trained token, split into generation time and queue time.

ages = batch.ages(step)                  # of a leased or recorded step ages.in_flight + ages.in_queue == ages.total
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from .ragged import Ragged
from .spans import steps_of, token_steps, token_versions


class TokenAges(NamedTuple):
    """Staleness of each token, in versions: int64 (tokens,).

    ``in_flight``: versions published between the token's version and the completion of its row.
    ``in_queue``: versions published after that and before the row's step was trained.
    """

    in_flight: npt.NDArray[np.int64]
    in_queue: npt.NDArray[np.int64]

    @property
    def total(self) -> npt.NDArray[np.int64]:
        """The step being trained minus the step of the token's version."""
        return self.in_flight + self.in_queue

    def metrics(self) -> dict[str, float]:
        """Return mean and maximum of the total and of both parts, by metric name."""
        return AgeSums.of(self).metrics()


class AgeSums(NamedTuple):
    """Sums of token ages, mergeable over shards of a step. ``parts``: (sum, maximum) by name."""

    tokens: int
    parts: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, ages: TokenAges) -> AgeSums:
        """Sum the ages of one shard."""
        named = {"staleness": ages.total, "staleness_in_flight": ages.in_flight, "staleness_in_queue": ages.in_queue}
        tokens = len(ages.total)
        return cls(tokens, {name: (int(each.sum()), int(each.max())) for name, each in named.items() if tokens})

    @classmethod
    def all(cls, packed: Iterable[bytes]) -> AgeSums:
        """Merge several shards, each encoded by ``packed``."""
        shards = [shard for each in packed if (shard := msgspec.msgpack.decode(each, type=cls)).tokens]
        names = shards[0].parts if shards else ()
        return cls(
            sum(shard.tokens for shard in shards),
            {
                name: (sum(shard.parts[name][0] for shard in shards), max(shard.parts[name][1] for shard in shards))
                for name in names
            },
        )

    def packed(self) -> bytes:
        """Encode as msgpack."""
        return msgspec.msgpack.encode(self)

    def metrics(self) -> dict[str, float]:
        """Return mean and maximum of each part, by metric name."""
        return {
            f"{name}_{statistic}": float(value)
            for name, (total, most) in self.parts.items()
            for statistic, value in (("mean", total / self.tokens), ("max", most))
        }


def token_ages(
    spans: Ragged,
    step: int,
    completed_at: npt.NDArray[np.int64] | None,
    version_step_offsets: tuple[tuple[int, int], ...] = (),
    mask: Ragged | None = None,
) -> TokenAges:
    """Return the ages of the tokens of ``step``, or of those in ``mask``, counted in steps as by ``token_steps``.

    ``completed_at``: int64 (rows,), the current version at each row's completion; -1 for a row, or
    None for all rows, if unknown: the full age then counts as queue time.
    """
    drawn = token_steps(spans, version_step_offsets)
    completed = drawn
    if completed_at is not None:
        completed = np.repeat(steps_of(completed_at, version_step_offsets), token_versions(spans).lengths)
        completed = np.clip(completed, drawn, np.maximum(drawn, step))
    chosen = slice(None) if mask is None else mask.values.astype(np.bool_)
    return TokenAges((completed - drawn)[chosen], (step - completed)[chosen])
