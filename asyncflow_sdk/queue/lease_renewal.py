"""LeaseRenewer: a worker's leases are short, so that others soon have what a frozen one holds, and yet last for as long as its
work does, because they are renewed while it gets on."""

from __future__ import annotations

import math
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ..errors import AsyncFlowError, LeaseLost
from ..ledger import commands as cmd
from .blocking import drive
from .connection import BlockingPort, Connection

if TYPE_CHECKING:
    from .leased import Lease

_PARTS = 3
"""A lease is renewed when one of so many parts of its time is over, so that two may be missed."""
_MOST = 1000
"""So many leases may have ended before those that are over are forgotten."""


class LeaseRenewer:
    """Renews what this connection leases from now on, in a thread of its own, until this is closed or the server is gone.

    Not for ever: when in ``patience_s`` nothing was leased and no row completed, the work hangs, and its leases run out
    like those of a process that is stopped, dead, or cut off. What is sent for them later is ``LeaseLost``.
    """

    def __init__(self, connection: Connection, patience_s: float) -> None:
        self._port, self._patience_s = BlockingPort(connection), patience_s
        self._held: dict[tuple[int, int], weakref.ref[Lease]] = {}
        self._left: dict[tuple[int, int], int] = {}
        self._moved = time.monotonic()  # last progress that was seen
        self._news = threading.Condition()
        self._closed = False
        self._until = math.inf
        """When it looks again: a lease that is due later need not wake it."""
        connection.on_lease = self._leased
        threading.Thread(target=self._run, name="renewing", daemon=True).start()

    @property
    def holds(self) -> bool:
        """Whether anything that was leased is held still, and has rows left."""
        with self._news:
            return bool(self._look())

    def close(self) -> None:
        """Renew nothing more, and end the thread. Does not wait."""
        with self._news:
            self._closed = True
            self._news.notify()

    def _leased(self, lease: Lease) -> None:
        with self._news:
            self._held[lease.token, lease.rank] = weakref.ref(lease)
            self._moved = time.monotonic()
            if lease._since + lease.lease_s / _PARTS < self._until or len(self._held) > _MOST:
                self._news.notify()

    def _run(self) -> None:
        while not self._closed:
            for token, rank in self._due():
                try:
                    drive(self._port.send(cmd.Renew(token=token, rank=rank)))
                except LeaseLost:
                    with self._news:
                        self._held.pop((token, rank), None)
                except AsyncFlowError:
                    if self._port.connection.wire.closed or self._port.connection.wire.server_closed:
                        return

    def _due(self) -> list[tuple[int, int]]:
        """Wait for leases that are to be renewed now, and count them as renewed. None when this is closed."""
        while True:
            with self._news:
                if self._closed:
                    return []
                held = self._look()
                now = time.monotonic()
                first = min((lease._since + lease.lease_s / _PARTS for lease in held), default=None)
                if first is None or first > now:
                    del held
                    self._until = math.inf if first is None else first
                    self._news.wait(None if first is None else first - now)
                    continue
                due = [lease for lease in held if lease._since + lease.lease_s / _PARTS <= now]
                for lease in due:
                    lease._since = now
                if now - self._moved < self._patience_s:
                    return [(lease.token, lease.rank) for lease in due]
            del held, due, lease

    def _look(self) -> list[Lease]:
        """What is held still. Fewer rows left than before is progress."""
        alive = {key: lease for key, ref in self._held.items() if (lease := ref()) is not None and lease.left > 0}
        left = {key: lease.left for key, lease in alive.items()}
        if any(rows < self._left.get(key, rows) for key, rows in left.items()) or self._left.keys() - left.keys():
            self._moved = time.monotonic()
        self._held, self._left = {key: self._held[key] for key in alive}, left
        return list(alive.values())
