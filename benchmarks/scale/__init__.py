"""``make bench-scale``: 32 to 1,024 replicas on one server."""
