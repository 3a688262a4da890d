"""Train engines of several ranks that do something only one of them does."""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asyncflow_sdk.interfaces import StepResult
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.types import Batch


class Apart(EchoTrain):
    """Ranks that need nothing of each other. Rank ``slow`` hangs in step ``at``."""

    def __init__(self, model: str = "", *, algorithm: Any = None, slow: int = -1, at: int = -1) -> None:
        super().__init__(model, algorithm=algorithm)
        self.rank = int(os.environ["RANK"])
        self._slow, self._at = slow, at

    def train_step(self, batch: Batch) -> StepResult:
        if (self.rank, self.steps) == (self._slow, self._at):
            time.sleep(3600.0)
        return super().train_step(batch)

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        return super().named_weights() if not self.rank else ()


class Telling(Apart):
    """Its model is what each rank found around it."""

    NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OWN")

    def export(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        told = {name: os.environ[name] for name in self.NAMES} | {"cpus": sorted(os.sched_getaffinity(0))}
        (path / str(self.rank)).write_text(repr(told))
