"""Prompts: read users' data as columns, or record by record, and feed them to the queue on demand.

source = prompt_source("train.jsonl")            # a Batch of all prompts
source = prompt_source(stream_of_prompts)        # a PromptStream: the function returns an iterable of records
"""

from __future__ import annotations

import codecs
import contextlib
import copy
import csv
import functools
import importlib
import itertools
import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np

from ..errors import ConfigError, DeadlineExceeded, Ended, SchemaError
from ..ledger import commands as cmd
from ..plugins import import_path
from ..queue import QueueClient
from ..types import Batch, Column, ColumnSpec, Ragged, carrier, check_column_name, pack
from ..types.batch import concat
from ..types.columns import JsonValues, find_invalid_entry, is_nested
from ..types.defaults import FEED_S
from .loops.event_sinks import WorkerLog

_PROMPTS = (
    "prompts are texts, chats, records, columns by name, a table, a stream of records, a function that returns one of"
    " these, or the path of a .jsonl, .json, .csv, .tsv or .parquet file"
)
HEAD = 8
"""Records of a stream that are read before a run, to know its columns."""
MOST_LEFT_OUT = 1000
"""Number of unusable records of a stream in a row to end the run."""
POWERS = {10**digits for digits in range(1, 12)}
DATA = "data_"
"""Prefix of columns of the data with the name of one of the run's own columns."""


