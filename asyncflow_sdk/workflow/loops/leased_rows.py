"""Rows of a rollout worker: leased with their prompts, and written to the queue with their responses, in one command
a lease. Rows of a finished lease are written at once, others with the rows finishing in the next 0.1 s."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, LeaseLost, SchemaError
from ...interfaces import Completion, Completions
from ...queue import AsyncLeasedBatch
from ...queue.coroutines import wait_for_event
from ...types import LOSS_MASK, VERSION_SPANS, Batch, Chat, ColumnSpec, Ragged, Sampling, one_version
from ...types.dtypes import carrier
from ...types.spans import FINISH_REASON
from .agent import Agent
from .chat import Encoded, PromptEncoder
from .engine_gateway import Generated, spans_of
from .event_sinks import WorkerLog
from .tokenizer import Ids, Tokenizer, before_stop, token_ids, with_stop_ids

BATCH_S = 0.1  # a response waits this long for others at most, unless its lease is finished (seconds)


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Options of a rollout worker: those of ``EngineProducer``, with a made ``text`` and ``agent``, and two of a stage.

    ``swap``: None: the engine keeps its weights, and the session is no replica. ``only``: the name of the one column
    to give: text if there is a tokenizer, else token ids; each row then has a prompt of its own. Raises ConfigError
    for stop texts without a tokenizer.
    """

    task: str = "rollout"
    prompt: str = "prompt_ids"
    text: Tokenizer | None = None
    chat: Chat | None = None
    prompt_limit: int | None = None
    prefix: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    samplings: Mapping[str, Sampling] = field(default_factory=dict)
    agent: Agent | None = None
    trained: bool = True
    needs_first: bool = False
    swap: str | None = "auto"
    verify: Sequence[str] = ()
    only: str = ""

    def __post_init__(self) -> None:
        mask, others = self.sampling.sampling_mask, dict(self.samplings)
        for name, sampling in others.items():
            others[name] = replace(with_stop_ids(sampling, self.text), sampling_mask=mask)
        object.__setattr__(self, "sampling", with_stop_ids(self.sampling, self.text))
        object.__setattr__(self, "samplings", others)


@dataclass(eq=False)
class PromptLease:
    """The rows of one lease. ``shared``: ranges of rows with the same prompt. ``prompt_ids``: the token ids of each
    row's prompt. ``version``: the version loaded when the lease began. ``requests``: the number of unfinished ones.
    ``tokens``: the number generated so far."""

    batch: AsyncLeasedBatch
    shared: list[range]
    prompt_ids: list[Encoded]
    version: int
    began: float = field(default_factory=time.monotonic)
    requests: int = 0
    tokens: int = 0

    def prompt(self, row: int) -> Ids:
        """Return the token ids of a row's prompt. Raises SchemaError if it could not be encoded."""
        prompt = self.prompt_ids[row]
        if isinstance(prompt, SchemaError):
            raise SchemaError(f"the prompt cannot be encoded: {prompt}")
        return prompt

    def find(self, ids: npt.NDArray[np.int64]) -> set[int]:
        """Return the positions of the rows with these ids."""
        return set(np.flatnonzero(np.isin(self.batch.ids, ids)).tolist())


class PromptReader:
    """Reads the prompts of leased rows: one of each group, or of each row."""

    def __init__(self, options: RolloutOptions) -> None:
        self._column, self._per_row, self._limit = options.prompt, bool(options.only), options.prompt_limit
        self._encoder = None if options.text is None else PromptEncoder(options.text, options.chat)

    def read(self, batch: AsyncLeasedBatch, version: int) -> PromptLease:
        """Encode prompts. Raises SchemaError for invalid token ids, ConfigError without a tokenizer."""
        firsts = np.arange(batch.rows) if self._per_row else np.flatnonzero(np.diff(batch.groups, prepend=-1))
        shared = list(map(range, firsts.tolist(), np.append(firsts[1:], batch.rows).tolist()))
        prompts = self._encode(batch, firsts.tolist())
        rows = [prompt for rows, prompt in zip(shared, prompts, strict=True) for _ in rows]
        return PromptLease(batch, shared, rows, version)

    def _encode(self, batch: Batch, rows: list[int]) -> list[Encoded]:
        if self._column == "prompt_ids" or batch.spec(self._column).kind not in ("text", "json"):
            ids = token_ids(batch, self._column)
            return [ids[row].copy() for row in rows]
        if self._encoder is None:
            text = f"column {self._column!r} is text, and there is no tokenizer to encode it; name its folder:"
            raise ConfigError(f"{text} Generate(..., tokenizer=FOLDER)")
        encoded = self._encoder.encode_rows(batch.take(rows), self._column)
        return [e if isinstance(e, SchemaError) or not self._limit else e[-self._limit :] for e in encoded]


