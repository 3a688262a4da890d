"""RankProcesses: a train engine of several processes, checked like one engine.

    made = RankProcesses(Mine, world_size=2)
    engine = made(model=PATH, algorithm=af.GRPO())       # one engine in each process, and a proxy for all here

Each call goes to all ranks at once. Each gets whole groups of a batch, or none; their results are
merged. Processes stay for the next engine, and end with ``close``.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ...errors import AsyncFlowError, ConfigError, error_from_name
from ...interfaces import StepResult, TrainEngine, WeightUpdate
from ...plugins import import_name, import_path
from ...types import Batch, Column, ColumnSpec, Ragged, Shard, carrier, dtype_name
from ...workflow.processes.ranks import free_port
from .check import CheckFailed
from .train.lab import copied
from .updates import HeldUpdate

MAKE_S, ANSWER_S = 240.0, 60.0
AFTER_AN_ERROR_S = 15.0
"""Seconds for the other ranks to return from a call after one raised."""
_KINDS: tuple[type[Any], ...] = (np.ndarray, Batch, Ragged)
"""Types sent to ranks and by them, beside plain values and dataclasses, which arrive as mappings."""
_SAID = ("computes", "restores", "streams", "whole_step")
"""Attributes of an engine that its proxy has, too."""


class RankProcesses:
    """Make engines of ``world_size`` ranks by an importable factory. Closed by ``close``. Raises ConfigError.

    The environment has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun.
    """

    def __init__(self, factory: Any, world_size: int) -> None:
        path = import_path(factory)
        if path is None:
            raise ConfigError(f"{factory!r} cannot be imported elsewhere, and ranks run in processes of their own")
        self.path, self.world_size = path, world_size
        self.__wrapped__ = factory  # for who asks for its options
        self._ranks: list[_Rank] = []

    def __call__(self, *, model: str, algorithm: Any, **options: Any) -> TrainEngine:
        if any(rank.broken for rank in self._ranks):
            self.close()
        self.begin()
        return _Together(self._ranks, self.path, {"model": model, **options}, _told(algorithm))

    def begin(self) -> None:
        """Start missing processes."""
        if not self._ranks:
            self._ranks = [_Rank(rank, self.world_size) for rank in range(self.world_size)]

    def close(self) -> None:
        """End all processes, also hung ones."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.close()


class _Rank:
    """One process, and the connection to it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.broken = rank, False
        ours, theirs = socket.socketpair()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
        place["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        fd = theirs.fileno()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve_rank; serve_rank({fd})"],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **{name: str(value) for name, value in place.items()}},
            )
        self.connection = Connection(ours.detach())

    def ask(self, call: str, *arguments: Any) -> None:
        """Send a call. Raises CheckFailed if the process has ended."""
        self.broken = True  # until it has answered
        try:
            _send(self.connection, call, arguments)
        except OSError as error:
            raise CheckFailed(f"rank {self.rank} has ended (status {self._process.poll()})") from error

    def answer(self) -> tuple[Any, tuple[str, str] | None]:
        """Receive the answer: a value, or name and text of an error. Raises CheckFailed if the process ended."""
        try:
            value, error = _receive(self.connection)
        except (EOFError, OSError):
            raise CheckFailed(f"rank {self.rank} ended in the call (status {self._process.wait(10)})") from None
        self.broken = False
        return value, error

    def close(self) -> None:
        """Close the connection and wait for the process, or kill it."""
        self.connection.close()  # it ends when it sees that
        try:
            self._process.wait(0.0 if self.broken else 10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve_rank(fd: int) -> None:
    """Answer the calls of `_Together` for one rank's engine, until the connection closes."""
    engine: Any = None
    with Connection(fd) as kit:
        while True:
            try:
                call, arguments = _receive(kit)
            except EOFError:
                return
            try:
                if call == "make":
                    engine = None  # the one before, which was closed, goes first
                    engine = _made(*arguments)
                    _send(kit, {name: getattr(engine, name) for name in _SAID}, None)
                elif call == "named_weights":
                    _send(kit, [(name, _plain(given)) for name, given in engine.named_weights()], None)
                elif call == "load_weights":
                    update = HeldUpdate(*arguments)
                    try:
                        engine.load_weights(update)
                    finally:
                        update.scribble()
                    _send(kit, None, None)
                else:
                    given = map(Path, arguments) if call in ("save", "load", "export") else arguments
                    _send(kit, getattr(engine, call)(*given), None)
            except Exception as error:
                _send(kit, None, (type(error).__name__, str(error)))


