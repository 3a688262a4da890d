"""EngineLoader: load a version into a rollout engine, and prove that the engine holds it: by names, log-probs of a
probe, and held bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence, Set
from typing import Any, TypeVar

import numpy as np

from ..errors import ConfigError, DeadlineExceeded, WeightError, WeightMismatch
from ..interfaces import RolloutEngine, TensorType, WeightUpdate
from ..types import Probe, Weights, dtype_name, from_torch
from ..types.dtypes import is_torch
from ..types.manifest import digest
from ..types.validation import check_types
from .fetcher import StagedVersion, run_in_thread

LOAD_S = 3600.0  # default limit of one load, and of scoring one probe (seconds)
T = TypeVar("T")
_SHOWN = 10


class EngineLoader:
    """Loads versions into ``engine``. The names of the tensors that the engine took are always compared.

    ``verify``: further proofs. "probe": the engine's log-probs of the version's probe must be the trainer's; without
    it, a probe is still scored if the version has one and the engine can. "held": the engine must hold the version
    byte for byte. ``running``: requests run during a load. Raises ConfigError for proofs that the engine cannot give.
    """

    def __init__(self, engine: RolloutEngine, verify: Sequence[str] = (), *, running: bool = False) -> None:
        can, self.engine_name = engine.capabilities, type(engine).__name__
        check_types(Weights, {"verify": verify})
        if "probe" in verify and not can.logprobs:
            raise ConfigError(f'{self.engine_name} cannot score given responses, which verify="probe" asks for')
        if "probe" in verify and running:
            raise ConfigError(
                'verify="probe" needs an engine in which nothing runs: it does not go with swap="in_flight"'
            )
        if "held" in verify and not can.held_weights:
            raise ConfigError(
                f'{self.engine_name} does not hold weights as they were published, which verify="held" asks for'
            )
        self._engine, self._requires_probe, self._held = engine, "probe" in verify, "held" in verify
        self._scores_probe = self._requires_probe or (can.logprobs and not running)

    async def load(self, update: StagedVersion) -> None:
        """Load ``update`` and prove it. If the call is cancelled, the engine has stopped loading, and the update is
        released. Raises ConfigError for a missing probe, DeadlineExceeded, WeightMismatch, WeightError, and the
        engine's errors."""
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
        """Return the result of ``work``. Raises its errors; DeadlineExceeded after LOAD_S."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task], timeout=LOAD_S)
            if task.done():
                return task.result()
        finally:
            if task.cancel():
                await asyncio.wait([task])  # the engine must have stopped before it gets other weights
                if not task.cancelled():
                    task.exception()  # too late to be raised
        raise DeadlineExceeded(f"{late} in {LOAD_S:g} s")


def check_names(update: WeightUpdate, names: Iterable[str]) -> None:
    """Raise WeightMismatch with names unless the engine took exactly the tensors of the update."""
    published, taken = set(update.tensors), names_taken(update.version, names)
    _check_empty(update, published - taken, "were not taken by the engine")
    _check_empty(update, taken - published, "were never published")


def names_taken(version: int, names: Any, source: str = "load_weights returned", verb: str = "return") -> Set[str]:
    """Return an engine's names as a set. Raises WeightMismatch for values that are no names."""
    if isinstance(names, Iterable) and not isinstance(names, (str, bytes)):
        names = list(names)
        if all(isinstance(name, str) for name in names):
            return set(names)
    raise WeightMismatch(f"version {version}: {source} {repr(names)[:80]}; {verb} the set of names it took")


def check_probe(update: WeightUpdate, probe: Probe, logprobs: Sequence[Sequence[float]]) -> None:
    """Raise WeightError unless the engine's ``logprobs`` of the probe's responses equal the trainer's within
    its tolerance. The error names the worst token: sequence, position, and both values."""
    lengths, wanted = [len(mine) for mine in logprobs], [len(theirs) for theirs in probe.logprobs]
    if lengths != wanted:
        raise WeightMismatch(
            f"version {update.version}: the engine gave log-probs of lengths {lengths} for a probe of {wanted} tokens"
        )
    if not sum(wanted):
        return
    mine, theirs = (np.concatenate([np.asarray(s, np.float64) for s in each]) for each in (logprobs, probe.logprobs))
    apart = np.where(np.isfinite(mine) & np.isfinite(theirs), np.abs(mine - theirs), np.inf)
    worst = int(apart.argmax())
    if apart[worst] > probe.tolerance:
        number = int(np.searchsorted(np.cumsum(wanted), worst, side="right"))
        raise WeightError(
            f"version {update.version}: the engine does not compute what the trainer does: sequence {number} of the"
            f" probe, token {worst - sum(wanted[:number])}: log-prob {mine[worst]:.6g}, the trainer's"
            f" {theirs[worst]:.6g}, {apart[worst]:.3g} apart where {probe.tolerance:g} is allowed. Either weights were"
            " not taken, or tolerance is too small for its dtype:"
            " weights=af.Weights(probe=af.Probe(..., tolerance=...)) allows another, probe=False compares none"
        )


def check_held(update: WeightUpdate, held: Iterable[tuple[str, Any]]) -> None:
    """Raise unless the engine holds the update byte for byte: WeightMismatch for names and types, WeightError for
    bytes, each with the first tensor that differs. One tensor at a time is read, in any order."""
    wanted = {name: _digest(array) for name, array in update.arrays()}
    seen = set()
    for name, tensor in held:
        if name not in wanted:
            _check_empty(update, {name}, "were never published, and are held by the engine")
        array = from_torch(tensor) if is_torch(tensor) else np.asarray(tensor)
        mine, theirs = TensorType(dtype_name(array.dtype), array.shape), update.tensors[name]
        if mine != theirs:
            raise WeightMismatch(
                f"version {update.version}: the engine holds {name!r} as {mine.dtype}{list(mine.shape)}, and it was"
                f" published as {theirs.dtype}{list(theirs.shape)}"
            )
        if _digest(array) != wanted[name]:
            raise WeightError(f"version {update.version}: the bytes of {name!r} that the engine holds are other ones")
        seen.add(name)
    _check_empty(update, wanted.keys() - seen, "are not held by the engine")


def _digest(array: np.ndarray[Any, Any]) -> bytes:
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return digest(memoryview(raw))  # type: ignore[arg-type]


def _check_empty(update: WeightUpdate, odd: Set[str], what: str) -> None:
    if odd:
        listed = ", ".join(sorted(odd)[:_SHOWN])
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        raise WeightMismatch(
            f"version {update.version}: {len(odd)} of {len(update.tensors)} tensors {what}: {listed}{more}"
        )
