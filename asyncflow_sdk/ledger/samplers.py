"""Samplers choose the ready rows for a lease. They are user code: their choices are recorded, so a replay does not
call them. Without one, a task leases the first ready rows (fifo)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import AsyncFlowError, ConfigError, PluginError, SchemaError
from ..interfaces import Candidates, Sampler
from ..plugins import registry
from ..types.tasks import PolicySpec, SamplerSpec, TaskSpec
from .commands import Ids, SamplerTraits, pack_ids, unpack_ids
from .state import LedgerState
from .state.rows import MAX_NUMBER
from .state.tasks import NO_ROWS, ReadyQueue, Task

Made = TypeVar("Made")
Factories: TypeAlias = Mapping[str, Callable[..., Any]] | None
"""Factories by name, tried before plugins."""


class Fifo(Sampler):
    """The first ready rows, like a task without a sampler."""


class WholeGroups(Sampler):
    """Complete groups, in order of completion: at least one, and as many as fit into the count."""

    whole_groups = True


class Shuffled(Sampler):
    """Rows in a random order, determined by ``seed`` and their ids: it does not depend on the client, the count, or
    restarts. It shuffles within each ``window`` of consecutively put rows, so a row waits for at most one window."""

    def __init__(self, seed: int = 0, window: int = 1024, whole_groups: bool = False) -> None:
        if window < 1:
            raise ConfigError(f"a window has at least 1 row, not {window}")
        self.seed, self.window, self.whole_groups = seed, window, whole_groups

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        """Return positions in shuffled order, highest priority first."""
        order = np.lexsort((_mix(rows.ids, self.seed), rows.ids // self.window, -rows.priorities))
        return order[:count]


class ByColumn(Sampler):
    """Rows by a column's value or length, largest first or smallest. Low ranks may starve."""

    may_starve = True

    def __init__(self, column: str, smallest_first: bool = False, window: int = 1024, whole_groups: bool = False):
        self.measure, self.smallest_first = column, smallest_first
        self.window, self.whole_groups = window, whole_groups

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        """Return the highest-ranked positions, highest priority first."""
        rank = rows.measures if self.smallest_first else -rows.measures
        return np.lexsort((rank, -rows.priorities))[:count]


class LengthBucketed(Sampler):
    """Rows of similar length, to reduce padding: the first row, and the rows of the window nearest to it in the
    length of ``column``, sorted by length."""

    def __init__(self, column: str, window: int = 1024, whole_groups: bool = False) -> None:
        self.measure, self.window, self.whole_groups = column, window, whole_groups

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        """Return positions of similar length, shortest first."""
        with np.errstate(invalid="ignore"):
            distance = np.abs(rows.measures - rows.measures[0])
        distance[0] = 0.0  # always taken, even NaN: no row waits for ever
        nearest = np.lexsort((distance, -rows.priorities))[:count]
        return nearest[np.argsort(rows.measures[nearest], kind="stable")]


class TokenBalanced(Sampler):
    """First come, first served. The ranks of a group get shards of equal row counts and nearly equal sums of
    ``column`` (of its lengths). ``whole_groups``: keep groups together."""

    balanced = True

    def __init__(self, column: str, whole_groups: bool = False) -> None:
        self.measure, self.whole_groups = column, whole_groups


