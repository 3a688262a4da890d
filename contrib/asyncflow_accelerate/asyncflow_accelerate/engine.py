"""AccelerateEngine: trains a Hugging Face model with Accelerate.

af.Train("accelerate", model="models/mine", learning_rate=1e-5, dtype="bfloat16", algorithm=af.GRPO())
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import asyncflow_sdk as af
from asyncflow_torch import checkpoint
from asyncflow_torch.data_parallel import ENTROPY, PROXIMAL, DataParallelEngine
from asyncflow_torch.devices import device_of
from asyncflow_torch.export import export_folder
from asyncflow_torch.folder_map import runs_of
from asyncflow_torch.masters import Masters
from asyncflow_torch.policy import context_of, load_policy, trained, vocabulary_of
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.recomputation import recompute_activations
from asyncflow_torch.shares import STALENESS
from asyncflow_torch.train_options import TrainOptions, keywords_of


class AccelerateEngine(DataParallelEngine):
    """Train engine of one process, without a critic; one engine at a time in a process. Options:
    `TrainOptions`.

    ``dtype`` "bfloat16" is Accelerate's mixed precision: weights and optimizer are float32, and are
    published in ``dtype``.
    """

    computes = (PROXIMAL, ENTROPY, STALENESS)

    check_options = TrainOptions

    @keywords_of(TrainOptions)
    def __init__(self, options: TrainOptions) -> None:
        options.prepare_torch()
        self._max_grad_norm = options.max_grad_norm
        self._plain = load_policy(
            options.model, dtype=options.dtype, device="cpu", trust_remote_code=options.trust_remote_code
        )
        self._folder = options.trained_part(self._plain)
        self.untrained = self._folder.untrained
        mixed = "bf16" if self._plain.dtype == torch.bfloat16 else "no"
        self._accelerator = Accelerator(mixed_precision=mixed, cpu=device_of(options.device).type == "cpu")
        if options.gradient_checkpointing:
            recompute_activations(self._plain)
        if not options.frozen:
            for _, parameter in trained(self._plain):  # in bfloat16 a small step would be rounded away
                parameter.data = parameter.data.float()
            self._folder.exact(runs_of(self._plain))
        parameters = [each for _, each in trained(self._plain)]
        optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, **options.adamw)
        prepared, self._prepared = self._accelerator.prepare(self._plain, optimizer)
        super().__init__(
            prepared, options, optimizer, ranks=Ranks.alone(), vocabulary=vocabulary_of(self._plain),
            context=context_of(self._plain), device=self._accelerator.device,
        )  # fmt: skip

    def zero_gradients(self) -> None:
        self._prepared.zero_grad()

    def backward(self, loss: Any, *, last: bool) -> None:
        self._accelerator.backward(loss)

    def divide_gradients(self, number: float) -> None:
        for parameter in self._plain.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(number)

    def optimizer_step(self) -> dict[str, float]:
        norm = float(self._accelerator.clip_grad_norm_(self._plain.parameters(), self._max_grad_norm))
        if math.isfinite(norm):
            self._prepared.step()
        else:
            self.zero_gradients()
        return {"grad_norm": norm}

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        return self._folder.published(runs_of(self._plain).items())

    def save_policy(self, path: Path) -> None:
        checkpoint.save(path, self._plain, Masters(self._plain), self._optimizer)

    def restore_policy(self, path: Path) -> None:
        checkpoint.load(path, self._plain, Masters(self._plain), self._optimizer)

    def replace_weights(self, update: af.WeightUpdate) -> None:
        self._folder.check(update)
        for name, tensor in update:
            self._folder.fill(name, tensor, runs_of(self._plain))
        self._optimizer.state.clear()

    def export_folder(self, path: Path) -> None:
        export_folder(path, self._folder, runs_of(self._plain).items(), self._ranks)

    def close(self) -> None:
        super().close()
        self._accelerator.free_memory()
        AcceleratorState._reset_state()  # of the process: it would refuse the next engine another dtype
