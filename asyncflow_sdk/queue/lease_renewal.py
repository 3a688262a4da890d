"""LeaseRenewer: renew short leases while their work makes progress, or their columns are fetched.

Leases are short so that other workers soon get the rows of a frozen one. A slow link is no fault of
the rows: it must not cost them an attempt.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from typing import TYPE_CHECKING, TypeAlias

from ..errors import AsyncFlowError, LeaseLost
from ..ledger import commands as cmd
from .connection import BlockingPort, Connection
from .coroutines import run_blocking

if TYPE_CHECKING:
    from .batches import BatchVerbs
    from .leased_steps import StepVerbs

Lease: TypeAlias = "BatchVerbs | StepVerbs | UnreadLease"
_Key: TypeAlias = tuple[int, int, bool]
_PARTS = 3
"""A lease is renewed after this fraction (1/3) of its time, so two renewals may be missed."""
_MOST = 1000
"""Ended leases are forgotten once this many leases are known."""


class UnreadLease:
    """A lease with columns that are fetched from another host. It is renewed while it is referenced."""

    left = 1

    def __init__(self, lease: cmd.Leased) -> None:
        self.token, self.rank, self.lease_s, self._since = lease.token, lease.rank, lease.lease_s, time.monotonic()
        self.lost = False

    def lose(self) -> None:
        """Note that the server says that it is lost."""
        self.lost = True

    def _renewed(self, now: float) -> None:
        self._since = now


class LeaseRenewer:
    """Renews every lease of a connection, in its own thread, until closed or the server is gone. With
    ``unread``, only those with columns that are fetched.

    It stops renewing if nothing was leased and no row was completed for ``patience_s`` seconds: the
    work hangs, and its leases expire like those of a dead process. A later request for them raises
    LeaseLost.
    """

    def __init__(self, connection: Connection, patience_s: float = math.inf, *, unread: bool = False) -> None:
        self._port, self._patience_s = BlockingPort(connection), patience_s
        self._held: dict[_Key, weakref.ref[Lease]] = {}
        self._left: dict[_Key, int] = {}
        self._progress_at = time.monotonic()  # last progress that was seen
        self._changed = threading.Condition()
        self._closed = False
        self._wake_at = math.inf
        """Time of the next check. A lease due later need not wake the thread."""
        connection.renew_by(self, None if unread else self.add)
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
        with self._changed:
            self._held[lease.token, lease.rank, isinstance(lease, UnreadLease)] = weakref.ref(lease)
            self._progress_at = time.monotonic()
            if lease._since + lease.lease_s / _PARTS < self._wake_at or len(self._held) > _MOST:
                self._changed.notify()

    def _run(self) -> None:
        while not self._closed:
            for token, rank in self._due():
                try:
                    run_blocking(self._port.send(cmd.Renew(token=token, rank=rank)))
                except LeaseLost:
                    with self._changed:
                        self._held.pop((token, rank, False), None)
                        reading = self._held.pop((token, rank, True), None)
                    if reading is not None and isinstance(lease := reading(), UnreadLease):
                        lease.lose()
                except AsyncFlowError:
                    if self._port.connection.wire.closed or self._port.connection.wire.server_closed:
                        return

    def _due(self) -> list[tuple[int, int]]:
        """Wait for leases due for renewal, and mark them renewed. Return none once this is closed."""
        while True:
            with self._changed:
                if self._closed:
                    return []
                held = self._update()
                now = time.monotonic()
                first = min((lease._since + lease.lease_s / _PARTS for lease in held), default=None)
                if first is None or first > now:
                    del held
                    self._wake_at = math.inf if first is None else first
                    self._changed.wait(None if first is None else first - now)
                    continue
                due = [lease for lease in held if lease._since + lease.lease_s / _PARTS <= now]
                for lease in due:
                    lease._renewed(now)
                if now - self._progress_at < self._patience_s:
                    return [(lease.token, lease.rank) for lease in due]
            del held, due, lease

    def _update(self) -> list[Lease]:
        """Return the leases still held. Fewer rows left than before count as progress."""
        alive = {key: lease for key, ref in self._held.items() if (lease := ref()) is not None and lease.left > 0}
        left = {key: lease.left for key, lease in alive.items()}
        if any(rows < self._left.get(key, rows) for key, rows in left.items()) or self._left.keys() - left.keys():
            self._progress_at = time.monotonic()
        self._held, self._left = {key: self._held[key] for key in alive}, left
        return list(alive.values())
