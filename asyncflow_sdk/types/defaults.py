"""Defaults of settings, each in one place. Times are in seconds."""

from __future__ import annotations

LEASE_S = 600.0  # rows of a lease go to others after this, unless they are completed or the lease is renewed
WORKER_LEASE_S = 60.0  # the same for tasks of workers, which renew their leases as long as they live
PRODUCER_LEASE_S = 3600.0  # the same for a producer in the user's own loop, which renews nothing
STEP_LEASE_S = 86400.0  # the same for steps trained by the user's own loop
CALL_S = 30.0  # limit of a call without waiting: the server then counts as lost
LISTENER_S = 600.0  # limit of a checkpoint's wait for listeners that read the rows of its steps
HOME_SILENCE_S = 60.0  # a home without a storage unit is given up after this, with its payload
TIMEOUT_S = 60.0  # limit of a queue call's wait for rows or for room
NEXT_S = 3600.0  # limit of a loop's wait for its next batch or version
FETCH_S = 600.0  # limit of publishing, fetching or rolling back a version
AGENT_S = 600.0  # a conversation of an agent may take this long
STAGE_CALL_S = 600.0  # a call of a stage's function may take this long
STALL_S = 3600.0  # a workflow ends if no step was trained for this long
SERVICE_CALL_S = 600.0  # limit of each call of ``af.Trainer``
FEED_S = 86400.0  # limit of the waits of feeders, rollout workers and stages: steps may train for hours
CHECK_S = 100.0  # limit of one check of the conformance kit
WAIT_S = 86400.0  # ``Run.wait`` waits this long for a worker
LEAVE_S = 60.0  # a worker or client that leaves a run may take this long to finish its rows
MAX_ATTEMPTS = 3  # leases that a row may lose before its group fails
MAX_FAILED = 0.1  # largest share of the groups ended last to fail before a workflow ends
GROUP_SIZE = 8  # responses to each prompt
CONCURRENCY = 8  # calls of a stage's coroutine function at a time
MAX_STALENESS = 1  # staleness of a trained token, in versions
CAPACITY_ROWS = 100_000  # live rows of a served run
KEEP_VERSIONS = 2  # newest versions available for fetches and rollbacks
KEEP_CHECKPOINTS = 2  # newest checkpoints kept
CHECKPOINT_STEPS = 50  # steps between two checkpoints
FEED_GROUPS = 64  # groups of one put of a feeder
