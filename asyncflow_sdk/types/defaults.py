"""Default times, in seconds. Each stands here once; a signature or an option says when it is another."""

from __future__ import annotations

LEASE_S = 600.0
"""Rows of a lease go to others after this, unless they are completed or the lease is renewed."""
WORKER_LEASE_S = 60.0
"""The same for tasks of workers, which renew their leases as long as they live."""
PRODUCER_LEASE_S = 3600.0
"""The same for a producer in a loop of one's own, which renews nothing."""
STEP_LEASE_S = 86400.0
"""The same for steps that a loop of one's own trains."""
CALL_S = 30.0
"""A call that waits for nothing may take this long before the server counts as lost."""
TIMEOUT_S = 60.0
"""A call of a queue waits this long for rows or for room."""
NEXT_S = 3600.0
"""A loop waits this long for its next batch or version."""
FETCH_S = 600.0
"""Publishing, fetching or rolling back a version may take this long."""
