"""TrainLab: a train engine under check, and the policy of its first weights."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ....algorithms import GRPO
from ....interfaces import StepResult, TrainEngine
from ....types import LOSS_MASK, VERSION_SPANS, Batch, Ragged, one_version
from ....types.dtypes import from_torch, is_torch
from ..check import CheckFailed, expect
from ..diagnosis import Diagnosis, diagnose_numbers
from ..lab import EngineThread, Lab
from ..policy import Policy
from ..precision import SHARE, too_far

LIMIT_S = 60.0
SAME = 0.02
"""The largest distance of equal updates, relative to their length: the effect of rounding on an
optimizer's division by a gradient of almost 0."""
NOTHING = 0.1
"""Weights moved by less than this part of an update count as not trained: decay is no training."""

FIRST_ROW, ROWS_APART = 5_000_000_000, 3
"""Numbers of rows are large, as in runs."""

Ids = npt.NDArray[np.int32]
Tensors = dict[str, npt.NDArray[Any]]


class TrainLab(Lab):
    """Makes the engine, anew for checks with an untrained one, never two at a time. Closed by ``close``.

    ``make``: the factory, called with ``model=`` the policy's folder, ``algorithm=`` GRPO unless in ``options``, and
    ``options``. ``tolerance``: the largest distance of a log-prob from the policy's. One thread of the lab calls the
    engine.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        policy: Policy,
        options: Mapping[str, Any],
        *,
        tolerance: float = 1e-4,
        limit_s: float = LIMIT_S,
    ) -> None:
        super().__init__(make, {"algorithm": GRPO(), **options}, limit_s)
        self.policy, self.tolerance = policy, tolerance
        self.same = max(SAME, min(4 * tolerance, 0.5))
        self._engine: TrainEngine | None = None
        self._new = False
        self._thread: EngineThread | None = None

    # ---- for the runner

    def ask(self, body: Callable[[TrainLab], Any], what: str) -> str | None:
        """Run a check in the engine's thread."""
        if self._thread is None or self._thread.stuck:
            self._thread = EngineThread(as_worker=True)
        self.waits(self.limit_s)
        return self._thread.call(lambda: body(self), self.limit_s, what)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the engine and its thread. Raises the error of the engine's close. A stuck engine is left behind."""
        thread, self._thread = self._thread, None
        try:
            if thread is not None and not thread.stuck:
                self.waits(self.limit_s)
                thread.call(self.end, self.limit_s, "close()")
        finally:
            self._engine = None
            if thread is not None:
                thread.close()

    # ---- for checks, in the engine's thread

    @property
    def engine(self) -> TrainEngine:
        """The current engine, trained or not."""
        return self._engine if self._engine is not None else self.start()

    def fresh(self) -> TrainEngine:
        """Return an untrained engine with the policy's version 0."""
        return self.engine if self._new else self.start()

    def start(self, **options: Any) -> TrainEngine:
        """Return a new engine, with these options instead of the usual. Raises the factory's error."""
        self.end()
        engine: TrainEngine = self.make(model=self.policy.folder, **{**self.options, **options})
        expect(isinstance(engine, TrainEngine), f"the factory made {engine!r}, which is no asyncflow_sdk.TrainEngine")
        self._engine, self._new, self.ever_made = engine, not options, True
        return engine

    def end(self) -> None:
        """Close the engine, if there is one."""
        engine, self._engine, self._new = self._engine, None, False
        if engine is not None:
            engine.close()

    @contextlib.contextmanager
    def of(self, policy: Policy) -> Iterator[None]:
        """Begin with the weights of another policy within the context."""
        usual = self.policy
        self.end()
        self.policy = policy
        try:
            yield
        finally:
            self.policy = usual
            self.end()

    def step(self, batch: Batch) -> StepResult:
        """Train on a batch; verify the result's type."""
        result = self.used.train_step(batch)
        expect(isinstance(result, StepResult), f"train_step() returned {result!r:.80}, no asyncflow_sdk.StepResult")
        return result

    @property
    def used(self) -> TrainEngine:
        """The current engine, for calls changing its state: the next `fresh` makes another one."""
        engine = self.engine
        self._new = False
        return engine

    def trained(self, *batches: Batch, **options: Any) -> Tensors:
        """Return the weights of a new engine after a step on each batch."""
        self.start(**options) if options else self.fresh()
        return self.further(*batches)

    def further(self, *batches: Batch) -> Tensors:
        """Return the weights after one more step on each batch."""
        for batch in batches:
            self.step(batch)
        return self.tensors()

    def published(self) -> Tensors:
        """Return a copy of named_weights() as they are."""
        return {name: copied(tensor) for name, tensor in self.engine.named_weights()}

    def tensors(self) -> Tensors:
        """Return a copy of the current named_weights(), of the policy's names."""
        known = self.policy.tensors(0)
        found = {name: copied(tensor) for name, tensor in self.engine.named_weights() if name in known}
        missing = [name for name in known if name not in found]
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        expect(not missing, f"named_weights() lacks {', '.join(map(repr, missing[:4]))}{more}")
        return found

    def expect_bits(self, one: Mapping[str, Any], other: Mapping[str, Any], said: str) -> None:
        """Compare tensors bit for bit. ``said``: the message, with {count} for the number of unlike ones."""
        odd = unlike(one, other)
        expect(not odd, f"{said.format(count=len(odd))}, {odd[:1]} for one")

    def moved(self, tensors: Mapping[str, npt.NDArray[Any]]) -> float:
        """Return the distance from version 0 over all weights: the length of the update."""
        return distance(tensors, self.policy.tensors(0))

    def stride(self, batch: Batch) -> float:
        """Return the length of a new engine's step on a batch; never 0."""
        went = self.moved(self.trained(batch))
        expect(went, "a step on rows with advantages changed no weight, so nothing can be said; see check 'step'")
        return went

    def expect_same(self, one: Tensors, other: Tensors, said: str, cause: str = "") -> None:
        """Compare two results of training, relative to the length of their updates."""
        went = max(self.moved(one), self.moved(other))
        expect(went, f"{said}: no weight changed, so nothing can be said; see check 'step'")
        apart = distance(one, other) / went
        expect(
            apart <= self.same,
            f"{said}: the updates are {apart:.2g} of their size apart; {self.same:g} is allowed",
            cause,
        )

    # ---- batches

    def batch(
        self,
        sizes: Sequence[int] = (4, 4, 4),
        *,
        seed: int = 0,
        longest: int = 24,
        rewards: Sequence[float] | None = None,
        prompts: Sequence[Ids] | None = None,
        responses: Sequence[Ids] | None = None,
    ) -> Batch:
        """Return groups of the given sizes, with rewards of 0 and 1 in each: of random prompts and responses
        unless these are given, one a group and one a row. Drawn by version 0, as far as their log-probs say.
        Numbers of rows and groups are large, as in runs."""
        random, rows = np.random.default_rng([seed, len(sizes)]), int(sum(sizes))
        asked = list(prompts or self.policy.prompts(len(sizes), seed=2 * seed + 100))
        given = list(responses or self._responses(rows, longest, random))
        group = np.repeat(np.arange(len(sizes)), sizes)
        if rewards is None:
            rewards = np.concatenate([random.permutation(np.arange(size) % 2) for size in sizes]).tolist()
        pairs = [(asked[each], response) for each, response in zip(group, given, strict=True)]
        logprobs = [self.policy.logprobs(0, *pair).astype(np.float32) for pair in pairs]
        packed = Ragged.of(given, np.int32)
        columns = {
            "prompt_ids": Ragged.of([prompt for prompt, _ in pairs], np.int32),
            "response_ids": packed,
            "logprobs": Ragged.of(logprobs, np.float32),
            VERSION_SPANS: one_version(0, packed.lengths),
            "reward": np.asarray(rewards, np.float64),
        }
        batch = Batch.of(columns)
        return Batch(batch.ids * ROWS_APART + FIRST_ROW, group.astype(np.int64) * 7 + 6_000_000_000, batch.columns)

    def _responses(self, rows: int, longest: int, random: np.random.Generator) -> list[Ids]:
        lengths = random.permutation(np.linspace(1, longest, rows).astype(int))
        stream = np.concatenate(self.policy.prompts(rows, longest=2 * longest, seed=int(random.integers(1 << 30))))
        while len(stream) < lengths.sum():
            stream = np.concatenate([stream, stream])
        return [np.asarray(part, np.int32) for part in np.split(stream, np.cumsum(lengths))[:rows]]

    def reference(self, batch: Batch, tensors: Mapping[str, npt.NDArray[Any]] | None = None) -> list[Any]:
        """Return log-probs of each response, under version 0 or given weights."""
        pairs = list(zip(batch.ragged("prompt_ids"), batch.ragged("response_ids"), strict=True))
        if tensors is None:
            return [self.policy.logprobs(0, prompt, response) for prompt, response in pairs]
        return [self.policy.logprobs_of(tensors, prompt, response) for prompt, response in pairs]

    def check_logprobs(self, batch: Batch, tensors: Tensors | None = None, *, when: str = "") -> None:
        """Compare the engine's log-probs of a batch with the policy's, under version 0 or given weights."""
        got = self.engine.logprobs(batch)
        expect(isinstance(got, Ragged), f"logprobs() returned {type(got).__name__}, no asyncflow_sdk.Ragged")
        expect(got.values.dtype == np.float32, f"logprobs() are {got.values.dtype}, not float32")
        lengths = batch.ragged("response_ids").lengths
        if got.lengths.tolist() != lengths.tolist():
            raise CheckFailed(
                f"logprobs() have rows of {got.lengths.tolist()} numbers, and the responses {lengths.tolist()} tokens"
            )
        wanted = self.reference(batch, tensors)
        apart = [np.abs(have - want) for have, want in zip(got, wanted, strict=True)]
        far = [too_far(each, self.tolerance) for each in apart]
        if any(far):
            rows = sorted((each for each in range(len(far)) if far[each]), key=lambda each: -float(apart[each].max()))
            row, found = rows[0], self._diagnose(batch, got, wanted, rows)
            at = int(apart[row].argmax())
            raise CheckFailed(
                f"logprobs(){when} are {far[row]} from the policy's (row {row}, token {at} of {lengths[row]}:"
                f" {got[row][at]:.6g}, not {wanted[row][at]:.6g}; {self.tolerance:g} is allowed,"
                f" {self.tolerance / SHARE:g} on average); {sum(map(bool, far))} of {len(apart)} rows are"
                f" wrong{found.text}",
                found.cause,
                found.hint,
            )

    def _diagnose(self, batch: Batch, got: Ragged, wanted: Sequence[Any], rows: Sequence[int]) -> Diagnosis:
        """Return the first explanation of wrong log-probs, of rows with at least three tokens."""
        have = [np.asarray(each, np.float64) for each in got]
        first = self.reference(batch)
        if all(np.abs(have[row] - first[row]).max() <= self.tolerance for row in rows):
            return Diagnosis("logprobs: of older weights", ": they are those of the weights before any step")
        for row in (row for row in rows if len(wanted[row]) > 2):
            found = diagnose_numbers(wanted[row], have[row], self.tolerance)
            if found.cause:
                return found
        joined, right = np.concatenate(have), np.concatenate(list(wanted))
        return diagnose_numbers(right, joined, self.tolerance)

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """Return an empty directory, removed at the end."""
        with tempfile.TemporaryDirectory(prefix="asyncflow-check-") as path:
            yield Path(path)


