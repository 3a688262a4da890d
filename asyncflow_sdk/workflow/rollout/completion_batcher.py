"""CompletionBatcher: write finished responses to the queue, in one command a lease.

Rows of a finished lease are written at once, others with the rows finishing in the next 0.1 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import LeaseLost
from ...interfaces import Completion, Completions
from ...queue.coroutines import wait_for_event
from ...types import LOSS_MASK, VERSION_SPANS, ColumnSpec, Ragged, one_version
from ...types.dtypes import carrier
from ...types.spans import FINISH_REASON
from ..workers.worker_log import WorkerLog
from .engine_gateway import Generated, spans_of
from .prompt_lease import PromptLease
from .tokenizer import Tokenizer, before_stop

BATCH_S = 0.1
"""A response waits this long for others at most, unless its lease is finished (seconds)."""


class ResponseColumns:
    """Makes the columns of finished rows. ``tokenizer``: for text, which ends before ``stop``.
    ``prefix``: of their names. ``prompt_ids``: with the encoded prompts. ``only``: one column of this
    name, text if there is a tokenizer, else token ids. ``gives``: the engine's further columns."""

    def __init__(
        self, tokenizer: Tokenizer | None, *, prefix: str = "", prompt_ids: bool = False, only: str = "",
        stop: Sequence[str] = (), gives: Mapping[str, ColumnSpec] = {},
    ) -> None:  # fmt: skip
        self._tokenizer, self._prefix, self._prompt_ids, self._only = tokenizer, prefix, prompt_ids, only
        self._stop, self._gives = stop, gives

    def make(self, lease: PromptLease, rows: Sequence[int], responses: Sequence[Generated]) -> dict[str, Any]:
        """Return the columns of ``rows``, the rows of ``responses`` in order."""
        completions = [each.completion for each in responses]
        ids = _ragged([each.token_ids for each in completions], np.int32)
        text: dict[str, Any] = {}
        if self._tokenizer is not None:
            text = {"response": [before_stop(each, self._stop) for each in self._tokenizer.decode(ids)]}
        if self._only:
            return {self._only: text.get("response", ids)}
        columns: dict[str, Any] = {
            "response_ids": ids,
            "logprobs": Ragged(_joined([each.logprobs for each in completions], np.float32), ids.offsets),
            VERSION_SPANS: _spans(responses, ids.lengths),
            FINISH_REASON: _reasons(completions),
        } | text
        masks = [each.mask for each in responses if each.mask is not None]
        if masks:
            columns[LOSS_MASK] = _ragged(masks, np.bool_)
        for name, spec in self._gives.items():
            values = [each.columns[name] for each in completions]
            if spec.kind == "ragged":
                columns[name] = _ragged(values, carrier(spec.dtype))
            else:
                columns[name] = np.concatenate([np.reshape(each, (-1, *spec.shape)) for each in values])
        columns |= {name: [each.columns[name] for each in responses] for name in responses[0].columns}
        if self._prompt_ids:
            columns["prompt_ids"] = _ragged([lease.prompt_ids[row] for row in rows], np.int32)
        return {self._prefix + name: column for name, column in columns.items()}


class CompletionBatcher:
    """Finished rows to be written, unless the lock ``held`` is held. For one event loop."""

    def __init__(self, columns: ResponseColumns, log: WorkerLog) -> None:
        self._columns, self._log = columns, log
        self._finished: dict[int, tuple[PromptLease, list[tuple[Sequence[int], Generated]]]] = {}  # by lease token
        self._added, self._urgent = asyncio.Event(), asyncio.Event()
        self.held = asyncio.Lock()

    def add(self, lease: PromptLease, rows: Sequence[int], generated: Generated) -> None:
        """Add finished rows of a lease."""
        self._finished.setdefault(lease.batch.token, (lease, []))[1].append((rows, generated))
        self._added.set()

    def flush_soon(self) -> None:
        """Wait for no further rows: a lease is finished."""
        self._urgent.set()

    def rows(self) -> dict[PromptLease, set[int]]:
        """Return the unwritten rows of each lease."""
        return {lease: {row for rows, _ in parts for row in rows} for lease, parts in self._finished.values()}

    def discard(self, ended: npt.NDArray[np.int64]) -> None:
        """Drop the rows with these ids: they have ended."""
        for token, (lease, parts) in self._finished.items():
            if lost := lease.find(ended):
                kept = [each for rows, generated in parts for each in _without(lost, rows, generated)]
                self._finished[token] = lease, kept

    def clear(self) -> None:
        """Drop all rows."""
        self._finished.clear()

    async def run(self) -> None:
        """Write rows as they finish, until cancelled."""
        while True:
            await self._added.wait()
            await asyncio.sleep(0)  # other requests that finished in this turn of the loop add theirs first
            if not self._urgent.is_set():
                await wait_for_event(self._urgent, BATCH_S)
            self._added.clear()
            self._urgent.clear()
            await self.flush()

    async def flush(self) -> None:
        """Write all rows added so far."""
        async with self.held:
            for token in list(self._finished):
                if token in self._finished:  # else dropped meanwhile
                    await self._write(*self._finished.pop(token))

    async def _write(self, lease: PromptLease, parts: Sequence[tuple[Sequence[int], Generated]]) -> None:
        rows = [row for part, _ in parts for row in part]
        if not rows:
            return
        columns = self._columns.make(lease, rows, [generated for _, generated in parts])
        try:
            await lease.batch.complete(columns, index=rows)
        except LeaseLost as error:
            self._log.note(f"{len(rows)} responses came too late: {error}")


def _without(lost: set[int], rows: Sequence[int], generated: Generated) -> Iterable[tuple[Sequence[int], Generated]]:
    """Return ``rows`` and their responses, without the lost ones."""
    if lost.isdisjoint(rows):
        return [(rows, generated)]
    each = zip(rows, generated.completion.each(), strict=True)
    return [([row], generated._replace(completion=completion)) for row, completion in each if row not in lost]


def _ragged(parts: Sequence[Any], dtype: npt.DTypeLike) -> Ragged:
    """Join parts of one row or of several rows."""
    lengths: list[int] = []
    for part in parts:
        lengths += part.lengths.tolist() if isinstance(part, Ragged) else (len(part),)
    return Ragged.from_lengths(_joined(parts, dtype), np.array(lengths))


def _joined(parts: Sequence[Any], dtype: npt.DTypeLike) -> Any:
    values = [part.values if isinstance(part, Ragged) else part for part in parts]
    return np.concatenate(values).astype(dtype, copy=False)


def _reasons(completions: Sequence[Completion | Completions]) -> list[str]:
    reasons: list[str] = []
    for each in completions:
        reasons += (each.finish_reason,) if isinstance(each, Completion) else each.finish_reason
    return reasons


def _spans(responses: Sequence[Generated], lengths: npt.NDArray[np.int64]) -> Ragged:
    """Return the version spans of the responses."""
    if not any(isinstance(each.completion, Completion) and each.completion.spans for each in responses):
        counts = [len(e.completion.index) if isinstance(e.completion, Completions) else 1 for e in responses]
        return one_version(np.repeat([each.version for each in responses], counts), lengths)
    rows = [spans_of(completion, each.version) for each in responses for completion in each.completion.each()]
    return Ragged.of([np.array(spans, np.int64).reshape(-1, 3) for spans in rows])
