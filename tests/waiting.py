"""What tests wait for: a condition that must come, a call in a thread; and processes that wait at a gate, a file."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any


def until(condition: Callable[[], Any], what: str, seconds: float = 100.0) -> None:
    """Wait for something that must come; the limit only ends a test that would hang."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.005)


def in_thread(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], Any]:
    """Start it; the returned call waits, and gives what it returned or raised."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(function(*arguments, **options))
        except BaseException as error:
            outcome.set_result(error)

    threading.Thread(target=run, daemon=True).start()
    return partial(outcome.result, 200)


def wait_at(gate: Path) -> None:
    """Wait until it is opened, and leave a file that says which process does."""
    if gate.exists():
        gate.with_name(f"{gate.name} {os.getpid()}").touch()
    while gate.exists():
        time.sleep(0.01)


def kill_at(gate: Path) -> Callable[[], Any]:
    """Close a gate, kill the first process that waits there, and open it. The returned call waits for that."""
    gate.parent.mkdir(exist_ok=True)
    gate.touch()

    def kill() -> None:
        until(lambda: list(gate.parent.glob(f"{gate.name} *")), f"a process at {gate}", seconds=250.0)
        (first, *_) = gate.parent.glob(f"{gate.name} *")
        os.kill(int(first.name.split()[-1]), signal.SIGKILL)
        gate.unlink()

    return in_thread(kill)
