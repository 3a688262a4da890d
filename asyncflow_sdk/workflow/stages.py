"""What the worker of a stage does: functions, coroutines and engines on the rows of a task, until the stream ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from ..algorithms import GRPO
from ..errors import ConfigError, DeadlineExceeded, Ended, EngineError, EngineGone, LeaseLost, SchemaError
from ..interfaces import LeasedBatch, Request, RolloutEngine, TrainEngine
from ..plugins import import_name
from ..queue import AsyncLeasedBatch, Connection, QueueClient
from ..queue.error_text import error_text
from ..types import Batch, Ragged, Sampling
from ..types import events as ev
from ..types.columns import find_invalid_entry, pack
from ..types.defaults import NEXT_S
from .engines import loading_model, make_engine
from .text import Text, token_ids, with_stop_ids
from .user_code import FunctionFailed, user_error_text
from .work import Generate, Logprobs, is_coroutine

GIVE_UP_AFTER = 8
"""Prompts refused in a row, with none accepted, after which an engine's stage says so and ends."""
FILTERED = "filtered"


def stage(
    queue: QueueClient,
    work: Callable[..., Any] | Logprobs | Generate | str,
    *,
    task: str,
    needs: tuple[str, ...],
    gives: tuple[str, ...],
    batch: int,
    concurrency: int = 8,
    groups: bool = False,
) -> None:
    """Work on the rows of a task until the stream ends; the task is declared. ``groups``: a function gets them, too.

    Raises FunctionFailed for what a function does wrong, EngineError for what an engine does.
    """
    state = _State(queue, task, gives)
    if isinstance(work, Logprobs):
        _each(state, batch, _scoring(state, work, needs))
    elif isinstance(work, Generate):
        asyncio.run(_generated(state, work, needs[0]))
    else:
        function: Callable[..., Any] = import_name(work) if isinstance(work, str) else work
        if is_coroutine(function):
            asyncio.run(_overlapping(state, function, batch, concurrency, groups))
        else:
            _each(state, batch, _calling(function, gives, groups))


class _State:
    """The task, and what is told of it."""

    def __init__(self, queue: QueueClient, task: str, gives: tuple[str, ...]) -> None:
        self.queue, self.task, self.gives = queue, task, gives
        self.connection: Connection = queue.connection
        self.kind = gives[0] if gives else task
        self._cpu_s = time.process_time()

    def late(self, rows: int, error: LeaseLost) -> None:
        """The rows ended, or took too long: they are others' now."""
        self.note(f"{rows} results of task {self.task!r} came too late: {error}")

    def note(self, text: str) -> None:
        name = self.connection.name
        self.connection.report(ev.Note(time_s=time.monotonic(), worker=name, text=text, level="warning"))

    def done(self, began: float, rows: int, tokens: int = 0) -> None:
        cpu_s, self._cpu_s = time.process_time() - self._cpu_s, time.process_time()
        self.connection.report(
            ev.Span(
                time_s=began, worker=self.connection.name, kind=self.kind, seconds=time.monotonic() - began, rows=rows,
                tokens=tokens, cpu_s=cpu_s,
            )
        )  # fmt: skip


# ---- one batch after another


def _each(state: _State, batch: int, work: Callable[[LeasedBatch], dict[str, Any]]) -> None:
    """A request for each batch: what came of one is sent with the request for the next."""
    batches, ended = state.queue.stream(state.task, batch, timeout_s=NEXT_S), False
    while not ended:
        unsaid = 0
        try:
            for rows in batches:
                began, unsaid = time.monotonic(), rows.rows
                columns = work(rows)
                filtered = columns.pop(FILTERED, None) if FILTERED not in state.gives else None
                rows.finish(columns, filtered=filtered)
                state.done(began, rows.rows)
            ended = True
        except LeaseLost as error:
            state.late(unsaid, error)
    state.queue.flush()


def _calling(
    function: Callable[..., Any], gives: tuple[str, ...], groups: bool
) -> Callable[[LeasedBatch], dict[str, Any]]:
    def call(rows: LeasedBatch) -> dict[str, Any]:
        try:
            returned = function(**_arguments(rows, groups))
        except Exception as error:
            raise _raised(function, rows, error) from None
        return _columns(function, returned, rows, gives)

    return call


