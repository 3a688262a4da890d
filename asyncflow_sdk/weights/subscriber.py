"""TransportSubscriber: new versions for a user's own loop around any engine.

for update in run.weight_updates():           # fetched, verified, and permitted to load
    with update:                              # leaving commits; an exception does not
        update.took(engine.load(update))

``async for`` and ``async with`` do the same without blocking the event loop. The states are those
of ``ReplicaSubscriber``, which runs on the event loop of a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Set
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import numpy as np

from ..errors import AsyncFlowError, Ended
from ..interfaces import FilePlace, LoadableUpdate, WeightSubscriber
from ..queue import QueueClient
from ..types import Probe
from ..types.defaults import FETCH_S, NEXT_S
from .engine_loader import names_taken
from .fetcher import CLOSE_S, StagedVersion
from .replica import ReplicaSubscriber, describe

T = TypeVar("T")


class StagedUpdate(LoadableUpdate):
    """A version for the user's loop. ``received``: True once the loop has it."""

    def __init__(
        self, staged: StagedVersion, leave: Callable[[StagedUpdate, BaseException | None], Future[None]]
    ) -> None:
        self.version, self.tensors, self.root = staged.version, staged.tensors, staged.root
        self.untrained = staged.untrained
        self.probe: Probe | None = staged.probe
        self._staged, self._leave = staged, leave
        self._read: set[str] = set()
        self._reported: Set[str] | None = None
        self.received = False

    def receive(self) -> StagedUpdate:
        """Note that the loop gets this update. Return it."""
        self.received = True
        return self

    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """See ``WeightUpdate.arrays``."""
        return map(self._note, self._staged.arrays())

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return map(self._note, self._staged)

    def _note(self, tensor: tuple[str, T]) -> tuple[str, T]:
        self._read.add(tensor[0])
        return tensor

    def place(self, name: str) -> FilePlace | None:
        """See ``WeightUpdate.place``."""
        place = self._staged.place(name)
        if place is not None:
            self._read.add(name)
        return place

    def took(self, names: Iterable[str]) -> None:
        """Record the tensors that the engine reports as loaded."""
        self._reported = names_taken(self.version, names, "took() was given", "give it")

    @property
    def taken(self) -> Set[str]:
        """Return the loaded names: the reported ones, else all that were read."""
        return self._read if self._reported is None else self._reported

    def release(self) -> None:
        """See ``WeightUpdate.release``."""
        self._staged.release()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(self, error).result()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        leaving = asyncio.wrap_future(self._leave(self, error))
        try:
            await asyncio.shield(leaving)
        except asyncio.CancelledError:
            await asyncio.wait([leaving])  # after a cancellation the version is either committed or not
            if not leaving.cancelled():
                leaving.exception()  # reported to the ledger; the cancellation is raised
            raise


class TransportSubscriber(WeightSubscriber):
    """Fetches versions in a thread. Arguments: see ``WeightSync.weight_updates``."""

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
        self._current: StagedUpdate | None = None  # handed out, and its block not left yet
        self._closed = False
        self._connection = queue.connection
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="asyncflow-weights", daemon=True).start()
        self._replica = ReplicaSubscriber(
            queue, loaded, asyncio.Event(), rename=rename, fetch_timeout_s=fetch_timeout_s
        )
        try:
            self._submit(self._replica.open()).result()
        except BaseException:
            self.close()
            raise

    @property
    def loaded(self) -> int | None:
        """Return the version committed last; None before one."""
        return self._replica.loaded

    def __iter__(self) -> Iterator[StagedUpdate]:
        while True:
            waiting = self._submit(self._next())
            try:
                update = waiting.result()
            except Ended:
                return
            except CancelledError:
                if self._closed:
                    return
                raise
            except BaseException:
                waiting.cancel()
                self._return_unreceived()
                raise
            yield update.receive()

    async def __aiter__(self) -> AsyncIterator[StagedUpdate]:
        while True:
            try:
                update = await asyncio.wrap_future(self._submit(self._next()))
            except Ended:
                return
            except asyncio.CancelledError:
                if self._closed:
                    return
                self._return_unreceived()
                raise
            yield update.receive()

    def close(self) -> None:
        """Stop fetching; this session is no replica any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(3 * CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)

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

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            work.close()
            raise AsyncFlowError("these weight updates are closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _next(self) -> StagedUpdate:
        if self._current is not None:
            skipped, self._current = self._current, None
            await self._replica.give_up("the loop went on without loading it", again=not skipped.received)
        staged = await self._replica.next(self._timeout_s)
        if staged is None:
            raise Ended("no further version will come")
        self._current = StagedUpdate(staged, self._leave)
        return self._current

    def _return_unreceived(self) -> None:
        """Release an update whose waiter was cancelled: its permission must not block other replicas."""
        self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._give_up_unreceived(), loop=self._loop))

    async def _give_up_unreceived(self) -> None:
        if self._current is not None and not self._current.received:
            self._current = None
            with contextlib.suppress(AsyncFlowError):  # the next request raises it again
                await self._replica.give_up("nobody waits for it any more")

    def _leave(self, update: StagedUpdate, error: BaseException | None) -> Future[None]:
        return self._submit(self._end_load(update, error))

    async def _end_load(self, update: StagedUpdate, error: BaseException | None) -> None:
        if self._current is not update:
            raise AsyncFlowError(f"version {update.version} was left already")
        self._current = None
        try:
            if error is None:
                await self._replica.commit(update.taken)
                return
        except Exception as refused:
            await self._replica.give_up(describe(refused))
            raise
        await self._replica.give_up(describe(error))

    async def _stop(self) -> None:
        self._current = None
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await self._replica.close()
        await self._connection.wire.aclose_loop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
