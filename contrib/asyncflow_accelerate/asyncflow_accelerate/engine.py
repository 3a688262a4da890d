"""AccelerateEngine: trains a Hugging Face model with Accelerate.

af.Train("accelerate", model="models/mine", lr=1e-5, mixed_precision="bf16", algorithm=af.GRPO())
"""

from __future__ import annotations

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


class AccelerateEngine(af.TrainEngine):
    """An engine of one process. ``model``: a Hugging Face folder. ``lr``: of AdamW.
    ``mixed_precision``: "no", "bf16" or "fp16", as in Accelerate, for computations; weights and
    optimizer are float32, and are published in the folder's dtypes. ``micro_batch_rows``: rows of a
    forward pass. ``temperature``: of the rollouts.

    `save` writes Accelerate's checkpoint, which has pickled parts: trust it only as much as code.
    """

    restores = True

    def __init__(
        self, model: str, *, algorithm: af.Algorithm | None = None, lr: float = 1e-6, mixed_precision: str = "no",
        max_grad_norm: float = 1.0, micro_batch_rows: int = 32, temperature: float = 1.0, cpu: bool = False,
    ) -> None:  # fmt: skip
        transformers.utils.logging.disable_progress_bar()
        self._accelerator = Accelerator(mixed_precision=mixed_precision, cpu=cpu)
        self._algorithm, self._source = algorithm or af.GRPO(), Path(model)
        self._max_grad_norm, self._rows, self._temperature = max_grad_norm, micro_batch_rows, temperature
        plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
        self._dtypes = {name: tensor.dtype for name, tensor in plain.state_dict().items()}
        plain.float()  # in bfloat16 a small step would be rounded away
        optimizer = torch.optim.AdamW(plain.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._model, self._optimizer = self._accelerator.prepare(plain, optimizer)
        self._plain = plain

    # ---- training

    def train_step(self, batch: af.Batch) -> af.StepResult:
        self._check(batch)
        worth = _of_tokens(self._algorithm.advantages(batch), batch)
        if not np.isfinite(worth.values).all():
            raise af.SchemaError("an advantage is not finite")
        used = np.ones(batch.rows, np.bool_)
        if self._algorithm.drop_zero_advantage:
            used = np.logical_or.reduceat(worth.values != 0, worth.offsets[:-1])
        metrics = {"reward": float(batch.array("reward").mean()), "rows_used": float(used.sum())}
        if used.any():
            rows = np.flatnonzero(used)
            metrics |= self._step(batch.take(rows), worth.take(rows))
        return af.StepResult(metrics, None if used.all() else ~used)

    def _step(self, batch: af.Batch, worth: af.Ragged) -> dict[str, float]:
        given, behaviour = loss_mask(batch), batch.ragged("logprobs")
        mask = np.ones(len(behaviour.values), np.bool_) if given is None else given.values.astype(np.bool_)
        offsets, total, sums = behaviour.offsets, int(mask.sum()), {"tokens": float(mask.sum())}
        columns = {name: _of_tokens(batch[name], batch) for name in self._algorithm.needs}
        self._optimizer.zero_grad()
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
                    row_count=len(rows), total_tokens=total, total_rows=batch.rows,
                    columns={name: self._tensor(each.values[part])[kept] for name, each in columns.items()},
                )
            )  # fmt: skip
            self._accelerator.backward(loss)
            for name, value in {**measured, "loss": loss.detach()}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        norm = self._accelerator.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        if not torch.isfinite(norm):
            raise af.EngineError(f"the gradient's norm is {float(norm)}; no step was made")
        self._optimizer.step()
        return sums | {"grad_norm": float(norm)}

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
