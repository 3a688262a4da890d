"""PlainLab: plugins without a model: transports, samplers, policies, launchers, algorithms,
trackers, stores."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .check import CheckFailed


class PlainLab:
    """Call the factory ``make`` with ``options`` in each check. Nothing is kept between checks.
    ``name``: of the adapter. ``limit_s``: of each check."""

    def __init__(self, name: str, make: Callable[..., Any], options: Mapping[str, Any], *, limit_s: float) -> None:
        self.name, self.factory, self.options, self.limit_s = name, make, dict(options), limit_s
        self.seed: int | None = None
        self.ever_made = True
        self.waits: Callable[[float], Any] = lambda _: None
        self._open = contextlib.ExitStack()

    def made(self) -> Any:
        """Return a new plugin, with the options."""
        return self.factory(**self.options)

    def directory(self) -> Path:
        """Return an empty directory, removed after the check."""
        return Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="asyncflow-check-")))

    def ask(self, body: Callable[[Any], Any], what: str) -> None:
        """Run a check in a thread. Raises its error, CheckFailed after the limit."""
        ended: list[BaseException | None] = []

        def run() -> None:
            """Keep the error, or None."""
            try:
                body(self)
            except BaseException as error:
                ended.append(error)
            else:
                ended.append(None)

        thread = threading.Thread(target=run, daemon=True, name="check")
        self.waits(self.limit_s)
        thread.start()
        thread.join(self.limit_s)
        self.renew()
        if not ended:
            raise CheckFailed(f"{what} did not end within {self.limit_s:g} s")
        if ended[0] is not None:
            raise ended[0]

    def renew(self) -> None:
        """Remove the directories of the last check."""
        opened, self._open = self._open, contextlib.ExitStack()
        opened.close()

    def close(self) -> None:
        """Remove the directories."""
        self.renew()
