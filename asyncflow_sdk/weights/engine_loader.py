"""EngineLoader: load a version into a rollout engine, and prove that the engine holds it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from ..errors import ConfigError, DeadlineExceeded
from ..interfaces import RolloutEngine
from .choices import check_verify
from .fetcher import StagedVersion
from .proof import check_held, check_names, check_probe
from .threads import run_in_thread

LOAD_S = 3600.0
"""Default limit of one load, and of scoring one probe (seconds)."""
T = TypeVar("T")


class EngineLoader:
    """Loads versions into ``engine``. The names of the tensors that the engine took are always compared.

    ``verify``: further proofs. "probe": the engine's log-probs of the version's probe must be the trainer's; without
    it, a probe is still scored if the version has one and the engine can. "held": the engine must hold the version
    byte for byte. ``running``: requests run during a load. Raises ConfigError for proofs that the engine cannot give.
    """

    def __init__(
        self, engine: RolloutEngine, verify: Sequence[str] = (), *, running: bool = False, timeout_s: float = LOAD_S
    ) -> None:
        can, self.engine_name = engine.capabilities, type(engine).__name__
        check_verify(self.engine_name, can, verify, running=running)
        self._engine, self._timeout_s = engine, timeout_s
        self._requires_probe, self._held = "probe" in verify, "held" in verify
        self._scores_probe = self._requires_probe or (can.logprobs and not running)

    async def load(self, update: StagedVersion) -> None:
        """Load ``update`` and prove it. If the call is cancelled, the engine has stopped loading,
        and the update is released.

        Raises ConfigError for a missing probe, DeadlineExceeded, WeightMismatch, WeightError, and
        the engine's errors.
        """
        if self._requires_probe and update.probe is None:
            raise ConfigError(
                f'version {update.version} carries no probe, and verify asks for one: leave "probe" out'
            )
        try:
            await self._load(update)
        except asyncio.CancelledError:
            update.release()
            raise

    async def _load(self, update: StagedVersion) -> None:
        names = await self._in_time(
            self._engine.load_weights(update), f"{self.engine_name} has not loaded version {update.version}"
        )
        check_names(update, names)
        if update.probe is not None and self._scores_probe:
            probe = update.probe
            logprobs = await self._in_time(
                self._engine.logprobs(probe.prompt_ids, probe.response_ids),
                f"{self.engine_name} has not scored the probe of version {update.version}",
            )
            check_probe(update, probe, logprobs)
        if self._held:
            await run_in_thread("held", lambda: check_held(update, self._engine.held_weights()))

    async def _in_time(self, work: Awaitable[T], late: str) -> T:
        """Return the result of ``work``. Raises its errors; DeadlineExceeded after the limit."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task], timeout=self._timeout_s)
            if task.done():
                return task.result()
        finally:
            if task.cancel():
                await asyncio.wait([task])  # the engine must have stopped before it gets other weights
                if not task.cancelled():
                    task.exception()  # too late to be raised
        raise DeadlineExceeded(f"{late} in {self._timeout_s:g} s")
