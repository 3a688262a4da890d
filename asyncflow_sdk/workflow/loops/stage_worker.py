"""Stage worker: functions, coroutines and engines with fixed weights on the rows of a task."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...algorithms import GRPO
from ...errors import DeadlineExceeded, Ended, EngineError, LeaseLost, MemoryFull, SchemaError
from ...interfaces import SAMPLING_MASK, LeasedBatch, RolloutEngine, TrainEngine
from ...plugins import import_name
from ...queue import AsyncLeasedBatch, QueueClient
from ...queue.protocol import error_text
from ...types import Batch, Ragged
from ...types.columns import find_invalid_entry, pack
from ...types.defaults import CONCURRENCY, FEED_S
from ..processes.ranks import RankCommunicator
from ..rewards import HttpReward, Rewards
from ..work import Generate, Logprobs, as_trl, full_name, is_coroutine, is_of_trl, needs_of, takes_all
from . import user_code
from .engines import check_mask, frozen_options, loading_model, make_engine
from .event_sinks import WorkerLog
from .leased_rows import RolloutOptions
from .rollout_worker import RolloutWorker
from .tokenizer import Tokenizer
from .user_code import CallLimit, MainThread, ServiceAway, user_error_text

FILTERED = "filtered"  # the column by which a function filters rows; a bool a row


def run_stage(
    queue: QueueClient,
    work: Callable[..., Any] | Logprobs | Generate | Rewards | str,
    *,
    task: str,
    needs: tuple[str, ...],
    gives: tuple[str, ...],
    batch: int,
    concurrency: int = CONCURRENCY,
    groups: bool = False,
    ranks: RankCommunicator | None = None,
    limit: CallLimit | None = None,
) -> None:
    """Work on the rows of a declared task until the stream ends. ``groups``: True to pass group ids, too.
    ``ranks``: the ranks of ``Logprobs`` in several processes; each works on its shard of every lease. ``limit``: the
    limit of a call; None: there is none.

    A failed call of a function costs its rows an attempt. Raises EngineError for a failed engine.
    """
    stage = _Stage(queue, task, gives, groups)
    for service in work.functions if isinstance(work, Rewards) else [work]:
        if isinstance(service, HttpReward):
            service.watch.report_to(stage.note)
    if isinstance(work, Logprobs):
        with _scoring(stage, work, needs) as score:
            stage.run(batch, score, ranks)
    elif isinstance(work, Generate):
        asyncio.run(_responding(stage, work, needs[0]).run())
    else:
        call: _UserFunction | _RewardFunctions
        function: Any = import_name(work) if isinstance(work, str) else work
        if isinstance(work, Rewards):
            call = _RewardFunctions(work, limit)
            awaits, start = work.awaited, call.main.run
        else:
            call = _UserFunction(function, gives, limit, groups)
            awaits, start = is_coroutine(function), asyncio.run
        if awaits:
            start(stage.run_async(batch, concurrency, call, limit))
        else:
            stage.run(batch, call.run)


@dataclass
class _Outcome:
    """The columns of a call. ``failed``: the reasons of rows without valid values, by position. ``reason``: why
    the whole call failed."""

    columns: dict[str, Any] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    reason: str = ""

    def divided(
        self, rows: Batch, whole_groups: bool, filters: bool
    ) -> tuple[list[tuple[list[int], str]], dict[str, Any]]:
        """Return the rows to give back, by position, with their reasons, and the arguments to complete the others.
        ``whole_groups``: True to give back a row with its group. ``filters``: True if the column "filtered" drops
        rows."""
        units = rows.groups if whole_groups else np.arange(rows.rows)
        reasons = {int(units[row]): reason for row, reason in self.failed.items()}
        losses = [(np.flatnonzero(units == unit).tolist(), reason) for unit, reason in reasons.items()]
        if self.reason:
            losses = [(list(range(rows.rows)), self.reason)]
        columns, index = self.columns, None
        if lost := [row for given, _ in losses for row in given]:
            index = np.setdiff1d(np.arange(rows.rows), lost)
            columns = dict(Batch.of(columns).take(index)) if len(index) else {}
        filtered = columns.pop(FILTERED, None) if filters else None
        return losses, {"columns": columns, "index": index, "filtered": filtered}


class _Stage:
    def __init__(self, queue: QueueClient, task: str, gives: tuple[str, ...], whole_groups: bool) -> None:
        self.queue, self.task, self.gives, self._whole_groups = queue, task, gives, whole_groups
        self.kind = gives[0] if gives else task
        self._filters = FILTERED not in gives
        self._log = WorkerLog(queue.connection)
        self.note = self._log.note
        self._cpu_s = time.process_time()

    def run(self, count: int, work: Callable[[LeasedBatch], _Outcome], ranks: RankCommunicator | None = None) -> None:
        """Call ``work`` for each lease. Its columns are sent with the request for the next. Each of several ranks
        calls it equally often: for every lease, with or without rows, since ``work`` may be a collective. Raises
        LeaseLost if another process became this rank."""
        # Hazard: a step may need a row that is left over; it must not wait for one row a rank.
        shared = ranks.shares | {"at_least": 1} if ranks is not None and ranks.world_size > 1 else {}
        batches, ended = self.queue.stream(self.task, count, timeout_s=FEED_S, **shared), False
        while not ended:
            unsent = 0
            try:
                for rows in batches:
                    began, unsent = time.monotonic(), rows.rows
                    losses, completion = work(rows).divided(rows, self._whole_groups, self._filters)
                    for index, reason in losses:
                        rows.give_back(index=index, reason=reason, blame=True)
                    if rows.left or not unsent:
                        rows.finish(**completion)
                    self._report_work(began, rows.rows)
                ended = True
            except LeaseLost as error:
                if shared and not unsent:  # it lost no rows, but its place
                    raise
                self._report_late(unsent, error)
        self.queue.flush()

    async def run_async(
        self, count: int, concurrency: int, call: _UserFunction | _RewardFunctions, limit: CallLimit | None
    ) -> None:
        """Await ``call`` for up to ``concurrency`` leases at a time, of ``count`` rows each. ``limit``: a limit for
        calls in the way of the event loop."""
        async with contextlib.nullcontext() if limit is None else limit.loop(f"stage {self.task!r}"):
            await self._run_loop(count, concurrency, call)

    async def _run_loop(self, count: int, concurrency: int, call: _UserFunction | _RewardFunctions) -> None:
        running: set[asyncio.Task[None]] = set()
        lease: asyncio.Task[AsyncLeasedBatch] | None = None
        ended = False
        try:
            while running or not ended:
                if lease is None and not ended and len(running) < concurrency:
                    lease = asyncio.create_task(self.queue.aio.get(self.task, count, timeout_s=FEED_S))
                waits: list[asyncio.Task[Any]] = [*running, *([lease] if lease is not None else [])]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for finished in [task for task in running if task.done()]:
                    running.remove(finished)
                    finished.result()
                if lease is not None and lease.done():
                    leased, lease = lease, None
                    try:
                        running.add(asyncio.create_task(self._await_call(leased.result(), call)))
                    except Ended:
                        ended = True
                    except DeadlineExceeded:
                        if not running:
                            raise
            await asyncio.to_thread(self.queue.flush)
        finally:
            left: list[asyncio.Task[Any]] = [*running, *([lease] if lease is not None else [])]
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await self.queue.connection.wire.aclose_loop()

    async def _await_call(self, rows: AsyncLeasedBatch, call: _UserFunction | _RewardFunctions) -> None:
        began = time.monotonic()
        async with rows:
            outcome = await call.run_async(rows)
            losses, completion = outcome.divided(rows, self._whole_groups, self._filters)
            try:
                for index, reason in losses:
                    await rows.give_back(index=index, reason=reason, blame=True)
                if rows.left:
                    await rows.complete(**completion)
            except LeaseLost as error:
                self._report_late(rows.rows, error)
            self._report_work(began, rows.rows)

    def _report_late(self, rows: int, error: LeaseLost) -> None:
        self._log.note(f"{rows} results of task {self.task!r} came too late: {error}")

    def _report_work(self, began: float, rows: int) -> None:
        cpu_s, self._cpu_s = time.process_time() - self._cpu_s, time.process_time()
        self._log.span(self.kind, began, rows=rows, cpu_s=cpu_s)


# ---- engines


@contextlib.contextmanager
def _scoring(stage: _Stage, work: Logprobs, needs: tuple[str, ...]) -> Iterator[Callable[[LeasedBatch], _Outcome]]:
    """Load a train engine, and give its scoring of leased responses. It is closed after the block."""
    options = frozen_options(work.engine, work.options)
    with loading_model(stage.queue, stage.task):
        engine: TrainEngine = make_engine("train", work.engine, model=work.model, algorithm=GRPO(), **options)

    def score(rows: LeasedBatch) -> _Outcome:
        names = zip(("prompt_ids", "response_ids", *SAMPLING_MASK), needs, strict=False)
        batch = Batch(rows.ids, rows.groups, {name: rows.columns[column] for name, column in names})
        scores = engine.logprobs(batch)
        lengths = batch.ragged("response_ids").lengths
        if not np.array_equal(scores.lengths, lengths):
            raise EngineError(f"{type(engine).__name__} gave log-probs of other lengths than the responses'")
        return _Outcome({stage.gives[0]: Ragged(scores.values.astype(np.float32), scores.offsets)})

    with contextlib.closing(engine):
        check_mask(type(engine).__name__, engine.sampling_mask, [*SAMPLING_MASK][: len(needs) - 2])
        yield score


def _responding(stage: _Stage, work: Generate, prompt: str) -> RolloutWorker:
    text, only = Tokenizer(work.tokenizer) if work.tokenizer else None, stage.gives[0]
    options = RolloutOptions(
        task=stage.task, prompt=prompt, text=text, chat=work.chat, sampling=work.sampling, only=only, swap=None
    )
    with loading_model(stage.queue, stage.task):
        engine: RolloutEngine = make_engine("rollout", work.engine, model=work.model, **work.options)
    return RolloutWorker(stage.queue, engine, options)


# ---- functions


class _FunctionFailed(Exception):
    """Raised if a user's function raised, took too long, or returned no valid values. Its message holds the
    function's frames, without the SDK's."""


class _UserFunction:
    """Calls a function on a lease and checks the returned columns. ``needs``: the columns passed to it;
    None: all. ``scores``: it returns one number or None a row."""

    def __init__(
        self,
        function: Callable[..., Any],
        gives: tuple[str, ...],
        limit: CallLimit | None,
        groups: bool,
        needs: tuple[str, ...] | None = None,
        scores: bool = False,
    ) -> None:
        self._function, self._gives, self._groups, self._needs, self._scores = function, gives, groups, needs, scores
        self._name, self._trl = full_name(function), is_of_trl(function)
        self._limit = None if isinstance(function, HttpReward) else limit  # it has limits of its own

    def run(self, rows: Batch, *, beside: bool = False) -> _Outcome:
        """Call the function. ``beside``: True in a thread beside an event loop."""
        what = f"{self._name}(), called {_named(rows)},"
        limited = contextlib.nullcontext() if self._limit is None else self._limit.call(what, beside=beside)
        try:
            with self._errors(rows), limited:
                returned = self._function(**self._arguments(rows))
            return self._check(returned, rows)
        except _FunctionFailed as failed:
            return _Outcome(reason=str(failed))

    async def run_async(self, rows: Batch) -> _Outcome:
        """Await the coroutine function, in a task of its own: a cancellation of this one is the stage's."""
        call, late = asyncio.create_task(self._call_async(rows)), False
        timeout_s = None if self._limit is None else self._limit.timeout_s
        try:
            late = not (await asyncio.wait({call}, timeout=timeout_s))[0]
        finally:
            if call.cancel():
                await asyncio.wait({call}, timeout=user_code.GRACE_S)
        if self._limit is not None and not call.done():
            self._limit.give_up(f"{self._name}(), called {_named(rows)},", call)
        try:
            return await call
        except asyncio.CancelledError as error:  # also one that a library of the function leaked
            return _Outcome(reason=self._failure("did not return in its timeout_s" if late else None, error, rows))

    async def _call_async(self, rows: Batch) -> _Outcome:
        function: Callable[..., Awaitable[Any]] = self._function
        try:
            with self._errors(rows):
                returned = await function(**self._arguments(rows))
            return self._check(returned, rows)
        except _FunctionFailed as failed:
            return _Outcome(reason=str(failed))

    def _arguments(self, rows: Batch) -> dict[str, Any]:
        given = dict(rows) if self._needs is None else {name: rows[name] for name in self._needs}
        given |= {"groups": rows.groups} if self._groups else {}
        return as_trl(given) if self._trl else given

    @contextlib.contextmanager
    def _errors(self, rows: Batch) -> Iterator[None]:
        try:
            yield
        except (ServiceAway, MemoryFull):  # no row is the cause
            raise
        except (Exception, SystemExit) as error:
            raise _FunctionFailed(self._failure(None, error, rows)) from None

    def _failure(self, text: str | None, error: BaseException, rows: Batch) -> str:
        text = text or f"raised {error_text(error)}"
        return user_error_text(f"{self._name}() {text}\ncalled {_named(rows)}", error)

    def _check(self, returned: Any, rows: Batch) -> _Outcome:
        single = {self._gives[0]: returned} if self._gives else {}
        outcome = _Outcome(dict(returned) if isinstance(returned, Mapping) else single)
        columns = outcome.columns
        if set(columns) - {FILTERED} != set(self._gives) - {FILTERED}:
            text = f"{self._name}() returned columns {sorted(columns)}; the stage gives {sorted(self._gives)}"
            raise _FunctionFailed(text)
        for column, values in columns.items():
            columns[column] = self._check_column(column, values, rows, outcome.failed)
        if FILTERED in columns and FILTERED not in self._gives:
            columns[FILTERED] = array = np.asarray(columns[FILTERED])
            if array.dtype != bool or array.ndim != 1:
                text = f"{self._name}() returned 'filtered' as {array.dtype} of {array.shape}; it is one bool a row"
                raise _FunctionFailed(text)
        return outcome

    def _check_column(self, column: str, values: Any, rows: Batch, failed: dict[int, str]) -> Any:
        """Return the values of a column. Adds the rows without a valid one to ``failed``."""
        if self._scores and isinstance(values, (list, tuple)):
            values = [float("nan") if each is None else each for each in values]
        try:
            packed = pack(column, values)
        except SchemaError as error:
            values = self._without_invalid(column, values, rows, failed)
            if values is None:
                raise _FunctionFailed(f"{self._name}() returned no column: {error}") from None
            packed = pack(column, values)
        if len(packed) != rows.rows:
            raise _FunctionFailed(f"{self._name}() returned {len(packed)} values for {rows.rows} rows")
        if column != "reward" and not self._scores:
            return values
        # Always one dtype: a function may return ints for one batch and floats for the next.
        if packed.spec.kind != "fixed" or packed.spec.shape:
            text = f"{self._name}() returned a reward that is {packed.spec}; it must be one number a row"
            raise _FunctionFailed(text)
        array = packed.values.astype(np.float32)
        for row in np.flatnonzero(np.isinf(array) if self._scores else ~np.isfinite(array)).tolist():
            failed.setdefault(row, self._invalid(column, str(array[row]), rows, row))
        return array

    def _without_invalid(self, column: str, values: Any, rows: Batch, failed: dict[int, str]) -> list[Any] | None:
        """Replace the invalid entries by valid ones; None if that makes no column."""
        if not isinstance(values, (list, tuple, np.ndarray)) or len(values) != rows.rows:
            return None
        invalid = {row: entry[1] for row in range(rows.rows) if (entry := find_invalid_entry(values[row : row + 1]))}
        valid = next((row for row in range(rows.rows) if row not in invalid), None)
        if not invalid:
            return None
        if valid is None:
            raise _FunctionFailed(self._invalid(column, invalid[0], rows, 0))
        kept = [values[valid if row in invalid else row] for row in range(rows.rows)]
        try:
            pack(column, kept)
        except SchemaError:
            return None
        for row, what in invalid.items():
            failed.setdefault(row, self._invalid(column, what, rows, row))
        return kept

    def _invalid(self, column: str, what: str, rows: Batch, row: int) -> str:
        return f"{self._name}() returned, as column {column!r}, {what}\n{_given(rows, row)}"


