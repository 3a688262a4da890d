"""A queue that is served while somebody holds two of its three rows."""

from children import hear, say

import asyncflow_sdk as af


def serve_held_rows(directory: str) -> None:
    """Serve rows that somebody holds, until told to end."""
    with af.serve(directory, name="driver") as run:
        run.queue.declare("work", needs=["x"])
        run.queue.put({"x": [1.0, 2.0, 3.0]})
        held = run.queue.get("work", 2)
        say(held.rows)
        hear()
