"""Prompts: read users' data as columns, or record by record, and feed them to the queue on demand.

source = prompt_source("train.jsonl")            # a Batch of all prompts
source = prompt_source(stream_of_prompts)        # a PromptStream: the function returns an iterable of records
"""

from __future__ import annotations

import abc
import csv
import importlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np

from ..errors import ConfigError, DeadlineExceeded, Ended, SchemaError
from ..ledger import commands as cmd
from ..plugins import import_path
from ..queue import QueueClient
from ..types import Batch
from ..types.columns import find_invalid_entry, is_nested
from ..types.defaults import FEED_S, NEXT_S

_PROMPTS = (
    "prompts are texts, chats, records, columns by name, a table, a stream of records, a function that returns one of"
    " these, or the path of a .jsonl, .json, .csv, .tsv or .parquet file"
)
HEAD = 8
"""Records of a stream that are read before a run, to know its columns."""


@runtime_checkable
class Dataset(Protocol):
    """A list of records in another class, such as ``datasets.Dataset``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Prompts = str | Path | Sequence[Any] | Mapping[str, Any] | Dataset | Iterable[Any] | Callable[[], Any]


def load_prompts(prompts: Prompts, column: str = "prompt") -> Batch:
    """Return a batch with one row a prompt. Takes a list of texts or of chats, a list or ``Dataset``
    of records, columns by name, a table (pyarrow, pandas, polars), a function that returns one of
    these, or the path of a .jsonl, .json, .csv, .tsv or .parquet file. Raises ConfigError with file,
    line and reason; also for no data, for records without the prompt column, and for a stream."""
    source = prompt_source(prompts, column)
    if isinstance(source, PromptStream):
        raise ConfigError("prompts are a stream, which is not loaded as a whole: give it to a Workflow, or to feed()")
    return source


def prompt_source(prompts: Prompts, column: str = "prompt") -> Batch | PromptStream:
    """Return all prompts as a batch, or a stream of them: an iterable of records without a length,
    such as ``datasets.IterableDataset``, or a function that returns one. Raises ConfigError."""
    given: Any = prompts
    prompts = _called(given) if callable(given) else given
    if hasattr(prompts, "__iter__") and not hasattr(prompts, "__len__"):
        if prompts is given and iter(prompts) is prompts:
            raise ConfigError(
                "prompts are an iterator, which can be read only once: give the function that makes it (prompts=read,"
                " not prompts=read())"
            )
        return PromptStream(given, column)
    if isinstance(prompts, (str, Path)):
        return _read(Path(prompts), column)
    if hasattr(prompts, "__arrow_c_stream__"):
        prompts = _arrow("pyarrow", "a table of prompts").table(prompts).to_pydict()
    if isinstance(prompts, Mapping):
        splits = [name for name, values in prompts.items() if hasattr(values, "column_names")]
        if splits:
            raise ConfigError(
                f"prompts are a DatasetDict, a dictionary of data sets, {', '.join(map(repr, splits))}: give one of"
                f" them, prompts=data[{splits[0]!r}]"
            )
        return _batch(prompts, column)
    try:
        rows: list[Any] = list(prompts)  # type: ignore[arg-type]  # __getitem__ is enough
    except TypeError:
        raise ConfigError(f"{_PROMPTS}, not {type(prompts).__name__}: {prompts!r:.80}") from None
    return _records(rows, column)


def _called(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except ConfigError:
        raise
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(f"prompts: {name}() raised {type(error).__name__}: {error}") from error


# ---- records to columns


class _Place(NamedTuple):
    """Where records come from, for errors. ``lines``: of each; None: they are counted from 0."""

    source: str = "prompts"
    lines: Sequence[int] | None = None

    def of(self, number: int) -> str:
        """Return the place of one record."""
        if self.lines is None:
            return f"{self.source}: record {number}"
        return f"{self.source}, line {self.lines[number]}"


_ARGUMENT = _Place()


def _records(rows: Sequence[Any], column: str, place: _Place = _ARGUMENT) -> Batch:
    """Return the columns of records, texts or chats."""
    if all(isinstance(row, str) or (is_nested(row) and not isinstance(row, Mapping)) for row in rows):
        return _batch({column: rows}, column, place)
    first = rows[0] if isinstance(rows[0], Mapping) else {}
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{place.of(number)} is {type(row).__name__}: {row!r:.80}. {_PROMPTS}")
        if row.keys() != first.keys():
            odd = ", ".join(sorted(map(str, row.keys() ^ first.keys())))
            raise ConfigError(f"{place.of(number)} differs from the first in its columns: {odd}")
    return _batch({name: [row[name] for row in rows] for name in first}, column, place)


def _batch(columns: Mapping[str, Any], column: str, place: _Place = _ARGUMENT) -> Batch:
    if column not in columns:
        known = ", ".join(columns) or "none"
        raise ConfigError(
            f"{place.source}: the data has no column {column!r}; it has: {known}. Rename a column, or name the column"
            " of the prompts: Rollout(prompt=NAME), `asyncflow serve --column NAME`"
        )
    try:
        batch = Batch.of(columns)
    except SchemaError as error:
        for name, values in columns.items():
            odd = find_invalid_entry(values) if isinstance(values, (list, tuple)) else None
            if odd is not None:
                raise ConfigError(f"{place.of(odd[0])}: column {name!r} is {odd[1]}") from None
        raise ConfigError(f"{place.source}: {error}") from None
    if not batch.rows:
        raise ConfigError(f"{place.source}: the data set is empty: there is nothing to train on")
    return batch


# ---- files


def _read(path: Path, column: str) -> Batch:
    """Read a file by its suffix; JSON lines by default."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            parquet = _arrow("pyarrow.parquet", path)
            with path.open("rb") as file:
                return _batch(parquet.read_table(file).to_pydict(), column, _Place(str(path)))
        if suffix in (".csv", ".tsv"):
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = list(_csv_records(path, csv.reader(file, delimiter="\t" if suffix == ".tsv" else ",")))
        else:
            rows = list(_json_records(path))
    except ConfigError:
        raise
    except Exception as error:  # of the disk, of UTF-8, or of pyarrow, which has many
        raise ConfigError(f"cannot read prompts from {path}: {error}") from None
    return _records([row for _, row in rows], column, _Place(str(path), [line for line, _ in rows]))


