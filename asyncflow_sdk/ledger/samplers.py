"""The built-in samplers. Without a sampler, a task leases the first ready rows (fifo)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..interfaces import Candidates, Sampler


class Fifo(Sampler):
    """The first ready rows, like a task without a sampler."""


class WholeGroups(Sampler):
    """Complete groups, in order of completion: at least one, and as many as fit into the count."""

    whole_groups = True


class Shuffled(Sampler):
    """Rows in a random order, determined by ``seed`` and their ids: it does not depend on the
    client, the count, or restarts. It shuffles within each ``window`` of consecutively put rows, so
    a row waits for at most one window."""

    def __init__(self, seed: int = 0, window: int = 1024, whole_groups: bool = False) -> None:
        if window < 1:
            raise ConfigError(f"a window has at least 1 row, not {window}")
        self.seed, self.window, self.whole_groups = seed, window, whole_groups

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        """Return positions in shuffled order, highest priority first."""
        order = np.lexsort((_mix(rows.ids, self.seed), rows.ids // self.window, -rows.priorities))
        return order[:count]


class ByColumn(Sampler):
    """Rows by a column's value or length, largest first or smallest. Low ranks may starve."""

    may_starve = True

    def __init__(
        self, column: str, smallest_first: bool = False, window: int = 1024, whole_groups: bool = False
    ) -> None:
        self.measure, self.smallest_first = column, smallest_first
        self.window, self.whole_groups = window, whole_groups

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        """Return the highest-ranked positions, highest priority first."""
        rank = rows.measures if self.smallest_first else -rows.measures
        return np.lexsort((rank, -rows.priorities))[:count]


class LengthBucketed(Sampler):
    """Rows of similar length, to reduce padding: the first row, and the rows of the window nearest
    to it in the length of ``column``, sorted by length."""

    def __init__(self, column: str, window: int = 1024, whole_groups: bool = False) -> None:
        self.measure, self.window, self.whole_groups = column, window, whole_groups

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        """Return positions of similar length, shortest first."""
        with np.errstate(invalid="ignore"):
            distance = np.abs(rows.measures - rows.measures[0])
        distance[0] = 0.0  # always taken, even NaN: no row waits for ever
        nearest = np.lexsort((distance, -rows.priorities))[:count]
        return nearest[np.argsort(rows.measures[nearest], kind="stable")]


class TokenBalanced(Sampler):
    """First come, first served. The ranks of a group get shards of equal row counts and nearly
    equal sums of ``column`` (of its lengths). ``whole_groups``: keep groups together."""

    balanced = True

    def __init__(self, column: str, whole_groups: bool = False) -> None:
        self.measure, self.whole_groups = column, whole_groups


def _mix(ids: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.uint64]:
    """Hash each id with the seed, equally on all platforms: splitmix64 (Steele et al., 2014)."""
    start = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % (1 << 64)
    with np.errstate(over="ignore"):
        x = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(start)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
