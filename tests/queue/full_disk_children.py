"""The server process of tests about full disks."""

from __future__ import annotations

from children import hear, say

import asyncflow_sdk as af


def serve(path: str, durability: str) -> None:
    """Serve a run directory until it is killed; say what was found there."""
    run = af.serve(path, durability=durability)
    found = run.recovered
    say(
        {"rows": 0, "lost": 0, "full": "", "differing": 0, "told": ""}
        if found is None
        else {
            "rows": found.rows, "lost": found.lost, "full": found.full, "differing": found.differing, "told": str(found),
        }
    )  # fmt: skip
    hear()
