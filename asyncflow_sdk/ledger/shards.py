"""Shards: rows of a lease are dealt to the ranks of a group."""

from __future__ import annotations

import numpy as np

from .balance import Weights, balance, imbalance, split
from .commands import Ids
from .state.grants import DealtPart
from .state.rows import Rows
from .state.tasks import Task


def deal(rows: Rows, task: Task, ids: Ids, shards: int, *, whole_groups: bool, first: int = 0) -> DealtPart:
    """Deal rows to shards: by weight if the task's sampler balances, else in equal numbers.
    ``whole_groups``: keep groups together; shards may differ in size. ``first``: the shard to begin
    with if there are fewer groups than shards."""
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
    """Return max / mean - 1 of the shards' weights."""
    shard = np.repeat(np.arange(part.shards), np.diff(part.bounds))
    return imbalance(_weights(rows, task, part.ids), shard, part.shards)


def _weights(rows: Rows, task: Task, ids: Ids) -> Weights:
    if not (task.sampling.balanced and task.sampling.measure):
        return np.ones(len(ids))
    measures: Weights = rows.measures[task.sampling.measure][rows.at(ids)]
    return measures
