"""Echo engines: the contract of real ones at no cost, without torch, for tests of what lies between them.

The policy is a few small arrays that all hold the version's number of training steps. A response repeats its
prompt; its log-probs are minus that number, so that whoever reads a row can tell which weights made it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Set
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import EngineError, WeightMismatch
from ..interfaces import Capabilities, Completion, Request, RolloutEngine, StepResult, TrainEngine, WeightUpdate
from ..types import Batch, Ragged


def weights(steps: int) -> dict[str, np.ndarray[Any, Any]]:
    """The policy after so many steps: several dtypes, one empty and one 0-dimensional array."""
    return {
        "layer.0.weight": np.full((64, 33), steps, np.float32),
        "layer.0.bias": np.full(33, steps, ml_dtypes.bfloat16),
        "head.weight": np.full((7, 5, 3), steps, np.float16),
        "empty": np.empty((0, 4), np.float32),
        "scale": np.array(steps, np.float64),
    }


class EchoRollout(RolloutEngine):
    """Answers after ``delay_s`` a response, spread by ``spread`` (0: all at once; 1: up to twice as long)."""

    def __init__(
        self, model: str = "", *, delay_s: float = 0.0, spread: float = 0.0, max_rows: int = 256, seed: int = 0
    ) -> None:
        self.capabilities = Capabilities(max_rows=max_rows, context=4096)
        self._delay_s, self._spread = delay_s, spread
        self._random = np.random.default_rng(seed)
        self._weights = weights(0)
        self._running = 0

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        if not len(request.prompt_ids):
            raise EngineError("an empty prompt")
        if len(request.prompt_ids) + request.sampling.max_tokens > 4096:
            raise EngineError(f"a prompt of {len(request.prompt_ids)} tokens does not fit into 4096")
        self._running += 1
        try:
            delays = self._delay_s * (1 + self._spread * self._random.random(request.n))
            waited = 0.0
            for index in np.argsort(delays, kind="stable").tolist():
                await asyncio.sleep(max(0.0, delays[index] - waited))
                waited = max(waited, float(delays[index]))
                ids = request.prompt_ids[: request.sampling.max_tokens]
                lps = np.full(len(ids), -float(self._weights["scale"]), np.float32)
                yield Completion(index, ids, lps, "stop")
        finally:
            self._running -= 1

    async def load_weights(self, update: WeightUpdate) -> Set[str]:
        if self._running:
            raise EngineError(f"{self._running} requests are running")
        new = {name: array.copy() for name, array in update.arrays()}
        for name, array in new.items():
            have = self._weights.get(name)
            if have is None or have.shape != array.shape or have.dtype != array.dtype:
                raise WeightMismatch(f"version {update.version}: tensor {name!r} is {array.dtype}{array.shape}")
        self._weights |= new
        return set(new)


class EchoTrain(TrainEngine):
    """A step adds one to every weight. Reports the mean reward; refuses rows that the wrong weights made.

    ``delay_s``: of a step. ``fail_at``: raise at this step, for tests of failure.
    """

    def __init__(self, model: str = "", *, algorithm: Any = None, delay_s: float = 0.0, fail_at: int = -1) -> None:
        self.steps = 0
        self._delay_s, self._fail_at = delay_s, fail_at

    def train_step(self, batch: Batch) -> StepResult:
        import time

        if self.steps == self._fail_at:
            raise RuntimeError(f"told to fail at step {self.steps}")
        made_by = -batch.ragged("logprobs").values
        spans = batch.ragged("version_spans").values
        if set(made_by.tolist()) - set(spans[:, 0].tolist()):
            raise WeightMismatch("rows say they were made by other versions than the weights that made them")
        time.sleep(self._delay_s)
        self.steps += 1
        return StepResult({"reward": float(batch.array("reward").mean())})

    def logprobs(self, batch: Batch) -> Ragged:
        lengths = batch.ragged("response_ids").lengths
        return Ragged.from_lengths(np.full(int(lengths.sum()), -self.steps, np.float32), lengths)

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        return weights(self.steps).items()

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "echo.json").write_text(json.dumps({"steps": self.steps}))

    def load(self, path: Path) -> None:
        self.steps = json.loads((path / "echo.json").read_text())["steps"]

    def export(self, path: Path) -> None:
        self.save(path)
