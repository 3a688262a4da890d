"""An engine that tells which algorithm it was given, and algorithms."""

from dataclasses import dataclass
from pathlib import Path

import asyncflow_sdk as af
from asyncflow_sdk.testing.echo import EchoTrain


class ShowTrain(EchoTrain):
    def __init__(self, model="", *, algorithm):
        super().__init__(model)
        self.algorithm = algorithm

    def export(self, path: Path):
        super().export(path)
        (path / "algorithm").write_text(repr(self.algorithm))


@dataclass(frozen=True)
class Penalised(af.Algorithm):
    beta: float = 0.1

    def advantages(self, batch):
        return batch.array("reward")

    def loss(self, tokens):
        return -(tokens.logprobs * tokens.advantages).sum() / tokens.total_tokens, {}


@dataclass(frozen=True)
class Referring(Penalised):
    needs = ("ref_logprobs",)


def Quarter():
    """Also what no class is, but makes one."""
    return Penalised(beta=0.25)
