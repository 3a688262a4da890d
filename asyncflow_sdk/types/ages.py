"""Ages: how stale each trained token is, and where its versions passed: while its row was generated, or in the queue.

ages = batch.ages(step)                  # of a step that was leased or recorded
ages.in_flight + ages.in_queue == ages.total
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
        return AgeSums.of(self).metrics()


class AgeSums(NamedTuple):
    """What is told of ages, so that shards of a step can be put together. ``parts``: by name, the sum and the most."""

    tokens: int
    parts: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, ages: TokenAges) -> AgeSums:
        named = {"staleness": ages.total, "staleness_in_flight": ages.in_flight, "staleness_in_queue": ages.in_queue}
        tokens = len(ages.total)
        return cls(tokens, {name: (int(each.sum()), int(each.max())) for name, each in named.items() if tokens})

    @classmethod
    def all(cls, packed: Iterable[bytes]) -> AgeSums:
        """Of several shards, each as ``packed`` gave it."""
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
        return msgspec.msgpack.encode(self)

    def metrics(self) -> dict[str, float]:
        """Mean and most of each part."""
        return {
            f"{name}_{what}": float(value)
            for name, (total, most) in self.parts.items()
            for what, value in (("mean", total / self.tokens), ("max", most))
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