def _send(line: Connection, *said: Any) -> None:
    line.send_bytes(msgspec.msgpack.encode(said, enc_hook=_to_ext))


def _receive(line: Connection) -> Any:
    return msgspec.msgpack.decode(line.recv_bytes(), ext_hook=_from_ext)


def _to_ext(value: Any) -> Any:
    """Return an array, or an object of arrays, as an extension of msgpack. Raises TypeError for others."""
    if isinstance(value, np.ndarray):
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        said: Any = (dtype_name(value.dtype), value.shape, flat.tobytes())
    elif isinstance(value, Batch):
        said = value.ids, value.groups, [(n, c.spec, c.values, c.offsets) for n, c in value.columns.items()]
    elif isinstance(value, Ragged):
        said = value.values, value.offsets
    elif isinstance(value, Path | np.number):
        return str(value) if isinstance(value, Path) else value.item()
    else:
        raise TypeError(f"the engine gave a {type(value).__name__}, where numbers, texts and arrays are expected")
    code = next(number for number, kind in enumerate(_KINDS) if isinstance(value, kind))
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(said, enc_hook=_to_ext))


def _from_ext(code: int, data: memoryview) -> Any:
    said = msgspec.msgpack.decode(data, ext_hook=_from_ext)
    if _KINDS[code] is np.ndarray:
        dtype, shape, values = said
        return np.frombuffer(bytearray(values), np.uint8).view(carrier(dtype)).reshape(shape)
    if _KINDS[code] is Batch:
        ids, groups, columns = said
        return Batch(
            ids, groups, {n: Column(msgspec.convert(spec, ColumnSpec), *arrays) for n, spec, *arrays in columns}
        )
    return Ragged(*said)


def _made(
    factory: str, options: Mapping[str, Any], algorithm: tuple[str, Mapping[str, Any]], port: int
) -> TrainEngine:
    os.environ["MASTER_PORT"] = str(port)
    path, told = algorithm
    made = import_name(factory)(algorithm=import_name(path)(**told), **options)
    if not isinstance(made, TrainEngine):
        raise CheckFailed(f"the factory made {made!r}, which is no asyncflow_sdk.TrainEngine")
    return made


def _plain(given: Any) -> Any:
    return Shard(copied(given.tensor), given.start, given.whole) if isinstance(given, Shard) else copied(given)


