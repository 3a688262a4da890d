"""Signals: Ctrl-C during imports, and SIGTERM and SIGHUP as Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any


def exit_on_interrupt() -> None:
    """Make Ctrl-C exit at once with status 130, until ``raise_on_interrupt``. Ignored signals stay
    ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background command ignores it
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again: the command may have started something to stop."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: Any) -> None:
    """Exit without raising: an exception inside an import would print its traceback."""
    os.write(2, b"interrupted\n")
    os._exit(130)


@contextlib.contextmanager
def stop_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on each of ``stop_signals`` within the block. No effect outside the main thread."""
    from ..workflow.processes.signals import stop_signals  # an import for which Ctrl-C must be handled already

    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def _stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, _stop) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
