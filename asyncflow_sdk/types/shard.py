"""Shard: a piece of a tensor, for ranks that each hold only a part of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shard:
    """A piece of a tensor; ``named_weights`` may yield it instead of a tensor. ``tensor``: the
    piece, starting at index ``start`` of a tensor of shape ``whole``. The pieces of all ranks must
    cover the tensor without gap or overlap; otherwise receivers refuse the version."""

    tensor: Any
    start: tuple[int, ...]
    whole: tuple[int, ...]

    def problem(self) -> str:
        """Return why the piece does not fit the whole tensor; "" if it fits."""
        shape = tuple(self.tensor.shape)
        if not len(shape) == len(self.start) == len(self.whole):
            return f"a piece of shape {shape} at {tuple(self.start)} of a tensor of shape {tuple(self.whole)}"
        for begin, size, whole in zip(self.start, shape, self.whole, strict=True):
            if begin < 0 or begin + size > whole:
                return (
                    f"a piece of shape {shape} at {tuple(self.start)} does not lie in a tensor of {tuple(self.whole)}"
                )
        return ""
