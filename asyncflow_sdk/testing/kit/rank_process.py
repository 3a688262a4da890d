"""One rank of an engine: ``python -m asyncflow_sdk.testing.kit.rank_process FD``. It ends with the
socket."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...interfaces import StepResult, TrainEngine
from ...plugins import import_name
from .check import CheckFailed
from .rank_files import read_batch, read_pieces, write_pieces
from .updates import HeldUpdate


class Rank:
    """Holds the engine. Each method is one call; it returns plain values."""

    def __init__(self) -> None:
        self._engine: TrainEngine | None = None

    @property
    def engine(self) -> TrainEngine:
        """The engine. Raises CheckFailed without one."""
        if self._engine is None:
            raise CheckFailed("there is no engine")
        return self._engine

    def make(
        self, factory: str, model: str, algorithm: Mapping[str, Any], options: Mapping[str, Any], port: int
    ) -> dict[str, Any]:
        """Make the engine, with the port of its ranks."""
        os.environ["MASTER_PORT"] = str(port)
        made = import_name(factory)(
            model=model, algorithm=import_name(algorithm["of"])(**algorithm["options"]), **options
        )
        if not isinstance(made, TrainEngine):
            raise CheckFailed(f"the factory made {made!r}, which is no asyncflow_sdk.TrainEngine")
        self._engine = made
        said = {"computes": list(made.computes), "restores": made.restores}
        return said | {"streams": made.streams, "whole_step": made.whole_step}

    def train_step(self, batch: str) -> dict[str, Any]:
        """Train on the batch in a file."""
        return _plain(self.engine.train_step(read_batch(Path(batch))))

    def begin_step(self, step: int) -> dict[str, Any]:
        """Begin a step in parts."""
        self.engine.begin_step(step)
        return {}

    def accumulate(self, batch: str) -> dict[str, Any]:
        """Add the batch in a file to the step."""
        self.engine.accumulate(read_batch(Path(batch)))
        return {}

    def end_step(self) -> dict[str, Any]:
        """End the step."""
        return _plain(self.engine.end_step())

    def abort_step(self) -> dict[str, Any]:
        """Abort the step."""
        self.engine.abort_step()
        return {}

    def logprobs(self, batch: str) -> dict[str, Any]:
        """Score the batch in a file."""
        return {"logprobs": self.engine.logprobs(read_batch(Path(batch))).tolist()}

    def named_weights(self, to: str) -> dict[str, Any]:
        """Write the weights to a file."""
        write_pieces(Path(to), self.engine.named_weights())
        return {}

    def load_weights(self, path: str, version: int) -> dict[str, Any]:
        """Load the version in a file."""
        update = HeldUpdate(version, {piece.name: piece.array for piece in read_pieces(Path(path))})
        try:
            self.engine.load_weights(update)
        finally:
            update.scribble()
        return {}

    def save(self, path: str) -> dict[str, Any]:
        """Save to a directory."""
        self.engine.save(Path(path))
        return {}

    def load(self, path: str) -> dict[str, Any]:
        """Load from a directory."""
        self.engine.load(Path(path))
        return {}

    def export(self, path: str) -> dict[str, Any]:
        """Export to a directory."""
        self.engine.export(Path(path))
        return {}

    def close(self) -> dict[str, Any]:
        """Close the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        return {}


def _plain(result: StepResult) -> dict[str, Any]:
    filtered = None if result.filtered is None else np.asarray(result.filtered, np.bool_).tolist()
    return {"metrics": result.metrics, "filtered": filtered}


def main() -> None:
    """Answer calls until the socket closes."""
    rank = Rank()
    with socket.socket(fileno=int(sys.argv[1])) as kit, kit.makefile("rb") as asked:
        for line in asked:
            said = json.loads(line)
            try:
                answer = getattr(rank, said.pop("call"))(**said)
            except Exception as error:
                answer = {"error": type(error).__name__, "text": str(error)}
            kit.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
