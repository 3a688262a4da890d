"""Echo train engine of several ranks: the contract of a sharded engine at no cost, without torch.

Ranks find each other by the environment of torchrun: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import AsyncFlowError, EngineError, error_from_name
from ..interfaces import StepResult
from ..types import Batch, Shard
from .echo import EchoTrain, weights

MEET_S = 60.0


class Gather:
    """All-gather of JSON values between ranks, over sockets through rank 0.

    ``deaf``: a waiting rank ignores the loss of another, like many device collectives.
    """

    def __init__(self, deaf: bool = False) -> None:
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._deaf = deaf
        self._lines: list[tuple[socket.socket, Any]] = []
        if self.world_size == 1:
            return
        taken = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun listens there itself
        at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + taken
        if self.rank:
            self._add(_reached(at))
            self._send(0, self.rank)
            return
        with socket.create_server(at) as server:
            server.settimeout(MEET_S)
            while len(self._lines) < self.world_size - 1:
                self._add(server.accept()[0])
        ranks = [self._hear(line) for line in range(len(self._lines))]
        self._lines = [line for _, line in sorted(zip(ranks, self._lines, strict=True), key=lambda pair: pair[0])]

    def __call__(self, word: Any) -> list[Any]:
        """Return the values of all ranks, in order, once all have sent theirs."""
        if self.world_size == 1:
            return [word]
        if self.rank:
            self._send(0, word)
            words: list[Any] = self._hear(0)
            return words
        words = [word, *(self._hear(line) for line in range(len(self._lines)))]
        for line in range(len(self._lines)):
            self._send(line, words)
        return words

    def close(self) -> None:
        """Close all connections."""
        for sock, file in self._lines:
            file.close()
            sock.close()

    def _add(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._lines.append((sock, sock.makefile("rb")))

    def _send(self, line: int, word: Any) -> None:
        self._lines[line][0].sendall(json.dumps(word).encode() + b"\n")

    def _hear(self, line: int) -> Any:
        said = self._lines[line][1].readline()
        while not said and self._deaf:
            time.sleep(3600.0)
        if not said:
            raise ConnectionError(f"rank {line + 1 if not self.rank else 0} is gone")
        return json.loads(said)


def _reached(at: tuple[str, int]) -> socket.socket:
    until = time.monotonic() + MEET_S
    while True:
        try:
            return socket.create_connection(at, MEET_S)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


class EchoRanks(EchoTrain):
    """`EchoTrain` in ``world_size`` processes: each rank verifies its own rows; all train a step or
    one of its parts, or none.

    Large tensors are given as one piece a rank. ``deaf``: see `Gather`.
    """

    def __init__(
        self, model: str = "", *, algorithm: Any = None, delay_s: float = 0.0, fail_at: int = -1, deaf: bool = False
    ) -> None:
        super().__init__(model, algorithm=algorithm, delay_s=delay_s, fail_at=fail_at)
        self._gather = Gather(deaf)

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._gather.rank

    def accumulate(self, batch: Batch) -> None:
        """Verify this rank's rows of a part, perhaps none. Raises on all ranks if one raised."""
        error: Exception | None = None
        try:
            super().accumulate(batch)
        except Exception as own:
            error = own
        self._agree(error)

    def end_step(self) -> StepResult:
        """Count the step on all ranks."""
        if (step := self._open) is None:
            raise EngineError("no step is open")
        rewards = np.concatenate(step.rewards) if step.rewards else np.zeros(0)
        every = self._agree(None, rows=len(rewards), reward=float(rewards.sum()))
        self._open = None
        rows = [each["rows"] for each in every]
        if not sum(rows):
            raise EngineError("the step has no rows")
        time.sleep(self._delay_s)
        self._count(step)
        reward = sum(each["reward"] for each in every) / sum(rows)
        return StepResult({"reward": reward, "rows": float(sum(rows))})

    def abort_step(self) -> None:
        """Discard the open step on all ranks: the others' next call for it raises StepAborted."""
        if self._open is not None:
            self._open = None
            self._gather({"error": ["StepAborted", f"rank {self.rank} aborted the step"]})

    def _agree(self, error: Exception | None, **word: Any) -> list[dict[str, Any]]:
        """Return the words of all ranks. An error of one ends the step and is raised on all."""
        own = None if error is None else [type(error).__name__, str(error)]
        every = self._gather({"error": own, **word})
        failed = [each["error"] for each in every if each["error"]]
        if failed:
            self._open = None
            raise error or _raised(*failed[0])
        return every

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """Yield whole small tensors from rank 0, and a piece of each large one."""
        size, rank = self._gather.world_size, self.rank
        for name, whole in weights(self.steps).items():
            if not whole.ndim or len(whole) < size:
                if not rank:
                    yield name, whole
                continue
            first, last = len(whole) * rank // size, len(whole) * (rank + 1) // size
            yield name, Shard(whole[first:last], (first, *([0] * (whole.ndim - 1))), whole.shape)

    def save(self, path: Path) -> None:
        """Write one file a rank, then wait for all ranks."""
        path.mkdir(parents=True, exist_ok=True)
        (path / f"rank-{self.rank}.json").write_text(json.dumps({"steps": self.steps}))
        self._gather("saved")

    def load(self, path: Path) -> None:
        """Continue with saved steps, equal on all ranks."""
        found = json.loads((path / "rank-0.json").read_text())["steps"]
        self._go_on_with(int(np.unique([found, *self._gather(found)]).item()))

    def export(self, path: Path) -> None:
        """Write the export of rank 0, then wait for all ranks."""
        if not self.rank:
            super().save(path)
        self._gather("exported")

    def close(self) -> None:
        """Close the connections to other ranks."""
        self._gather.close()


def _raised(name: str, text: str) -> Exception:
    error = error_from_name(name, text)
    return error if type(error) is not AsyncFlowError else RuntimeError(text)
