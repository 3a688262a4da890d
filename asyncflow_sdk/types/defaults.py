"""Default times, in seconds. Each stands here once; a signature or an option says when it is another."""

from __future__ import annotations

LEASE_S = 600.0
"""Rows of a lease go to others after this, unless they are completed or the lease is renewed."""
WORKER_LEASE_S = 60.0
"""The same for tasks of workers, which renew their leases as long as they live."""
PRODUCER_LEASE_S = 3600.0
"""The same for a producer in the user's own loop, which renews nothing."""
STEP_LEASE_S = 86400.0
"""The same for steps trained by the user's own loop."""
CALL_S = 30.0
"""Limit of a call without waiting: the server then counts as lost."""
TIMEOUT_S = 60.0
"""Limit of a queue call's wait for rows or for room."""
NEXT_S = 3600.0
"""Limit of a loop's wait for its next batch or version."""
FETCH_S = 600.0
"""Limit of publishing, fetching or rolling back a version."""
