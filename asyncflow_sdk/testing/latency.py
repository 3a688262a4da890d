"""Latency models: the durations of an engine as numbers, without a clock. `timed` has engines with these times.

All times are the model's seconds, lengths are tokens. With the same model and seed, a simulation and a real run have
responses of the same lengths, in any order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..types.validation import check_above, check_least

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class RolloutLatency:
    """A replica with continuous batching.

    A step draws one token for each of n running responses in ``step_s + step_row_s * n``. A request delays all by
    ``prefill_s`` a prompt token, new weights by ``load_s``. Lengths are lognormal with ``median`` and ``sigma``,
    rounded up, at most ``longest``; ``seed`` and the prompt's first token determine them.
    """

    step_s: float = 0.02
    step_row_s: float = 0.0
    prefill_s: float = 0.0
    load_s: float = 0.0
    median: float = 500.0
    sigma: float = 0.8
    longest: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        times = (self.step_s, self.step_row_s, self.prefill_s, self.load_s, self.sigma)
        if not all(math.isfinite(t) and t >= 0 for t in times) or not self.step_s + self.step_row_s > 0:
            raise ConfigError(f"times and sigma are finite numbers from 0, and a step takes some time: {self}")
        check_above(0, median=self.median)
        check_least(1, longest=self.longest)

    def lengths(self, prompt: int, n: int) -> npt.NDArray[np.int64]:
        """Return the lengths of ``n`` responses to a prompt, named by its first token."""
        normal = np.random.default_rng([self.seed, prompt]).standard_normal(n)
        drawn = np.ceil(self.median * np.exp(self.sigma * normal))
        return np.clip(drawn, 1, self.longest).astype(np.int64)

    def row_s(self, running: int, mean_length: float, prefill_tokens: float) -> float:
        """Return a replica's seconds for a response while ``running`` responses run, with so many
        prefill tokens a response."""
        return mean_length * (self.step_s / running + self.step_row_s) + prefill_tokens * self.prefill_s


class Decoding(Generic[K]):
    """The running responses of a replica, by key. Times may be late, but never decrease; each end has its own time.

    All running responses draw a token in each step. One position, the tokens drawn by a response running since the
    start, tells the progress of each. Every method first advances to ``now``.
    """

    def __init__(self, latency: RolloutLatency) -> None:
        self._latency = latency
        self._drawn = 0.0
        self._since = 0.0  # ``_drawn`` was right then; tokens are drawn from then on
        self._ends: list[tuple[float, int, K]] = []
        self._running: dict[K, float] = {}
        self._ended: list[K] = []
        self._serial = 0

    @property
    def running(self) -> int:
        """The number of running responses."""
        return len(self._running)

    def start(self, now: float, lengths: Iterable[tuple[K, int]], prompt_tokens: int) -> float:
        """Start responses after their prompt is read; return the position of their first token."""
        self.hold(now, prompt_tokens * self._latency.prefill_s)
        for key, tokens in lengths:
            end = self._drawn + tokens
            self._running[key] = end
            heapq.heappush(self._ends, (end, self._serial, key))
            self._serial += 1
        return self._drawn

    def hold(self, now: float, seconds: float) -> None:
        """Draw nothing for ``seconds``."""
        self._pass(now)
        self._since = max(self._since, now) + seconds

    def stop(self, now: float, keys: Iterable[K]) -> None:
        """Drop these responses."""
        self._pass(now)
        gone = set(keys)
        for key in gone:
            self._running.pop(key, None)
        self._ended = [key for key in self._ended if key not in gone]

    def position(self, now: float) -> float:
        """Return the tokens drawn since the start by a response running all the time."""
        self._pass(now)
        return self._drawn

    def ended(self, now: float) -> list[K]:
        """Return the responses ended since the last call, in order."""
        self._pass(now)
        ended, self._ended = self._ended, []
        return ended

    def next(self) -> float | None:
        """Return the time of the next end, or of a past one; None if nothing runs."""
        if self._ended:
            return self._since
        self._forget_stopped()
        return self._end_of_first() if self._ends else None

    def _pass(self, now: float) -> None:
        self._forget_stopped()
        while self._ends and (at := self._end_of_first()) <= now:
            self._drawn, _, key = heapq.heappop(self._ends)
            self._since = at
            del self._running[key]
            self._ended.append(key)
            self._forget_stopped()
        if now > self._since:
            if self._running:
                self._drawn += (now - self._since) / self._pace
            self._since = now

    def _forget_stopped(self) -> None:
        while self._ends and self._running.get(self._ends[0][2]) != self._ends[0][0]:
            heapq.heappop(self._ends)

    def _end_of_first(self) -> float:
        return self._since + (self._ends[0][0] - self._drawn) * self._pace

    @property
    def _pace(self) -> float:
        return self._latency.step_s + self._latency.step_row_s * len(self._running)
