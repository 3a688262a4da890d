"""Results of user code and of the file system, recorded with each input for replay.

    chosen = log.record(lambda: sampler.choose(...).tobytes())

Live, the function is called and its result is recorded with the current input. A replay returns the
recorded result and calls nothing. All other decisions of a ledger follow from its inputs and times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from ...errors import AsyncFlowError, error_from_name


class NondeterminismLog:
    """Owned by the ledger's thread. ``keep``: True if results are kept for ``take``."""

    def __init__(self) -> None:
        self.keep = False
        self._results: list[bytes] = []
        self._replay: deque[bytes] | None = None

    @property
    def active(self) -> bool:
        """True if results are recorded or replayed. Otherwise a caller need not compute them."""
        return self.keep or self._replay is not None

    def record(self, produce: Callable[[], bytes]) -> bytes:
        """Call ``produce`` and record its result, but no error; or return the recorded one."""
        if self._replay is not None:
            return self._replay.popleft()
        result = produce()
        if self.keep:
            self._results.append(result)
        return result

    def record_or_raise(self, produce: Callable[[], bytes]) -> bytes:
        """Like ``record``, but an AsyncFlowError is recorded too, and raised again in a replay."""

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
        """Return these results from now on; None ends the replay. True if all before were used."""
        used = not self._replay
        self._replay = None if results is None else deque(results)
        return used
