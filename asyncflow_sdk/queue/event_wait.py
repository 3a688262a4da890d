"""Awaiting: whether an event comes in time, by a wait whose cancellation is never lost.

``asyncio.wait_for`` before Python 3.12 swallows a cancellation that comes in the turn in which what it waits for is done.
"""

from __future__ import annotations

import asyncio


async def is_set(event: asyncio.Event, timeout_s: float | None = None) -> bool:
    """Wait until ``event`` is set, for ``timeout_s`` seconds at most. Returns whether it is."""
    if event.is_set():
        return True
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=timeout_s)
    finally:
        waiting.cancel()
    return event.is_set()