@runtime_checkable
class Dataset(Protocol):
    """A list of records in another class, such as ``datasets.Dataset``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


LongPrompts = Literal["error", "drop", "truncate_left"]
"""Treatment of a prompt without room for a response."""


@dataclass(kw_only=True)
class Selection:
    """The columns of a data set for a run.

    ``prompt``: the column of prompts. ``needs``: the columns of tasks; None: all. ``gives``: the names of columns
    given by tasks: the data's column of one of these names is called data_NAME. ``rename``: new names by name in the
    data. ``more``: number of columns to take beside ``needs`` for functions with ``**columns``, as far as a queue can
    hold them. ``names``: the new name of each column found so far, also of the ones left out. ``unfit``: new names of
    columns left out of ``**columns``."""

    prompt: str = "prompt"
    needs: Collection[str] | None = None
    gives: Collection[str] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    more: int = 0
    names: dict[str, str] = field(default_factory=dict)
    unfit: set[str] = field(default_factory=set)

    def of(self, known: Iterable[str], source: str = "prompts") -> dict[str, str]:
        """Return the new names of the columns to take, by their names in the data. Raises ConfigError for data
        without prompts, and for two columns of one name."""
        found: dict[str, str] = {}
        for name in known:
            new = self.rename.get(name, name)
            found[name] = DATA + new if new in self.gives else new
        for name, new in found.items():
            if [*found.values()].count(new) > 1 and name != new:
                raise ConfigError(
                    f"{source}: column {name!r} would be named {new!r}, as another one is: give it a name by rename="
                )
        if self.prompt not in found.values():
            raise ConfigError(
                f"{source}: the data has no column {self.prompt!r}; it has: {', '.join(str(self.rename.get(n, n)) for n in found) or 'none'}. Rename"
                " a column, or name the column of the prompts: Rollout(prompt=NAME), `asyncflow serve --column NAME`"
            )
        self.names = self.names | found
        further = [new for new in found.values() if self.more and new not in (self.needs or ())]
        fit = [new for new in further if new not in self.unfit and _is_name(new)][: self.more]
        self.unfit = self.unfit | {*further} - {*fit}
        return {n: new for n, new in found.items() if self.needs is None or new in self.needs or new in fit}

    def go_without(self, new: str) -> bool:
        """Leave out a column, unless a task needs it by name: return False then."""
        if not self.more or new in (self.needs or ()):
            return False
        self.unfit = self.unfit | {new}
        return True

    @property
    def changes(self) -> str:
        """Columns left out and renamed, for people; "" for none."""
        kept = {*self.names.values()} - self.unfit if self.more else self.needs
        left = [str(name) for name, new in self.names.items() if kept is not None and new not in kept]
        text = f"no task needs {', '.join(left)}"
        if self.more:
            text = f"**columns goes without {', '.join(left)}: a queue has no such name, type or room, or a record lacks them"
        new = [f"{name} is named {new}" for name, new in self.names.items() if name != new and str(name) not in left]
        return "; ".join([*([text] if left else []), *new])


def _is_name(name: Any) -> bool:
    try:
        check_column_name(name)
    except SchemaError:
        return False
    return True


Prompts = str | Path | Sequence[Any] | Mapping[str, Any] | Dataset | Iterable[Any] | Callable[[], Any]


def load_prompts(prompts: Prompts, column: str = "prompt") -> Batch:
    """Return a batch with one row a prompt. Takes a list of texts or of chats, a list or ``Dataset`` of records,
    columns by name, a table (pyarrow, pandas, polars), a function that returns one of these, or the path of a .jsonl,
    .json, .csv, .tsv or .parquet file. Raises ConfigError with file, line and reason; also for no data, for records
    without the prompt column, and for a stream."""
    return _loaded(prompts, Selection(prompt=column))


def _loaded(prompts: Prompts, select: Selection) -> Batch:
    source = prompt_source(prompts, select)
    if isinstance(source, PromptStream):
        raise ConfigError("prompts are a stream, which is not loaded as a whole: give it to a Workflow, or to feed()")
    return source


def select_like(prompts: Prompts, select: Selection, data: Batch) -> Batch:
    """Return the columns of a selection of held-out data, with the types of ``data``. Raises ConfigError for a value
    of another type."""
    found = _loaded(prompts, copy.copy(select))
    columns = dict(found.columns)
    for name, column in columns.items():
        spec = data.spec(name) if name in data else column.spec
        if spec != column.spec:
            values, rows = found[name], list[Column]()
            for number, value in enumerate(values if isinstance(values, list) else values.tolist()):
                try:
                    rows.append(cast(name, value, spec, native=name == select.prompt))
                except SchemaError as error:
                    raise ConfigError(
                        f"held-out record {number} differs from the data of training: {error}"
                    ) from None
            columns[name] = concat(rows)
    return Batch(found.ids, found.groups, columns)


def prompt_source(prompts: Prompts, select: Selection) -> Batch | PromptStream:
    """Return all prompts as a batch, or a stream of them: an iterable of records without a length, such as
    ``datasets.IterableDataset``, or a function that returns one. Raises ConfigError."""
    given: Any = prompts
    prompts = _called(given) if callable(given) else given
    if hasattr(prompts, "__iter__") and not hasattr(prompts, "__len__"):
        if prompts is given and iter(prompts) is prompts:
            raise ConfigError(
                "prompts are an iterator, which can be read only once: give the function that makes it (prompts=read,"
                " not prompts=read())"
            )
        return PromptStream(given, select)
    if isinstance(prompts, (str, Path)):
        return _read(Path(prompts), select)
    if hasattr(prompts, "select_columns") and not isinstance(prompts, Mapping):  # a datasets.Dataset, which decodes
        table: Any = prompts
        prompts = table.select_columns([*select.of(table.column_names)])[:]
    elif hasattr(prompts, "__arrow_c_stream__"):
        return _table(_arrow("pyarrow", "a table of prompts").table(prompts), select)
    if isinstance(prompts, Mapping):
        splits = [name for name, values in prompts.items() if hasattr(values, "column_names")]
        if splits:
            raise ConfigError(
                f"prompts are a DatasetDict, a dictionary of data sets, {', '.join(map(repr, splits))}: give one of"
                f" them, prompts=data[{splits[0]!r}]"
            )
        return _batch(prompts, select)
    try:
        rows: list[Any] = list(prompts)  # type: ignore[arg-type]  # __getitem__ is enough
    except TypeError:
        raise ConfigError(f"{_PROMPTS}, not {type(prompts).__name__}: {prompts!r:.80}") from None
    return _records(rows, select)


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


def _records(rows: Sequence[Any], select: Selection, place: _Place = _ARGUMENT) -> Batch:
    """Return the columns of records, texts or chats."""
    if all(isinstance(row, str) or (is_nested(row) and not isinstance(row, Mapping)) for row in rows):
        return _batch({select.prompt: rows}, select, place)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{place.of(number)} is {type(row).__name__}: {row!r:.80}. {_PROMPTS}")
    known = rows[0].keys() if select.needs is None else dict.fromkeys(name for row in rows for name in row)
    names = select.of(known, place.source)
    for number, row in enumerate(rows):
        odd = row.keys() ^ known if select.needs is None else names.keys() - row.keys()
        if odd := {name for name in odd if not select.go_without(names.get(name, name))}:
            odd_names = ", ".join(sorted(map(str, odd)))
            raise ConfigError(f"{place.of(number)} differs from the first in its columns: {odd_names}")
    names = select.of(known, place.source)
    return _batch({name: [row[name] for row in rows] for name in known if name in names}, select, place)


def _batch(columns: Mapping[str, Any], select: Selection, place: _Place = _ARGUMENT) -> Batch:
    packed: dict[str, Column] = {}
    for name, new in select.of(columns, place.source).items():
        values, native = columns[name], new == select.prompt
        try:
            packed[new] = _packed(new, values, native=native)
        except SchemaError as error:
            if select.go_without(new):
                continue
            for number, value in enumerate(values if isinstance(values, (list, tuple)) else ()):
                if fault := _fault(new, value, values[0], native=native):
                    raise ConfigError(f"{place.of(number)}: {fault}") from None
            raise ConfigError(f"{place.source}: {error}") from None
    sizes = sorted({len(column) for column in packed.values()})
    if len(sizes) > 1:
        raise ConfigError(f"{place.source}: columns have different numbers of rows: {sizes}")
    if not sizes[0]:
        raise ConfigError(f"{place.source}: the data set is empty: there is nothing to train on")
    ids = np.arange(sizes[0])
    return Batch(ids, ids, packed)


def _packed(name: str, values: Any, *, native: bool) -> Column:
    """Return a column, of JSON if it is not ``native`` and no other kind of column can hold its values."""
    try:
        return pack(name, values)
    except SchemaError:
        if native or not isinstance(values, (list, tuple, np.ndarray)):
            raise
        return pack(name, _json_values(values))


def _json_values(values: Iterable[Any]) -> JsonValues:
    """Return values as JSON has them: dates and decimals as text, bytes as base64, arrays as lists. Raises
    SchemaError."""
    try:
        return JsonValues(msgspec.to_builtins([*values], enc_hook=_json_value, str_keys=True))
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"it has no form in JSON: {error}") from None


def _json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    for convert in ("tolist", "isoformat"):  # of numpy, torch and pandas
        if hasattr(value, convert):
            return getattr(value, convert)()
    raise TypeError(f"JSON has no {type(value).__name__}")


def _fault(name: str, value: Any, first: Any, *, native: bool) -> str:
    """Return the reason why a column cannot hold a value, "" if it can. ``first``: the column's first value.
    ``native``: True if the column may not become JSON."""
    try:
        pack(name, [value] if native else _json_values([value]))
    except SchemaError as error:
        odd = find_invalid_entry([value])
        return str(error) if odd is None else f"column {name!r} is {odd[1]}"
    if native and isinstance(value, str) != isinstance(first, str):
        return f"column {name!r} is {type(value).__name__}, and in the first record {type(first).__name__}"
    return ""


def _table(table: Any, select: Selection, place: _Place = _ARGUMENT) -> Batch:
    """Return the columns of a table of pyarrow."""
    return _batch(table.select([*select.of(table.column_names, place.source)]).to_pydict(), select, place)


# ---- files


def _read(path: Path, select: Selection) -> Batch:
    """Read a file by its suffix; JSON lines by default."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            parquet = _arrow("pyarrow.parquet", path)
            with path.open("rb") as file:
                return _table(parquet.read_table(file), select, _Place(str(path)))
        if suffix in (".csv", ".tsv"):
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = list(_csv_records(path, csv.reader(file, delimiter="\t" if suffix == ".tsv" else ",")))
        else:
            rows = list(_json_records(path))
    except ConfigError:
        raise
    except Exception as error:  # of the disk, of UTF-8, or of pyarrow, which has many
        raise ConfigError(f"cannot read prompts from {path}: {error}") from None
    return _records([row for _, row in rows], select, _Place(str(path), [line for line, _ in rows]))


