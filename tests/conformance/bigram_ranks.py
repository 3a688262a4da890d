"""The bigram's train engine as several ranks: right, or with one fault of those that ranks have."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from bigram import BigramTrain
from faults import Fault, before, with_fault

from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.testing.echo_ranks import Gather
from asyncflow_sdk.types import Batch, Shard


class BigramRanks(BigramTrain):
    """Each rank computes the gradient of its rows; the table is published in pieces, one a rank, the rest by rank 0."""

    def __init__(self, model: str, *, algorithm: Any, learning_rate: float = 1.0, fault: str = "") -> None:
        super().__init__(model, algorithm=algorithm, learning_rate=learning_rate)
        self.gather = Gather()
        self.rank, self.ranks = self.gather.rank, self.gather.world_size
        with_fault(self, FAULTS.get(fault, {}))

    def check(self, batch: Batch) -> None:
        """All refuse a step, or none: who went on would wait for the others."""
        refused = ""
        try:
            super().check(batch)
        except SchemaError as error:
            refused = str(error)
        if self.summed(np.array(refused != "", np.float64)):
            raise SchemaError(f"a rank refused its rows of this step: {refused}")

    def summed(self, array: Any) -> Any:
        return np.sum(self.gather(array.tolist()), axis=0)

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
        self.gather("saved")

    def export(self, path: Path) -> None:
        if not self.rank:
            super().export(path)
        self.gather("exported")

    def close(self) -> None:
        self.gather.close()


FAULTS: dict[str, Fault] = {
    "sums no gradients": {"summed": lambda self, right, array: array},
    "refuses alone": {"check": lambda self, right, batch: BigramTrain.check(self, batch)},
    "publishes half": {"named_weights": lambda self, right: () if self.rank else right()},
    "both publish": {"named_weights": lambda self, right: BigramTrain.named_weights(self)},
    "never comes": {"descend": before(lambda self, *_: self.rank and time.sleep(600))},
}
