"""The samplers that come with the SDK. Without one a task gives the first rows that are ready (fifo)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..interfaces import Candidates, Sampler


class Fifo(Sampler):
    """The first rows that are ready: what a task without a sampler does."""


class WholeGroups(Sampler):
    """The groups that are complete so far, first come first: at least one, as many as fit into the count."""

    whole_groups = True


class Shuffled(Sampler):
    """Rows in a random order that depends on ``seed`` and their ids alone: whoever asks, how much at a time and how
    often, also after a restart. It mixes each ``window`` rows put one after another, so no row waits longer."""

    def __init__(self, seed: int = 0, window: int = 1024, whole_groups: bool = False) -> None:
        if window < 1:
            raise ConfigError(f"a window has at least 1 row, not {window}")
        self.seed, self.window, self.whole_groups = seed, window, whole_groups

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        order = np.lexsort((_mix(rows.ids, self.seed), rows.ids // self.window, -rows.priorities))
        return order[:count]


class ByColumn(Sampler):
    """Rows by a column, the largest first (or the smallest): its value, or its length. Within one the oldest first.
    What ranks low may wait for ever."""

    may_starve = True

    def __init__(
        self, column: str, smallest_first: bool = False, window: int = 1024, whole_groups: bool = False
    ) -> None:
        self.measure, self.smallest_first, self.window, self.whole_groups = (
            column,
            smallest_first,
            window,
            whole_groups,
        )

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        rank = rows.measures if self.smallest_first else -rows.measures
        return np.lexsort((rank, -rows.priorities))[:count]


class LengthBucketed(Sampler):
    """Rows of about one length together, to pad little: the first row, and those of the window nearest to it in the
    length of ``column``. In the order of their length."""

    def __init__(self, column: str, window: int = 1024, whole_groups: bool = False) -> None:
        self.measure, self.window, self.whole_groups = column, window, whole_groups

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        with np.errstate(invalid="ignore"):
            distance = np.abs(rows.measures - rows.measures[0])
        distance[0] = 0.0  # always taken, so that no row waits for ever; also one whose measure is no number
        nearest = np.lexsort((distance, -rows.priorities))[:count]
        return nearest[np.argsort(rows.measures[nearest], kind="stable")]


class TokenBalanced(Sampler):
    """First come first; and the ranks of a team get shards of equal row counts and about equal sums of ``column``
    (its lengths). ``whole_groups``: rows are taken and dealt out in whole groups."""

    balanced = True

    def __init__(self, column: str, whole_groups: bool = False) -> None:
        self.measure, self.whole_groups = column, whole_groups


def _mix(ids: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.uint64]:
    """A hash of each id and the seed, the same everywhere: splitmix64 (Steele et al., 2014)."""
    start = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % (1 << 64)
    with np.errstate(over="ignore"):
        x = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(start)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
