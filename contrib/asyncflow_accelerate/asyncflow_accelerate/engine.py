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
from asyncflow_torch.export import export_together
from asyncflow_torch.masters import Masters
from asyncflow_torch.policy import context_of, load_policy, named_weights, published_tensors, vocabulary_of
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.recomputation import recompute_activations
from asyncflow_torch.sharded_files import RANK_BUCKET_BYTES, kind_of
from asyncflow_torch.shares import STALENESS
from asyncflow_torch.train_options import TrainOptions, keywords_of


class AccelerateEngine(DataParallelEngine):
    """Train engine of one process, without a critic; one engine at a time in a process. Options:
    `TrainOptions`.

    ``dtype`` "bfloat16" is Accelerate's mixed precision: weights and optimizer are float32, and are
    published in ``dtype``.
    """

    computes = (PROXIMAL, ENTROPY, STALENESS)

    @keywords_of(TrainOptions)
    def __init__(self, options: TrainOptions) -> None:
        options.prepare_torch()
        self._source, self._max_grad_norm = options.model, options.max_grad_norm
        self._plain = load_policy(
            options.model, dtype=options.dtype, device="cpu", trust_remote_code=options.trust_remote_code
        )
        self._dtypes = {name: tensor.dtype for name, tensor in named_weights(self._plain)}
        mixed = "bf16" if self._plain.dtype == torch.bfloat16 else "no"
        self._accelerator = Accelerator(mixed_precision=mixed, cpu=device_of(options.device).type == "cpu")
        if options.gradient_checkpointing:
            recompute_activations(self._plain)
        if not options.frozen:
            self._plain.float()  # in bfloat16 a small step would be rounded away
        optimizer = torch.optim.AdamW(self._plain.parameters(), lr=options.learning_rate, **options.adamw)
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
        return ((name, tensor.to(self._dtypes[name])) for name, tensor in named_weights(self._plain))

    def save_policy(self, path: Path) -> None:
        checkpoint.save(path, self._plain, Masters(self._plain), self._optimizer)

    def restore_policy(self, path: Path) -> None:
        checkpoint.load(path, self._plain, Masters(self._plain), self._optimizer)

    def replace_weights(self, update: af.WeightUpdate) -> None:
        weights = dict(named_weights(self._plain))
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        with torch.no_grad():
            for name, tensor in published_tensors(update, shapes, self._dtypes):
                weights[name].copy_(tensor)
        self._optimizer.state.clear()

    def export_folder(self, path: Path) -> None:
        weights = dict(named_weights(self._plain))
        kinds = {name: kind_of(tensor, self._dtypes[name]) for name, tensor in weights.items()}
        export_together(
            path, self._plain.config, self._source, kinds, lambda names: ((name, weights[name], 0) for name in names),
            self._ranks, bucket_bytes=RANK_BUCKET_BYTES,
        )  # fmt: skip

    def close(self) -> None:
        super().close()
        self._accelerator.free_memory()
        AcceleratorState._reset_state()  # of the process: it would refuse the next engine another dtype
