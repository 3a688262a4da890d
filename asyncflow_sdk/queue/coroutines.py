"""Run coroutines without an event loop, and wait for events with a timeout.

Each verb is written once, as a coroutine. Over a blocking port it never suspends: a plain call.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def run_blocking(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that never suspends, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    coroutine.close()
    raise AssertionError("a blocking port must not suspend")


def sync(
    verb: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], promised: Callable[..., Any]
) -> Callable[Concatenate[Any, P], R]:
    """Return the blocking form of an async method, with the name and docstring of ``promised``."""

    @functools.wraps(promised, updated=())  # __dict__ marks it as abstract
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return run_blocking(verb(self, *args, **kwargs))

    return call  # type: ignore[return-value]  # wraps() names another function


async def wait_for_event(event: asyncio.Event, timeout_s: float | None = None) -> bool:
    """Wait until ``event`` is set, or for ``timeout_s`` seconds. Return True if it is set.

    Unlike ``asyncio.wait_for`` before Python 3.12, it never swallows a cancellation that arrives in
    the same turn of the loop as the event.
    """
    if event.is_set():
        return True
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=timeout_s)
    finally:
        waiting.cancel()
    return event.is_set()
