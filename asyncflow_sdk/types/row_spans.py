"""The life of traced rows as spans, from put to end: the source of `asyncflow trace` and OpenTelemetry.

spans = RowSpans()
for event in events:
    for span in spans.add(event): ...          # spans ended by this event
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields

import numpy as np
import numpy.typing as npt

from .events import Event, RowsTraced
from .reports import TERMINAL

TRACED_SHARE = 0.01
"""Least share of groups traced in a recorded run."""
LIFE = "row"
"""Name of the span from put to end."""
_GOLDEN, _MOST = 0x9E3779B97F4A7C15, (1 << 64) - 1


def is_traced(group: int, share: float) -> bool:
    """Return True if a group, by the id of its first row, is in a sample of ``share`` of all groups.

    The sample depends on the ids alone, and a larger share includes a smaller one. Group 0 is in
    every sample.
    """
    # Multiples of the golden ratio, of which only the fractions count, fill 0 to 1 evenly.
    return group * _GOLDEN & _MOST <= _limit(share)


def traced_mask(groups: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.bool_]:
    """Return a mask of the groups in a sample; see ``is_traced``."""
    mask: npt.NDArray[np.bool_] = groups.view(np.uint64) * np.uint64(_GOLDEN) <= np.uint64(_limit(share))
    return mask


def _limit(share: float) -> int:
    return min(int(share * 2.0**64), _MOST)


@dataclass(frozen=True, kw_only=True)
class RowSpan:
    """Work on a row (``name``: the task), a wait for it ("wait TASK"), or its whole life (``LIFE``). Times
    are seconds of the run's clock.

    ``attempt``: counts the leases of the row by this task, and the waits for them, from 1; 0 for a life. ``worker``,
    ``version``, ``step``, ``staleness``: as in ``RowsTraced``. ``state``: of the end of a life.
    ``reason``: why work was returned, or the row's end.
    """

    row: int
    group: int
    name: str
    start_s: float
    end_s: float
    attempt: int = 0
    worker: str = ""
    version: int = -1
    step: int = -1
    staleness: int = -1
    state: str = ""
    reason: str = ""

    @property
    def attributes(self) -> dict[str, int | str]:
        """The known ones of all fields but name and times."""
        values = {name: getattr(self, name) for name in ("row", "group", *_OPTIONAL)}
        return {name: value for name, value in values.items() if value != _OPTIONAL.get(name)}


_OPTIONAL = {each.name: each.default for each in fields(RowSpan) if each.default is not MISSING}


@dataclass
class _Life:
    """A live row: tasks that wait for a worker since some time, and leases."""

    put_s: float
    waits: dict[str, float] = field(default_factory=dict)
    leased: dict[str, RowsTraced] = field(default_factory=dict)
    attempts: Counter[str] = field(default_factory=Counter)
    trained: RowsTraced | None = None


class RowSpans:
    """Turns events into spans. Rows first seen after their put, as after a resume, have a shorter life.
    Its memory grows with the number of live traced rows. ``share``: of groups; others are ignored."""

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._lives: dict[int, _Life] = {}

    def add(self, event: Event | None) -> list[RowSpan]:
        """Return the spans ended by an event, the parts of a life before it."""
        if not isinstance(event, RowsTraced) or not is_traced(event.group, self._share):
            return []
        return [span for row in event.rows for span in self._of_row(row, event)]

    def _of_row(self, row: int, event: RowsTraced) -> Iterator[RowSpan]:
        life = self._lives.setdefault(row, _Life(event.time_s))
        task = event.task
        if event.state == "ready":
            life.waits[task] = event.time_s
        elif event.state == "leased":
            yield from self._waited(row, task, life, event)
            life.leased[task] = event
            life.attempts[task] += 1
        elif event.state in ("done", "returned"):
            yield from self._worked(row, task, life, event)
            if event.state == "returned":
                life.waits[task] = event.time_s
        elif event.state in TERMINAL:
            for name in list(life.waits):
                yield from self._waited(row, name, life, event)
            for name in list(life.leased):
                yield from self._worked(row, name, life, event)
            del self._lives[row]
            step = life.trained
            yield RowSpan(
                row=row,
                group=event.group,
                name=LIFE,
                start_s=life.put_s,
                end_s=event.time_s,
                state=event.state,
                reason=event.reason,
                step=step.step if step else -1,
                staleness=step.staleness if step else -1,
            )

    def _waited(self, row: int, task: str, life: _Life, event: RowsTraced) -> Iterator[RowSpan]:
        since = life.waits.pop(task, None)
        if since is not None:
            yield RowSpan(
                row=row,
                group=event.group,
                name=f"wait {task}",
                start_s=since,
                end_s=event.time_s,
                attempt=life.attempts[task] + 1,
            )

    def _worked(self, row: int, task: str, life: _Life, event: RowsTraced) -> Iterator[RowSpan]:
        lease = life.leased.pop(task, None)
        if lease is None:
            return
        if lease.step >= 0 and event.state == "done":
            life.trained = lease
        yield RowSpan(
            row=row,
            group=event.group,
            name=task,
            start_s=lease.time_s,
            end_s=event.time_s,
            attempt=life.attempts[task],
            worker=lease.worker,
            version=lease.version,
            step=lease.step,
            staleness=lease.staleness,
            reason="" if event.state == "done" else event.reason or event.state,
        )
