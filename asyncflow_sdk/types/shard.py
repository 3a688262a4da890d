"""Shard: a piece of a tensor, for a publisher of several ranks that each have only a part of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shard:
    """What ``named_weights`` may give in place of a tensor: ``tensor`` is the piece of one of shape ``whole`` that begins at
    ``start`` in each dimension. The pieces of all ranks together make the whole; where they leave a gap, or
    overlap, receivers refuse the version."""

    tensor: Any
    start: tuple[int, ...]
    whole: tuple[int, ...]

    def problem(self) -> str:
        """Why it cannot be such a piece; "" when it can."""
        shape = tuple(self.tensor.shape)
        if not len(shape) == len(self.start) == len(self.whole):
            return f"a piece of shape {shape} at {tuple(self.start)} of a tensor of shape {tuple(self.whole)}"
        for begin, size, whole in zip(self.start, shape, self.whole, strict=True):
            if begin < 0 or begin + size > whole:
                return (
                    f"a piece of shape {shape} at {tuple(self.start)} does not lie in a tensor of {tuple(self.whole)}"
                )
        return ""
