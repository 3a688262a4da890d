"""torch.distributed's broadcast over Gloo, the group warmed: flattened into buckets of 64 MB, or tensor by tensor into
the parameters. Both sides are held from the first to the last of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from .contender import Replica, Trainer
from .model import Parameters

BUCKET = 32 << 20  # elements


def spans(parameters: Parameters) -> Iterator[list[tuple[torch.Tensor, int]]]:
    """Buckets of pieces, flat, with where each begins; buckets split tensors."""
    at, pieces = 0, []
    for tensor in parameters.values():
        flat, start = tensor.view(-1), 0
        while start < len(flat):
            piece = flat[start : start + BUCKET - at]
            pieces.append((piece, at))
            at, start = at + len(piece), start + len(piece)
            if at == BUCKET:
                yield pieces
                at, pieces = 0, []
    if pieces:
        yield pieces


class _End:
    """Either end: rank 0 sends."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole

    def _join(self, parameters: Parameters, address: str, rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
        self._rank = rank
        self._tensors = list(parameters.values())
        self._buckets = list(spans(parameters))
        self._flat = torch.zeros(0 if self._whole else BUCKET, dtype=torch.bfloat16)

    def _move(self) -> None:
        if self._whole:
            for tensor in self._tensors:
                dist.broadcast(tensor, 0)
            return
        for pieces in self._buckets:
            last, at = pieces[-1]
            flat = self._flat[: at + len(last)]
            if self._rank == 0:
                for piece, at in pieces:
                    flat[at : at + len(piece)].copy_(piece)
            dist.broadcast(flat, 0)
            if self._rank:
                for piece, at in pieces:
                    piece.copy_(flat[at : at + len(piece)])


class GlooTrainer(_End, Trainer):
    def start(self, parameters: Parameters) -> str:
        self._folder = tempfile.TemporaryDirectory()
        self._parameters = parameters
        return f"{self._folder.name}/store"

    def meet(self) -> None:
        self._join(self._parameters, f"{self._folder.name}/store", 0)

    def publish(self, version: int) -> None:
        self._move()

    def close(self) -> None:
        self._folder.cleanup()


class GlooReplica(_End, Replica):
    def start(self, parameters: Parameters, address: str) -> None:
        self._join(parameters, address, 1)

    def take(self, version: int) -> float:
        began = time.perf_counter()
        self._move()
        return time.perf_counter() - began

    def close(self) -> None:
        """The group ends with its processes."""


def trainer(name: str) -> Trainer:
    return GlooTrainer(name == "gloo-tensors")


def replica(name: str) -> Replica:
    return GlooReplica(name == "gloo-tensors")
