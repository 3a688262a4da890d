"""What an engine implements to be measured. Each lives in its own module, imported only where its library is."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class Contender(ABC):
    """An engine, as the SDK uses it and as its own users do: the same one, one after the other."""

    @abstractmethod
    def make(self, model: str, rows: int) -> Any:
        """The adapter's RolloutEngine, with room for so many responses at once."""

    @abstractmethod
    async def generate(self, engine: Any, prompts: Sequence[Ids], n: int, max_tokens: int) -> int:
        """Without the SDK, and all at once: ``n`` responses to each prompt with the log-probs of their tokens, at temperature 1. How many tokens came."""

    @abstractmethod
    async def update(self, engine: Any, folder: str) -> None:
        """Without the SDK: generation stops, the weights in ``folder`` are loaded by the engine's own fastest way, and it goes on."""


@dataclass(frozen=True)
class Place:
    """Where a contender runs. ``make``: what makes its environment."""

    module: str
    python: str
    make: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def contender(self) -> Contender:
        made: Contender = importlib.import_module(f"benchmarks.engines.{self.module}").contender()
        return made


PLACES = {
    "vLLM": Place(
        "vllm", ".venv-vllm/bin/python", "make .venv-vllm/.ready",
        {"TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"},
    ),
    "SGLang": Place(
        "sglang", ".venv-sglang/bin/python", "make .venv-sglang/.ready",
        {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"},
    ),
}  # fmt: skip
