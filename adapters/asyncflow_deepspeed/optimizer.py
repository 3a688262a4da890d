"""AdamW that makes no step where the gradient's norm is no finite number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


class CheckedAdamW(torch.optim.AdamW):  # type: ignore[misc]
    """DeepSpeed computes the norm over all ranks, clips by it and calls ``step``, without a look at it in float32 and bfloat16.

    ``norm``: what says it, the same on all ranks, so that all step or none. Until it is set no step is made: stage 0 makes one of
    zeros when it begins, which would count, and let weights decay.
    """

    norm: Callable[[], float] = staticmethod(lambda: math.nan)

    def step(self, closure: Any = None) -> Any:
        return super().step(closure) if math.isfinite(float(self.norm())) else None
