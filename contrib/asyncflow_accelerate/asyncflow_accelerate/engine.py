"""AccelerateEngine: trains a Hugging Face model with Accelerate.

af.Train("accelerate", model="models/mine", learning_rate=1e-5, mixed_precision="bf16", algorithm=af.GRPO())
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator

import asyncflow_sdk as af
from asyncflow_sdk.types import loss_mask


class _Step:
    """Sums of a step. ``in_parts``: losses are sums, divided at its end; ``scale``: their factor, a power of two, for float16."""

    def __init__(self, *, in_parts: bool) -> None:
        self.in_parts, self.scale = in_parts, 1.0
        self.random_state = torch.get_rng_state()
        self.used: list[np.ndarray[Any, Any]] = []
        self.rewards: list[np.ndarray[Any, Any]] = []
        self.sums: dict[str, float] = {}
        self.totals: dict[str, int] = {}

    def add_totals(self, part: dict[str, int], normaliser: str | None) -> None:
        if self.in_parts and not self.totals and normaliser in part:
            self.scale = 2.0 ** -math.ceil(math.log2(8 * part[normaliser]))
        self.totals = {name: self.totals.get(name, 0) + count for name, count in part.items()}

    def number(self, normaliser: str | None) -> int:
        """By which sums are divided at the end."""
        return self.totals.get(normaliser or "", 1) if self.in_parts else 1


class AccelerateEngine(af.TrainEngine):
    """An engine of one process. ``model``: a Hugging Face folder. ``learning_rate``: of AdamW.
    ``mixed_precision``: "no", "bf16" or "fp16", as in Accelerate, for computations; weights and
    optimizer are float32, and are published in the folder's dtypes. ``micro_batch_rows``: rows of a
    forward pass. ``temperature``: of the rollouts.

    `save` writes Accelerate's checkpoint, which has pickled parts: trust it only as much as code.
    """

    restores = True
    streams = True

    def __init__(
        self, model: str, *, algorithm: af.Algorithm | None = None, learning_rate: float = 1e-6, mixed_precision: str = "no",
        max_grad_norm: float = 1.0, micro_batch_rows: int = 32, temperature: float = 1.0, cpu: bool = False,
    ) -> None:  # fmt: skip
        transformers.utils.logging.disable_progress_bar()
        self._accelerator = Accelerator(mixed_precision=mixed_precision, cpu=cpu)
        self._algorithm, self._source = algorithm or af.GRPO(), Path(model)
        self._max_grad_norm, self._rows, self._temperature = max_grad_norm, micro_batch_rows, temperature
        plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
        self._dtypes = {name: tensor.dtype for name, tensor in plain.state_dict().items()}
        plain.float()  # in bfloat16 a small step would be rounded away
        optimizer = torch.optim.AdamW(plain.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._model, self._optimizer = self._accelerator.prepare(plain, optimizer)
        self._plain = plain
        self._open: _Step | None = None

    # ---- training

    def train_step(self, batch: af.Batch) -> af.StepResult:
        self._refuse_open("train_step")
        step = _Step(in_parts=False)
        self._add(step, batch)
        return self._finish(step)

    @property
    def whole_step(self) -> str:
        return self._algorithm.whole_step

    def begin_step(self, step: int) -> None:
        if self.whole_step:
            raise af.EngineError(f"begin_step() is not possible: {self.whole_step}")
        self._refuse_open("begin_step")
        self._open = _Step(in_parts=True)

    def accumulate(self, batch: af.Batch) -> None:
        if self._open is None:
            raise af.EngineError("accumulate() is not possible: call begin_step() first")
        try:
            self._add(self._open, batch)
        except Exception:
            self.abort_step()
            raise

    def end_step(self) -> af.StepResult:
        step, self._open = self._open, None
        if step is None or not step.used:
            raise af.EngineError("end_step() is not possible: no step with rows is open")
        return self._finish(step)

    def abort_step(self) -> None:
        step, self._open = self._open, None
        if step is not None:
            torch.set_rng_state(step.random_state)

    def _refuse_open(self, call: str) -> None:
        if self._open is not None:
            raise af.EngineError(f"{call}() is not possible: a step in parts is open")

    def _add(self, step: _Step, batch: af.Batch) -> None:
        """Add the gradients and metrics of some groups: all of a step, or a part."""
        self._check(batch)
        worth = _of_tokens(self._algorithm.advantages(batch), batch)
        if not np.isfinite(worth.values).all():
            raise af.SchemaError("an advantage is not finite")
        used = np.ones(batch.rows, np.bool_)
        if self._algorithm.drop_zero_advantage:
            used = np.logical_or.reduceat(worth.values != 0, worth.offsets[:-1])
        if not step.used:
            self._optimizer.zero_grad()
        step.used.append(used)
        step.rewards.append(np.asarray(batch.array("reward"), np.float64))
        rows = np.flatnonzero(used)
        if len(rows):
            self._backward(step, batch.take(rows), worth.take(rows))

    def _backward(self, step: _Step, batch: af.Batch, worth: af.Ragged) -> None:
        given, behaviour = loss_mask(batch), batch.ragged("logprobs")
        mask = np.ones(len(behaviour.values), np.bool_) if given is None else given.values.astype(np.bool_)
        offsets = behaviour.offsets
        totals = {"tokens": int(mask.sum()), "rows": batch.rows, "groups": len(np.unique(batch.groups))}
        step.add_totals(totals, self._algorithm.normaliser)
        seen = dict.fromkeys(totals, 1) if step.in_parts else totals
        columns = {name: _of_tokens(batch[name], batch) for name in self._algorithm.needs}
        for start in range(0, batch.rows, self._rows):
            rows = np.arange(start, min(start + self._rows, batch.rows))
            logprobs = self._logprobs(batch.take(rows))
            part = slice(int(offsets[rows[0]]), int(offsets[rows[-1] + 1]))
            kept = self._tensor(mask[part])
            row = np.repeat(np.arange(len(rows)), np.diff(offsets)[rows])
            loss, measured = self._algorithm.loss(
                af.PackedTokens(
                    logprobs=logprobs[kept], behaviour=self._tensor(behaviour.values[part])[kept],
                    advantages=self._tensor(worth.values[part])[kept], rows=self._tensor(row)[kept],
                    row_count=len(rows), total_tokens=seen["tokens"], total_rows=seen["rows"], total_groups=seen["groups"],
                    columns={name: self._tensor(each.values[part])[kept] for name, each in columns.items()},
                )
            )  # fmt: skip
            self._accelerator.backward(loss * step.scale)
            for name, value in {**measured, "loss": loss.detach()}.items():
                step.sums[name] = step.sums.get(name, 0.0) + float(value)

    def _finish(self, step: _Step) -> af.StepResult:
        """Divide gradients and metrics of a step in parts, and make the optimizer's step."""
        used = np.concatenate(step.used)
        metrics = {"reward": float(np.concatenate(step.rewards).mean()), "rows_used": float(used.sum())}
        if used.any():
            normalisers = {**self._algorithm.metric_normalisers, "loss": self._algorithm.normaliser}
            if step.in_parts:
                for parameter in self._model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(step.number(self._algorithm.normaliser) * step.scale)
            norm = self._accelerator.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
            if not torch.isfinite(norm):
                raise af.EngineError(f"the gradient's norm is {float(norm)}; no step was made")
            self._optimizer.step()
            metrics |= {
                name: value / step.number(normalisers.get(name, "tokens")) for name, value in step.sums.items()
            }
            metrics |= {"tokens": float(step.totals["tokens"]), "grad_norm": float(norm)}
        return af.StepResult(metrics, None if used.all() else ~used)

    def logprobs(self, batch: af.Batch) -> af.Ragged:
        self._check(batch, training=False)
        starts = range(0, batch.rows, self._rows)
        with torch.no_grad():
            parts = [self._logprobs(batch.take(range(at, min(at + self._rows, batch.rows)))) for at in starts]
        values = torch.cat(parts).float().cpu().numpy()
        return af.Ragged(values, batch.ragged("response_ids").offsets)

    def _logprobs(self, batch: af.Batch) -> Any:
        """Return the log-probs of all response tokens, row after row: float32 (tokens,). Rows are
        padded on the right, which does not affect a causal model."""
        prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
        ends = prompts.lengths + responses.lengths
        ids = np.zeros((batch.rows, int(ends.max())), np.int64)
        at = np.arange(ids.shape[1])
        ids[at < prompts.lengths[:, None]] = prompts.values
        answered = (at >= prompts.lengths[:, None]) & (at < ends[:, None])
        ids[answered] = responses.values
        tokens = self._tensor(ids)
        logits = self._model(input_ids=tokens, use_cache=False).logits.float() / self._temperature
        each = torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]
        return each[self._tensor(answered[:, 1:])]

    def _check(self, batch: af.Batch, *, training: bool = True) -> None:
        if training and not np.isfinite(batch.array("reward")).all():
            raise af.SchemaError("a reward is not a finite number")
        responses, vocabulary = batch.ragged("response_ids"), self._plain.config.vocab_size
        if not responses.lengths.all() or not batch.ragged("prompt_ids").lengths.all():
            raise af.SchemaError("a prompt or a response has no tokens")
        context = getattr(self._plain.config, "max_position_embeddings", None)
        if context and (responses.lengths + batch.ragged("prompt_ids").lengths > context).any():
            raise af.SchemaError(f"a row is longer than the model's context of {context} tokens")
        for name in ("prompt_ids", "response_ids"):
            ids = batch.ragged(name).values
            if ids.min() < 0 or ids.max() >= vocabulary:
                raise af.SchemaError(f"column {name!r} has tokens outside of the vocabulary of {vocabulary}")
        if training and (batch.ragged("logprobs").lengths != responses.lengths).any():
            raise af.SchemaError("column 'logprobs' has not one number for each response token")
        if training and not np.isfinite(batch.ragged("logprobs").values).all():
            raise af.SchemaError("column 'logprobs' has numbers that are not finite")

    def _tensor(self, values: np.ndarray[Any, Any]) -> Any:
        return torch.from_numpy(np.array(values)).to(self._accelerator.device)

    # ---- weights and checkpoints

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for name, tensor in self._plain.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:  # tied weights once
                seen.add(id(tensor))
                yield name, tensor.detach().to(self._dtypes[name])

    def load_weights(self, update: af.WeightUpdate) -> None:
        weights = dict(self._plain.state_dict(keep_vars=True))
        shapes = {name: tuple(weights[name].shape) for name, _ in self.named_weights()}
        given = {name: shape for name, (_, shape) in update.tensors.items()}
        if given != shapes:
            unlike = sorted(name for name in given.keys() | shapes.keys() if given.get(name) != shapes.get(name))
            raise af.errors.WeightMismatch(
                f"version {update.version} is of another model; these differ: {', '.join(unlike)}"
            )
        with torch.no_grad():
            for name, tensor in update:
                weights[name].copy_(tensor)
        self._optimizer.optimizer.state.clear()  # a new optimizer's

    def save(self, path: Path) -> None:
        self._accelerator.save_state(str(path))

    def load(self, path: Path) -> None:
        self._accelerator.load_state(str(path))

    def export(self, path: Path) -> None:
        stored = transformers.AutoModelForCausalLM.from_pretrained(self._source, dtype="auto")
        stored.load_state_dict(self._plain.state_dict())
        stored.save_pretrained(path)
        for file in (*self._source.glob("tokenizer*"), *self._source.glob("special_tokens_map.json")):
            shutil.copy2(file, path / file.name)

    def close(self) -> None:
        self._accelerator.free_memory()


def _of_tokens(values: Any, batch: af.Batch) -> af.Ragged:
    """Return a float32 number for each response token, from numbers of rows or tokens."""
    lengths = batch.ragged("response_ids").lengths
    packed = values.values if isinstance(values, af.Ragged) else np.repeat(np.asarray(values), lengths)
    return af.Ragged.from_lengths(packed.astype(np.float32), lengths)
