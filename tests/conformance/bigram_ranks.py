"""The bigram's train engine as several ranks over gloo: right in every way, and wrong in the ways of ranks."""

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
    """Each rank computes the gradient of its rows; the table is published in pieces, one a rank, the rest by rank 0."""

    def __init__(self, model: str, *, algorithm: Any, lr: float = 1.0, momentum: float = 0.9) -> None:
        super().__init__(model, algorithm=algorithm, lr=lr, momentum=momentum)
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def check(self, batch: Batch) -> None:
        """All refuse a step, or none: who went on would wait for the others."""
        problem: SchemaError | None = None
        try:
            super().check(batch)
        except SchemaError as error:
            problem = error
        refused = torch.tensor(int(problem is not None))
        dist.all_reduce(refused)
        if refused:
            raise problem or SchemaError("another rank refused its rows of this step")

    def summed(self, array: Any) -> Any:
        total = torch.from_numpy(array).clone()
        dist.all_reduce(total)
        return total.numpy()

    def named_weights(self) -> Any:
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


class EachForItself(BigramRanks):
    """Forgets to sum the gradients: ranks drift apart, and the weights are of whoever publishes them."""

    def summed(self, array: Any) -> Any:
        return array


class MeanOfRanks(BigramRanks):
    """Divides by its own tokens, and takes the mean of all: a token weighs less on the rank that has more of them."""

    def summed(self, array: Any) -> Any:
        return array if not array.shape else super().summed(array) / self.ranks


class RefusesAlone(BigramRanks):
    """Looks at its own rows only: the others wait in the all-reduce."""

    def check(self, batch: Batch) -> None:
        BigramTrain.check(self, batch)


class PublishesHalf(BigramRanks):
    """What the other rank has is missing."""

    def named_weights(self) -> Any:
        return super().named_weights() if not self.rank else []


class BothPublish(BigramRanks):
    """What no rank has alone comes from each."""

    def named_weights(self) -> Any:
        return BigramTrain.named_weights(self)


class NeverComes(BigramRanks):
    """One rank is lost in its step."""

    def descend(self, tokens: Any, coefficients: Any) -> None:
        if self.rank:
            time.sleep(600)
        super().descend(tokens, coefficients)
