"""Echo engines: the contract of real engines at no cost, without torch.

All weights of the policy hold the version's number of training steps. A response repeats its
prompt, and its log-probs are minus the number of steps: each row shows the weights behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..errors import EngineError, SchemaError, WeightMismatch
from ..interfaces import Capabilities, Completion, Request, RolloutEngine, StepResult, TrainEngine, WeightUpdate
from ..interfaces.rollout import Swap
from ..types import Batch, Ragged, VersionSpan, loss_mask, token_versions


def weights(steps: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return the policy after ``steps`` steps: several dtypes, one empty and one 0-dimensional array."""
    return {
        "layer.0.weight": np.full((64, 33), steps, np.float32),
        "layer.0.bias": np.full(33, steps, ml_dtypes.bfloat16),
        "head.weight": np.full((7, 5, 3), steps, np.float16),
        "empty": np.empty((0, 4), np.float32),
        "scale": np.array(steps, np.float64),
    }


class EchoRollout(RolloutEngine):
    """Answer after ``delay_s`` seconds a response, up to ``1 + spread`` times as long.

    ``in_flight``: draw each token after ``token_s`` seconds by the current weights, and load
    weights in between. ``partial``: draw token by token, and support `interrupt`. ``slow_load_s``:
    the duration of a load (seconds). ``proves``: support scoring and held weights, for proofs.
    """

    conformance_policy = "asyncflow_sdk.testing:EchoPolicy"

    def __init__(
        self,
        model: str = "",
        *,
        delay_s: float = 0.0,
        spread: float = 0.0,
        max_rows: int = 256,
        in_flight: bool = False,
        partial: bool = False,
        token_s: float = 0.0,
        slow_load_s: float = 0.0,
        proves: bool = True,
    ) -> None:
        can = {"drain": True, "partial": partial, "in_flight": in_flight}
        self.capabilities = Capabilities(
            swap=frozenset(how for how in get_args(Swap) if can[how]),
            token_versions=in_flight,
            max_rows=max_rows,
            context=4096,
            logprobs=proves,
            held_weights=proves,
        )
        self._delay_s, self._spread, self._token_s, self._slow_load_s = delay_s, spread, token_s, slow_load_s
        self._random = np.random.default_rng(0)
        self._weights, self._version = weights(0), 0
        self._running = 0
        self._between = asyncio.Event()  # no load is under way: tokens may be drawn
        self._between.set()
        self._interrupted = asyncio.Event()

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        """Yield the prompt as each response, whole or token by token."""
        if not len(request.prompt_ids):
            raise EngineError("an empty prompt")
        if len(request.prompt_ids) + request.sampling.max_tokens > 4096:
            raise EngineError(f"a prompt of {len(request.prompt_ids)} tokens does not fit into 4096")
        self._running += 1
        try:
            slower = 1 + self._spread * self._random.random(request.n)
            answer = self._token_by_token if self.capabilities.swap - {"drain"} else self._whole
            async with contextlib.aclosing(answer(request, slower)) as completions:
                async for completion in completions:
                    yield completion
        finally:
            self._running -= 1

    async def _whole(self, request: Request, slower: npt.NDArray[np.float64]) -> AsyncGenerator[Completion, None]:
        delays, waited = self._delay_s * slower, 0.0
        for index in np.argsort(delays, kind="stable").tolist():
            await asyncio.sleep(max(0.0, delays[index] - waited))
            waited = max(waited, float(delays[index]))
            ids, reason = _answer(request)
            yield Completion(index, ids, np.full(len(ids), -self._held, np.float32), reason)

    async def interrupt(self) -> None:
        """End running responses with the tokens drawn so far."""
        interrupted, self._interrupted = self._interrupted, asyncio.Event()
        interrupted.set()

    async def _token_by_token(
        self, request: Request, slower: npt.NDArray[np.float64]
    ) -> AsyncGenerator[Completion, None]:
        drawing = [
            asyncio.create_task(self._draw(request, i, float(slower[i]), self._interrupted)) for i in range(request.n)
        ]
        try:
            for done in asyncio.as_completed(drawing):
                yield await done
        finally:
            for task in drawing:
                task.cancel()

    async def _draw(self, request: Request, index: int, slower: float, interrupted: asyncio.Event) -> Completion:
        ids, reason = _answer(request)
        drawn: list[tuple[int, float]] = []
        await asyncio.sleep(self._delay_s * slower)
        while len(drawn) < len(ids) and not interrupted.is_set():
            await asyncio.sleep(self._token_s * slower)
            await self._between.wait()
            drawn.append((self._version, -self._held))
        if len(drawn) < len(ids):
            reason, ids = "aborted", ids[: len(drawn)]
        spans, start = [], 0
        for version, tokens in itertools.groupby(version for version, _ in drawn):
            spans.append(VersionSpan(version, start, start + len(list(tokens))))
            start = spans[-1].end
        spans = spans if self.capabilities.token_versions else []
        return Completion(index, ids, np.array([lp for _, lp in drawn], np.float32), reason, spans)

    async def load_weights(self, update: WeightUpdate) -> Set[str]:
        """Copy a version after comparing all names, shapes and dtypes. Raises WeightMismatch, EngineError."""
        if self._running and not self.capabilities.token_versions:
            raise EngineError(f"{self._running} requests are running")
        new = {name: array.copy() for name, array in update.arrays()}
        for name, array in new.items():
            have = self._weights.get(name)
            if have is None or have.shape != array.shape or have.dtype != array.dtype:
                has = "no such tensor" if have is None else f"{have.dtype}{have.shape}"
                raise WeightMismatch(
                    f"version {update.version}: tensor {name!r} is {array.dtype}{array.shape}; this engine has {has}"
                )
        if missing := self._weights.keys() - new.keys():
            raise WeightMismatch(
                f"version {update.version} lacks {', '.join(sorted(missing))}, which this engine has"
            )
        self._between.clear()
        try:
            await asyncio.sleep(self._slow_load_s)
            self._take(update.version, new)
        finally:
            self._between.set()
        return set(new)

    def _take(self, version: int, new: dict[str, np.ndarray[Any, Any]]) -> None:
        self._weights |= new
        self._version = version

    async def logprobs(
        self, prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[float]]:
        """Score responses: minus the number of steps for each token."""
        return [[-self._held] * len(ids) for ids in response_ids]

    def held_weights(self) -> Iterator[tuple[str, Any]]:
        """Return the loaded weights."""
        return iter(self._weights.items())

    @property
    def _held(self) -> float:
        steps = float(self._weights["scale"])
        full = (array.reshape(-1) for array in self._weights.values() if array.size)
        return steps if all(array[0] == array.dtype.type(steps) for array in full) else float("nan")


