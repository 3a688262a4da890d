"""Sampler: chooses the ready rows to be leased next by a task. Register one of your own as an adapter of kind
"sampler" and check it with ``asyncflow_sdk.testing.check_sampler``; the guide of the queue has an example.

    queue.declare("train", needs=["response_ids"], sampler=("longest_first", {"column": "response_ids"}))
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Candidates:
    """Ready rows, by descending priority, then oldest first; one entry a row, or one a group if the task leases whole
    groups. Read-only. ``ids``, ``groups``: int64 (n,), the entry's first row, and the first row of its group.
    ``measures``: float64 (n,), for a group the mean of its rows; NaN if unknown, empty for a sampler without
    ``measure``. ``priorities``: int32 (n,). ``turn``: number of leases granted by the task."""

    ids: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    measures: npt.NDArray[np.float64]
    priorities: npt.NDArray[np.int32]
    turn: int = 0

    def __len__(self) -> int:
        return len(self.ids)


class Sampler:
    """Chooses rows for a task. One object serves one task; the queue's server makes it from plain options.
    ``measure``: column measured by the sampler: one number a row, the length of a ragged, text (UTF-8 bytes) or bytes
    column, or the value of a column of one number. The task must need this column. ``window``: maximum number of
    candidates, from the front of the ready rows, but at least the requested count. ``whole_groups``: the task leases
    complete groups only. ``balanced``: balance the shards of a rank group by the measure. ``may_starve``: rows may
    wait for ever while better ones arrive."""

    measure: str = ""
    window: int = 1024
    whole_groups: bool = False
    balanced: bool = False
    may_starve: bool = False

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        """Return positions of at most ``count`` entries of ``rows``, in lease order; none: wait. Must depend on its
        arguments and the options only: no clock, no random state, no state between calls (seed with ``rows.turn``).
        Runs in the server's thread and delays all clients. An exception fails the request with PluginError; no row is
        lost. Default: the first entries."""
        return np.arange(min(count, len(rows)))
