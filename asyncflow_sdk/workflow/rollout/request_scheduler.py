"""RequestScheduler: the running requests of a rollout worker, and the conversations of its agent."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, DeadlineExceeded, EngineError, EngineGone, LeaseLost, SchemaError
from ...interfaces import Request, RolloutEngine
from ...queue.protocol import plain_text
from ...types import Sampling
from ..workers.worker_log import WorkerLog
from .agent import Agent, AgentFailed, Turns
from .agent_runner import AgentRunner
from .completion_batcher import CompletionBatcher
from .engine_gateway import RESPONSE_S, EngineGateway, Generated, derived_seed
from .prompt_lease import PromptLease
from .tokenizer import Tokenizer


@dataclass(eq=False)
class _Running:
    """A request for ``rows`` with one prompt, or a conversation for one row."""

    lease: PromptLease
    rows: range
    unfinished: set[int]


class RequestScheduler:
    """Runs requests for leased rows and adds finished rows to ``batcher``. ``failure``: an error to
    end the worker. Sets ``wake`` on a failure, when idle, and when another group fits."""

    def __init__(
        self, engine: RolloutEngine, gateway: EngineGateway, batcher: CompletionBatcher, log: WorkerLog, wake: asyncio.Event, *,
        sampling: Sampling, tokenizer: Tokenizer | None = None, agent: Agent | None = None, kind: str = "generate",
        samplings: Mapping[str, Sampling] | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._gateway, self._batcher, self._log, self._wake = engine, gateway, batcher, log, wake
        self._sampling, self._tokenizer, self._kind = sampling, tokenizer, kind
        self._agent = None if agent is None else AgentRunner(agent, log.note)
        self._samplings = samplings or {}  # of other partitions
        self.failure: BaseException | None = None
        self._running: dict[asyncio.Task[None], _Running] = {}
        self._rows, self._largest = 0, 1  # unfinished rows, and rows of the largest group
        self._ended_early = np.empty(0, np.int64)  # rows that ended, perhaps of a lease on its way
        self._load_ended: asyncio.Event | None = None  # of the load under way
        self._cpu_s = 0.0
        self._idle_since = time.monotonic()  # while nothing runs

    @property
    def running(self) -> bool:
        """True if a request or a conversation has not ended."""
        return bool(self._running)

    @property
    def idle(self) -> bool:
        """True if nothing is in the engine. Conversations may be between two turns."""
        return not self._running if self._agent is None else self._gateway.idle

    @property
    def room(self) -> int:
        """Rows that may be leased now; 0 unless a whole group fits."""
        free = self._engine.capabilities.max_rows - self._rows
        return free if free >= (self._largest if self._running else 1) else 0

    def begin(self, lease: PromptLease) -> None:
        """Start the requests of a lease. Raises ConfigError for a group above ``max_rows``."""
        most = self._engine.capabilities.max_rows
        self._largest = max(self._largest, *map(len, lease.shared))
        if self._largest > most:
            raise ConfigError(
                f"groups of {self._largest} do not fit {type(self._engine).__name__}, which generates {most} rows"
                " at once; raise its max_rows"
            )
        ended, self._ended_early = lease.find(self._ended_early), np.empty(0, np.int64)
        for rows in lease.shared:
            if ended.isdisjoint(rows):
                for part in [rows] if self._agent is None else [range(row, row + 1) for row in rows]:
                    self._start(_Running(lease, part, set(part)))

    def _start(self, work: _Running) -> None:
        if not self._running:
            self._report_wait()
        self._rows += len(work.rows)
        work.lease.requests += 1
        task = asyncio.create_task(self._run(work))
        self._running[task] = work
        task.add_done_callback(self._end)

    async def _run(self, work: _Running) -> None:
        """Generate, and give back the rows without a response if that fails."""
        try:
            await (self._respond(work) if self._agent is None else self._converse(self._agent, work))
            return
        except EngineGone:
            raise  # not the prompt's fault; the engine answers no other either
        except (EngineError, AgentFailed, SchemaError) as failed:
            error = failed
        blame, reason = True, str(error)
        if isinstance(error, EngineError):
            blame, reason = self._load_ended is None, f"the engine refused the prompt: EngineError: {error}"
        if blame or self._load_ended is None:
            self._log.note(plain_text(f"a prompt was refused: {error}"))
        else:  # the engine may lose requests with its weights; a failed load cancels this task here
            await self._load_ended.wait()
        rows = sorted(work.unfinished)
        self._finish_rows(work, rows)
        if rows:
            with contextlib.suppress(LeaseLost):
                await work.lease.batch.give_back(index=rows, reason=reason, blame=blame)

    async def _respond(self, work: _Running) -> None:
        """Generate a response for each row of a shared prompt, by one request."""
        prompt, seed = work.lease.prompt(work.rows[0]), self._seed(work)
        request = Request(prompt, self._sampling_of(work), len(work.rows), seed)
        async with contextlib.aclosing(self._gateway.generate(request)) as responses:
            async for generated in responses:
                self._finish(work, [work.rows[index] for index in generated.indices], generated)

    async def _converse(self, agent: AgentRunner, work: _Running) -> None:
        row = work.rows[0]
        begin = functools.partial(
            Turns, self._gateway, work.lease.prompt(row), self._sampling_of(work), seed=self._seed(work),
            tokenizer=self._tokenizer, context=self._engine.capabilities.context,
        )  # fmt: skip
        columns = {name: work.lease.batch[name][row] for name in agent.agent.needs or ()}
        group = int(work.lease.batch.groups[row])
        self._finish(work, [row], await agent.converse(begin, columns, group))

    def _sampling_of(self, work: _Running) -> Sampling:
        return self._samplings.get(work.lease.batch.partition, self._sampling)

    def _seed(self, work: _Running) -> int | None:
        return derived_seed(self._sampling_of(work).seed, int(work.lease.batch.ids[work.rows[0]]))

    def _finish(self, work: _Running, rows: list[int], generated: Generated) -> None:
        work.lease.tokens += generated.tokens
        self._batcher.add(work.lease, rows, generated)
        self._finish_rows(work, rows)  # the longest response of a group does not keep the places of the others

    def _finish_rows(self, work: _Running, rows: Sequence[int]) -> None:
        had_room = self.room
        work.unfinished.difference_update(rows)
        self._rows -= len(rows)
        if self.room and not had_room:
            self._wake.set()

    def _end(self, task: asyncio.Task[None]) -> None:
        work = self._running.pop(task)
        lease = work.lease
        self._finish_rows(work, list(work.unfinished))
        lease.requests -= 1
        if not task.cancelled() and task.exception() is not None and self.failure is None:
            self.failure = task.exception()
        if not lease.requests:
            self._batcher.flush_soon()
            cpu_s, self._cpu_s = self._engine.cpu_s - self._cpu_s, self._engine.cpu_s
            self._log.span(
                self._kind,
                lease.began,
                rows=lease.batch.rows,
                tokens=lease.tokens,
                version=lease.version,
                cpu_s=cpu_s,
            )
        if not self._running:
            self._idle_since = time.monotonic()
        if not self._running or self.failure is not None:
            self._wake.set()

    # ---- waits and cancellations

    async def drain(self) -> None:
        """Wait until every request has ended. Raises DeadlineExceeded."""
        while self._running:
            ended, running = await asyncio.wait(self._running, timeout=RESPONSE_S)
            if not ended:
                raise DeadlineExceeded(f"{len(running)} requests have not ended in {RESPONSE_S:g} s")

    async def abort_rows(self, ended: npt.NDArray[np.int64]) -> None:
        """Forget ended rows by their ids, and cancel their requests. Groups end as a whole."""
        self._ended_early = np.concatenate([self._ended_early, ended])
        self._batcher.discard(ended)
        running = self._running.items()
        tasks = [task for task, work in running if not work.unfinished.isdisjoint(work.lease.find(ended))]
        await self._cancel(tasks)
        if tasks:
            self._log.note(f"{len(tasks)} requests were aborted: their rows had ended", "info")

    async def abort(self, reason: str) -> None:
        """Cancel all requests, and give back all rows that are not written yet."""
        rows = self._batcher.rows()
        for work in self._running.values():
            rows[work.lease] = rows.get(work.lease, set()) | work.unfinished
        await self.close()
        self._batcher.clear()
        for lease, index in rows.items():
            if index:
                with contextlib.suppress(LeaseLost):
                    await lease.batch.give_back(index=sorted(index), reason=reason)

    async def close(self) -> None:
        """Cancel all requests. The end of the session gives their rows to other workers."""
        await self._cancel(list(self._running))

    async def end(self) -> None:
        """Cancel all requests, and end the agent's threads."""
        await self.close()
        if self._agent is not None:
            await self._agent.close()

    async def _cancel(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- times

    @contextlib.contextmanager
    def load(self, version: int) -> Iterator[None]:
        """Mark a load of new weights: prompts are not blamed for errors inside this block."""
        if not self._running:
            self._report_wait()
        began, self._load_ended = time.monotonic(), asyncio.Event()
        try:
            yield
        finally:
            self._load_ended.set()
            self._load_ended = None
        self._idle_since = time.monotonic()
        self._log.span("load", began, version=version)

    def _report_wait(self) -> None:
        """Report the time without requests until now."""
        if time.monotonic() - self._idle_since > 0.001:
            self._log.span("wait", self._idle_since)