def _json_records(path: Path) -> Iterator[tuple[int, Any]]:
    whole = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if path.suffix.lower() == ".json" and whole.lstrip()[:1] == b"[":  # one document
        try:
            yield from enumerate(_decoded(whole, list[dict[str, Any]]))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not a list of JSON objects: {error}") from None
        return
    for number, line in enumerate(whole.splitlines(), 1):
        if line.strip():
            try:
                yield number, _decoded(line, dict[str, Any])
            except (ValueError, RecursionError) as error:  # not JSON, or no UTF-8
                raise ConfigError(f"{path}, line {number}: not a JSON object: {error}") from None


def _decoded(text: bytes, kind: Any) -> Any:
    """Return a value of JSON, in which Python's json writes NaN and Infinity, too."""
    try:
        return msgspec.json.decode(text, type=kind)
    except ValueError:
        if b"NaN" not in text and b"Infinity" not in text:
            raise
    return msgspec.convert(json.loads(text), kind)


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

    ``of``: the iterable of an epoch, or a function that returns it. A new epoch calls its ``set_epoch``, if it has
    one, so that ``datasets.IterableDataset.shuffle`` gives another order. ``head``: the first records, with the
    columns and types of all. Raises ConfigError for a stream without records of the prompt column."""

    def __init__(self, of: Any, select: Selection) -> None:
        self._of, self._prompt, self._number = of, select.prompt, 0
        self.head = _records(list(itertools.islice(self.epoch(0), HEAD)), select)
        self._names = {name: new for name, new in select.names.items() if new in self.head}
        self._limits: list[tuple[Callable[[Batch], int], int]] = []
        self._cut = 0

    def limit(self, length: Callable[[Batch], int], limit: int) -> None:
        """Leave out records with an empty prompt, and those with a longer one than the limit. ``length``: returns the
        tokens of a row's prompt."""
        self._limits.append((length, limit))

    def cut(self, limit: int) -> None:
        """Cut off the beginnings of token ids longer than the limit."""
        self._cut = min(limit, self._cut or limit)

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield the records of an epoch. Raises ConfigError for an error of the stream's own code."""
        records: Any = _called(self._of) if callable(self._of) else self._of
        try:
            if (number or self._number) and hasattr(records, "set_epoch"):  # the first epoch is as it was given
                records.set_epoch(number)
            self._number = number
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

    def row(self, record: Any) -> Batch:
        """Return a record with the types of ``head``. Raises SchemaError for a lacking column, and for a value of
        another type."""
        values = record if isinstance(record, Mapping) else {self._prompt: record}
        for name in self._names.keys() - values.keys():
            raise SchemaError(f"it has no column {name!r}")
        columns = {
            new: cast(new, values[name], self.head.spec(new), native=new == self._prompt)
            for name, new in self._names.items()
        }
        row = Batch(np.zeros(1, np.int64), np.zeros(1, np.int64), columns)
        for length, limit in self._limits:
            if not 0 < (tokens := length(row)) <= limit:
                raise SchemaError(f"its prompt has {tokens} tokens, and may have 1 to {limit}")
        return cut_prompts(row, self._prompt, self._cut) if self._cut else row


