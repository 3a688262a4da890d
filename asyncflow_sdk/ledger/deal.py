"""Deal the rows of a lease to the shards of a rank group: equal row counts and nearly equal weights.

N-way number partitioning with equal counts: the largest differencing method of Karmarkar and Karp (1982) in its
balanced form (Michiels, Korst, Aarts and van Leeuwen, 2003). It is weak where few rows outweigh all others, so pairs
of rows are then swapped between the heaviest and a lighter shard. O(n log n): milliseconds for 1000s of rows."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .commands import Ids
from .state.rows import Rows
from .state.sessions import DealtPart
from .state.tasks import Task

Weights = npt.NDArray[np.float64]
HEAVIEST = 1e200
SWAPS = 8  # most swaps for each shard
TRIED = 8  # lighter shards tried for each swap


def balance(weights: Weights, shards: int) -> npt.NDArray[np.int64]:
    """Return the shard of each row, 0 to ``shards - 1``: row counts differ by at most 1, sums of weights by as little
    as found. Deterministic on all platforms. Weights below 0 and not finite count as 0."""
    clean = _clean(weights)
    if shards < 2 or len(clean) <= shards or (clean == clean[0]).all():
        return split(len(clean), shards)
    order = np.argsort(-clean, kind="stable")
    shard = np.empty(len(clean), np.int64)
    shard[order] = _differencing(clean[order].tolist(), shards)
    return _renumber(_improve(clean, shard, shards), shards)


def split(rows: int, shards: int) -> npt.NDArray[np.int64]:
    """Return shards of consecutive rows, with lengths that differ by at most 1."""
    return np.arange(rows, dtype=np.int64) * shards // max(rows, 1) if rows >= shards else np.arange(rows)


def _clean(weights: Weights) -> Weights:
    return np.where(np.isfinite(weights) & (weights > 0), np.minimum(weights, HEAVIEST), 0.0)


def _renumber(shard: npt.NDArray[np.int64], shards: int) -> npt.NDArray[np.int64]:
    """Number shards in order of their first row; empty ones last."""
    first = np.full(shards, len(shard))
    np.minimum.at(first, shard, np.arange(len(shard)))
    names = np.empty(shards, np.int64)
    names[np.argsort(first, kind="stable")] = np.arange(shards)
    return names[shard]


def _differencing(weights: Sequence[float], shards: int) -> npt.NDArray[np.int64]:
    """Start with runs of ``shards`` rows in order of weight, one row a shard. Merge the two partial solutions with
    the largest spread, heaviest set with lightest, until one is left. ``weights`` must not increase. A set of rows is
    a node of a binary tree, so a merge is O(1)."""
    n = len(weights)
    full = -(-n // shards) * shards
    padded = [*weights, *[0.0] * (full - n)]
    left, right = [-1] * full, [-1] * full  # children of a node; a row has none
    heap: list[tuple[float, int, list[tuple[float, int]]]] = []
    for start in range(0, full, shards):
        sets = [(padded[i], i) for i in range(start, start + shards)]
        heap.append((sets[-1][0] - sets[0][0], start, sets))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, turn, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = []
        for (heavy, a), (light, b) in zip(first, reversed(second), strict=True):
            joined.append((heavy + light, len(left)))
            left.append(a)
            right.append(b)
        joined.sort(reverse=True)
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], turn, joined))
    shard = np.full(len(left), -1, np.int64)
    for number, (_, node) in enumerate(heap[0][2]):
        shard[node] = number
    for node in range(len(left) - 1, full - 1, -1):  # parents come after their children
        shard[left[node]] = shard[right[node]] = shard[node]
    return shard[:n]


def _improve(weights: Weights, shard: npt.NDArray[np.int64], shards: int) -> npt.NDArray[np.int64]:
    """Swap rows of the heaviest shard with lighter ones, each as near as can be to half the gap."""
    sums = np.bincount(shard, weights, shards)
    order = np.lexsort((weights, shard))
    members = np.split(order, np.cumsum(np.bincount(shard, minlength=shards))[:-1])  # lightest first
    for _ in range(SWAPS * shards):
        heavy = int(sums.argmax())
        for light in np.argsort(sums, kind="stable")[:TRIED].tolist():
            found = _swap(weights, members[heavy], members[light], float(sums[heavy] - sums[light]))
            if found is not None:
                a, b, moved = found
                members[heavy][a], members[light][b] = members[light][b], members[heavy][a]
                for number in (heavy, light):
                    rows = members[number]
                    members[number] = rows[np.argsort(weights[rows], kind="stable")]
                sums[heavy] -= moved
                sums[light] += moved
                break
        else:
            break
    out = np.empty_like(shard)
    for number, rows in enumerate(members):
        out[rows] = number
    return out


def _swap(weights: Weights, heavy: Ids, light: Ids, gap: float) -> tuple[int, int, float] | None:
    """Return two rows to swap and the weight this moves; None if no swap helps."""
    if not (gap > 0 and len(heavy) and len(light)):
        return None
    have, other = weights[heavy], weights[light]
    at = np.searchsorted(other, have - gap / 2)
    candidates = np.stack([np.maximum(at - 1, 0), np.minimum(at, len(light) - 1)])
    moved = have - other[candidates]
    side, a = np.unravel_index(int(np.abs(moved - gap / 2).argmin()), moved.shape)
    best = float(moved[side, a])
    return (int(a), int(candidates[side, a]), best) if 0 < best < gap else None


def deal(rows: Rows, task: Task, ids: Ids, shards: int, *, whole_groups: bool, first: int = 0) -> DealtPart:
    """Deal rows to shards: by weight if the task's sampler balances, else in equal numbers. ``whole_groups``: keep
    groups together; shards may differ in size. ``first``: the first shard to fill if groups are fewer."""
    if shards == 1:
        return DealtPart(ids, [0, ids.size])
    if whole_groups:
        _, group = np.unique(rows.first[rows.at(ids)], return_inverse=True)
        weights = np.bincount(group, np.nan_to_num(_weights(rows, task, ids))).astype(np.float64)
        of_group = balance(weights, shards)
        shard = ((of_group + first) % shards if len(weights) < shards else of_group)[group]
    elif task.sampling.balanced and task.sampling.measure:
        shard = balance(_weights(rows, task, ids), shards)
    else:
        shard = split(len(ids), shards)
    order = np.argsort(shard, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(shard, minlength=shards))])
    return DealtPart(ids[order], bounds.tolist())


def imbalance_of(rows: Rows, task: Task, part: DealtPart) -> float:
    """Return max / mean - 1 of the shards' weights; 0 is perfect."""
    shards = len(part.bounds) - 1
    shard = np.repeat(np.arange(shards), np.diff(part.bounds))
    sums = np.bincount(shard, _clean(_weights(rows, task, part.ids)), shards)
    mean = float(sums.mean())
    return float(sums.max()) / mean - 1.0 if mean > 0 else 0.0


def _weights(rows: Rows, task: Task, ids: Ids) -> Weights:
    if not (task.sampling.balanced and task.sampling.measure):
        return np.ones(len(ids))
    measures: Weights = rows.measures[task.sampling.measure][rows.at(ids)]
    return measures
