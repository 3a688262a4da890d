"""Cancellation of calls whose work must end first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

_Result = TypeVar("_Result")


async def finish(work: Awaitable[_Result]) -> _Result:
    """Await ``work`` to its end, even if cancelled; then raise CancelledError. For loads: a
    cancelled caller releases the update, and the work may still be reading from it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
