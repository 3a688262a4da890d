"""How far right answers may be apart: by the dtype of the weights, for one token, for a response, for a greedy choice."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError
from ...types import dtype_name
from .policy import Ids, Policy, Tensors

TOLERANCES = {"float64": 1e-4, "float32": 1e-4, "float16": 0.15, "bfloat16": 1.5}
"""Of a log-prob, nats. Each is above what the engine on transformers was ever away from float32 in 1,500 responses of its small
model: 5e-5, 0.10 and 1.0. It is the few tokens of next to no probability that are so far."""
SHARE, LONG = 4, 8
"""So many times nearer is a response of so many tokens on average, and a greedy token to the likeliest one: 0.114 and 0.22 in bfloat16."""


def dtype_of(tensors: Tensors) -> str:
    """That of most of the weights."""
    sizes: dict[str, int] = {}
    for array in tensors.values():
        sizes[dtype_name(array.dtype)] = sizes.get(dtype_name(array.dtype), 0) + array.size
    return max(sizes, key=lambda name: sizes[name])


def tolerance_of(dtype: str) -> float:
    """Raises ConfigError where none is known."""
    if dtype not in TOLERANCES:
        raise ConfigError(f"how far log-probs of {dtype} weights may be apart is not known: give a tolerance (nats)")
    return TOLERANCES[dtype]


def too_far(apart: npt.NDArray[np.floating], tolerance: float) -> str:
    """What is wrong with log-probs of a response that are so far from the policy's; "" where nothing is."""
    if not len(apart) or apart.max() <= tolerance:
        mean = float(apart.mean()) if len(apart) >= LONG else 0.0
        return f"on average {mean:.3g}" if not mean <= tolerance / SHARE else ""
    return f"up to {apart.max():.3g}"


def follows(policy: Policy, version: int, prompt: Ids, ids: Ids, tolerance: float) -> bool:
    """Whether each token is the likeliest after what came before it, or so near to it that rounding decides."""
    ahead = policy.ahead(version, prompt, ids)
    if ahead is None or not len(ids):
        return False
    below = ahead.max(1) - ahead[np.arange(len(ids)), ids]
    return bool(below.max() <= tolerance / SHARE)
