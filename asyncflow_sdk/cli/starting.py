"""Starting: what the command imports takes a moment, in which Ctrl-C ends it as it does later, with one line and status 130."""

from __future__ import annotations

import os
import signal
from typing import Any


def main() -> None:
    """Entry point of the command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a command in the background ignores it
        signal.signal(signal.SIGINT, _end)
    from .app import main as command

    command()


def let_go() -> None:
    """From here on the command itself sees to Ctrl-C: there may be something to be ended."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: Any) -> None:
    """Nothing is begun: at once, or an import that is under way would raise, and what waits for it would tell of that."""
    os.write(2, b"interrupted\n")
    os._exit(130)
