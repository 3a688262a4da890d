"""TransportSubscriber: new versions for a loop of one's own, which generates with an engine the SDK knows nothing of.

for update in run.weight_updates():           # fetched, verified, and this replica may load it now
    with update:                              # leaving commits; an exception does not
        update.took(engine.load(update))

``async for`` and ``async with`` do the same without blocking the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Set
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from ..errors import AsyncFlowError, DeadlineExceeded, Ended
from ..interfaces import FilePlace, LoadableUpdate, WeightSubscriber
from ..queue import LoopPort, QueueClient
from ..queue.coroutines import wait_for_event
from ..types import Probe
from ..types.defaults import FETCH_S, NEXT_S
from .prefetch import CLOSE_S, Staged, said
from .proof import names_taken
from .updates import WeightUpdates

T = TypeVar("T")


class StagedUpdate(LoadableUpdate):
    """A version that this replica has fetched and verified."""

    def __init__(self, staged: Staged, leave: Callable[[StagedUpdate, BaseException | None], Future[None]]) -> None:
        self.version, self.tensors, self.root = staged.version, staged.tensors, staged.root
        self.probe: Probe | None = staged.probe
        self._staged, self._leave = staged, leave
        self._handed: set[str] = set()
        self._took: Set[str] | None = None
        self.heard = False  # whoever waited for it has it

    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        for name, array in self._staged.arrays():
            self._handed.add(name)
            yield name, array

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._staged:
            self._handed.add(name)
            yield name, tensor

    def place(self, name: str) -> FilePlace | None:
        place = self._staged.place(name)
        if place is not None:
            self._handed.add(name)
        return place

    def took(self, names: Iterable[str]) -> None:
        self._took = names_taken(self.version, names, "took() was given", "give it")

    @property
    def taken(self) -> Set[str]:
        return self._handed if self._took is None else self._took

    def release(self) -> None:
        self._staged.release()

    def __enter__(self) -> StagedUpdate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(self, error).result()

    async def __aenter__(self) -> StagedUpdate:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leaving = asyncio.wrap_future(self._leave(self, error))
        try:
            await asyncio.shield(leaving)
        except asyncio.CancelledError:
            await asyncio.wait([leaving])  # whoever cancels this finds the version either committed or not
            if not leaving.cancelled():
                leaving.exception()  # it was told to the ledger; here the cancellation counts
            raise


class TransportSubscriber(WeightSubscriber):
    """Fetches versions through a ``WeightTransport`` in a thread of its own. Arguments: see ``WeightSync.weight_updates``."""

    def __init__(
        self,
        queue: QueueClient,
        *,
        loaded: int | None = None,
        timeout_s: float = NEXT_S,
        fetch_timeout_s: float = FETCH_S,
        rename: Callable[[str], str] | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._current: StagedUpdate | None = None  # handed out, and not left yet
        self._closed = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="asyncflow-weights", daemon=True).start()
        options = {"rename": rename, "fetch_timeout_s": fetch_timeout_s}
        try:
            self._ask(self._start(queue, loaded, options)).result()
        except BaseException:
            self.close()
            raise

    @property
    def loaded(self) -> int | None:
        return self._updates.loaded

    def __iter__(self) -> Iterator[StagedUpdate]:
        while True:
            coming = self._ask(self._next())
            try:
                update = coming.result()
            except Ended:
                return
            except CancelledError:
                if self._closed:
                    return
                raise
            except BaseException:
                coming.cancel()  # a wait that was interrupted
                self._take_back()
                raise
            update.heard = True
            yield update

    async def __aiter__(self) -> AsyncIterator[StagedUpdate]:
        while True:
            try:
                update = await asyncio.wrap_future(self._ask(self._next()))
            except Ended:
                return
            except asyncio.CancelledError:
                if self._closed:
                    return
                self._take_back()
                raise
            update.heard = True
            yield update

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(3 * CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def __enter__(self) -> TransportSubscriber:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> TransportSubscriber:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    # ---- on the thread's event loop

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _ask(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            work.close()
            raise AsyncFlowError("these weight updates are closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _start(self, queue: QueueClient, loaded: int | None, options: dict[str, Any]) -> None:
        self._port = LoopPort(queue.connection)
        self._changed = asyncio.Event()
        self._updates = WeightUpdates(queue, loaded, self._changed.set, **options)
        await self._updates.join()

    async def _next(self) -> StagedUpdate:
        if self._current is not None:
            passed, self._current = self._current, None
            await self._updates.give_up(passed._staged, "the loop went on without loading it", again=not passed.heard)
        until = time.monotonic() + self._timeout_s
        while (staged := await self._staged(until)) is not None:
            if await self._permission(staged.version, until) and self._updates.staged is staged:
                self._current = StagedUpdate(self._updates.take(), self._leave)
                return self._current
        raise Ended("no further version will come")

    def _take_back(self) -> None:
        """A version that comes when nobody waits for it any more must not keep others from loading theirs."""
        self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._unheard(), loop=self._loop))

    async def _unheard(self) -> None:
        if (update := self._current) is not None and not update.heard:
            self._current = None
            with contextlib.suppress(AsyncFlowError):  # it is told again by whatever comes next
                await self._updates.give_up(update._staged, "nobody waits for it any more")

    async def _staged(self, until: float) -> Staged | None:
        """The version that is staged, once there is one; None at the end of the run."""
        while True:
            self._changed.clear()
            if self._updates.failure is not None:
                raise self._updates.failure
            if self._updates.staged is not None or self._updates.ended:
                return self._updates.staged
            if not await wait_for_event(self._changed, max(until - time.monotonic(), 0.0)):
                on = "no version" if self.loaded is None else f"version {self.loaded}"
                why = await self._updates.why()
                raise DeadlineExceeded(
                    f"no version was published and fetched in {self._timeout_s:g} s; this replica has {on}{why}"
                )

    async def _permission(self, version: int, until: float) -> bool:
        """Whether ``version`` may be loaded; False when a newer one is there instead."""
        try:
            return await self._updates.permission(version, timeout_s=max(until - time.monotonic(), 0.0))
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"version {version} could not be loaded in {self._timeout_s:g} s: {error}"
            ) from None

    def _leave(self, update: StagedUpdate, error: BaseException | None) -> Future[None]:
        return self._ask(self._left(update, error))

    async def _left(self, update: StagedUpdate, error: BaseException | None) -> None:
        if self._current is not update:
            raise AsyncFlowError(f"version {update.version} was left already")
        self._current = None
        try:
            if error is None:
                await self._updates.commit(update._staged, update.taken)
                return
        except Exception as refused:
            await self._updates.give_up(update._staged, said(refused))
            raise
        await self._updates.give_up(update._staged, said(error))

    async def _stop(self) -> None:
        self._current = None
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if hasattr(self, "_updates"):
            await self._updates.close()
            await self._port.connection.wire.aclose_loop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