def _mix(ids: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.uint64]:
    """Hash each id with the seed, equally on all platforms: splitmix64 (Steele et al., 2014)."""
    start = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % (1 << 64)
    with np.errstate(over="ignore"):
        x = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(start)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


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

        def describe(named: SamplerSpec = spec.sampler) -> bytes:
            made = self.make_sampler(named)
            chooses = type(made).choose is not Sampler.choose
            traits = SamplerTraits(made.measure, made.window, made.whole_groups, made.balanced, chooses)
            return msgspec.msgpack.encode(traits)

        return msgspec.msgpack.decode(self._state.context.log.record_or_raise(describe), type=SamplerTraits)

    def check(self, spec: TaskSpec, sampling: SamplerTraits) -> None:
        """Raise ConfigError for a sampler unusable in the task."""
        what = f"sampler {spec.sampler.name!r} of task {spec.name!r}" if spec.sampler else ""
        if sampling.window < 1:
            raise ConfigError(f"{what} has a window of {sampling.window} rows; it needs at least 1")
        if spec.batch_rows is not None and sampling.chooses:
            use = "a sampler that only balances shards (token_balanced) can be used there"
            raise ConfigError(f"{what} chooses rows, but the staleness rule selects the rows of a step; {use}")
        if sampling.measure and sampling.measure not in spec.needs:
            raise ConfigError(f"{what} measures column {sampling.measure!r}, not among the needs of the task")
        known = self._state.columns.specs.get(sampling.measure)
        if known is not None and not known.measurable:
            raise ConfigError(f"{what} measures column {sampling.measure!r}: {known} has no number for each row")

    def take(self, task: Task, queue: ReadyQueue, count: int, at_least: int = 0, room: int = MAX_NUMBER) -> Ids:
        """Remove ready rows from their queue for a lease; none if the sampler chooses too few. With whole groups:
        about ``count`` rows, at least one group, never more than ``room`` rows. Rows that lost a lease are taken with
        few others. Raises PluginError, SchemaError."""
        if task.sampling.chooses:
            ids = self._sampled(task, queue, count, room)
        else:
            ids = queue.take(count, room if task.whole_groups else None)
        if not len(ids):
            return NO_ROWS
        if len(ids) < at_least:
            enough = len(queue.peek_group()) > 0 and not task.sampling.chooses
            queue.push(ids, front=True)
            if enough:
                few = f"no whole groups make up {at_least} to {count} rows: {len(ids)} would be too few"
                raise SchemaError(f"{few}, one more group too many; ask for more, or for fewer at least")
            return NO_ROWS
        if self._state.dead_letters.blamed:
            if task.sampling.chooses:  # in any order: higher priorities stay first
                ids = ids[np.argsort(-self._state.rows.priority[self._state.rows.at(ids)], kind="stable")]
            if (count := task.together(ids, at_least)) < len(ids):
                queue.push(ids[count:], front=True)
                ids = ids[:count]
        return ids

    def _sampled(self, task: Task, queue: ReadyQueue, count: int, room: int) -> Ids:
        most = max(task.sampling.window, count)
        window = queue.take(most, MAX_NUMBER if task.whole_groups else None)
        if not len(window):
            return window
        chosen = NO_ROWS
        try:
            log = self._state.context.log
            chosen = unpack_ids(log.record_or_raise(lambda: self._choose(task, window, count, room)))
        finally:
            queue.push(window[~np.isin(window, chosen)] if len(chosen) else window, front=True)
        return chosen

    def _choose(self, task: Task, window: Ids, count: int, room: int) -> bytes:
        assert task.spec.sampler is not None
        rows, name, whole = self._state.rows, task.spec.name, task.whole_groups
        groups = rows.first[rows.at(window)]
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
            array.setflags(write=False)
        what = f"sampler {task.spec.sampler.name!r} of task {name!r}"
        try:
            if name not in self._samplers:
                self._samplers[name] = self.make_sampler(task.spec.sampler)
            positions = np.asarray(self._samplers[name].choose(candidates, count) if count else [])
        except Exception as error:
            raise PluginError(f"{what} failed: {type(error).__name__}: {error}") from error
        if wrong := _wrong(positions, len(candidates), count):
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


def make_sampler(spec: SamplerSpec, own: Factories = None) -> Sampler:
    """Create a sampler: from ``own``, else from the plugins. Raises PluginError, ConfigError."""
    return make("sampler", "sampler", spec, own, Sampler)


def make(
    kind: Literal["sampler", "staleness"], noun: str, spec: SamplerSpec | PolicySpec, own: Factories, of: type[Made]
) -> Made:
    """Create a ``kind`` of plugin with its options. Raises PluginError, ConfigError."""
    what, factory = f"{noun} {spec.name!r}", (own or {}).get(spec.name) or registry().get(kind, spec.name).load()
    try:
        made = factory(**spec.options)
    except AsyncFlowError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} cannot be created with {spec.options}: {type(error).__name__}: {error}") from error
    if not isinstance(made, of):
        raise PluginError(f"{what} is a {type(made).__name__}, not a {of.__name__}")
    return made
