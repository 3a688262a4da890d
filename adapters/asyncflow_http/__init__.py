"""Common parts of rollout engines: HTTP client and server, model folder, limits of requests,
cancellation of loads."""
