"""EngineProducer: leases prompts, has them answered by an engine, and swaps in new versions at its safe points.

How rows come to be is ``answering``'s, of an agent ``agent``'s; what an engine is asked ``drawing``'s; how they get to the
ledger ``completing``'s. New weights are fetched and verified while the engine generates; when they are loaded is the swap
policy's to say (``swap_policy``); their states, and what becomes of a load that fails, is ``ReplicaSubscriber``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DeadlineExceeded, Ended
from ..interfaces import Producer, RolloutEngine
from ..queue import AsyncLeasedBatch, QueueClient
from ..types import Sampling
from ..types import events as ev
from ..weights import EngineLoader, ReplicaSubscriber, StagedVersion, SubscriberState, choose_swap
from .agent import Agent
from .answering import Answering
from .completing import Completing
from .drawing import Drawing
from .specs import rollout_task
from .swap_policy import SwapPolicy
from .text import Text, with_stop_ids
from .work import tokenizer_file

WAIT_S = 3600.0
"""The longest a producer waits for prompts or versions before it fails with the reason (seconds)."""
CLOSE_S = 30.0


class EngineProducer(Producer):
    """Runs one engine until the stream ends: ``work`` in this thread, or ``run`` on an event loop. Called once.

    ``prompt``: the column of prompts; "prompt_ids" holds token ids, any other holds text, and ``text`` is the folder of its
    tokenizer. ``prefix``: what the names of the columns it gives begin with. ``agent``: answers each row by a conversation.
    ``needs_first``: generate nothing before a published version is loaded; else the engine's own weights count as version 0.
    ``swap``: when new versions are loaded: "drain", "boundary", "partial" or "in_flight"; "auto": as the engine can. ``verify``: what a load
    must prove beyond the names of its tensors: "probe", "held". Raises ConfigError, with the reason, for what the engine
    cannot do.
    """

    def __init__(
        self,
        queue: QueueClient,
        engine: RolloutEngine,
        *,
        task: str = "rollout",
        prefix: str = "",
        sampling: Sampling | None = None,
        prompt: str = "prompt_ids",
        text: Text | str | Path | None = None,
        agent: Agent | Callable[..., Awaitable[Any]] | None = None,
        needs_first: bool = False,
        swap: str = "auto",
        verify: Sequence[str] = (),
    ) -> None:
        if text is not None and not isinstance(text, Text):
            text = Text(tokenizer_file(text, ""))
        if prompt != "prompt_ids" and text is None:
            raise ConfigError(f"column {prompt!r} is text; a producer needs a tokenizer to encode it")
        if agent is not None and not isinstance(agent, Agent):
            agent = Agent(function=agent)
        can = engine.capabilities
        chosen = choose_swap(type(engine).__name__, can.swap, swap, token_versions=can.token_versions, verify=verify)
        self._queue, self._engine, self._task = queue, engine, task
        self._spec = rollout_task(task, prompt, prefix, text is not None, agent)
        self._connection = queue.connection
        if swap == "auto":
            self._connection.report(
                ev.Chosen(
                    time_s=time.monotonic(),
                    worker=self._connection.name,
                    what=chosen.what,
                    chosen=chosen.chosen,
                    reason=chosen.reason,
                )
            )
        swap = chosen.chosen
        self._wake = asyncio.Event()
        """There is something to look at: a version, a failure, room, an engine that is idle."""
        wake = self._wake.set
        self._drawing = Drawing(engine, None if needs_first else 0, wake)
        self._completing = Completing(prefix, text, prompt_ids=prompt != "prompt_ids", late=self._warn)
        self._answering = Answering(
            engine, self._drawing, self._completing, self._connection, sampling=with_stop_ids(sampling or Sampling(), text), prompt=prompt,
            text=text, agent=agent, wake=wake, room=self._room,
        )  # fmt: skip
        self._swap_policy = SwapPolicy(swap)
        self._loader = EngineLoader(engine, verify, running=not self._swap_policy.stops)
        self._subscriber = ReplicaSubscriber(queue, self._drawing.loaded, self._wake, rename=engine.weight_name)
        self._asking: asyncio.Task[AsyncLeasedBatch] | None = None
        self._failure: BaseException | None = None

    def work(self) -> None:
        self._queue.declare(**{name: getattr(self._spec, name) for name in self._spec.__struct_fields__})
        asyncio.run(self.run())

    async def run(self) -> None:
        self._aio = self._queue.aio
        background = [
            asyncio.create_task(self._watched(work)) for work in (self._completing.run(), self._hear_of_lost())
        ]
        try:
            await self._subscriber.open()
            while await self._turn():
                pass
            await self._drain()
        finally:
            await self._end([*background, *([self._asking] if self._asking is not None else [])])

    async def _end(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Whatever fails on the way, and when it is cancelled: this session is no replica any more."""
        try:
            for task in tasks:
                task.cancel()
            await asyncio.gather(self._answering.close(), *tasks, return_exceptions=True)
            with contextlib.suppress(asyncio.TimeoutError):  # an engine that hangs must not hide why
                await asyncio.wait_for(self._engine.close(), CLOSE_S)
        finally:
            try:
                await self._subscriber.close()
            finally:
                await self._connection.wire.aclose_loop()

    async def _turn(self) -> bool:
        """Swap what is due, else begin what is allowed. False when the stream has ended."""
        self._wake.clear()
        self._raise_failure()
        if self._subscriber.state is SubscriberState.STAGED:
            if self._swap_policy.waits_for_boundary and self._answering.idle:
                with self._drawing.held():  # or something would begin in the moment that permission takes
                    await self._take_back()
                    if self._answering.idle:
                        await self._subscriber.try_permission()
            if self._answering.idle or not self._swap_policy.waits_for_boundary:
                self._subscriber.request_permission()
        if self._subscriber.state is SubscriberState.PERMITTED:
            await self._swap()
            return True
        if self._asking is None:
            if self._drawing.loaded is None and self._subscriber.ended:
                return False  # it was to generate nothing before it had a version, and none will come
            if not self._may_ask:
                await self._first_of(self._wake.wait())
                return True
            most = self._engine.capabilities.max_rows
            get = self._aio.get(self._task, self._places, most=most, timeout_s=WAIT_S)
            self._asking = asyncio.create_task(get)  # it waits also for a version that has to be loaded first
        await self._first_of(self._asking, self._wake.wait())
        if self._asking.done():
            asked, self._asking = self._asking, None
            try:
                self._answering.begin(asked.result())
            except Ended:
                return False
        return True

    @property
    def _places(self) -> int:
        """So many more rows may run."""
        return self._engine.capabilities.max_rows - self._answering.rows

    @property
    def _may_ask(self) -> bool:
        """Whether there is room for prompts, and a version that may answer them."""
        least = self._answering.largest if self._answering.running else 1  # a lease is a whole group at least
        return self._drawing.loaded is not None and self._places >= least

    def _room(self) -> None:
        """A row has ended, so that another may begin."""
        if self._asking is None and self._may_ask:
            self._wake.set()

    def _raise_failure(self) -> None:
        for failure in (self._failure, self._answering.failure, self._subscriber.failure):
            if failure is not None:
                raise failure

    async def _first_of(self, *waits: Awaitable[Any]) -> None:
        """Wait for one of several things."""
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        done, _ = await asyncio.wait(tasks, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:  # made here, so ended here
                task.cancel()
        if not done:
            why = await self._subscriber.diagnose()
            raise DeadlineExceeded(f"nothing came for {WAIT_S:g} s: no version to load, no row to finish{why}")

    async def _watched(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:
            self._failure = self._failure or error
            self._wake.set()

    async def _hear_of_lost(self) -> None:
        """Rows that end while they are generated (too late for any step, cancelled, their group failed) make room at once."""
        while True:
            with contextlib.suppress(DeadlineExceeded):
                await self._answering.abort_lost(await self._aio.lost(timeout_s=WAIT_S))

    async def _take_back(self) -> None:
        """Ask for no more prompts. What is given already is begun."""
        asked, self._asking = self._asking, None
        if asked is None:
            return
        asked.cancel()  # the server takes the request back, and rows it may just have leased
        await asyncio.gather(asked, return_exceptions=True)
        if not asked.cancelled() and asked.exception() is None:
            self._answering.begin(asked.result())

    async def _drain(self) -> None:
        await self._answering.drain()
        await self._completing.now()
        self._raise_failure()

    # ---- new versions

    async def _swap(self) -> None:
        """Load the version that is due. While requests run, none is completed before the weights are proven that drew it."""
        update = self._subscriber.take()
        async with contextlib.AsyncExitStack() as stack:
            if self._swap_policy.stops:
                try:
                    await self._stop(update, stack)
                    update = await self._subscriber.take_newer()
                except BaseException:
                    update.release()
                    raise
            await stack.enter_async_context(self._completing.held)
            await self._load(update)

    async def _stop(self, update: StagedVersion, stack: contextlib.AsyncExitStack) -> None:
        """Nothing is in the engine from here to the end of ``stack``."""
        began = time.monotonic()
        ran = not self._answering.idle
        if self._swap_policy.drains:
            await self._drain()
        else:
            await stack.enter_async_context(self._drawing.stopped(interrupt=self._swap_policy.interrupts))
            self._raise_failure()
        if ran and not self._swap_policy.interrupts:
            self._answering.span("wait", began, detail=f"draining for version {update.version}")

    async def _load(self, update: StagedVersion) -> None:
        answering = self._answering
        answering.end_wait()
        began, self._drawing.newest = time.monotonic(), update.version
        answering.load_ended = load_ended = asyncio.Event()
        try:
            try:
                await self._loader.load(update)
            except Exception as error:
                if answering.running and not self._swap_policy.stops:
                    # Unproven weights generated tokens of running requests, and nobody knows which.
                    await answering.abort("a load of new weights failed")
                await self._subscriber.recover(self._loader, error)
            else:
                await self._subscriber.commit()
            self._drawing.loaded = self._subscriber.loaded
        finally:
            answering.load_ended = None
            load_ended.set()
        answering.loaded(began, update.version)

    def _warn(self, text: str) -> None:
        name = self._connection.name
        self._connection.report(ev.Note(time_s=time.monotonic(), worker=name, text=text, level="warning"))