class _RewardFunctions:
    def __init__(self, rewards: Rewards, limit: CallLimit | None) -> None:
        self._rewards, self.main = rewards, MainThread()
        self._calls = []
        for function, name in zip(rewards.functions, rewards.names, strict=True):
            needs = needs_of(function)
            plain = None if takes_all(function) else tuple(column for column in needs if column != "groups")
            call = _UserFunction(function, (name,), limit, "groups" in needs, plain, scores=True)
            self._calls.append((call, is_coroutine(function)))

    def run(self, rows: Batch) -> _Outcome:
        """Call all functions, one after another."""
        return self._sum([call.run(rows) for call, _ in self._calls], rows)

    async def run_async(self, rows: Batch) -> _Outcome:
        """Await all functions together; plain ones run in the thread of ``main``."""
        calls = [
            call.run_async(rows) if awaits else self.main.call(functools.partial(call.run, beside=True), rows)
            for call, awaits in self._calls
        ]
        return self._sum(await asyncio.gather(*calls), rows)

    def _sum(self, scored: list[_Outcome], rows: Batch) -> _Outcome:
        if reasons := [each.reason for each in scored if each.reason]:
            return _Outcome(reason=reasons[0])
        columns = {name: values for each in scored for name, values in each.columns.items()}
        failed = {row: reason for each in scored for row, reason in each.failed.items()}
        total = self._rewards.total(columns)
        for row in np.flatnonzero(np.isnan(total)).tolist():
            failed.setdefault(row, f"no reward function scored a row: each returned None\n{_given(rows, row)}")
        return _Outcome(columns | {"reward": total.astype(np.float32)}, failed)


def _named(rows: Batch) -> str:
    ids = f"rows {rows.ids[0]} to {rows.ids[-1]}" if rows.rows > 1 else f"row {rows.ids[0]}"
    return f"with {', '.join(rows)} of {ids}"


def _given(rows: Batch, row: int) -> str:
    return f"row {rows.ids[row]} was given { {name: rows[name][row] for name in rows} }"
