"""Samplers: which of the ready rows a task gets next.

    class LongestFirst(af.Sampler):                          # a user's own
        may_starve = True

        def __init__(self, column: str) -> None:
            self.measure = column                            # its lengths (or numbers) come with the candidates

        def choose(self, rows: af.Candidates, count: int) -> npt.ArrayLike:
            return np.argsort(-rows.measures, kind="stable")[:count]

    queue.declare("train", needs=["response_ids"], sampler=("longest_first", {"column": "response_ids"}))

It is registered as an adapter of kind "sampler" and checked with ``asyncflow_sdk.testing.check_sampler``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Candidates:
    """Ready rows, the highest priority first and within one the oldest; one entry a row, or one a group where the
    task takes whole groups.

    ``ids``, ``groups``: int64 (n,), of the entry's first row, and the first row of its group. ``measures``: float64
    (n,), of a group the mean of its rows; NaN where unknown, empty for a sampler without ``measure``.
    ``priorities``: int32 (n,). ``turn``: how many leases the task has given. Read-only.
    """

    ids: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    measures: npt.NDArray[np.float64]
    priorities: npt.NDArray[np.int32]
    turn: int = 0

    def __len__(self) -> int:
        return len(self.ids)


class Sampler:
    """Chooses rows for a task. One object serves one task; it is made in the queue's server, from plain options.

    ``measure``: the column it measures: a number a row, its length where it is ragged, text (UTF-8 bytes) or bytes,
    its value where it is one number. The task must need that column. ``window``: so many of the first ready rows it
    sees at most (never fewer than are asked for). ``whole_groups``: the task gets whole groups only, as they become
    complete. ``balanced``: the shards of a team are balanced by the measure. ``may_starve``: rows may wait for ever
    while better ones come.
    """

    measure: str = ""
    window: int = 1024
    whole_groups: bool = False
    balanced: bool = False
    may_starve: bool = False

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        """Positions of at most ``count`` entries of ``rows``, in the order they are to be given; none: not yet.

        A function of its arguments and the options alone: no clock, no random state, nothing kept from call to
        call (``rows.turn`` can seed). Called in the server's thread, so its cost is everybody's wait. What it raises
        fails the request that needed it, as PluginError, and no row is lost. By default the first ones.
        """
        return np.arange(min(count, len(rows)))
