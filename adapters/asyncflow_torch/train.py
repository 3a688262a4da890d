"""TorchEngine: trains a Hugging Face model with AdamW in this process, by GRPO or any other algorithm.

engine = TorchEngine("runs/demo/model", lr=2e-4)
result = engine.train_step(batch)                        # result.metrics["reward"]
publisher.publish(version, engine.named_weights())
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from asyncflow_sdk.algorithms import GRPO
from asyncflow_sdk.interfaces import Algorithm, WeightUpdate
from asyncflow_sdk.types import check_above

from . import checkpoint
from .critic import TorchCritic
from .data_parallel import DataParallelEngine
from .masters import Masters
from .policy import context_of, export_policy, load_policy, named_weights, take, vocabulary_of
from .ranks import Ranks
from .schedules import go_to, make_schedule, steps_made
from .shares import VALUES


class TorchEngine(DataParallelEngine):
    """One process, one device. Optimizer and master weights are float32; what is computed with and published is in ``dtype``,
    by default the checkpoint's.

    ``device``: "auto" is a GPU if torch can use one, else the CPU. ``schedule``: of the learning rate: constant, linear or cosine, after ``warmup_steps``, to 0 after ``decay_steps`` more.
    ``temperature``: the rollouts', under which log-probs are computed. ``micro_batch_tokens``: the most
    input tokens of a forward pass, padding included; None takes a step in one pass. ``threads``: of torch,
    for the whole process; None leaves them. ``seed``: of torch's generator. Dropout is off: with it, the
    ratio to the policy that generated would be noise. ``updates``: so many optimizer steps a batch, each on its part of the rows, drawn at random.

    An algorithm with a critic has one: it begins as the layers of ``critic``, a model folder, by default ``model``, and learns with
    ``critic_lr``, by default ``lr``.
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
        schedule: str = "constant",
        warmup_steps: int = 0,
        decay_steps: int | None = None,
        dtype: str = "auto",
        device: str = "auto",
        temperature: float = 1.0,
        micro_batch_tokens: int | None = None,
        updates: int = 1,
        critic: str | None = None,
        critic_lr: float | None = None,
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        check_above(
            0,
            lr=lr,
            max_grad_norm=max_grad_norm,
            temperature=temperature,
            micro_batch_tokens=micro_batch_tokens,
            updates=updates,
            critic_lr=critic_lr,
            threads=threads,
        )
        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._source = model
        self._max_grad_norm = max_grad_norm
        loaded = load_policy(model, dtype=dtype, device=device)
        self._masters = Masters(loaded)
        self._optimizer = torch.optim.AdamW(
            self._masters.named.values(), lr=lr, betas=tuple(betas), weight_decay=weight_decay, fused=True
        )
        self._schedule = make_schedule(self._optimizer, schedule, warmup_steps=warmup_steps, decay_steps=decay_steps)
        algorithm = algorithm or GRPO()
        self._values: TorchCritic | None = None
        if VALUES in algorithm.asks:
            self._values = TorchCritic(
                critic or model, lr=critic_lr or lr, betas=tuple(betas), weight_decay=weight_decay,
                max_grad_norm=max_grad_norm, dtype=dtype, device=device,
            )  # fmt: skip
        super().__init__(
            loaded,
            ranks=Ranks.alone(),
            algorithm=algorithm,
            vocabulary=vocabulary_of(loaded),
            context=context_of(loaded),
            device=loaded.device,
            temperature=temperature,
            micro_batch_tokens=micro_batch_tokens,
            updates=updates,
            critic=self._values,
        )

    def zero_gradients(self) -> None:
        self._model.zero_grad()
        self._optimizer.zero_grad()
        if self._values is not None:
            self._values.zero_gradients()

    def backward(self, loss: Any, *, last: bool) -> None:
        loss.backward()
        self._masters.take_gradients()

    def optimizer_step(self) -> dict[str, float]:
        made = {"grad_norm": float(torch.nn.utils.clip_grad_norm_(self._masters.named.values(), self._max_grad_norm))}
        if self._values is not None:
            made["critic_grad_norm"] = self._values.clip()
        rate = self._optimizer.param_groups[0]["lr"]
        if not all(map(math.isfinite, made.values())):
            self.zero_gradients()
        else:
            self._optimizer.step()
            self._schedule.step()
            self._masters.give_weights()
            if self._values is not None:
                self._values.optimizer_step()
        return {**made, "lr": float(rate)}

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """Live views of the parameters, in Hugging Face names and ``dtype``, tied weights once."""
        return named_weights(self._model)

    def save(self, path: Path) -> None:
        """Write master weights, optimizer and random state below ``path``, and a critic's: safetensors and JSON, no pickle."""
        if self._critic is not None:
            self._critic.save(path / "critic")
        checkpoint.save(path, self._model, self._masters, self._optimizer)

    def load(self, path: Path) -> None:
        """Continue from what ``save`` wrote. Learning rate and the like are this engine's, not the saved."""
        if self._critic is not None:
            self._critic.load(path / "critic")
        checkpoint.load(path, self._model, self._masters, self._optimizer)
        go_to(self._schedule, steps_made(self._optimizer))

    def load_weights(self, update: WeightUpdate) -> None:
        """Take a version's weights. Masters are made from them; the optimizer, and with it the schedule of its learning rate, begins
        anew. A critic stays as it is: it is not published."""
        take(self._model, update)
        self._masters.take_weights()
        self._optimizer.state.clear()
        go_to(self._schedule, 0)

    def export(self, path: Path) -> None:
        """Write the policy as a Hugging Face folder, with the tokenizer it came with."""
        export_policy(self._model, self._source, path)
