"""Task samplers: choose the ready rows for a lease.

Samplers are user code. Their choices are recorded, so a replay does not call them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from ..errors import ConfigError, PluginError, SchemaError
from ..interfaces import Candidates, Sampler
from ..types.tasks import SamplerSpec, TaskSpec
from .commands import Ids, SamplerTraits, pack_ids, unpack_ids
from .state import LedgerState
from .state.budget import MAX_NUMBER
from .state.ready import NO_ROWS, ReadyQueue
from .state.tasks import Task


class TaskSamplers:
    """The samplers by task."""

    TRANSIENT = frozenset({"make_sampler", "_samplers"})

    def __init__(self, state: LedgerState, make_sampler: Callable[[SamplerSpec], Sampler]) -> None:
        self._state, self.make_sampler = state, make_sampler
        self._samplers: dict[str, Sampler] = {}  # made when first needed

    def describe(self, spec: TaskSpec) -> SamplerTraits:
        """Return the traits of a task's sampler. Raises PluginError, ConfigError."""
        if spec.sampler is None:
            return SamplerTraits()

        def describe() -> bytes:
            assert spec.sampler is not None
            sampler = self.make_sampler(spec.sampler)
            chooses = type(sampler).choose is not Sampler.choose
            return msgspec.msgpack.encode(
                SamplerTraits(sampler.measure, sampler.window, sampler.whole_groups, sampler.balanced, chooses)
            )

        return msgspec.msgpack.decode(self._state.context.log.record_or_raise(describe), type=SamplerTraits)

    def check(self, spec: TaskSpec, sampling: SamplerTraits) -> None:
        """Raise ConfigError for a sampler that the task cannot use."""
        what = f"sampler {spec.sampler.name!r} of task {spec.name!r}" if spec.sampler else ""
        if sampling.window < 1:
            raise ConfigError(f"{what} has a window of {sampling.window} rows; it needs at least 1")
        if spec.batch_rows is not None and sampling.chooses:
            raise ConfigError(
                f"{what} chooses rows, but the staleness rule selects the rows of a step; a sampler that only"
                " balances shards (token_balanced) can be used there"
            )
        if sampling.measure and sampling.measure not in spec.needs:
            raise ConfigError(f"{what} measures column {sampling.measure!r}, not among the needs of the task")
        known = self._state.columns.specs.get(sampling.measure)
        if known is not None and not known.measurable:
            raise ConfigError(f"{what} measures column {sampling.measure!r}: {known} has no number for each row")

    def take(self, task: Task, queue: ReadyQueue, count: int, at_least: int = 0, room: int = MAX_NUMBER) -> Ids:
        """Remove ready rows from their queue for a lease; none if the sampler chooses too few. With
        whole groups: about ``count`` rows, at least one group, never more than ``room`` rows. Rows that lost
        a lease are taken with few others. Raises PluginError, SchemaError."""
        if task.sampling.chooses:
            ids = self._sampled(task, queue, count, room)
        else:
            ids = queue.take_groups(count, room) if task.whole_groups else queue.take(count)
        if not len(ids):
            return NO_ROWS
        if len(ids) < at_least:
            enough = len(queue.peek_group()) > 0 and not task.sampling.chooses
            queue.push_front(ids)
            if enough:
                few = f"no whole groups make up {at_least} to {count} rows: {len(ids)} would be too few"
                raise SchemaError(f"{few}, one more group too many; ask for more, or for fewer at least")
            return NO_ROWS
        if self._state.dead_letters.blamed and task.sampling.chooses:  # in any order: higher priorities stay first
            ids = ids[np.argsort(-self._state.rows.priority[self._state.rows.at(ids)], kind="stable")]
        if self._state.dead_letters.blamed and (count := self._state.tasks.together(task, ids, at_least)) < len(ids):
            queue.push_front(ids[count:])
            ids = ids[:count]
        return ids

    def _sampled(self, task: Task, queue: ReadyQueue, count: int, room: int) -> Ids:
        most = max(task.sampling.window, count)
        window = queue.take_groups(most, MAX_NUMBER) if task.whole_groups else queue.take(most)
        if not len(window):
            return window
        chosen = NO_ROWS
        try:
            chosen = unpack_ids(
                self._state.context.log.record_or_raise(lambda: self._choose(task, window, count, room))
            )
        finally:
            queue.push_front(window[~np.isin(window, chosen)] if len(chosen) else window)
        return chosen

    def _choose(self, task: Task, window: Ids, count: int, room: int) -> bytes:
        """Call the sampler. Return the chosen ids. Raises PluginError."""
        assert task.spec.sampler is not None
        rows = self._state.rows
        name, groups, whole = task.spec.name, rows.first[rows.at(window)], task.whole_groups
        starts = np.flatnonzero(np.diff(groups, prepend=-1)) if whole else np.arange(len(window))
        sizes = np.diff(starts, append=len(window))
        if whole:
            count = min(max(1, count // int(sizes.max())), room // int(sizes.max()))
        at = rows.at(window[starts])
        measures = np.empty(0)
        if task.sampling.measure:
            measures = np.add.reduceat(rows.measures[task.sampling.measure][rows.at(window)], starts) / sizes
        candidates = Candidates(window[starts], groups[starts], measures, rows.priority[at], task.leases_granted)
        for array in (candidates.ids, candidates.groups, candidates.measures, candidates.priorities):
            array.flags.writeable = False
        what = f"sampler {task.spec.sampler.name!r} of task {name!r}"
        try:
            if name not in self._samplers:
                self._samplers[name] = self.make_sampler(task.spec.sampler)
            positions = np.asarray(self._samplers[name].choose(candidates, count) if count else [])
        except Exception as error:
            raise PluginError(f"{what} failed: {type(error).__name__}: {error}") from error
        wrong = _wrong(positions, len(candidates), count)
        if wrong:
            raise PluginError(f"{what} chose {wrong}")
        chosen = positions.astype(np.int64)
        lengths = sizes[chosen]
        skips = np.repeat(starts[chosen] - np.cumsum(lengths) + lengths, lengths)
        return pack_ids(window[skips + np.arange(int(lengths.sum()))])


def _wrong(positions: np.ndarray[tuple[int, ...], np.dtype[np.generic]], there: int, count: int) -> str:
    """Describe the fault in a sampler's result; "" if it is valid."""
    if positions.ndim != 1 or (positions.dtype.kind not in "iu" and len(positions)):
        return f"{positions.dtype} of shape {positions.shape}, not positions"
    if len(positions) > count:
        return f"{len(positions)} entries where {count} were asked for"
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < there:
        return f"positions {positions.min()} to {positions.max()} of {there} entries"
    if len(np.unique(positions)) != len(positions):
        return "an entry twice"
    return ""
