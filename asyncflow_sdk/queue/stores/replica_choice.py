"""Choose one place of each block of ``BlockSlices`` with replicas. Readers of memory take slices
without replicas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...types.blocks import BlockSlices
from .homes import SERVER_MEMORY, home_of

_RUNS = -8  # position in ``BlockSlices.blocks`` of the last row's number of runs


def has_replicas(slices: BlockSlices) -> bool:
    """True if a block of the slices may have two places."""
    return slices.blocks[_RUNS:] == bytes(8)


def choose(slices: BlockSlices, cost: Callable[[str], int]) -> BlockSlices:
    """Return the slices with one place for each block: that with the lower cost of its segment, else
    the first."""
    if not has_replicas(slices):
        return slices
    first, replica = np.frombuffer(slices.blocks, np.int64).reshape(2, -1, 6)
    costs = np.array([*map(cost, slices.segments), np.iinfo(np.int64).max])  # the last is that of no replica
    better = costs[replica[:, 0]] < costs[first[:, 0]]
    blocks = first.copy()
    blocks[better, :3] = replica[better, :3]
    numbers, blocks[:, 0] = np.unique(blocks[:, 0], return_inverse=True)
    segments = tuple(slices.segments[number] for number in numbers.tolist())
    return BlockSlices(slices.columns, slices.fields, segments, blocks.tobytes(), slices.entries, slices.counts)


def choose_server_memory(slices: BlockSlices) -> BlockSlices:
    """Return the slices with the places in the server's memory, where there is one."""
    return choose(slices, lambda segment: int(home_of(segment) != SERVER_MEMORY))