def _scoring(state: _State, work: Logprobs, needs: tuple[str, ...]) -> Callable[[LeasedBatch], dict[str, Any]]:
    engine: TrainEngine
    with loading_model(state.queue, state.task):
        engine = make_engine("train", work.engine, model=work.model, algorithm=GRPO(), **work.options)

    def score(rows: LeasedBatch) -> dict[str, Any]:
        named = zip(("prompt_ids", "response_ids"), needs, strict=True)
        asked = Batch(rows.ids, rows.groups, {name: rows.columns[column] for name, column in named})
        scores = engine.logprobs(asked)
        lengths = asked.ragged("response_ids").lengths
        if not np.array_equal(scores.lengths, lengths):
            raise EngineError(f"{type(engine).__name__} gave log-probs of other lengths than the responses'")
        return {state.gives[0]: Ragged(scores.values.astype(np.float32), scores.offsets)}

    return score


# ---- several at a time


async def _overlapping(
    state: _State, function: Callable[..., Awaitable[Any]], batch: int, concurrency: int, groups: bool
) -> None:
    async def work(rows: AsyncLeasedBatch) -> None:
        began = time.monotonic()
        try:
            returned = await function(**_arguments(rows, groups))
        except Exception as error:
            raise _raised(function, rows, error) from None
        columns = _columns(function, returned, rows, state.gives)
        filtered = columns.pop(FILTERED, None) if FILTERED not in state.gives else None
        try:
            await rows.complete(columns, filtered=filtered)
        except LeaseLost as error:
            state.late(rows.rows, error)
        state.done(began, rows.rows)

    await _overlap(state, work, batch, batch * concurrency, concurrency)


async def _generated(state: _State, job: Generate, prompt: str) -> None:
    engine: RolloutEngine
    with loading_model(state.queue, state.task):
        engine = make_engine("rollout", job.engine, model=job.model, **job.options)
    try:
        text = Text(job.tokenizer) if job.tokenizer else None
        generating = _Generating(state, engine, with_stop_ids(job.sampling, text), text, prompt)
        most = engine.capabilities.max_rows
        await _overlap(state, generating.work, most, most, most)
    finally:
        await engine.close()


class _Generating:
    """Answers rows by an engine, each completed as it finishes."""

    def __init__(
        self, state: _State, engine: RolloutEngine, sampling: Sampling, text: Text | None, prompt: str
    ) -> None:
        self._state, self._engine, self._sampling, self._text, self._prompt = state, engine, sampling, text, prompt
        self._refused: set[int] = set()  # groups, with none accepted since

    async def work(self, rows: AsyncLeasedBatch) -> None:
        began, tokens = time.monotonic(), 0
        prompts = self._encoded(rows)
        running = {asyncio.create_task(self._answer(rows, i, prompt)): i for i, prompt in enumerate(prompts)}
        try:
            while running:
                finished, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                answers = {running.pop(task): task.result() for task in finished}
                done = {i: ids for i, ids in answers.items() if ids is not None}
                tokens += sum(map(len, done.values()))
                await self._complete(rows, done)
                await self._refuse(rows, sorted(answers.keys() - done.keys()))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        self._state.done(began, rows.rows, tokens)

    def _encoded(self, rows: AsyncLeasedBatch) -> list[Any]:
        if rows.spec(self._prompt).kind != "text":
            return [row.copy() for row in token_ids(rows, self._prompt)]
        if self._text is None:
            raise ConfigError(
                f"stage {self._state.task!r}: column {self._prompt!r} is text, and there is no tokenizer to encode it;"
                " say Generate(..., tokenizer=FOLDER)"
            )
        return list(self._text.encode(rows.texts(self._prompt)))

    async def _answer(self, rows: AsyncLeasedBatch, index: int, prompt: Any) -> Any:
        """The token ids of the response; None where the engine refuses the prompt."""
        seed = self._sampling.seed
        if seed is not None:
            seed = hash((seed, int(rows.ids[index]))) & 0x7FFFFFFF
        try:
            async with contextlib.aclosing(self._engine.generate(Request(prompt, self._sampling, 1, seed))) as each:  # type: ignore[type-var]
                async for completed in each:
                    for completion in completed.each():
                        self._refused.clear()
                        return np.asarray(completion.token_ids, np.int32)
            raise EngineError("the engine ended a request without a response")
        except EngineGone:
            raise
        except EngineError as error:
            self._refused.add(int(rows.groups[index]))
            if len(self._refused) >= GIVE_UP_AFTER:
                raise ConfigError(
                    f"{len(self._refused)} prompts in a row were refused, the last because: {error}"
                ) from error
            self._state.note(f"a prompt of task {self._state.task!r} was refused: {error}")
            return None

    async def _complete(self, rows: AsyncLeasedBatch, done: dict[int, Any]) -> None:
        if not done:
            return
        ids = Ragged.of(list(done.values()))
        column = self._text.decode(ids) if self._text is not None else ids
        try:
            await rows.complete({self._state.gives[0]: column}, index=list(done))
        except LeaseLost as error:
            self._state.late(len(done), error)

    async def _refuse(self, rows: AsyncLeasedBatch, index: list[int]) -> None:
        if index:
            with contextlib.suppress(LeaseLost):
                await rows.give_back(index=index, reason="the engine refused the prompt", blame=True)


