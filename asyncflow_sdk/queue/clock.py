"""Ledger seconds: the monotonic clock of this host while a run is served; downtime does not count."""

from __future__ import annotations

import time

import msgspec

from ..types import Event


class Clock:
    """``fixed``: the time of a record that is being replayed; None when live."""

    def __init__(self) -> None:
        self._offset = 0.0
        self.fixed: float | None = None

    def __call__(self) -> float:
        return time.monotonic() + self._offset if self.fixed is None else self.fixed

    def resume(self, now: float) -> None:
        """Go on from here."""
        self.fixed = None
        self._offset = now - time.monotonic()

    def told(self, event: Event) -> Event:
        """An event of the ledger with the host's time, which all events have."""
        if not self._offset:
            return event
        told: Event = msgspec.structs.replace(event, time_s=event.time_s - self._offset)
        return told