def _same(one: np.ndarray[Any, Any] | None, other: np.ndarray[Any, Any]) -> bool:
    if one is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.tobytes() == other.tobytes()


def _answer(request: Request) -> tuple[npt.NDArray[np.int32], str]:
    """Return the rest of the response, and the reason for its end: the prompt up to a stop token or
    the limit, without tokens drawn before."""
    ids = request.prompt_ids[: len(request.prompt_ids) - request.drawn]
    if request.sampling.stop_ids:
        ends = np.flatnonzero(np.isin(ids, request.sampling.stop_ids))
        ids = ids[: ends[0] + 1 if len(ends) else None]
    left, most = ids[request.drawn :], request.sampling.max_tokens
    return left[:most], "stop" if len(left) <= most else "length"


@dataclass
class _OpenStep:
    """The parts of a step so far. ``version``: the one it trains, where its batches say so."""

    rewards: list[np.ndarray[Any, Any]] = field(default_factory=list)
    version: int = -1


class EchoTrain(TrainEngine):
    """Add one to every weight in each step, and report the mean reward. Refuse rows of wrong
    weights. Trains a step whole or in parts.

    The log-probs of a version trained or loaded here must be minus its steps; for other versions
    the first row decides. ``delay_s``: seconds a step. ``fail_at``: raise at this step.
    """

    conformance_policy = "asyncflow_sdk.testing:EchoPolicy"
    restores = streams = reshards = True

    def __init__(self, model: str = "", *, algorithm: Any = None, delay_s: float = 0.0, fail_at: int = -1) -> None:
        self.steps = 0
        self._delay_s, self._fail_at = delay_s, fail_at
        self._version = -1  # of these weights, where a leased step or a load has said so
        self._told, self._resumed = True, False  # leased steps say so
        self._steps_of: dict[int, float] = {}  # by version
        self._open: _OpenStep | None = None

    def train_step(self, batch: Batch) -> StepResult:
        """Verify the rows' log-probs against their versions, then count a step."""
        self.begin_step(-1)
        self.accumulate(batch)
        return self.end_step()

    def begin_step(self, step: int) -> None:
        """Begin a step."""
        if self._open is not None:
            raise EngineError("a step is open: end or abort it before the next")
        if self.steps == self._fail_at:
            raise RuntimeError(f"told to fail at step {self.steps}")
        self._open = _OpenStep()

    def accumulate(self, batch: Batch) -> None:
        """Verify the rows of a part as of a whole step. An error ends the step."""
        if self._open is None:
            raise EngineError("no step is open: begin one before its parts")
        try:
            self._verify(batch)
        except Exception:
            self._open = None
            raise
        self._open.rewards.append(np.array(batch.array("reward")))
        self._open.version = max(self._open.version, getattr(batch, "version", -1))

    def end_step(self) -> StepResult:
        """Count the step; its reward is the mean over the rows of all parts."""
        step, self._open = self._open, None
        if step is None or not sum(map(len, step.rewards)):
            raise EngineError("no step is open" if step is None else "the step has no rows")
        time.sleep(self._delay_s)
        self._count(step)
        return StepResult({"reward": float(np.concatenate(step.rewards).mean())})

    def abort_step(self) -> None:
        """Discard the open step."""
        self._open = None

    def _count(self, step: _OpenStep) -> None:
        self.steps += 1
        trained = max(self._version, step.version) if self._told else -1
        if trained >= 0:
            self._version = trained + 1
            self._steps_of[self._version] = self.steps

    def _verify(self, batch: Batch) -> None:
        if not np.isfinite(batch.array("reward")).all():
            raise SchemaError("rows have a reward that is no finite number")
        if (batch.ragged("logprobs").lengths != batch.ragged("response_ids").lengths).any():
            raise SchemaError("rows do not have one log-prob for each response token")
        made_by = -batch.ragged("logprobs").values
        named = token_versions(batch.ragged("version_spans")).values
        if (mask := loss_mask(batch)) is not None:
            made_by, named = made_by[mask.values], named[mask.values]
        if np.isnan(made_by).any():
            raise WeightMismatch("rows were made by weights of several versions at once")
        for version, steps in set(zip(named.tolist(), made_by.tolist(), strict=True)):
            if self._steps_of.setdefault(version, steps) != steps:
                raise WeightMismatch(
                    f"rows say they were made by version {version}, which has had {self._steps_of[version]:g}"
                    f" steps; they were made by weights that have had {steps:g}"
                )

    def logprobs(self, batch: Batch) -> Ragged:
        """Return minus the number of steps for each response token."""
        lengths = batch.ragged("response_ids").lengths
        return Ragged.from_lengths(np.full(int(lengths.sum()), -self.steps, np.float32), lengths)

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """Return the current weights."""
        return weights(self.steps).items()

    def save(self, path: Path) -> None:
        """Write the number of steps to ``echo.json``."""
        path.mkdir(parents=True, exist_ok=True)
        (path / "echo.json").write_text(json.dumps({"steps": self.steps}))

    def load(self, path: Path) -> None:
        """Continue with the steps of a saved ``echo.json``."""
        self._go_on_with(json.loads((path / "echo.json").read_text())["steps"])

    def _go_on_with(self, steps: int) -> None:
        """Take a checkpoint's steps. After a rollback in a run, earlier leased steps carry other version numbers."""
        self.steps, self._version, self._told = steps, -1, not (self._steps_of or self._resumed)
        self._resumed = True
        self._steps_of.clear()

    def load_weights(self, update: WeightUpdate) -> None:
        """Take a published version as the present weights. Raises WeightMismatch for any other array."""
        found = dict(update.arrays())
        steps = int(found["scale"]) if "scale" in found else -1
        wrong = {
            name for name, array in weights(steps).items() if not _same(found.pop(name, None), array)
        } | found.keys()
        if wrong:
            raise WeightMismatch(f"version {update.version} is no echo policy's: {', '.join(sorted(wrong))}")
        self.steps, self._version, self._told = steps, update.version, True
        self._steps_of[update.version] = steps

    def export(self, path: Path) -> None:
        """Write the same file as `save`."""
        self.save(path)