async def _overlap(
    state: _State, work: Callable[[AsyncLeasedBatch], Awaitable[None]], count: int, most_rows: int, most: int
) -> None:
    """``work`` on leases of up to ``count`` rows, so many at a time, of so many rows in all."""
    aio = state.queue.aio
    running: dict[asyncio.Task[None], int] = {}
    asking: asyncio.Task[AsyncLeasedBatch] | None = None
    ended = False

    async def one(rows: AsyncLeasedBatch) -> None:
        async with rows:
            await work(rows)

    try:
        while running or not ended:
            room = min(count, most_rows - sum(running.values()))
            if asking is None and not ended and room > 0 and len(running) < most:
                asking = asyncio.create_task(aio.get(state.task, room, timeout_s=NEXT_S))
            waits: list[asyncio.Task[Any]] = [*running, *([asking] if asking is not None else [])]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for finished in [task for task in running if task.done()]:
                del running[finished]
                finished.result()
            if asking is not None and asking.done():
                asked, asking = asking, None
                try:
                    rows = asked.result()
                    running[asyncio.create_task(one(rows))] = rows.rows
                except Ended:
                    ended = True
                except DeadlineExceeded:
                    if not running:
                        raise
        await asyncio.to_thread(state.queue.flush)
    finally:
        left: list[asyncio.Task[Any]] = [*running, *([asking] if asking is not None else [])]
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await state.connection.wire.aclose_loop()


# ---- what a function is given, and what it returns


def _arguments(rows: Batch, groups: bool) -> dict[str, Any]:
    return {**rows, "groups": rows.groups} if groups else dict(rows)


def _raised(function: Callable[..., Any], rows: Batch, error: Exception) -> FunctionFailed:
    ids = f"rows {rows.ids[0]} to {rows.ids[-1]}" if rows.rows > 1 else f"row {rows.ids[0]}"
    what = f"{_name(function)}() raised {error_text(error)} (called with {', '.join(rows)} of {ids})"
    return FunctionFailed(user_error_text(what, error))


def _columns(function: Callable[..., Any], out: Any, rows: Batch, gives: tuple[str, ...]) -> dict[str, Any]:
    """What a user's function returned, checked. Raises FunctionFailed that names function and row."""
    name = _name(function)
    columns = dict(out) if isinstance(out, Mapping) else {gives[0]: out} if gives else {}
    if set(columns) - {FILTERED} != set(gives) - {FILTERED}:
        raise FunctionFailed(f"{name}() returned columns {sorted(columns)}; the stage gives {sorted(gives)}")
    for column, values in columns.items():
        columns[column] = _checked(name, column, values, rows)
    if FILTERED in columns and FILTERED not in gives:
        columns[FILTERED] = np.asarray(columns[FILTERED])
        array = columns[FILTERED]
        if array.dtype != bool or array.ndim != 1:
            raise FunctionFailed(
                f"{name}() returned 'filtered' as {array.dtype} of {array.shape}; it is one bool a row"
            )
    return columns


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _checked(name: str, column: str, values: Any, rows: Batch) -> Any:
    try:
        packed = pack(column, values)
    except SchemaError as error:
        entry = find_invalid_entry(values) if isinstance(values, (list, tuple, np.ndarray)) else None
        if entry is None or entry[0] >= rows.rows:
            raise FunctionFailed(f"{name}() returned no column: {error}") from None
        at, what = entry
        raise FunctionFailed(
            f"{name}() returned for row {rows.ids[at]}, as column {column!r}, {what}. It was given {_seen(rows, at)}"
        ) from None
    if len(packed) != rows.rows:
        raise FunctionFailed(f"{name}() returned {len(packed)} values for {rows.rows} rows")
    array = packed.values
    if column == "reward":
        # One dtype for ever: a function that returns ints for one batch and floats for the next is fine.
        if packed.spec.kind != "fixed" or packed.spec.shape:
            raise FunctionFailed(f"{name}() returned a reward that is {packed.spec}; it must be one number a row")
        array = array.astype(np.float32)
        odd = np.flatnonzero(~np.isfinite(array))
        if len(odd):
            first = int(odd[0])
            raise FunctionFailed(
                f"{name}() returned {array[first]} for row {rows.ids[first]}, given {_seen(rows, first)}"
            )
        return array
    return values


def _seen(rows: Batch, at: int) -> str:
    return repr({key: rows[key][at] for key in rows})