def _json_records(path: Path) -> Iterator[tuple[int, Any]]:
    whole = path.read_bytes()
    if path.suffix.lower() == ".json" and whole.lstrip()[:1] == b"[":  # one document
        try:
            yield from enumerate(msgspec.json.decode(whole, type=list[dict[str, Any]]))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: not a list of JSON objects: {error}") from None
        return
    for number, line in enumerate(whole.splitlines(), 1):
        if line.strip():
            try:
                yield number, msgspec.json.decode(line, type=dict[str, Any])
            except (ValueError, RecursionError) as error:  # not JSON, or no UTF-8
                raise ConfigError(f"{path}, line {number}: not a JSON object: {error}") from None


def _csv_records(path: Path, lines: Any) -> Iterator[tuple[int, dict[str, str]]]:
    header: list[str] = next(lines, [])
    for fields in lines:
        if len(fields) != len(header) and fields:
            raise ConfigError(
                f"{path}, line {lines.line_num}: {len(fields)} fields, and the header has {len(header)}"
            )
        if fields:
            yield lines.line_num, dict(zip(header, fields, strict=True))


def _arrow(module: str, what: Any) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{what} is read by pyarrow, which is not installed: pip install 'asyncflow-sdk[data]'"
        ) from None


# ---- order


class PromptStream:
    """Records read one after another, epoch after epoch, of which only a few are held.

    ``of``: the iterable of an epoch, or a function that returns it. A new epoch calls its
    ``set_epoch``, if it has one, so that ``datasets.IterableDataset.shuffle`` gives another order.
    ``head``: the first records. Raises ConfigError for a stream without records of the prompt column.
    """

    def __init__(self, of: Any, column: str) -> None:
        self._of, self._column = of, column
        self.head = _records(list(itertools.islice(self.epoch(0), HEAD)), column)

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield the records of an epoch. Raises ConfigError for an error of the stream's own code."""
        records: Any = _called(self._of) if callable(self._of) else self._of
        try:
            if number and hasattr(records, "set_epoch"):
                records.set_epoch(number)
            yield from records
        except Exception as error:
            raise ConfigError(f"the stream of prompts raised {type(error).__name__}: {error}") from error

    def check_resumable(self) -> None:
        """Raise ConfigError unless another process can make the stream again."""
        if not callable(self._of) or import_path(self._of) is None:
            raise ConfigError(
                "prompts are a stream, which a resumed run reads again up to its position: with checkpoint=, give a"
                " function of a module that returns it"
            )

    def batch(self, records: Sequence[Any], first: int) -> Batch:
        """Return the columns of records. ``first``: the position of the first one, for errors."""
        made = _records(records, self._column, _Place("the stream of prompts", range(first, first + len(records))))
        if set(made) != set(self.head):
            odd = ", ".join(sorted(set(made) ^ set(self.head)))
            raise ConfigError(f"record {first} of the stream of prompts differs from the first in its columns: {odd}")
        return made


class PromptOrder(abc.ABC):
    """The prompts of a run in their order. For one thread."""

    @abc.abstractmethod
    def seek(self, position: int) -> None:
        """Continue after the first ``position`` prompts of the run."""

    @abc.abstractmethod
    def next(self, count: int) -> Batch:
        """Return the next prompts, fewer at the end of the last epoch."""