def changed(batch: Batch, **columns: Any) -> Batch:
    """Return the batch with other columns; None removes one."""
    values = {name: batch[name] for name in batch} | columns
    made = Batch.of({name: value for name, value in values.items() if value is not None})
    return Batch(batch.ids, batch.groups, made.columns)


def masked(batch: Batch, mask: npt.NDArray[np.bool_]) -> Batch:
    """Return the batch with a loss mask, bool (response tokens,)."""
    return changed(batch, **{LOSS_MASK: Ragged(mask, batch.ragged("response_ids").offsets)})


def random_mask(batch: Batch, seed: int, share: float) -> npt.NDArray[np.bool_]:
    """Return a mask with a share of all tokens, and the last token of each response."""
    logprobs = batch.ragged("logprobs")
    mask = np.random.default_rng(seed).random(len(logprobs.values)) < share
    mask[logprobs.offsets[1:] - 1] = True
    return mask


def distance(one: Mapping[str, npt.NDArray[Any]], other: Mapping[str, npt.NDArray[Any]]) -> float:
    """Return the Euclidean distance over all common tensors."""
    with np.errstate(all="ignore"):
        squares = [
            float(((one[name].astype(np.float64) - other[name].astype(np.float64)) ** 2).sum())
            for name in other
            if name in one and one[name].shape == other[name].shape
        ]
    return float(np.sqrt(sum(squares)))


def plain(tensor: Any) -> npt.NDArray[Any]:
    """Return a tensor of any framework as an array."""
    return np.asarray(from_torch(tensor.detach()) if is_torch(tensor) else tensor)


def copied(tensor: Any) -> npt.NDArray[Any]:
    """Copy a tensor of any framework to an array."""
    return np.array(plain(tensor))


def unlike(one: Mapping[str, npt.NDArray[Any]], other: Mapping[str, npt.NDArray[Any]]) -> list[str]:
    """Return the names of tensors different in a bit, or present only once."""
    return [name for name in one.keys() | other.keys() if not _equal(one.get(name), other.get(name))]


def _equal(one: npt.NDArray[Any] | None, other: npt.NDArray[Any] | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.tobytes() == other.tobytes()
