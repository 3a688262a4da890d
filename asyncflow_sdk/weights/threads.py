"""Run blocking calls beside an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_in_thread(name: str, function: Callable[[], T]) -> asyncio.Future[T]:
    """Run ``function`` in a new daemon thread, and return a future of its result.

    The default executor would delay the end of the process until the call returns.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def work() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = function(), None
        except BaseException as error:
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(resolve, *outcome)

    threading.Thread(target=work, name=f"asyncflow-{name}", daemon=True).start()
    return future
