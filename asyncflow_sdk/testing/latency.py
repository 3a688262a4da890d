"""Latency models: how long an engine takes, as numbers, without a clock. Engines that are timed by them are in ``timed``.

All times are the model's seconds, lengths are tokens. A simulation and a real run that use the same model and seed generate the
same responses of the same lengths, whoever generates them and in whatever order.
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
    """A replica with continuous batching. A step draws one token of each of n running responses and takes ``step_s +
    step_row_s * n``. The prompt of each request holds it up for ``prefill_s`` a token, new weights for ``load_s``.

    Lengths are lognormal with ``median`` and ``sigma``, rounded up, at most ``longest``. They follow from ``seed``
    and the prompt's first token alone.
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
        """How long the ``n`` responses to a prompt are, by its first token."""
        normal = np.random.default_rng([self.seed, prompt]).standard_normal(n)
        drawn = np.ceil(self.median * np.exp(self.sigma * normal))
        return np.clip(drawn, 1, self.longest).astype(np.int64)

    def row_s(self, running: int, mean_length: float, prefill_tokens: float) -> float:
        """Seconds of a replica that a response takes up where ``running`` run all the time; prefill of so many tokens a
        response."""
        return mean_length * (self.step_s / running + self.step_row_s) + prefill_tokens * self.prefill_s


class Decoding(Generic[K]):
    """The responses that run in one replica, each by a key. Times may come late, but never fall: what ended meanwhile ended when it did.

    All that run draw a token in each step; so one number, of the tokens that anything would have drawn since the beginning,
    says how far each is, and nothing is done for each token. Every method first lets time pass up to ``now``.
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
        return len(self._running)

    def start(self, now: float, lengths: Iterable[tuple[K, int]], prompt_tokens: int) -> float:
        """Responses begin, once their prompt is read. Returns the position from which they are drawn; see ``position``."""
        self.hold(now, prompt_tokens * self._latency.prefill_s)
        for key, tokens in lengths:
            end = self._drawn + tokens
            self._running[key] = end
            heapq.heappush(self._ends, (end, self._serial, key))
            self._serial += 1
        return self._drawn

    def hold(self, now: float, seconds: float) -> None:
        """Nothing is drawn for so long."""
        self._pass(now)
        self._since = max(self._since, now) + seconds

    def stop(self, now: float, keys: Iterable[K]) -> None:
        """Nothing more is heard of these responses."""
        self._pass(now)
        gone = set(keys)
        for key in gone:
            self._running.pop(key, None)
        self._ended = [key for key in self._ended if key not in gone]

    def position(self, now: float) -> float:
        """How many tokens anything would have drawn since the beginning."""
        self._pass(now)
        return self._drawn

    def ended(self, now: float) -> list[K]:
        """Those that ended since the last call, in the order in which they did."""
        self._pass(now)
        ended, self._ended = self._ended, []
        return ended

    def next(self) -> float | None:
        """When the next response ends, if nothing else happens; the past, if one has ended already. None: nothing runs."""
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
