"""StopSignals: Ctrl-C, SIGTERM and SIGHUP during a run in the main thread.

with StopSignals() as signals:
    work()                                      # a signal raises KeyboardInterrupt
    signals.closing(run.kill_workers)           # from here on a signal calls this instead
    close()
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType


def stop_signals() -> list[signal.Signals]:
    """Return the signals to stop a run: SIGHUP, of a closed terminal, unless it is ignored, as under nohup."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


class StopSignals(contextlib.AbstractContextManager["StopSignals"]):
    """The first signal stops the work; later ones hurry the closing. In other threads than the main
    one it does nothing, since signals arrive only there."""

    hurried = False
    """True if a signal arrived after the one that stopped the work."""

    def __init__(self) -> None:
        self._hurry: tuple[Callable[[], None], ...] | None = None
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def closing(self, *hurry: Callable[[], None]) -> None:
        """Call each of ``hurry`` in a thread of its own for every further signal, and now if one
        has arrived since the work was stopped. They must not raise."""
        self._hurry = hurry
        if self.hurried:
            self._call()

    def _received(self, number: int, frame: FrameType | None) -> None:
        # Hazard: two signals at once. The second must not raise in the handling of the first, and skip the closing.
        if self._hurry is None and not isinstance(sys.exc_info()[1], KeyboardInterrupt):
            raise KeyboardInterrupt
        self.hurried = True
        self._call()

    def _call(self) -> None:
        for each in self._hurry or ():
            # Hazard: the main thread may hold any lock here, even those of threading.Thread. This call takes none.
            _thread.start_new_thread(each, ())
