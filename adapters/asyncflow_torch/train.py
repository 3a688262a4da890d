"""TorchEngine: trains a Hugging Face model with AdamW in this process, by GRPO or any other algorithm.

engine = TorchEngine("runs/demo/model", lr=2e-4)
result = engine.train_step(batch)                        # result.metrics["reward"]
publisher.publish(version, engine.named_weights())
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncflow_sdk.algorithms import GRPO
from asyncflow_sdk.errors import ConfigError, EngineError
from asyncflow_sdk.interfaces import Algorithm, PackedTokens, StepResult, TrainEngine
from asyncflow_sdk.types import Batch, Ragged, loss_mask

from . import checkpoint
from .collate import check_tokens, check_training, micro_batches
from .logprobs import batch_logprobs, response_logprobs
from .masters import Masters
from .packing import PerToken, checked_advantages, extra_columns
from .policy import context_of, export_policy, load_policy, named_weights, vocabulary_of


class TorchEngine(TrainEngine):
    """One process, one device. Optimizer and master weights are float32; what is computed with and published is in ``dtype``,
    by default the checkpoint's.

    ``temperature``: the rollouts', under which log-probs are computed. ``micro_batch_tokens``: the most
    input tokens of a forward pass, padding included; None takes a step in one pass. ``threads``: of torch,
    for the whole process; None leaves them. ``seed``: of torch's generator. Dropout is off: with it, the
    ratio to the policy that generated would be noise.
    """

    def __init__(
        self,
        model: str,
        *,
        algorithm: Algorithm | None = None,
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        dtype: str = "auto",
        device: str = "cpu",
        temperature: float = 1.0,
        micro_batch_tokens: int | None = None,
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        _check_positive(
            lr=lr,
            max_grad_norm=max_grad_norm,
            temperature=temperature,
            micro_batch_tokens=micro_batch_tokens,
            threads=threads,
        )
        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._source = model
        self._algorithm = algorithm or GRPO()
        self._max_grad_norm = max_grad_norm
        self._temperature = temperature
        self._micro_batch_tokens = micro_batch_tokens
        self._model = load_policy(model, dtype=dtype, device=device)
        self._device = self._model.device
        self._vocabulary, self._context = vocabulary_of(self._model), context_of(self._model)
        self._masters = Masters(self._model)
        self._optimizer = torch.optim.AdamW(
            self._masters.named.values(), lr=lr, betas=tuple(betas), weight_decay=weight_decay, fused=True
        )

    def train_step(self, batch: Batch) -> StepResult:
        """One AdamW step on the rows of ``batch``, whole groups.

        Where the algorithm drops rows of advantage 0 and all are, no step is made, and ``rows_used`` is 0. Metrics over all
        rows: reward, reward_std, response_tokens (mean length), rows_used; over the tokens trained, which are those of the
        column loss_mask where there is one: tokens (how many), loss, grad_norm (before clipping), entropy (under the weights before
        the step), and the algorithm's own. Raises EngineError, the weights unchanged, when the gradient is not finite.
        """
        check_tokens(batch, vocabulary=self._vocabulary, context=self._context)
        check_training(batch)
        advantages = checked_advantages(self._algorithm.advantages(batch), batch, self._algorithm)
        used = np.ones(batch.rows, np.bool_)
        if self._algorithm.drop_zero_advantage:
            used = advantages.nonzero
        rewards = batch.array("reward").astype(np.float64)
        metrics = {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "response_tokens": float(batch.ragged("response_ids").lengths.mean()),
            "rows_used": float(used.sum()),
            "tokens": 0.0,
        }
        if used.any():
            chosen = np.flatnonzero(used)
            metrics |= self._step(batch.take(chosen), advantages.take(chosen))
        return StepResult(metrics, None if used.all() else ~used)

    def _step(self, batch: Batch, advantages: PerToken) -> dict[str, float]:
        mask = loss_mask(batch)
        behaviour = PerToken.of(batch.ragged("logprobs")).masked(mask)
        advantages = advantages.masked(mask)
        columns = {name: each.masked(mask) for name, each in extra_columns(self._algorithm.needs, batch).items()}
        lengths = behaviour.lengths
        total = int(lengths.sum())
        sums: dict[str, Any] = defaultdict(float)
        self._no_gradients()
        for part in micro_batches(batch, tokens=self._micro_batch_tokens, device=self._device, mask=mask):
            stats = response_logprobs(self._model, part, temperature=self._temperature)
            rows = np.repeat(np.arange(len(part.rows)), lengths[part.rows])
            loss, measured = self._algorithm.loss(
                PackedTokens(
                    logprobs=stats.logprobs, behaviour=self._tensor(behaviour.of_rows(part.rows)),
                    advantages=self._tensor(advantages.of_rows(part.rows)),
                    rows=torch.from_numpy(rows).to(self._device), row_count=len(part.rows),
                    total_tokens=total, total_rows=batch.rows,
                    columns={name: self._tensor(each.of_rows(part.rows)) for name, each in columns.items()},
                )
            )  # fmt: skip
            loss.backward()
            self._masters.take_gradients()
            measured = {**measured, "loss": loss.detach(), "entropy": stats.entropy.sum() / total}
            for name, value in measured.items():
                sums[name] += value
        norm = torch.nn.utils.clip_grad_norm_(self._masters.named.values(), self._max_grad_norm)
        if not torch.isfinite(norm):
            self._no_gradients()
            raise EngineError(f"the gradient's norm is {float(norm)}; no step was made, the weights are as before")
        self._optimizer.step()
        self._masters.give_weights()
        sums["grad_norm"] = norm
        return {name: float(value) for name, value in sums.items()} | {"tokens": float(total)}

    def _no_gradients(self) -> None:
        self._model.zero_grad()  # a backward pass that raised may have left some
        self._optimizer.zero_grad()

    def logprobs(self, batch: Batch) -> Ragged:
        """Log-probs of ``response_ids`` under the current weights and the engine's temperature."""
        check_tokens(batch, vocabulary=self._vocabulary, context=self._context)
        return batch_logprobs(self._model, batch, temperature=self._temperature, tokens=self._micro_batch_tokens)

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """Live views of the parameters, in Hugging Face names and ``dtype``, tied weights once."""
        return named_weights(self._model)

    def save(self, path: Path) -> None:
        """Write master weights, optimizer and random state below ``path``: safetensors and JSON, no pickle."""
        checkpoint.save(path, self._model, self._masters, self._optimizer)

    def load(self, path: Path) -> None:
        """Continue from what ``save`` wrote. Learning rate and the like are this engine's, not the saved."""
        checkpoint.load(path, self._model, self._masters, self._optimizer)

    def export(self, path: Path) -> None:
        """Write the policy as a Hugging Face folder, with the tokenizer it came with."""
        export_policy(self._model, self._source, path)

    def _tensor(self, values: npt.NDArray[np.float32]) -> Any:
        return torch.from_numpy(values.astype(np.float32)).to(self._device)


def _check_positive(**options: float | None) -> None:
    for name, value in options.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be above 0, not {value}")
