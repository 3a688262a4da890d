"""RankProcesses: a train engine of several processes, checked like one engine.

    made = RankProcesses(Mine, world_size=2)
    engine = made(model=PATH, algorithm=af.GRPO())       # one engine in each process, and a proxy for all here

Each call goes to all ranks at once. Each gets whole groups of a batch, or none; their results are
merged. Processes stay for the next engine, and end with ``close``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ...errors import AsyncFlowError, ConfigError, error_from_name
from ...interfaces import StepResult, TrainEngine, WeightUpdate
from ...plugins import import_path
from ...types import Batch, Ragged
from ...workflow.workers.ranks import free_port
from .check import CheckFailed
from .rank_files import WeightPiece, read_pieces, write_batch, write_pieces

MAKE_S, ANSWER_S = 240.0, 60.0
AFTER_AN_ERROR_S = 15.0
"""Seconds for the other ranks to return from a call after one raised."""


class RankProcesses:
    """Make engines of ``world_size`` ranks by an importable factory. Closed by ``close``. Raises
    ConfigError.

    The environment has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under
    torchrun.
    """

    def __init__(self, factory: Any, world_size: int) -> None:
        path = import_path(factory)
        if path is None:
            raise ConfigError(f"{factory!r} cannot be imported elsewhere, and ranks run in processes of their own")
        self.path, self.world_size = path, world_size
        self.__wrapped__ = factory  # for who asks for its options
        self._files = tempfile.TemporaryDirectory(prefix="asyncflow-ranks-")
        self._ranks: list[_Rank] = []

    def __call__(self, *, model: str, algorithm: Any, **options: Any) -> TrainEngine:
        if any(rank.broken for rank in self._ranks):
            self.close()
        self.begin()
        return _Together(self._ranks, Path(self._files.name), self.path, model, algorithm, options)

    def begin(self) -> None:
        """Start missing processes."""
        if not self._ranks:
            self._ranks = [_Rank(rank, self.world_size) for rank in range(self.world_size)]

    def close(self) -> None:
        """End all processes, whatever they do."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.close()


class _Rank:
    """One process, and its socket: a JSON line for a call, one for the answer."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.broken = rank, False
        self._socket, theirs = socket.socketpair()
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
        }
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.rank_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={**os.environ, **place, "PYTHONPATH": path},
            )  # fmt: skip
        self._answers = self._socket.makefile("rb")

    @property
    def fd(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def ask(self, call: str, **said: Any) -> None:
        """Send a call. Raises CheckFailed if the process has ended."""
        self.broken = True  # until it has answered
        try:
            self._socket.sendall(json.dumps({"call": call, **said}).encode() + b"\n")
        except OSError as error:
            raise CheckFailed(f"rank {self.rank} has ended (status {self._process.poll()})") from error

    def answer(self) -> dict[str, Any]:
        """Receive the answer. Raises CheckFailed if the process ended."""
        line = self._answers.readline()
        if not line:
            raise CheckFailed(f"rank {self.rank} ended in the call (status {self._process.wait(10)})")
        self.broken = False
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Close the socket and wait for the process, or kill it."""
        self._answers.close()
        self._socket.close()  # it ends when it sees that
        try:
            self._process.wait(0.0 if self.broken else 10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Together(TrainEngine):
    """All ranks of one engine."""

    def __init__(
        self, ranks: list[_Rank], files: Path, factory: str, model: str, algorithm: Any,
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._ranks, self._files = ranks, files
        made = self._all(
            "make", factory=factory, model=model, algorithm=_told(algorithm), options=options, port=free_port()
        )
        self.computes, self.restores = tuple(made[0]["computes"]), made[0]["restores"]
        self.streams, self._whole_step = made[0]["streams"], made[0]["whole_step"]
        self._parts: list[list[npt.NDArray[np.int64]]] = []
        self._rows = 0

    def train_step(self, batch: Batch) -> StepResult:
        """Train on all ranks; merge the filtered rows."""
        rows, said = self._shared("train_step", batch)
        return _merged(rows, said, batch.rows)

    @property
    def whole_step(self) -> str:
        """The reason of the first rank."""
        return str(self._whole_step)

    def begin_step(self, step: int) -> None:
        """Begin on all ranks."""
        self._all("begin_step", step=step)
        self._parts, self._rows = [], 0

    def accumulate(self, batch: Batch) -> None:
        """Add a part on all ranks."""
        rows, _ = self._shared("accumulate", batch)
        self._parts.append([each + self._rows for each in rows])
        self._rows += batch.rows

    def end_step(self) -> StepResult:
        """End on all ranks; merge the filtered rows."""
        said = self._all("end_step")
        rows = [np.concatenate(each) for each in zip(*self._parts, strict=True)]
        return _merged(rows, said, self._rows)

    def abort_step(self) -> None:
        """Abort on all ranks."""
        self._all("abort_step")

    def logprobs(self, batch: Batch) -> Ragged:
        """Score on all ranks; return the rows in order."""
        rows, said = self._shared("logprobs", batch)
        values: list[npt.NDArray[np.float32]] = [np.empty(0, np.float32)] * batch.rows
        for part, each in zip(rows, said, strict=True):
            for row, given in zip(part.tolist(), each["logprobs"], strict=True):
                values[row] = np.array(given, np.float32)
        return Ragged.of(values, np.float32)

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """Yield the weights of all ranks: whole tensors first, then merged pieces."""
        self._all("named_weights", to=[str(self._weights(rank)) for rank in range(len(self._ranks))])
        pieces: dict[str, list[WeightPiece]] = {}
        for rank in range(len(self._ranks)):
            for piece in read_pieces(self._weights(rank)):
                if piece.start is None:
                    yield piece.name, piece.array
                else:
                    pieces.setdefault(piece.name, []).append(piece)
        for name, parts in pieces.items():
            yield name, _whole(name, parts)

    def load_weights(self, update: WeightUpdate) -> None:
        """Load a version on all ranks."""
        path = self._files / "update.npz"
        write_pieces(path, update.arrays())
        self._all("load_weights", path=str(path), version=update.version)

    def save(self, path: Path) -> None:
        """Save on all ranks."""
        self._all("save", path=str(path))

    def load(self, path: Path) -> None:
        """Load on all ranks."""
        self._all("load", path=str(path))

    def export(self, path: Path) -> None:
        """Export on all ranks."""
        self._all("export", path=str(path))

    def close(self) -> None:
        """Close all ranks, unless one is broken."""
        if not any(rank.broken for rank in self._ranks):  # else the processes end before the next engine
            self._all("close")

    def _weights(self, rank: int) -> Path:
        return self._files / f"weights-{rank}.npz"

    def _shared(self, call: str, batch: Batch) -> tuple[list[npt.NDArray[np.int64]], list[dict[str, Any]]]:
        """Return each rank's rows, and its answer."""
        rows = _dealt(batch, len(self._ranks))
        paths = [self._files / f"batch-{rank}.npz" for rank in range(len(rows))]
        for path, part in zip(paths, rows, strict=True):
            write_batch(path, batch.take(part))
        return rows, self._all(call, batch=[str(path) for path in paths])

    def _all(self, call: str, **said: Any) -> list[dict[str, Any]]:
        """Call all ranks and wait for all; lists have one argument a rank. Raises the error of the
        first."""
        for rank in self._ranks:
            own = {name: value[rank.rank] if isinstance(value, list) else value for name, value in said.items()}
            rank.ask(call, **own)
        waiting, answers = {rank.fd: rank for rank in self._ranks}, {}
        until, raised = time.monotonic() + (MAKE_S if call == "make" else ANSWER_S), ""
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, until - time.monotonic()))
            if not ready:
                others = ", ".join(str(rank.rank) for rank in waiting.values())
                raise CheckFailed(f"rank {others} does not come back from {call}(){raised}")
            for fd in ready:
                rank = waiting.pop(fd)
                answer = answers[rank.rank] = rank.answer()
                if "error" in answer and not raised:
                    raised = f", and rank {rank.rank} raised {answer['error']} ({answer['text']}): all must, or none"
                    until = min(until, time.monotonic() + AFTER_AN_ERROR_S)
        failed = [answers[rank] for rank in sorted(answers) if "error" in answers[rank]]
        if failed and len(failed) < len(answers):
            raise CheckFailed(f"{call}() ended well in some ranks{raised}")
        if failed:
            raise _error(failed[0])
        return [answers[rank.rank] for rank in self._ranks]


