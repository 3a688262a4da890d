"""DataParallelEngine: the common part of train engines whose ranks compute different rows and sum
their gradients.

    class Mine(DataParallelEngine):
        @keywords_of(TrainOptions)
        def __init__(self, options):
            ...                                                # load, wrap, make the optimizer
            super().__init__(wrapped, options, optimizer, ranks=ranks, vocabulary=..., context=..., device=...)

        def zero_gradients(self): ...
        def backward(self, loss, *, last): ...
        def divide_gradients(self, number): ...
        def optimizer_step(self): ...                          # {"grad_norm": ...}
        # and named_weights, save_policy, restore_policy, replace_weights, export_folder

One rank needs no process group. Sums over ranks differ from sums of one process by the order of
addition: in float32, losses, means of log-probs and norms of gradients agree to a relative 1e-5,
and updates to 2e-2, since Adam divides by gradients near 0.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncflow_sdk.errors import ConfigError, EngineError, SchemaError, StepAborted
from asyncflow_sdk.interfaces import PackedTokens, StepResult, TrainEngine, WeightUpdate
from asyncflow_sdk.types import Batch, Ragged

from .chunked_head import chunked_head
from .collate import MicroBatch, check_tokens, check_training, collate, no_rows, split
from .critic import ValueCritic
from .drift import NAMES as DRIFT
from .logprobs import TokenStats, of_parts, response_logprobs
from .open_step import OpenStep, StepSums, divisor_of
from .per_token import PerToken
from .ranks import Ranks
from .schedules import go_to, make_schedule, steps_made
from .shares import (
    BEFORE,
    STALENESS,
    VALUES,
    Share,
    Whole,
    pieces,
    share_of,
    standardised_over,
    token_staleness_of,
)
from .train_options import TrainOptions

PROXIMAL, ENTROPY = "proximal_logprobs", "entropy"


class DataParallelEngine(TrainEngine):
    """``model``: the module to call, wrapped by the engine; ``vocabulary`` and ``context`` are
    the plain model's. ``optimizer``: steps on the policy. ``packed``: rows are packed, not
    padded. ``critic``: given if ``options.needs_critic``. All ranks make the same number of
    passes, possibly some without rows."""

    computes: tuple[str, ...] = (PROXIMAL, ENTROPY, STALENESS, VALUES)
    restores = reshards = streams = sampling_mask = True
    marks_last_pass = False
    """True if `backward` must know the last pass: a step in parts ends with a pass without rows."""

    def __init__(
        self, model: Any, options: TrainOptions, optimizer: Any, *, ranks: Ranks, vocabulary: int, context: int | None,
        device: Any, packed: bool = False, critic: ValueCritic | None = None,
    ) -> None:  # fmt: skip
        algorithm = options.used_algorithm
        unknown = [name for name in algorithm.asks if name not in self.computes]
        if unknown:
            raise ConfigError(
                f"{type(algorithm).__name__} asks for {', '.join(unknown)}, which {type(self).__name__} does not"
                " compute"
            )
        self._model, self._ranks, self._algorithm, self._device = model, ranks, algorithm, device
        self._vocabulary, self._context = vocabulary, context
        self._temperature, self._tokens, self._packed = options.temperature, options.micro_batch_tokens, packed
        self._updates, self._critic, self._optimizer = options.updates, critic, optimizer
        self._normaliser, self._whole_step = algorithm.normaliser or "constant", algorithm.whole_step
        self._open: OpenStep | None = None
        self._head = chunked_head(model, device)
        self._frozen = options.frozen
        self._schedule = make_schedule(
            optimizer,
            options.lr_scheduler_type,
            warmup_steps=options.warmup_steps,
            warmup_ratio=options.warmup_ratio,
            max_steps=options.max_steps,
        )

    # ---- implemented by each engine, called on all ranks together

    @abc.abstractmethod
    def zero_gradients(self) -> None:
        """Clear all gradients, including the critic's and those left by a failed backward pass."""

    @abc.abstractmethod
    def backward(self, loss: Any, *, last: bool) -> None:
        """Add the gradients of ``loss`` to the step's: the sum, not the mean, over all passes
        and ranks. ``last``: True for the last pass of the step."""

    @abc.abstractmethod
    def divide_gradients(self, number: float) -> None:
        """Divide the step's gradients, including the critic's. Called after the last pass of a
        step in parts, before `optimizer_step`."""

    @abc.abstractmethod
    def optimizer_step(self) -> dict[str, float]:
        """Clip the gradients and make one step of policy and critic. Return ``grad_norm`` and,
        with a critic, ``critic_grad_norm``: norms of the whole model before clipping, the same
        on all ranks. If a norm is not finite, make neither step and clear the gradients."""

    @abc.abstractmethod
    def save_policy(self, path: Path) -> None:
        """Write weights, optimizer and random state below ``path``: safetensors and JSON, no pickle."""

    @abc.abstractmethod
    def restore_policy(self, path: Path) -> None:
        """Restore a checkpoint of any engine of this format, saved by any number of ranks."""

    @abc.abstractmethod
    def replace_weights(self, update: WeightUpdate) -> None:
        """Load the weights of ``update`` and reset the optimizer. Raises WeightMismatch before any
        change."""

    @abc.abstractmethod
    def export_folder(self, path: Path) -> None:
        """Write the policy as a Hugging Face folder with the source's tokenizer."""

    # ---- common to all engines

    def train_step(self, batch: Batch) -> StepResult:
        """Make one optimizer step, or ``updates`` of them, on the rows of ``batch``, whole groups,
        and of the other ranks.

        If the algorithm drops rows of advantage 0 and drops all, no step is made, and ``rows_used`` is 0. Metrics of
        all ranks' rows: reward, reward_std, response_tokens (mean length), rows_used; of the trained tokens (the
        column loss_mask if present): tokens (their number), loss, grad_norm (before clipping), entropy (under the
        weights before the step), those of `Drift.metrics`, and the algorithm's own; of several updates their means,
        of `Drift.metrics` those of the first, and updates_skipped: number of updates left out for gradients that are
        not finite. Raises EngineError if all were left out: the weights are unchanged."""
        self._refuse_open("train_step")
        self._check_trains()
        with self._ranks.calling("train_step"):
            share, counts = self._share(batch)
            whole = Whole.of(counts)
            if not whole.rows:
                raise self._ranks.agreed(SchemaError("the batch has no rows"))
            metrics = dict(whole.metrics)
            if whole.trained.rows:
                metrics |= self._step(standardised_over(share, whole, self._algorithm.standardise), whole)
        return StepResult(metrics, None if share.used.all() else ~share.used)

    @property
    def whole_step(self) -> str:
        """The reason why a step cannot be trained in parts, "" if it can."""
        if self._updates > 1:
            return f"updates={self._updates}: each optimizer step takes random rows of the whole batch"
        return self._whole_step

    def begin_step(self, step: int) -> None:
        """Begin a step in parts. No collective."""
        if self.whole_step:
            raise EngineError(f"begin_step() is not possible: {self.whole_step}; use train_step()")
        self._refuse_open("begin_step")
        self._check_trains()
        self.zero_gradients()
        self._open = OpenStep(step)

    def accumulate(self, batch: Batch) -> None:
        """Add the gradients of rows, whole groups, to those of the step. A collective. A rank may
        have no rows."""
        with self._in_step("accumulate") as step:
            share, counts = self._share(batch)
            step.add(share.used, counts)
            part = Whole.of(counts)
            if part.trained.rows:
                self._add_passes(share, part.passes, step.update, last=False)

    def end_step(self) -> StepResult:
        """Divide the gradients of all parts by the number of tokens, rows or groups of the whole
        step, as the algorithm declares, and make one optimizer step. A collective. The result is
        that of `train_step`."""
        with self._in_step("end_step") as step:
            self._ranks.together(step.check)
            whole = Whole.of(step.counts)
            metrics = dict(whole.metrics)
            if whole.trained.rows:
                if self.marks_last_pass:
                    self._pass(no_rows(device=self._device), None, step.update, last=True)
                self.divide_gradients(whole.trained.of(self._normaliser))
                norms, made = self._optimize(
                    step.update, partial(divisor_of, totals=whole.trained, algorithm=self._algorithm)
                )
                if made is None:
                    raise self._no_step(norms)
                metrics |= made
            self._open = None
        return StepResult(metrics, step.filtered)

    def abort_step(self) -> None:
        """Discard the open step on all ranks, and restore the random state. The other ranks'
        `accumulate` or `end_step` raises StepAborted."""
        if self._open is None:
            return

        def gave_up() -> None:
            raise StepAborted(f"step {number} was aborted")

        number = self._open.number
        with contextlib.suppress(StepAborted), self._in_step("abort_step"):
            self._ranks.together(gave_up)

    @contextlib.contextmanager
    def _in_step(self, call: str) -> Iterator[OpenStep]:
        """Return the open step. An error discards it."""
        step = self._open
        if step is None:
            raise EngineError(f"{call}() is not possible: no step is open, call begin_step() first")
        with self._ranks.calling(call):
            try:
                yield step
            except Exception as error:
                self._open = None
                torch.set_rng_state(step.random_state)
                if self._ranks.on_all(error):
                    self.discard_gradients()
                raise

    def discard_gradients(self) -> None:
        """Clear the gradients of an aborted step. All ranks call it together."""
        self.zero_gradients()

    def _refuse_open(self, call: str) -> None:
        if self._open is not None:
            raise EngineError(
                f"{call}() is not possible: step {self._open.number} is open, call end_step() or abort_step() first"
            )

    def _share(self, batch: Batch) -> tuple[Share, list[dict[str, float]]]:
        """Return this rank's share of the rows, and the counts of all ranks."""
        if BEFORE & {*self._algorithm.asks}:
            batch = self._ranks.together(partial(self._prepared, batch))
        if self._critic is not None:
            batch = _with(batch, VALUES, of_parts(self._critic.values, batch, self._passes(batch)))
        share = self._ranks.together(
            lambda: share_of(
                batch, self._algorithm, vocabulary=self._vocabulary, context=self._context, tokens=self._tokens,
                packed=self._packed,
            )
        )  # fmt: skip
        return share, self._ranks.gather(share.counts)

    def _prepared(self, batch: Batch) -> Batch:
        """Check the batch and add columns needed for advantages."""
        if not batch.rows:
            return batch
        check_tokens(batch, vocabulary=self._vocabulary, context=self._context)
        check_training(batch)
        if STALENESS in self._algorithm.asks:
            batch = _with(batch, STALENESS, token_staleness_of(batch))
        return batch

    def _step(self, share: Share, whole: Whole) -> dict[str, float]:
        """Make all updates. An update without finite gradients is left out; earlier ones stay."""
        made: list[dict[str, float]] = []
        skipped: list[dict[str, float]] = []
        for piece, part in self._updates_of(share, whole):
            norms, metrics = self._update(piece, part)
            if metrics is None:
                skipped.append(norms)
            else:
                made.append(metrics)
        if not made:
            raise self._no_step(skipped[0])
        if self._updates == 1:
            return made[0]
        means = {name: sum(each[name] for each in made) / len(made) for name in made[0]}
        means |= {name: made[0][name] for name in DRIFT if name in made[0]}  # later ones move the weights
        return means | {"updates_skipped": float(len(skipped))}

    def _no_step(self, norms: dict[str, float]) -> Exception:
        said = ", ".join(f"{name} is {value}" for name, value in norms.items())
        return self._ranks.agreed(EngineError(f"{said}; no step was made, the weights are as before"))

    def _updates_of(self, share: Share, whole: Whole) -> Iterator[tuple[Share, Whole]]:
        """Yield the rows of each update, here and on all ranks."""
        if self._updates == 1:
            yield share, whole
            return
        if PROXIMAL in self._algorithm.asks:
            share = self._proximal(share, whole)
        # All ranks draw one number per step, with any number of rows: their random states stay equal, and one is saved.
        drawn = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))
        order = np.array_split(torch.randperm(share.batch.rows, generator=drawn).numpy(), self._updates)
        for piece in pieces(share, order, tokens=self._tokens, packed=self._packed):
            part = Whole.of(self._ranks.gather(piece.counts))
            if part.trained.rows:
                yield piece, part

    def _proximal(self, share: Share, whole: Whole) -> Share:
        """Add the log-probs under the weights before the step."""
        passes = (self._part(share.batch, share.parts, number, None) for number in range(whole.passes))
        found = self._logprobs_of(share.batch, passes)
        return replace(share, columns={**share.columns, PROXIMAL: PerToken.of(found).masked(share.mask)})

    def _update(self, share: Share, whole: Whole) -> tuple[dict[str, float], dict[str, float] | None]:
        """Return the norms of the gradients and the metrics of the update, None if it was left out."""
        update = StepSums(whole.trained)
        self.zero_gradients()
        self._add_passes(share, whole.passes, update, last=True)
        return self._optimize(update, lambda _: 1)

    def _add_passes(self, share: Share, passes: int, update: StepSums, *, last: bool) -> None:
        """Add the gradients and metrics of a share. ``last``: True if the update has no further passes."""
        for number in range(passes):
            part = self._part(share.batch, share.parts, number, share.mask)
            self._pass(part, share, update, last=last and number == passes - 1)

    def _pass(self, part: MicroBatch, share: Share | None, update: StepSums, *, last: bool) -> None:
        """Add one forward and backward pass. ``share``: None for a pass without rows."""
        with_entropy = ENTROPY in self._algorithm.asks
        stats = self._stats(part, entropy_gradient=with_entropy)
        values = None if self._critic is None else self._critic.values(part)
        given = None if values is None else values.detach().requires_grad_()
        if share is not None and len(part.rows):
            loss, measured = self._loss(share, update, part, stats, given)
            update.add(measured)
        else:
            loss = stats.logprobs.sum()  # a sum of no terms: its gradient is 0
        self.backward(loss, last=last)
        if self._critic is not None and values is not None and given is not None:
            gradient = torch.zeros_like(values) if given.grad is None else given.grad
            self._critic.backward(values, gradient, last=last)

    def _stats(self, part: MicroBatch, *, entropy_gradient: bool = False) -> TokenStats:
        return response_logprobs(
            self._model, part, head=self._head, temperature=self._temperature, entropy_gradient=entropy_gradient
        )

    def _optimize(
        self, update: StepSums, divisor: Callable[[str], int]
    ) -> tuple[dict[str, float], dict[str, float] | None]:
        """Make an optimizer step. Return the norms of the gradients and the metrics, None if the
        step was left out. ``divisor``: of the sums of a metric."""
        rate = float(self._optimizer.param_groups[0]["lr"])
        norms = self.optimizer_step()
        if not all(map(math.isfinite, norms.values())):
            return norms, None
        self._schedule.step()
        return norms, StepSums.metrics(self._ranks.gather(update.counts), divisor) | norms | {"learning_rate": rate}

    def _loss(
        self, share: Share, update: StepSums, part: MicroBatch, stats: TokenStats, values: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the loss of one pass, and its part of the metrics."""
        lengths, totals = share.behaviour.lengths[part.rows], update.totals
        behaviour = self._tensor(share.behaviour.of_rows(part.rows))
        columns = {name: self._tensor(each.of_rows(part.rows)) for name, each in share.columns.items()}
        if PROXIMAL in self._algorithm.asks:  # with a single update, the weights before the step
            columns.setdefault(PROXIMAL, stats.logprobs.detach())
        loss, measured = self._algorithm.loss(
            PackedTokens(
                logprobs=stats.logprobs, behaviour=behaviour, advantages=self._tensor(share.advantages.of_rows(part.rows)),
                rows=torch.from_numpy(np.repeat(np.arange(len(part.rows)), lengths)).to(self._device),
                row_count=len(part.rows), total_tokens=totals.tokens, total_rows=totals.rows, total_groups=totals.groups,
                columns=columns, entropy=stats.entropy if ENTROPY in self._algorithm.asks else None, values=values,
            )
        )  # fmt: skip
        update.drift.add(stats.logprobs, behaviour)
        entropy = stats.entropy.detach().sum() / totals.tokens
        return loss, {**measured, "loss": loss.detach(), "entropy": entropy}

    def logprobs(self, batch: Batch) -> Ragged:
        """Return log-probs of ``response_ids`` under the current weights, at the engine's temperature. A
        collective."""
        with self._ranks.calling("logprobs"):
            self._ranks.together(lambda: self._check(batch))
            return self._logprobs_of(batch, self._passes(batch))

    def _logprobs_of(self, batch: Batch, passes: Iterator[MicroBatch]) -> Ragged:
        return of_parts(lambda part: self._stats(part).logprobs, batch, passes)

    def save(self, path: Path) -> None:
        """Write policy and critic below ``path``, a directory visible to all ranks: safetensors
        and JSON, no pickle. Any number of ranks of any engine of this format can load it."""
        self._check_trains()
        with self._ranks.calling("save"):
            if self._critic is not None:
                self._critic.save(path / "critic")
            self.save_policy(path)

    def load(self, path: Path) -> None:
        """Restore a saved state. Learning rate and other options stay this engine's."""
        self._refuse_open("load")
        self._check_trains()
        with self._ranks.calling("load"):
            if self._critic is not None:
                self._critic.load(path / "critic")
            self.restore_policy(path)
            go_to(self._schedule, steps_made(self._optimizer))

    def load_weights(self, update: WeightUpdate) -> None:
        """Replace the policy's weights by a version. Optimizer and learning-rate schedule start
        anew. The critic is unchanged: it is not published."""
        self._refuse_open("load_weights")
        self._check_trains()
        with self._ranks.calling("load_weights"):
            self.replace_weights(update)
            go_to(self._schedule, 0)

    def export(self, path: Path) -> None:
        """Write the policy as a Hugging Face folder with the source's tokenizer."""
        with self._ranks.calling("export"):
            self.export_folder(path)

    def close(self) -> None:
        """Leave the process group."""
        self._ranks.close()

    def _check_trains(self) -> None:
        if self._frozen:
            raise EngineError(
                "an engine made with frozen=True computes only log-probs: it has no masters, no optimizer"
            )

    def _check(self, batch: Batch) -> None:
        if batch.rows or self._ranks.size == 1:
            check_tokens(batch, vocabulary=self._vocabulary, context=self._context)

    def _passes(self, batch: Batch) -> Iterator[MicroBatch]:
        """Yield all rows with all response tokens, in the number of parts of the rank with most."""
        parts = split(batch, tokens=self._tokens, packed=self._packed)
        for number in range(max(self._ranks.gather(len(parts)))):
            yield self._part(batch, parts, number, None)

    def _part(
        self, batch: Batch, parts: Sequence[npt.NDArray[np.int64]], number: int, mask: Ragged | None
    ) -> MicroBatch:
        if number >= len(parts):
            return no_rows(device=self._device)
        return collate(batch, parts[number], device=self._device, mask=mask, packed=self._packed)

    def _tensor(self, values: npt.NDArray[np.float32]) -> Any:
        return torch.from_numpy(values.astype(np.float32)).to(self._device)


def _with(batch: Batch, name: str, column: Ragged) -> Batch:
    return Batch(batch.ids, batch.groups, {**batch.columns, **Batch.of({name: column}).columns})
