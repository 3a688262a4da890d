"""Results of user code and of the file system, recorded with each input, so that a log of inputs can be replayed.

    chosen = log.record(lambda: sampler.choose(...).tobytes())

Live, the function is called and its result is recorded with the current input. In a replay the recorded result is
returned and nothing is called. All other decisions of a ledger follow from its inputs and their times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from ...errors import AsyncFlowError, error_from_name


class NondeterminismLog:
    """Not thread-safe: the thread that owns the ledger owns it."""

    def __init__(self) -> None:
        self.keep = False
        """True if results are kept for ``take``. The default is False: nothing is journaled."""
        self._results: list[bytes] = []
        self._replay: deque[bytes] | None = None

    @property
    def active(self) -> bool:
        """True if results are recorded or replayed. If not, a caller need not compute them."""
        return self.keep or self._replay is not None

    def record(self, produce: Callable[[], bytes]) -> bytes:
        """Call ``produce`` and record its result, or return the recorded one. Nothing is recorded if it raises."""
        if self._replay is not None:
            return self._replay.popleft()
        result = produce()
        if self.keep:
            self._results.append(result)
        return result

    def record_or_raise(self, produce: Callable[[], bytes]) -> bytes:
        """The same for a function that may fail: an AsyncFlowError is recorded too, and raised again in a replay."""

        def attempt() -> bytes:
            try:
                return b"+" + produce()
            except AsyncFlowError as error:
                return b"-" + msgspec.msgpack.encode((type(error).__name__, str(error)))

        result = self.record(attempt)
        if result[:1] == b"-":
            raise error_from_name(*msgspec.msgpack.decode(result[1:], type=tuple[str, str]))
        return result[1:]

    def take(self) -> tuple[bytes, ...]:
        """Return the results recorded since the last call."""
        results, self._results = tuple(self._results), []
        return results

    def replay(self, results: tuple[bytes, ...] | None) -> bool:
        """Return these results from now on; None ends the replay. Return True if all those of the last call were used."""
        used = not self._replay
        self._replay = None if results is None else deque(results)
        return used
