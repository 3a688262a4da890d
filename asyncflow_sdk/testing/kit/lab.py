"""Lab: holds the plugin under check; PlainLab holds plugins without a model."""

from __future__ import annotations

import abc
import contextlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .threads import EngineThread


class Lab(abc.ABC):
    """Holds the plugin under check, of one kind; for one thread.

    ``make``: the factory, called with ``options``. ``limit_s``: the limit of each wait (seconds).
    ``seed``: the seed of randomised checks; None: a fixed one. ``ever_made``: True once there was an
    engine. ``waits``: called before each wait for the engine, with its limit in seconds.
    """

    def __init__(self, make: Callable[..., Any], options: Mapping[str, Any], limit_s: float) -> None:
        self.make, self.options, self.limit_s = make, dict(options), limit_s
        self.seed: int | None = None
        self.ever_made = False
        self.waits: Callable[[float], Any] = lambda _: None

    @abc.abstractmethod
    def ask(self, body: Callable[[Any], Any], what: str) -> str | None:
        """Run a check; return its remark. Raises the error of the check, CheckFailed after a timeout."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything. Idempotent."""

    def renew(self) -> None:
        """Drop the engine after a failure, since its state is unknown; the next check gets a new one."""
        with contextlib.suppress(Exception):
            self.close()


class PlainLab(Lab):
    """Makes the plugin anew in each check. ``name``: the adapter's name."""

    def __init__(self, name: str, make: Callable[..., Any], options: Mapping[str, Any], *, limit_s: float) -> None:
        super().__init__(make, options, limit_s)
        self.name, self.ever_made = name, True
        self._open = contextlib.ExitStack()

    def made(self) -> Any:
        """Return a new plugin, with the options."""
        return self.make(**self.options)

    def directory(self) -> Path:
        """Return an empty directory, removed after the check."""
        return Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="asyncflow-check-")))

    def ask(self, body: Callable[[Any], Any], what: str) -> str | None:
        """Run a check in a thread of its own."""
        thread = EngineThread()
        self.waits(self.limit_s)
        try:
            return thread.call(lambda: body(self), self.limit_s, what)  # type: ignore[no-any-return]
        finally:
            thread.close()
            self.close()

    def close(self) -> None:
        """Remove the directories of the last check."""
        opened, self._open = self._open, contextlib.ExitStack()
        opened.close()