def cast(name: str, value: Any, spec: ColumnSpec, *, native: bool) -> Column:
    """Return a value as a column of one row. Raises SchemaError if it is none of this type without a loss.
    ``native``: True for prompts, for which empty lists and values of JSON are errors."""
    if spec.kind == "json" and not native:
        return pack(name, _json_values([value]))
    if spec.kind == "text" and type(value) in (int, float) and not native:
        value = str(value)
    if spec.kind == "ragged" and isinstance(value, (list, tuple)) and not value and not native:
        value = np.empty((0, *spec.shape), carrier(spec.dtype))
    if fault := _fault(name, value, value, native=True):
        raise SchemaError(fault)
    column = pack(name, [value])
    if column.spec == spec:
        return column
    if (column.spec.kind, column.spec.shape) == (spec.kind, spec.shape) and spec.kind != "text":
        with np.errstate(invalid="ignore"):
            same = column.values.astype(carrier(spec.dtype))
        if same.tolist() == column.values.tolist():
            return Column(spec, same, column.offsets)
    raise SchemaError(f"column {name!r} is {spec}, and here {column.spec}: {value!r:.80}")


def cut_prompts(rows: Batch, column: str, limit: int) -> Batch:
    """Return rows without the beginnings of token ids longer than the limit."""
    cut = pack(column, Ragged.of([ids[-limit:] for ids in rows.ragged(column)]))
    return Batch(rows.ids, rows.groups, {**rows.columns, column: cut})


