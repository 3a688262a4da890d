"""LengthHistogram: response lengths in the logarithmic bins of events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...types.reports import BINS_PER_DOUBLING


def bin_start(number: int) -> float:
    """Return the lower bound of a bin."""
    return float(2 ** (number / BINS_PER_DOUBLING))


def bin_middle(number: int) -> float:
    """Return the middle of the integers in a bin."""
    low, high = math.ceil(bin_start(number) - 1e-9), math.ceil(bin_start(number + 1) - 1e-9) - 1
    return (low + max(low, high)) / 2


@dataclass
class LengthHistogram:
    """A histogram with exact mean and deviation. ``tokens``, ``squares``: sums of lengths and squares."""

    rows: float = 0
    tokens: float = 0
    squares: float = 0
    bins: dict[int, float] = field(default_factory=dict)

    def add(self, bins: Mapping[int, float], tokens: float, squares: float) -> None:
        """Add rows by bin, with the sums of their lengths and squared lengths."""
        self.rows += sum(bins.values())
        self.tokens += tokens
        self.squares += squares
        for number, rows in bins.items():
            self.bins[number] = self.bins.get(number, 0) + rows

    def merge(self, other: LengthHistogram) -> None:
        """Add the rows of another histogram."""
        self.add(other.bins, other.tokens, other.squares)

    @property
    def mean(self) -> float:
        """The mean length; nan without rows."""
        return self.tokens / self.rows if self.rows else math.nan

    @property
    def deviation(self) -> float:
        """The standard deviation; 0 with fewer than two rows."""
        if self.rows < 2:
            return 0.0
        return math.sqrt(max(self.squares - self.tokens * self.tokens / self.rows, 0.0) / (self.rows - 1))

    def quantile(self, share: float) -> float:
        """Return the length not exceeded by ``share`` of the rows, with the precision of a bin; nan without rows."""
        left = share * self.rows
        for number in sorted(self.bins):
            left -= self.bins[number]
            if left <= 0:
                return bin_middle(number)
        return math.nan

    def with_unfinished(self, unfinished: LengthHistogram) -> LengthHistogram:
        """Return the estimated histogram of all responses, as if the ``unfinished`` ones had
        finished like the longer finished ones (Kaplan and Meier 1958, product-limit estimate)."""
        if not unfinished.rows:
            return self
        rows = at_risk = self.rows + unfinished.rows
        left, found = 1.0, LengthHistogram()
        for number in sorted({*self.bins, *unfinished.bins}):
            share = left * self.bins.get(number, 0) / at_risk
            at_risk -= self.bins.get(number, 0) + unfinished.bins.get(number, 0)
            left -= share
            if at_risk < 0.5:  # no longer response
                share, left = share + left, 0.0
            if share:
                length = bin_middle(number)
                found.add({number: share * rows}, share * rows * length, share * rows * length**2)
        return found