class ShuffledPrompts(PromptOrder):
    """Prompts in memory, in a new order each epoch."""

    def __init__(self, data: Batch, seed: int, epochs: int | None) -> None:
        self._data, self._seed = data, seed
        self._left = None if epochs is None else epochs * data.rows
        self._most = self._left
        self._order = np.empty(0, np.int64)
        self._epoch = 0

    def seek(self, position: int) -> None:
        """Draw the order of the epoch at the position again."""
        self._order = np.empty(0, np.int64)
        self._left = None if self._most is None else self._most - position
        self._epoch, within = divmod(position, self._data.rows)  # whole epochs need no order
        self._take(within)

    def next(self, count: int) -> Batch:
        """Return a copy of the next prompts."""
        if self._left is not None:
            count = min(count, self._left)
            self._left -= count
        return self._data.take(self._take(count))

    def _take(self, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        while len(self._order) < count:
            shuffled = np.random.default_rng([self._seed, self._epoch]).permutation(self._data.rows)
            self._order = np.concatenate([self._order, shuffled])
            self._epoch += 1
        taken, self._order = self._order[:count], self._order[count:]
        return taken


class StreamedPrompts(PromptOrder):
    """Prompts of a stream, in its order.

    ``seek`` reads the stream again: the state of a ``datasets.IterableDataset`` lacks the records in
    its shuffle buffer.
    """

    def __init__(self, stream: PromptStream, epochs: int | None) -> None:
        self._stream, self._epochs = stream, epochs
        self.seek(0)

    def seek(self, position: int) -> None:
        """Read the stream again up to the position."""
        self._position = 0
        self._records = self._all()
        while self._position < position and self._read(1):
            pass

    def next(self, count: int) -> Batch:
        """Read the next records. Raises ConfigError for a bad one."""
        first = self._position
        records = self._read(count)
        return self._stream.batch(records, first) if records else self._stream.head.take([])

    def _read(self, count: int) -> list[Any]:
        records = list(itertools.islice(self._records, count))
        self._position += len(records)
        return records

    def _all(self) -> Iterator[Any]:
        for number in itertools.count() if self._epochs is None else range(self._epochs):
            empty = True
            for record in self._stream.epoch(number):
                yield record
                empty = False
            if empty:  # else this thread would spin
                raise ConfigError(f"epoch {number} of the stream of prompts has no records")


class Feeder:
    """Puts prompts while the steps lack rows, in a new order each epoch, at most a chunk ahead of
    the queue's room. The next prompt replaces a failed or filtered group.

    ``ends``: the partition that ends then; None: the stream. ``epochs``: end it after this many;
    None: continue while steps want rows. Runs in a thread; ``on_failure`` is called there with its
    error. ``key``: prefix of the keys of its puts. ``begin``: number of prompts put by earlier queues.
    """

    def __init__(
        self,
        queue: QueueClient,
        data: Batch | PromptStream,
        *,
        group_size: int,
        chunk: int,
        seed: int,
        on_failure: Callable[[BaseException], None],
        epochs: int | None = None,
        key: str = "prompts",
        ends: str | None = None,
        begin: int = 0,
    ) -> None:
        self._ends, self._begin = ends, begin
        self._queue, self._group_size, self._chunk = queue, group_size, chunk
        self._prompts: PromptOrder = (
            StreamedPrompts(data, epochs) if isinstance(data, PromptStream) else ShuffledPrompts(data, seed, epochs)
        )
        self._on_failure, self._key = on_failure, key
        self.fed = 0
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def start(self) -> None:
        """Start its thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of its thread."""
        self._thread.join(timeout_s)

    def _resume(self) -> None:
        """Continue after the last put under this key, by the feeder of a process that died."""
        last: cmd.LastPut = self._queue.send(cmd.GetPut(prefix=f"{self._key}-"))
        number = last.key[len(self._key) + 1 :]
        self.fed = int(number) + last.count // self._group_size if number.isdecimal() else self._begin
        self._prompts.seek(self.fed)

    def _run(self) -> None:
        try:
            self._resume()
            while True:
                try:
                    wanted = self._queue.wanted(timeout_s=NEXT_S)
                except DeadlineExceeded:
                    continue  # there are enough rows while training takes this long
                rows = self._prompts.next(min(self._chunk, -(-wanted // self._group_size)))
                if not rows.rows:
                    self._queue.end(partition=self._ends)
                    break
                try:
                    self._queue.put(
                        dict(rows), group_size=self._group_size, key=f"{self._key}-{self.fed}", timeout_s=FEED_S
                    )
                except SchemaError:  # the feeder of a dead process put more or fewer rows here
                    before = self.fed
                    self._resume()
                    if self.fed <= before:
                        raise
                else:
                    self.fed += rows.rows
        except Ended:
            pass
        except Exception as error:
            self._on_failure(error)