class ShuffledPrompts:
    """Prompts in memory, in a new order each epoch; ``epochs``: None for any number. For one thread. ``position``:
    the number of prompts passed so far. With epochs of 4 prompts, ``seek(6)`` and ``next(3)`` return the last two of
    the second epoch's order and the first of the third's."""

    position = left_out = 0

    def __init__(self, data: Batch, seed: int, epochs: int | None) -> None:
        self._data, self._seed = data, seed
        self._end = None if epochs is None else epochs * data.rows
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.random.default_rng([self._seed, epoch]).permutation(self._data.rows)

    def seek(self, position: int) -> None:
        """Continue after the first ``position`` prompts of the run."""
        self.position = position

    def next(self, count: int) -> Batch:
        """Return a copy of the next prompts, fewer at the end of the last epoch."""
        end = self.position + count if self._end is None else min(self.position + count, self._end)
        epochs, rows = np.divmod(np.arange(self.position, end), self._data.rows)
        self.position += len(rows)
        taken = [self._order(epoch)[rows[epochs == epoch]] for epoch in np.unique(epochs).tolist()]
        return self._data.take(np.concatenate([np.empty(0, np.int64), *taken]))


class StreamedPrompts:
    """Prompts of a stream, in its order, as ``ShuffledPrompts``. An unusable record is left out: ``note`` is called
    with its number and the reason, for the first three, then for the tenth, the hundredth and so on. ``left_out``:
    the number of unusable records passed so far."""

    position = left_out = 0

    def __init__(self, stream: PromptStream, epochs: int | None, note: Callable[[str], None]) -> None:
        self._stream, self._epochs, self._note = stream, epochs, note
        self._in_a_row = 0
        self._records = self._all()

    def seek(self, position: int) -> None:
        """Read on to the position, or to it from the beginning: the state of a ``datasets.IterableDataset`` lacks the
        records in its shuffle buffer."""
        if position < self.position:
            self._records, self.position, self.left_out = self._all(), 0, 0
        for record in itertools.islice(self._records, position - self.position):
            self._row(record)

    def next(self, count: int) -> Batch:
        """Read the next records. Raises ConfigError after many unusable ones in a row."""
        rows: list[Batch] = []
        for record in self._records:
            row = self._row(record)
            if isinstance(row, Batch):
                rows.append(row)
                self._in_a_row = 0
            else:
                self._leave_out(row)
            if len(rows) == count:
                break
        if not rows:
            return self._stream.head.take([])
        ids = np.arange(len(rows))
        return Batch(ids, ids, {name: concat([row.columns[name] for row in rows]) for name in rows[0]})

    def _row(self, record: Any) -> Batch | SchemaError:
        self.position += 1
        try:
            return self._stream.row(record)
        except SchemaError as error:
            self.left_out += 1
            return error

    def _leave_out(self, reason: SchemaError) -> None:
        self._in_a_row += 1
        text = f"record {self.position - 1} of the stream of prompts is left out: {reason}"
        if self._in_a_row == MOST_LEFT_OUT:
            raise ConfigError(f"{text}. So were the {MOST_LEFT_OUT - 1} before it")
        if self.left_out <= 3 or self.left_out in POWERS:
            self._note(f"{text} ({self.left_out} so far)")

    def _all(self) -> Iterator[Any]:
        for number in itertools.count() if self._epochs is None else range(self._epochs):
            empty = True
            for record in self._stream.epoch(number):
                yield record
                empty = False
            if empty:  # else this thread would spin
                raise ConfigError(f"epoch {number} of the stream of prompts has no records")


