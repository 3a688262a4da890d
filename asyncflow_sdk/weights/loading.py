"""Loading: a version into an engine, proven, or else the one before it once more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from ..errors import ConfigError, DeadlineExceeded, VersionGone, WeightError, WeightMismatch
from ..interfaces import RolloutEngine
from .negotiating import check_verify
from .prefetch import Staged, in_thread, said
from .proof import check_held, check_names, check_probe
from .updates import WeightUpdates

T = TypeVar("T")

LOAD_S = 3600.0
GIVE_UP_AFTER = 5
"""Loads that may fail one after another before a replica ends."""


class Loading:
    """Loads versions into ``engine``. Nothing generates with weights that are not proven.

    The names an engine took are always compared. ``verify``: what else must hold: "probe" (log-probs of the version's probe
    are the trainer's), which is also looked at unasked where version and engine can, and "held" (what the engine holds is the
    version, byte for byte). Raises ConfigError for what the engine cannot.
    """

    def __init__(
        self, engine: RolloutEngine, updates: WeightUpdates, verify: Sequence[str] = (), *, running: bool = False,
        timeout_s: float = LOAD_S,
    ) -> None:  # fmt: skip
        can = engine.capabilities
        check_verify(type(engine).__name__, can, verify, running=running)
        self._engine, self._updates, self._timeout_s = engine, updates, timeout_s
        self._probed, self._must_probe = can.logprobs and not running, "probe" in verify
        self._held = "held" in verify
        self._failed = 0

    async def load(self, update: Staged, on_failure: Callable[[], Awaitable[None]] | None = None) -> bool:
        """Load ``update``, for which there is permission, and commit it. False when that failed and the engine is on what it had.

        ``on_failure`` is awaited first then. Raises WeightMismatch for what would come again; WeightError when the engine cannot
        be brought back to a whole version, or one load after another fails: then it must not generate any more.
        """
        if self._must_probe and update.probe is None:
            update.release()
            raise ConfigError(
                f'version {update.version} carries no probe, and verify asks for one: leave "probe" out'
            )
        try:
            await self._take(update)
        except Exception as error:
            if on_failure is not None:
                await on_failure()
            update.release()
            if isinstance(error, (WeightMismatch, ConfigError)):
                raise
            return await self._back(update, error)
        except BaseException:
            update.release()
            raise
        await self._updates.commit(update)
        self._failed = 0
        return True

    async def _take(self, update: Staged) -> None:
        """Load and prove."""
        name = type(self._engine).__name__
        names = await self._in_time(
            self._engine.load_weights(update), f"{name} has not loaded version {update.version}"
        )
        check_names(update, names)
        if update.probe is not None and (self._probed or self._must_probe):
            probe = update.probe
            work = self._engine.logprobs(probe.prompt_ids, probe.response_ids)
            scored = await self._in_time(work, f"{name} has not scored the probe of version {update.version}")
            check_probe(update, probe, scored)
        if self._held:
            await in_thread("held", lambda: check_held(update, self._engine.held_weights()))

    async def _in_time(self, work: Awaitable[T], late: str) -> T:
        """What ``work`` comes to, which may be a TimeoutError of its own. Raises DeadlineExceeded when it takes too long."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task], timeout=self._timeout_s)
            if task.done():
                return task.result()
        finally:
            if task.cancel():
                await asyncio.wait([task])  # an engine that is still at it must not be given anything else
                if not task.cancelled():
                    task.exception()  # it came too late to be told
        raise DeadlineExceeded(f"{late} in {self._timeout_s:g} s")

    async def _back(self, update: Staged, error: Exception) -> bool:
        """The version before, once more; where that is kept no longer, this one. True when the engine is on this one."""
        before, self._failed = self._updates.loaded, self._failed + 1
        if before is not None:
            try:
                whole = await self._whole_again(update)
            except Exception as again:
                raise WeightError(
                    f"version {update.version} could not be loaded ({said(error)}), and neither could version"
                    f" {before} again ({said(again)}): {type(self._engine).__name__} holds neither and must not"
                    " generate any more"
                ) from error
            if whole.version == update.version:
                await self._updates.commit(whole)
                return True
            self._updates.restored(whole)
        await self._updates.give_up(update, said(error))
        if self._failed >= GIVE_UP_AFTER:
            raise WeightError(
                f"{self._failed} loads failed one after another, the last of version {update.version}: {said(error)}"
            ) from error
        return False

    async def _whole_again(self, update: Staged) -> Staged:
        try:
            whole = await self._updates.previous()
        except VersionGone as gone:
            try:
                whole = await self._updates.fetch(update)
            except Exception:
                raise gone from None
        try:
            await self._take(whole)
        except BaseException:
            whole.release()
            raise
        return whole
