"""Version directories for tests: what is published into them, and what is found there."""

from pathlib import Path
from typing import Any

import numpy as np

FIRST = "model-00001-of-00003.safetensors"


def tensors(seed: int = 0, count: int = 6) -> dict[str, Any]:
    """Of sizes that need padding in memory."""
    numbers = np.random.default_rng(seed)
    return {f"layer.{n}": numbers.integers(0, 256, 30_000 + 7 * n, np.uint8) for n in range(count)}


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if not each.name.startswith("."))
