"""LeaseRenewer: renew short leases while their work makes progress, or their columns are fetched.

Leases are short so that other workers soon get the rows of a frozen one. A slow link is no fault of
the rows: it must not cost them an attempt.
"""

from __future__ import annotations

import math
import threading
import time
import weakref

from ..errors import AsyncFlowError, LeaseLost
from ..ledger import commands as cmd
from .batches import Lease, UnreadLease
from .connection import BlockingPort, Connection
from .coroutines import run_blocking

_PARTS = 3
"""A lease is renewed after this fraction (1/3) of its time, so two renewals may be missed."""
_making = threading.Lock()
_MOST = 1000
"""Ended leases are forgotten once this many leases are known."""


class LeaseRenewer:
    """Renews every lease of a connection, in its own thread, until closed or the server is gone. With ``unread``,
    only those with columns that are fetched.

    It stops renewing if nothing was leased and no row was completed for ``patience_s`` seconds: the work hangs, and
    its leases expire like those of a dead process. A later request for them raises LeaseLost.
    """

    def __init__(self, connection: Connection, patience_s: float = math.inf, *, unread: bool = False) -> None:
        self._port, self._patience_s, self._unread = BlockingPort(connection), patience_s, unread
        self._held: dict[int, weakref.ref[Lease]] = {}  # by id; they are referenced only while they are looked at
        self._left: dict[int, int] = {}
        self._progress_at = time.monotonic()  # last progress that was seen
        self._changed = threading.Condition()
        self._closed = False
        self._wake_at = math.inf
        """Time of the next check. A lease due later need not wake the thread."""
        connection.renew_by(self)
        threading.Thread(target=self._run, name="renewing", daemon=True).start()

    @property
    def holds(self) -> bool:
        """True if a lease is still held and has rows left."""
        with self._changed:
            return bool(self._update())

    def close(self) -> None:
        """Renew nothing more, and end the thread. Does not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def add(self, lease: Lease) -> None:
        """Renew a lease while it is referenced and has rows left."""
        if self._unread and not isinstance(lease, UnreadLease):
            return
        with self._changed:
            self._held[id(lease)] = weakref.ref(lease)
            self._progress_at = time.monotonic()
            if _due_s(lease) < self._wake_at or len(self._held) > _MOST:
                self._changed.notify()

    def _run(self) -> None:
        while not self._closed:
            for token, rank in self._due():
                try:
                    run_blocking(self._port.send(cmd.Renew(token=token, rank=rank)))
                except LeaseLost:
                    self._lose(token, rank)
                except AsyncFlowError:
                    if self._port.connection.wire.closed or self._port.connection.wire.server_closed:
                        return

    def _lose(self, token: int, rank: int) -> None:
        with self._changed:
            for lease in self._update():
                if (lease.token, lease.rank) == (token, rank):
                    del self._held[id(lease)]
                    if isinstance(lease, UnreadLease):
                        lease.lose()

    def _due(self) -> list[tuple[int, int]]:
        """Wait for leases due for renewal, and mark them renewed. Return none once this is closed."""
        while True:
            with self._changed:
                if self._closed:
                    return []
                now = time.monotonic()
                due = self._mark_due(now)
                if due and now - self._progress_at < self._patience_s:
                    return due
                if not due:
                    self._changed.wait(None if self._wake_at == math.inf else self._wake_at - now)

    def _mark_due(self, now: float) -> list[tuple[int, int]]:
        held = self._update()
        due = [lease for lease in held if _due_s(lease) <= now]
        for lease in due:
            lease.renewed(now)
        self._wake_at = min(map(_due_s, held), default=math.inf)
        return [(lease.token, lease.rank) for lease in due]

    def _update(self) -> list[Lease]:
        """Return the leases still held. Fewer rows left than before count as progress."""
        alive = {key: lease for key, ref in self._held.items() if (lease := ref()) is not None and lease.left > 0}
        left = {key: lease.left for key, lease in alive.items()}
        if any(rows < self._left.get(key, rows) for key, rows in left.items()) or self._left.keys() - left.keys():
            self._progress_at = time.monotonic()
        self._held, self._left = {key: self._held[key] for key in alive}, left
        return list(alive.values())


def renewer_of(connection: Connection) -> LeaseRenewer:
    """Return the connection's renewer, or a new one for leases with columns that are fetched. Thread-safe."""
    with _making:
        return connection.renewer or LeaseRenewer(connection, unread=True)


def _due_s(lease: Lease) -> float:
    return lease.since + lease.lease_s / _PARTS
