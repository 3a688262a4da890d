"""LeaseRenewer: renew short leases while their work makes progress.

Leases are short so that other workers soon get the rows of a frozen one.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ..errors import AsyncFlowError, LeaseLost
from ..ledger import commands as cmd
from .connection import BlockingPort, Connection
from .coroutines import run_blocking

if TYPE_CHECKING:
    from .batches import BatchVerbs
    from .leased_steps import StepVerbs

_PARTS = 3
"""A lease is renewed after this fraction (1/3) of its time, so two renewals may be missed."""
_MOST = 1000
"""Ended leases are forgotten once this many leases are known."""


class LeaseRenewer:
    """Renews every lease of a connection, in its own thread, until closed or the server is gone.

    It stops renewing if nothing was leased and no row was completed for ``patience_s`` seconds: the
    work hangs, and its leases expire like those of a dead process. A later request for them raises
    LeaseLost.
    """

    def __init__(self, connection: Connection, patience_s: float) -> None:
        self._port, self._patience_s = BlockingPort(connection), patience_s
        self._held: dict[tuple[int, int], weakref.ref[BatchVerbs | StepVerbs]] = {}
        self._left: dict[tuple[int, int], int] = {}
        self._progress_at = time.monotonic()  # last progress that was seen
        self._changed = threading.Condition()
        self._closed = False
        self._wake_at = math.inf
        """Time of the next check. A lease due later need not wake the thread."""
        connection.on_lease = self._leased
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

    def _leased(self, lease: BatchVerbs | StepVerbs) -> None:
        with self._changed:
            self._held[lease.token, lease.rank] = weakref.ref(lease)
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
                        self._held.pop((token, rank), None)
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
                    lease._since = now
                if now - self._progress_at < self._patience_s:
                    return [(lease.token, lease.rank) for lease in due]
            del held, due, lease

    def _update(self) -> list[BatchVerbs | StepVerbs]:
        """Return the leases still held. Fewer rows left than before count as progress."""
        alive = {key: lease for key, ref in self._held.items() if (lease := ref()) is not None and lease.left > 0}
        left = {key: lease.left for key, lease in alive.items()}
        if any(rows < self._left.get(key, rows) for key, rows in left.items()) or self._left.keys() - left.keys():
            self._progress_at = time.monotonic()
        self._held, self._left = {key: self._held[key] for key in alive}, left
        return list(alive.values())