class _Together(TrainEngine):
    """All ranks of one engine."""

    def __init__(
        self, ranks: list[_Rank], factory: str, options: Mapping[str, Any], algorithm: tuple[str, Mapping[str, Any]]
    ) -> None:
        self._ranks = ranks
        said = self._all("make", factory, options, algorithm, free_port())[0]
        self.computes, self.restores, self.streams, self._whole_step = (said[name] for name in _SAID)
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
        self._all("begin_step", step)
        self._parts, self._rows = [], 0

    def accumulate(self, batch: Batch) -> None:
        """Add a part on all ranks."""
        rows, _ = self._shared("accumulate", batch)
        self._parts.append([each + self._rows for each in rows])
        self._rows += batch.rows

    def end_step(self) -> StepResult:
        """End on all ranks; merge the filtered rows."""
        said = self._all("end_step")
        return _merged([np.concatenate(each) for each in zip(*self._parts, strict=True)], said, self._rows)

    def abort_step(self) -> None:
        """Abort on all ranks."""
        self._all("abort_step")

    def logprobs(self, batch: Batch) -> Ragged:
        """Score on all ranks; return the rows in order."""
        rows, said = self._shared("logprobs", batch)
        values: list[npt.NDArray[np.float32]] = [np.empty(0, np.float32)] * batch.rows
        for part, each in zip(rows, said, strict=True):
            for row, given in zip(part.tolist(), each, strict=True):
                values[row] = np.array(given, np.float32)
        return Ragged.of(values, np.float32)

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """Yield the weights of all ranks: whole tensors first, then merged shards."""
        shards: dict[str, list[Shard]] = {}
        for name, given in (each for weights in self._all("named_weights") for each in weights):
            if isinstance(given, dict):
                shards.setdefault(name, []).append(
                    Shard(given["tensor"], tuple(given["start"]), tuple(given["whole"]))
                )
            else:
                yield name, given
        for name, parts in shards.items():
            yield name, _whole(name, parts)

    def load_weights(self, update: WeightUpdate) -> None:
        """Load a version on all ranks."""
        self._all("load_weights", update.version, dict(update.arrays()))

    def save(self, path: Path) -> None:
        """Save on all ranks."""
        self._all("save", path)

    def load(self, path: Path) -> None:
        """Load on all ranks."""
        self._all("load", path)

    def export(self, path: Path) -> None:
        """Export on all ranks."""
        self._all("export", path)

    def close(self) -> None:
        """Close all ranks, unless one is broken."""
        if not any(rank.broken for rank in self._ranks):  # else the processes end before the next engine
            self._all("close")

    def _shared(self, call: str, batch: Batch) -> tuple[list[npt.NDArray[np.int64]], list[Any]]:
        rows = _dealt(batch, len(self._ranks))
        return rows, self._all(call, shares=[batch.take(part) for part in rows])

    def _all(self, call: str, *arguments: Any, shares: Sequence[Batch] = ()) -> list[Any]:
        """Call all ranks and wait for all. ``shares``: one argument for each rank. Raises the error of the first."""
        for rank in self._ranks:
            rank.ask(call, *([shares[rank.rank]] if shares else arguments))
        waiting, answers = {rank.connection: rank for rank in self._ranks}, dict[int, Any]()
        errors: dict[int, tuple[str, str]] = {}
        until, raised = time.monotonic() + (MAKE_S if call == "make" else ANSWER_S), ""
        while waiting:
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                others = ", ".join(str(rank.rank) for rank in waiting.values())
                raise CheckFailed(f"rank {others} does not come back from {call}(){raised}")
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                answers[rank.rank], error = rank.answer()
                if error is not None:
                    errors[rank.rank] = error
                    raised = raised or f", and rank {rank.rank} raised {error[0]} ({error[1]}): all must, or none"
                    until = min(until, time.monotonic() + AFTER_AN_ERROR_S)
        if errors and len(errors) < len(answers):
            raise CheckFailed(f"{call}() ended well in some ranks{raised}")
        if errors:
            raise _error(*errors[min(errors)])
        return [answers[rank.rank] for rank in self._ranks]


def _merged(rows: list[npt.NDArray[np.int64]], said: list[dict[str, Any]], count: int) -> StepResult:
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


def _whole(name: str, parts: list[Shard]) -> npt.NDArray[Any]:
    whole = np.zeros(parts[0].whole, parts[0].tensor.dtype)
    covered = np.zeros(whole.shape, np.int64)
    for part in parts:
        at = tuple(slice(low, low + size) for low, size in zip(part.start, part.tensor.shape, strict=True))
        whole[at] = part.tensor
        covered[at] += 1
    if (covered != 1).any():
        raise CheckFailed(f"the pieces of {name!r} leave a gap, or overlap: {[part.start for part in parts]}")
    return whole


def _told(algorithm: Any) -> tuple[str, dict[str, Any]]:
    path = import_path(type(algorithm))
    if path is None or not dataclasses.is_dataclass(algorithm):
        raise ConfigError(f"{algorithm!r} cannot be told to ranks: it is no dataclass that can be imported")
    fields = [field.name for field in dataclasses.fields(algorithm) if field.init and field.compare]
    return path, msgspec.to_builtins({name: getattr(algorithm, name) for name in fields})


def _error(name: str, text: str) -> Exception:
    if name == NotImplementedError.__name__:
        return NotImplementedError(text)
    error = error_from_name(name, text)
    return error if type(error) is not AsyncFlowError else RuntimeError(str(error))
