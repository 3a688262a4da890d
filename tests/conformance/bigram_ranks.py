"""The bigram's train engine as several ranks over gloo: right, or with one fault of those that ranks have."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bigram import BigramTrain

from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.types import Batch, Shard


class BigramRanks(BigramTrain):
    """Each rank computes the gradient of its rows; the table is published in pieces, one a rank, the rest by rank 0.

    ``fault``: what is wrong with it. "" is nothing."""

    def __init__(
        self, model: str, *, algorithm: Any, lr: float = 1.0, momentum: float = 0.9, fault: str = ""
    ) -> None:
        super().__init__(model, algorithm=algorithm, lr=lr, momentum=momentum)
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.ranks, self.fault = dist.get_rank(), dist.get_world_size(), fault

    def check(self, batch: Batch) -> None:
        """All refuse a step, or none: who went on would wait for the others."""
        problem: SchemaError | None = None
        try:
            super().check(batch)
        except SchemaError as error:
            if self.fault == "refuses alone":
                raise
            problem = error
        if self.fault == "refuses alone":
            return
        refused = torch.tensor(int(problem is not None))
        dist.all_reduce(refused)
        if refused:
            raise problem or SchemaError("another rank refused its rows of this step")

    def summed(self, array: Any) -> Any:
        if self.fault == "sums no gradients" or (self.fault == "mean of ranks" and not array.shape):
            return array
        total = torch.from_numpy(array).clone()
        dist.all_reduce(total)
        return total.numpy() / (self.ranks if self.fault == "mean of ranks" else 1)

    def descend(self, tokens: Any, coefficients: Any) -> None:
        if self.fault == "never comes" and self.rank:
            time.sleep(600)
        super().descend(tokens, coefficients)

    def named_weights(self) -> Any:
        if self.fault == "both publish":
            yield from super().named_weights()
        elif self.fault != "publishes half" or not self.rank:
            for name, array in super().named_weights():
                if name == "table.weight":
                    part = len(array) // self.ranks
                    start = self.rank * part
                    yield name, Shard(array[start : start + part], (start, 0), array.shape)
                elif not self.rank:
                    yield name, array

    def save(self, path: Path) -> None:
        if not self.rank:
            super().save(path)
        dist.barrier()

    def export(self, path: Path) -> None:
        if not self.rank:
            super().export(path)
        dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()
