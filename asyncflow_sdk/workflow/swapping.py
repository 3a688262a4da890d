"""Swapping: when a replica loads the version it has staged.

"drain"       as soon as it may: it takes no new prompts, finishes what runs, loads
"boundary"    when nothing runs: it goes on with the old version for as long as the staleness rule admits prompts for it
"partial"     as soon as it may: it interrupts what runs, loads, and has it go on where it was
"in_flight"   as soon as it may, while requests run: the engine stops between two tokens

A conversation with an agent that is between two turns runs only for "drain", which waits for its end; for the others nothing
of it is in the engine, and its next turn is of the version that is loaded then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ..errors import DeadlineExceeded
from ..weights import Staged, WeightUpdates


class Swapping:
    """Asks for permission at the right moment. ``wake`` is called when it has come.

    Permission comes first, then draining: of many replicas that may not swap at once, the others go on generating.
    """

    def __init__(self, updates: WeightUpdates, policy: str, wake: Callable[[], None]) -> None:
        self._updates, self._policy, self._wake = updates, policy, wake
        self._asking: tuple[int, asyncio.Task[None]] | None = None
        self._permitted = -1
        self.failure: Exception | None = None

    @property
    def stops(self) -> bool:
        """Whether nothing may be in the engine during a load."""
        return self._policy != "in_flight"

    @property
    def drains(self) -> bool:
        """Whether all that is begun ends before a load."""
        return self._policy == "drain"

    @property
    def interrupts(self) -> bool:
        """Whether what runs is interrupted for a load."""
        return self._policy == "partial"

    @property
    def waits_for_boundary(self) -> bool:
        """Whether a version would be loaded at the next moment at which nothing runs, and nobody was asked yet."""
        staged = self._updates.staged
        asked = -1 if self._asking is None else self._asking[0]
        return self._policy == "boundary" and staged is not None and staged.version not in (self._permitted, asked)

    async def ask_now(self) -> None:
        """Get permission if it is there to be had at once."""
        staged = self._updates.staged
        if staged is None:
            return
        with contextlib.suppress(DeadlineExceeded):
            if await self._updates.permission(staged.version, timeout_s=0.0):
                self._permitted = staged.version

    def due(self, idle: bool) -> bool:
        """Whether the staged version may be loaded now. ``idle``: nothing runs in the engine."""
        staged = self._updates.staged
        if staged is None:
            return False
        if self._permitted == staged.version:
            return True
        if (idle or self._policy != "boundary") and (self._asking is None or self._asking[0] != staged.version):
            self._stop_asking()
            self._asking = staged.version, asyncio.create_task(self._ask(staged.version))
        return False

    def take(self) -> Staged:
        """The version that is due: it is loaded even when a newer one comes, or a slow replica would never load any."""
        self._permitted = -1
        return self._updates.take()

    async def newer(self, update: Staged) -> Staged:
        """``update``, or what was staged since, if that may be loaded at once."""
        staged = self._updates.staged
        if staged is None:
            return update
        self._stop_asking()
        with contextlib.suppress(DeadlineExceeded):
            if await self._updates.permission(staged.version, timeout_s=0.0) and self._updates.staged is staged:
                update.release()
                return self._updates.take()
        return update

    def close(self) -> None:
        self._stop_asking()

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._asking[1].cancel()
            self._asking = None

    async def _ask(self, version: int) -> None:
        try:
            if await self._updates.permission(version):
                self._permitted = version
        except Exception as error:
            self.failure = error
        finally:
            if self._asking is not None and self._asking[0] == version:
                self._asking = None
            self._wake()
