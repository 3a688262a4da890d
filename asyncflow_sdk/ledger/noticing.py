"""Noticing: how old rows are when they are trained, and how long the responses are of those that end, and how."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..types import events as ev
from ..types.lengths import bins_of
from ..types.spans import steps_of
from .commands import TERMINAL, Ids, StepAges, pack_ids
from .rows import LEASED, NONE
from .state import State


class Noticing(State):
    """Notes what no decision depends on."""

    def _note_ages(self, at: Ids, step: int) -> bytes:
        """Rows at these places are leased for ``step``. Returns what was current when each was completed."""
        completed = self.rows.current[at]
        known = (completed != NONE) & (self.rows.version[at] != NONE)
        begun = steps_of(self.rows.version[at][known], self.lineage.told)
        done = np.clip(steps_of(completed[known], self.lineage.told), begun, np.maximum(begun, step))
        flying, queued = done - begun, step - done
        if len(flying):
            means, most = (flying.mean(), queued.mean()), (flying.max(), queued.max())
            self.ages = StepAges(
                step=step, in_flight_mean=float(means[0]), in_queue_mean=float(means[1]),
                in_flight_max=int(most[0]), in_queue_max=int(most[1]),
            )  # fmt: skip
        return pack_ids(completed)

    def _note_lengths(self, ids: Ids, lengths: bytes, pick: Any) -> bool:
        """Rows got their responses. What is not one length for each is left out: nothing depends on it."""
        if len(lengths) % 4:
            return False
        values = np.frombuffer(lengths, "<i4")
        try:
            values = values[pick]
        except IndexError:
            return False
        if len(values) != len(ids) or (len(values) and int(values.min()) < 0):
            return False
        self.rows.length[self.rows.at(ids)] = values
        self.lengths_known = True
        return True

    def _note_pace(self, ids: Ids, since: float) -> None:
        """These rows, generated since then, have just been given their lengths."""
        self.pace[0] += int(self.rows.length[self.rows.at(ids)].sum())
        self.pace[1] += len(ids) * (self._now - since)

    def _ended_event(self, ids: Ids, state: int, reason: str) -> ev.RowsEnded:
        """What is said of rows that end now. Their leases still hold them."""
        rows = self.rows
        if not self.lengths_known:
            return ev.RowsEnded(time_s=self._now, state=TERMINAL[state - 1], count=len(ids), reason=reason)
        at = rows.at(ids)
        whole = rows.length[at].astype(np.int64)
        whole = whole[whole != NONE]
        begun = self._begun(at)
        return ev.RowsEnded(
            time_s=self._now, state=TERMINAL[state - 1], count=len(ids), reason=reason, lengths=bins_of(whole),
            tokens=int(whole.sum()), squares=int((whole * whole).sum()), unfinished=bins_of(begun),
            unfinished_tokens=int(begun.sum()), unfinished_squares=int((begun * begun).sum()),
        )  # fmt: skip

    def _begun(self, at: Ids) -> Ids:
        """Of rows that are being generated, about how many tokens they have by now, at the pace of those that were finished."""
        parts: list[Ids] = [np.empty(0, np.int64)]
        tokens, seconds = self.pace
        if not tokens or not seconds:
            return parts[0]
        for name, task in self.tasks.items():
            if not task.spec.admits or not task.counts[LEASED]:
                continue
            leased = self.rows.task(name, "token")[at][self.rows.task(name, "state")[at] == LEASED]
            for token, count in zip(*np.unique(leased, return_counts=True), strict=True):
                if (lease := self.leases.get(int(token))) is not None:
                    so_far = int((self._now - lease.since) * tokens / seconds)
                    parts.append(np.full(int(count), so_far, np.int64))
        return np.concatenate(parts)
