"""Timed engines: they take the time of a latency model and no CPU, so that many run on few cores.

    af.Rollout("timed", step_s=0.02, step_row_s=0.0005, median=700, max_rows=64, time_scale=20)
    af.Train("timed", token_s=1e-4, step_s=1.0, time_scale=20)

Tokens and log-probs are zeros. ``time_scale``: the model's seconds in a real one. A prompt's first
token determines the lengths of its responses on every replica.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ConfigError, EngineError
from ..interfaces import Capabilities, Completion, Request, RolloutEngine, StepResult, WeightUpdate
from ..types import Batch, Ragged, VersionSpan
from .echo import EchoTrain
from .latency import Decoding, RolloutLatency


def check_scale(time_scale: float) -> float:
    """Return ``time_scale`` if finite and above 0. Raises ConfigError."""
    if not (math.isfinite(time_scale) and time_scale > 0):
        raise ConfigError(f"time_scale is a number above 0, not {time_scale}")
    return time_scale


@dataclass
class _Request:
    """A request: the position of its first token, and its finished responses."""

    start: float
    lengths: list[int]
    ended: asyncio.Queue[Completion] = field(default_factory=asyncio.Queue)


class TimedRollout(RolloutEngine):
    """Generate with the times of `RolloutLatency`: its fields are options beside ``max_rows`` and ``time_scale``.

    Weights load after draining or in flight. One timer serves all running responses.
    """

    conformance_policy = ""

    def __init__(self, model: str = "", *, max_rows: int = 64, time_scale: float = 1.0, **latency: Any) -> None:
        self.capabilities = Capabilities(
            swap=frozenset({"drain", "in_flight"}), token_versions=True, max_rows=max_rows
        )
        try:
            self.latency = RolloutLatency(**latency)
        except TypeError as error:
            raise ConfigError(f"engine 'timed': {error}") from None
        self._scale = check_scale(time_scale)
        self._decoding = Decoding[tuple[int, int]](self.latency)
        self._requests: dict[int, _Request] = {}
        self._serial = itertools.count()
        self._marks: list[tuple[float, int]] = [(0.0, 0)]  # from which position on which version draws
        self._timer: asyncio.TimerHandle | None = None
        self._began: float | None = None
        self._ids = np.zeros(self.latency.longest, np.int32)
        self._logprobs = np.zeros(self.latency.longest, np.float32)

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        """Yield each response at the time of its end."""
        if not len(request.prompt_ids):
            raise EngineError("an empty prompt")
        drawn = self.latency.lengths(int(request.prompt_ids[0]), request.n)
        lengths = np.minimum(drawn, request.sampling.max_tokens).tolist()
        number, now = next(self._serial), self._now()
        keys = [(number, index) for index in range(request.n)]
        start = self._decoding.start(now, zip(keys, lengths, strict=True), len(request.prompt_ids))
        mine = self._requests[number] = _Request(start, lengths)
        self._look()
        try:
            for _ in range(request.n):
                yield await mine.ended.get()
        finally:
            del self._requests[number]
            self._decoding.stop(self._now(), keys)
            self._look()

    async def load_weights(self, update: WeightUpdate) -> Set[str]:
        """Take a version after ``load_s``; later tokens carry it."""
        names = {name for name, _ in update.arrays()}
        now = self._now()
        self._decoding.hold(now, self.latency.load_s)
        self._look()  # what had ended by now is of the old version
        self._marks.append((self._decoding.position(now), update.version))
        oldest = min((request.start for request in self._requests.values()), default=math.inf)
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            del self._marks[0]
        await asyncio.sleep(self.latency.load_s / self._scale)
        return names

    async def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _now(self) -> float:
        time_s = asyncio.get_running_loop().time()
        if self._began is None:
            self._began = time_s
        return (time_s - self._began) * self._scale

    def _look(self) -> None:
        for number, index in self._decoding.ended(self._now()):
            request = self._requests[number]
            request.ended.put_nowait(self._completion(request, index))
        if self._timer is not None:
            self._timer.cancel()
        self._timer, then = None, self._decoding.next()
        if then is not None:
            assert self._began is not None
            self._timer = asyncio.get_running_loop().call_at(self._began + then / self._scale, self._look)

    def _completion(self, request: _Request, index: int) -> Completion:
        tokens, spans = request.lengths[index], [VersionSpan(self._marks[0][1], 0, request.lengths[index])]
        for position, version in self._marks[1:]:
            at = max(0, math.floor(position - request.start))
            if at < tokens:
                cut = (VersionSpan(span.version, span.start, min(span.end, at)) for span in spans)
                spans = [*(span for span in cut if span.start < span.end), VersionSpan(version, at, tokens)]
        reason = "stop" if tokens < self.latency.longest else "length"
        return Completion(index, self._ids[:tokens], self._logprobs[:tokens], reason, spans)


class TimedTrain(EchoTrain):
    """A step takes ``step_s`` plus ``token_s`` a token of prompts and responses, reading all
    weights ``copy_s``, and log-probs of a batch ``token_s`` a token. In parts, each part takes its
    tokens' time, and the end of the step ``step_s``."""

    conformance_policy = ""
    reshards = False

    def __init__(
        self,
        model: str = "",
        *,
        algorithm: Any = None,
        token_s: float = 0.0,
        step_s: float = 0.0,
        copy_s: float = 0.0,
        time_scale: float = 1.0,
    ) -> None:
        super().__init__(model, algorithm=algorithm)
        scale = check_scale(time_scale)
        self._token_s, self._step_s, self._copy_s = token_s / scale, step_s / scale, copy_s / scale
        self._busy = threading.Lock()

    def end_step(self) -> StepResult:
        """Wait for ``step_s``; report the mean reward of all parts."""
        self._take(self._step_s)
        return super().end_step()

    def logprobs(self, batch: Batch) -> Ragged:
        """Return zeros after the duration of a pass."""
        self._verify(batch)
        lengths = batch.ragged("response_ids").lengths
        return Ragged.from_lengths(np.zeros(int(lengths.sum()), np.float32), lengths)

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """Yield the number of steps as the one tensor."""
        self._take(self._copy_s)
        yield "steps", np.array([self.steps], np.int64)

    def load_weights(self, update: WeightUpdate) -> None:
        """Continue with a version's steps."""
        self._take(self._copy_s)
        self.steps = int(dict(update.arrays())["steps"][0])

    def _verify(self, batch: Batch) -> None:
        self._take(self._token_s * sum(len(batch.ragged(name).values) for name in ("prompt_ids", "response_ids")))

    def _take(self, seconds: float) -> None:
        with self._busy:  # a device does one thing after another
            time.sleep(seconds)
