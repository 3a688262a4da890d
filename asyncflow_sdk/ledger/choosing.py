"""Choosing: which of the ready rows of a task a lease gets. What a sampler chose is noted, so that a replay runs none."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from ..errors import ConfigError, PluginError, SchemaError
from ..interfaces import Candidates, Sampler
from .commands import Ids, SamplerSpec, Sampling, TaskSpec, pack_ids, unpack_ids
from .making import make_sampler
from .ready import NOBODY, ReadyQueue
from .records import Task
from .state import MAX_NUMBER
from .stepping import Stepping


class Choosing(Stepping):
    """Takes ready rows for leases."""

    TRANSIENT = Stepping.TRANSIENT | {"make_sampler", "_samplers"}

    def __init__(self) -> None:
        super().__init__()
        self.make_sampler: Callable[[SamplerSpec], Sampler] = make_sampler
        self._samplers: dict[str, Sampler] = {}  # by task; made when first needed

    def having(self, column: str) -> Ids:
        """Live rows that have a column."""
        live = self.rows.live_ids()
        if column not in self._places:
            return live[:0]
        has: Ids = live[(self.rows.columns[self.rows.at(live)] & self._bit(column)) != 0]
        return has

    def sampling_of(self, spec: TaskSpec) -> Sampling:
        """What the ledger must know of a task's sampler beside its choices. Raises PluginError, ConfigError."""
        if spec.sampler is None:
            return Sampling()

        def look() -> bytes:
            assert spec.sampler is not None
            sampler = self.make_sampler(spec.sampler)
            chooses = type(sampler).choose is not Sampler.choose
            facts = Sampling(sampler.measure, sampler.window, sampler.whole_groups, sampler.balanced, chooses)
            return msgspec.msgpack.encode(facts)

        return msgspec.msgpack.decode(self.outside.guarded(look), type=Sampling)

    def _check_sampling(self, spec: TaskSpec, sampling: Sampling) -> None:
        what = f"sampler {spec.sampler.name!r} of task {spec.name!r}" if spec.sampler else ""
        if sampling.window < 1:
            raise ConfigError(f"{what} has a window of {sampling.window} rows; it needs at least 1")
        if spec.batch_rows is not None and sampling.chooses:
            raise ConfigError(
                f"{what} chooses rows, but the staleness rule says which rows make a step; one that only balances"
                " shards (token_balanced) can be used there"
            )
        if sampling.measure and sampling.measure not in spec.needs:
            raise ConfigError(f"{what} measures column {sampling.measure!r}, which the task must need")
        known = self.schema.get(sampling.measure)
        if known is not None and not known.measurable:
            raise ConfigError(f"{what} measures column {sampling.measure!r}, which is {known}: no number a row")

    def _take(self, task: Task, queue: ReadyQueue, count: int, at_least: int = 0, room: int = MAX_NUMBER) -> Ids:
        """Ready rows for a lease, no longer in their queue; none if the sampler gives too few. Of grouped rows whole
        groups, about ``count`` rows, at least one group, never more than ``room`` rows. Raises PluginError."""
        whole = task.spec.grouped or task.sampling.whole_groups
        if not task.sampling.chooses:
            ids = queue.take_groups(count, room) if whole else queue.take(count)
        else:
            ids = self._sampled(task, queue, count, room, whole)
        if not len(ids):
            return NOBODY
        if len(ids) < at_least:
            enough = len(queue.peek_group()) > 0 and not task.sampling.chooses
            queue.push_front(ids)
            if enough:
                raise SchemaError(
                    f"no whole groups make up {at_least} to {count} rows: {len(ids)} would be too few, one more group"
                    " too many; ask for more, or for fewer at least"
                )
            return NOBODY
        return ids

    def _sampled(self, task: Task, queue: ReadyQueue, count: int, room: int, whole: bool) -> Ids:
        most = max(task.sampling.window, count)
        window = queue.take_groups(most, MAX_NUMBER) if whole else queue.take(most)
        if not len(window):
            return window
        chosen = NOBODY
        try:
            chosen = unpack_ids(self.outside.guarded(lambda: self._choose(task, window, count, room, whole)))
        finally:
            queue.push_front(window[~np.isin(window, chosen)] if len(chosen) else window)
        return chosen

    def _choose(self, task: Task, window: Ids, count: int, room: int, whole: bool) -> bytes:
        """Ask the sampler for ids. Raises PluginError."""
        assert task.spec.sampler is not None
        name, groups = task.spec.name, self.rows.first[self.rows.at(window)]
        starts = np.flatnonzero(np.diff(groups, prepend=-1)) if whole else np.arange(len(window))
        sizes = np.diff(starts, append=len(window))
        if whole:
            count = min(max(1, count // int(sizes.max())), room // int(sizes.max()))
        at = self.rows.at(window[starts])
        measures = np.empty(0)
        if task.sampling.measure:
            measures = (
                np.add.reduceat(self.rows.measures[task.sampling.measure][self.rows.at(window)], starts) / sizes
            )
        rows = Candidates(window[starts], groups[starts], measures, self.rows.priority[at], task.given)
        for array in (rows.ids, rows.groups, rows.measures, rows.priorities):
            array.flags.writeable = False
        what = f"sampler {task.spec.sampler.name!r} of task {name!r}"
        try:
            if name not in self._samplers:
                self._samplers[name] = self.make_sampler(task.spec.sampler)
            positions = np.asarray(self._samplers[name].choose(rows, count) if count else [])
        except Exception as error:
            raise PluginError(f"{what} failed: {type(error).__name__}: {error}") from error
        wrong = _wrong(positions, len(rows), count)
        if wrong:
            raise PluginError(f"{what} chose {wrong}")
        chosen = positions.astype(np.int64)
        lengths = sizes[chosen]
        skips = np.repeat(starts[chosen] - np.cumsum(lengths) + lengths, lengths)
        return pack_ids(window[skips + np.arange(int(lengths.sum()))])


def _wrong(positions: np.ndarray[tuple[int, ...], np.dtype[np.generic]], there: int, count: int) -> str:
    """What is wrong with what a sampler returned; "" when nothing is."""
    if positions.ndim != 1 or (positions.dtype.kind not in "iu" and len(positions)):
        return f"{positions.dtype} of shape {positions.shape}, not positions"
    if len(positions) > count:
        return f"{len(positions)} entries where {count} were asked for"
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < there:
        return f"positions {positions.min()} to {positions.max()} of {there} entries"
    if len(np.unique(positions)) != len(positions):
        return "an entry twice"
    return ""