def _merged(rows: list[npt.NDArray[np.int64]], said: list[dict[str, Any]], count: int) -> StepResult:
    """Return the result of all ranks. ``rows``: of each rank."""
    filtered = np.zeros(count, np.bool_)
    for part, each in zip(rows, said, strict=True):
        if each["filtered"] is not None:
            filtered[part] = each["filtered"]
    return StepResult(said[0]["metrics"], filtered if filtered.any() else None)


def _dealt(batch: Batch, shares: int) -> list[npt.NDArray[np.int64]]:
    """Return random whole groups for each rank, determined by the order of rows.

    In another order groups are on other ranks, and a rank may have none. Neither must matter.
    """
    groups, group = np.unique(batch.groups, return_inverse=True)
    owner = np.random.default_rng(batch.ids % (1 << 32)).integers(shares, size=len(groups))
    return [np.flatnonzero(owner[group] == share) for share in range(shares)]


def _whole(name: str, parts: list[WeightPiece]) -> npt.NDArray[Any]:
    whole = np.zeros(parts[0].whole or (), parts[0].array.dtype)
    covered = np.zeros(whole.shape, np.int64)
    for part in parts:
        at = tuple(slice(low, low + size) for low, size in zip(part.start or (), part.array.shape, strict=True))
        whole[at] = part.array
        covered[at] += 1
    if (covered != 1).any():
        raise CheckFailed(f"the pieces of {name!r} leave a gap, or overlap: {[part.start for part in parts]}")
    return whole


def _told(algorithm: Any) -> dict[str, Any]:
    """Return an algorithm as plain values. Raises ConfigError."""
    path = import_path(type(algorithm))
    if path is None or not dataclasses.is_dataclass(algorithm):
        raise ConfigError(f"{algorithm!r} cannot be told to ranks: it is no dataclass that can be imported")
    told = [field.name for field in dataclasses.fields(algorithm) if field.init and field.compare]
    return {"of": path, "options": msgspec.to_builtins({name: getattr(algorithm, name) for name in told})}


def _error(said: Mapping[str, str]) -> Exception:
    if said["error"] == NotImplementedError.__name__:
        return NotImplementedError(said["text"])
    error = error_from_name(said["error"], said["text"])
    return error if type(error) is not AsyncFlowError else RuntimeError(str(error))
