"""What tests wait for: a condition that must come, and a call in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], what: str, seconds: float = 100.0) -> None:
    """Wait for something that must come; the limit only ends a test that would hang."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.005)


def in_thread(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], Any]:
    """Start it; the returned call waits, and gives what it returned or raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function(*arguments, **options))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> Any:
        thread.join(60)
        assert outcome, "it hangs"
        return outcome[0]

    return join