class Feeder:
    """Puts prompts while the steps lack rows, in a new order each epoch, at most a chunk ahead of the queue's room.
    The next prompt replaces a failed or filtered group; a group whose payload was lost with its host is put again, so
    that it ends only when no row of a step can be lost.

    ``ends``: the partition that ends then; None: the stream. ``epochs``: end it after this many; None: continue while
    steps want rows. Runs in a thread; ``on_failure`` is called there with its error. ``key``: prefix of the keys of
    its puts. ``begin``: number of prompts put by earlier queues."""

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
        self._prompts = (
            StreamedPrompts(data, epochs, lambda text: WorkerLog(queue.connection).note(text))
            if isinstance(data, PromptStream)
            else ShuffledPrompts(data, seed, epochs)
        )
        self._on_failure, self._prefix = on_failure, f"{key}-"
        self._next: tuple[int, Batch] | None = None  # position and prompts, read and not put yet
        self.fed = 0
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def start(self) -> None:
        """Start its thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of its thread."""
        self._thread.join(timeout_s)

    @property
    def left_out(self) -> int:
        """The number of unusable prompts so far, with those of feeders before it."""
        return self._prompts.left_out

    def _resume(self) -> bool:
        """Continue after the last put under this key, by the feeder of a process that died. Return False without
        one."""
        last: cmd.LastPut = self._queue.send(cmd.GetPut(prefix=self._prefix))
        number = last.key[len(self._prefix) :]
        if not number.isdecimal():
            self._prompts.seek(self._begin)
            self.fed = self._begin
            return False
        self._prompts.seek(int(number))
        self.fed = int(number) + self._prompts.next(last.count // self._group_size).rows
        return True

    def _run(self) -> None:
        more = True
        try:
            self._resume()
            while True:
                try:
                    wanted = self._queue.send(cmd.AwaitRowsWanted(timeout_s=FEED_S, prefix=self._prefix, more=more))
                except DeadlineExceeded:
                    continue  # there are enough rows while training takes this long
                if not (wanted.lost or more):
                    self._queue.end(partition=self._ends)
                    return
                with contextlib.suppress(Ended):  # the steps are full now, and a loss may open them again
                    if wanted.lost:
                        self._put_again(wanted.lost)
                    else:
                        more = self._put_next(-(-wanted.count // self._group_size))
        except Ended:
            pass
        except Exception as error:
            self._on_failure(error)

    def _put_next(self, count: int) -> bool:
        """Put the next prompts, or those refused last time. Return False if there are none."""
        if self._next is None:
            self._next = self._prompts.position, self._prompts.next(min(self._chunk, count))
        position, rows = self._next
        if not rows.rows:
            return False
        try:
            self._put(rows, position)
        except SchemaError:  # the feeder of a dead process put more or fewer rows here
            self._next = None
            if not self._resume() or self._prompts.position <= position:
                raise
        else:
            self._next = None
            self.fed += rows.rows
        return True

    def _put_again(self, lost: dict[str, int]) -> None:
        """Repeat puts, of which the queue adds the lost groups, and go back. ``lost``: numbers of prompts, by key."""
        prompts, back = self._prompts, self._prompts.position
        try:
            for position, count in sorted((int(key[len(self._prefix) :]), count) for key, count in lost.items()):
                prompts.seek(position)
                self._put(prompts.next(count), position)
        except SchemaError as error:
            raise ConfigError(f"prompts whose payload was lost are not read as before: {error}") from error
        finally:
            prompts.seek(back)

    def _put(self, rows: Batch, position: int) -> None:
        self._queue.put(dict(rows), group_size=self._group_size, key=f"{self._prefix}{position}", timeout_s=FEED_S)
