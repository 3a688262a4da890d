"""The bigram's train engine as several ranks over gloo: right, or with one fault of those that ranks have."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bigram import BigramTrain
from faults import Fault, before, replace_methods

from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.types import Batch, Shard


class BigramRanks(BigramTrain):
    """Each rank computes the gradient of its rows; the table is published in pieces, one a rank, the rest by rank 0."""

    def __init__(self, model: str, *, algorithm: Any, learning_rate: float = 1.0, fault: str = "") -> None:
        super().__init__(model, algorithm=algorithm, learning_rate=learning_rate)
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        replace_methods(self, FAULTS.get(fault, {}))

    def check(self, batch: Batch) -> None:
        """All refuse a step, or none: who went on would wait for the others."""
        problem: list[SchemaError] = []
        try:
            super().check(batch)
        except SchemaError as error:
            problem.append(error)
        if self.summed(torch.tensor(len(problem)).numpy()):
            raise SchemaError(f"a rank refused its rows of this step: {problem}")

    def summed(self, array: Any) -> Any:
        total = torch.from_numpy(array).clone()
        dist.all_reduce(total)
        return total.numpy()

    def named_weights(self) -> Any:
        for name, array in super().named_weights():
            if name == "table.weight":
                start, end = (len(array) * rank // self.ranks for rank in (self.rank, self.rank + 1))
                yield name, Shard(array[start:end], (start, 0), array.shape)
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


FAULTS: dict[str, Fault] = {
    "sums no gradients": {"summed": lambda self, right, array: array},
    "refuses alone": {"check": lambda self, right, batch: BigramTrain.check(self, batch)},
    "publishes half": {"named_weights": lambda self, right: () if self.rank else right()},
    "both publish": {"named_weights": lambda self, right: BigramTrain.named_weights(self)},
    "never comes": {"descend": before(lambda self, *_: self.rank and time.sleep(600))},
}
