"""Prompts: load users' data as columns, and feed them to the queue on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from ..errors import ConfigError, DeadlineExceeded, Ended, SchemaError
from ..ledger import commands as cmd
from ..queue import QueueClient
from ..types import Batch
from ..types.columns import CHAT, is_chat
from ..types.defaults import FEED_S, NEXT_S

_PROMPTS = "prompts are texts, records, columns by name, or the path of a .jsonl file"
_OTHER_FILES = {
    ".csv": ("CSV", "list(csv.DictReader(open(FILE)))"),
    ".tsv": ("CSV with tabs", 'list(csv.DictReader(open(FILE), delimiter="\\t"))'),
    ".json": ("one JSON document", "json.load(open(FILE))"),
    ".parquet": ("Parquet", 'pandas.read_parquet(FILE).to_dict("records")'),
}
"""Other formats by suffix: their name, and an expression to read their records."""


@runtime_checkable
class Dataset(Protocol):
    """A list of records in another class, such as ``datasets.Dataset``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Prompts = str | Path | Sequence[str] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | Dataset


def load_prompts(prompts: Prompts, column: str = "prompt") -> Batch:
    """Return a batch with one row a prompt. Takes a list of texts, a list or ``Dataset`` of
    records, columns by name, or the path of a .jsonl file of records. Raises ConfigError for no
    data and for records without the prompt column."""
    if isinstance(prompts, (str, Path)):
        prompts = _read_jsonl(Path(prompts))
    if not isinstance(prompts, Mapping):
        try:
            rows: list[Any] = list(prompts)  # type: ignore[arg-type]  # __getitem__ is enough
        except TypeError:
            raise ConfigError(f"{_PROMPTS}, not {type(prompts).__name__}: {prompts!r:.80}") from None
        if all(isinstance(row, str) for row in rows):
            prompts = {column: rows}
        else:
            prompts = _columns(rows)
    if column not in prompts:
        raise ConfigError(f"the data has no column {column!r}; it has: {', '.join(prompts) or 'none'}")
    try:
        batch = Batch.of(prompts)
    except SchemaError as error:
        raise ConfigError(f"prompts: {error}") from None
    if not batch.rows:
        raise ConfigError("the data set is empty: there is nothing to train on")
    return batch


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    records = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read prompts from {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(msgspec.json.decode(line, type=dict[str, Any]))
        except ValueError as error:  # not JSON, or no UTF-8
            other = _OTHER_FILES.get(path.suffix.lower())
            if other is not None:
                raise ConfigError(
                    f"prompts from {path}: a file of prompts has a JSON object a line (.jsonl), and this one is"
                    f" {other[0]}; read it, and give its records: prompts={other[1]}"
                ) from None
            raise ConfigError(f"{path}, line {number}: not a JSON object: {error}") from None
    return records


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    for number, row in enumerate(rows):
        if is_chat(row):
            raise ConfigError(f"prompts: entry {number} is {CHAT}")
        if not isinstance(row, Mapping):
            raise ConfigError(f"{_PROMPTS}; entry {number} is {type(row).__name__}: {row!r:.80}")
    names = list(rows[0]) if rows else []
    for number, row in enumerate(rows):
        if set(row) != set(names):
            odd = ", ".join(sorted(set(row) ^ set(names)))
            raise ConfigError(f"record {number} differs from the first in its columns: {odd}")
    return {name: [row[name] for row in rows] for name in names}


class Feeder:
    """Puts prompts while the steps lack rows, in a new order each epoch, at most a chunk ahead of
    the queue's room. The next prompt replaces a failed or filtered group.

    ``epochs``: end the stream after this many; None: continue while steps want rows. Runs in a
    thread; ``on_failure`` is called there with its error. ``key``: prefix of the keys of its puts.
    """

    def __init__(
        self,
        queue: QueueClient,
        data: Batch,
        *,
        group_size: int,
        chunk: int,
        seed: int,
        on_failure: Callable[[BaseException], None],
        epochs: int | None = None,
        key: str = "prompts",
    ) -> None:
        self._queue, self._data, self._group_size, self._chunk = queue, data, group_size, chunk
        self._seed, self._on_failure = seed, on_failure
        self._left = None if epochs is None else epochs * data.rows
        self._key = key
        self._order = np.empty(0, np.int64)
        self._epoch = 0
        self.fed = 0
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def start(self) -> None:
        """Start its thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of its thread."""
        self._thread.join(timeout_s)

    def next(self, groups: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the positions of the next prompts in the data."""
        while len(self._order) < groups:
            shuffled = np.random.default_rng([self._seed, self._epoch]).permutation(self._data.rows)
            self._order = np.concatenate([self._order, shuffled])
            self._epoch += 1
        taken, self._order = self._order[:groups], self._order[groups:]
        return taken

    def _resume(self) -> None:
        """Continue after the last put under this key, by the feeder of a process that died."""
        last: cmd.LastPut = self._queue.send(cmd.GetPut(prefix=f"{self._key}-"))
        number = last.key[len(self._key) + 1 :]
        if number.isdigit():
            self._order = np.empty(0, np.int64)
            self.fed = int(number) + last.count // self._group_size
            self._epoch, within = divmod(self.fed, self._data.rows)  # whole epochs need no order
            self.next(within)

    def _run(self) -> None:
        try:
            self._resume()
            while True:
                try:
                    wanted = self._queue.wanted(timeout_s=NEXT_S)
                except DeadlineExceeded:
                    continue  # there are enough rows while training takes this long
                groups = min(self._chunk, -(-wanted // self._group_size))
                if self._left is not None:
                    groups = min(groups, self._left - self.fed)
                if not groups:
                    self._queue.end()
                    break
                rows = self._data.take(self.next(groups))
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
                    self.fed += groups
        except Ended:
            pass
        except Exception as error:
            self._on_failure(error)