class CompletionBatcher:
    """Finished rows to be written, unless the lock ``held`` is held. For one event loop. ``gives``: the engine's
    further columns."""

    def __init__(self, options: RolloutOptions, gives: Mapping[str, ColumnSpec], log: WorkerLog) -> None:
        self._options, self._gives, self._log = options, gives, log
        self._stop = options.sampling.stop if options.agent is None else ()  # a conversation is kept whole
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
        columns = self._columns(lease, rows, [generated for _, generated in parts])
        try:
            await lease.batch.complete(columns, index=rows)
        except LeaseLost as error:
            self._log.note(f"{len(rows)} responses came too late: {error}")

    def _columns(self, lease: PromptLease, rows: Sequence[int], responses: Sequence[Generated]) -> dict[str, Any]:
        completions = [each.completion for each in responses]
        ids, reasons = _ragged([each.token_ids for each in completions], np.int32), list[str]()
        for each in completions:
            reasons += (each.finish_reason,) if isinstance(each, Completion) else each.finish_reason
        text: dict[str, Any] = {}
        if self._options.text is not None:
            text = {"response": [before_stop(each, self._stop) for each in self._options.text.decode(ids)]}
        if self._options.only:
            return {self._options.only: text.get("response", ids)}
        columns: dict[str, Any] = {
            "response_ids": ids,
            "logprobs": Ragged(_joined([each.logprobs for each in completions], np.float32), ids.offsets),
            VERSION_SPANS: _spans(responses, ids.lengths),
            FINISH_REASON: reasons,
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
        if self._options.prompt != "prompt_ids":
            columns["prompt_ids"] = _ragged([lease.prompt_ids[row] for row in rows], np.int32)
        return {self._options.prefix + name: column for name, column in columns.items()}


def _without(lost: set[int], rows: Sequence[int], generated: Generated) -> Iterable[tuple[Sequence[int], Generated]]:
    """Return ``rows`` and their responses, without the lost ones."""
    if lost.isdisjoint(rows):
        return [(rows, generated)]
    each = zip(rows, generated.completion.each(), strict=True)
    return [([row], generated._replace(completion=completion)) for row, completion in each if row not in lost]


def _ragged(parts: Sequence[Any], dtype: npt.DTypeLike) -> Ragged:
    lengths: list[int] = []
    for part in parts:
        lengths += part.lengths.tolist() if isinstance(part, Ragged) else (len(part),)
    return Ragged.from_lengths(_joined(parts, dtype), np.array(lengths))


def _joined(parts: Sequence[Any], dtype: npt.DTypeLike) -> Any:
    values = [part.values if isinstance(part, Ragged) else part for part in parts]
    return np.concatenate(values).astype(dtype, copy=False)


def _spans(responses: Sequence[Generated], lengths: npt.NDArray[np.int64]) -> Ragged:
    if not any(isinstance(each.completion, Completion) and each.completion.spans for each in responses):
        counts = [len(e.completion.index) if isinstance(e.completion, Completions) else 1 for e in responses]
        return one_version(np.repeat([each.version for each in responses], counts), lengths)
    rows = [spans_of(completion, each.version) for each in responses for completion in each.completion.each()]
    return Ragged.of([np.array(spans, np.int64).reshape(-1, 3) for spans in rows])
