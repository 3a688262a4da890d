"""A version on its way from the trainer: copied, hashed, sent, and made current."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from ..errors import AsyncFlowError, DeadlineExceeded, WeightError
from ..interfaces import Publication
from ..types import Manifest
from ..types.defaults import FETCH_S


class TransportPublication(Publication):
    """A version that a ``TransportPublisher`` delivers."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.doing = "being hashed"
        self._done: Future[Manifest] = Future()
        self._heard = False
        self._lost = ""
        self.told = False
        self._lock = threading.RLock()

    @property
    def done(self) -> bool:
        return self._done.done()

    def _failed(self, error: BaseException) -> None:
        """It will not be current because of ``error``. Once it has ended nothing changes that."""
        what = f"version {self.version} failed while it was {self.doing}"
        explained: BaseException
        if not isinstance(error, AsyncFlowError):
            explained = WeightError(f"{what}: {type(error).__name__}: {error}")
        elif f"version {self.version}" in str(error):
            explained = error
        else:
            explained = type(error)(f"{what}: {error}")
        if explained is not error:
            explained.__cause__ = error
        with self._lock:
            if not self.done:
                self._done.set_exception(explained)

    def _lose(self, reason: str) -> None:
        """This rank's part is there, and the version will not be: ``reason`` says which rank withdrew it and why."""
        self._lost = reason

    def _last_word(self) -> None:
        """The server is told now, and what it answers counts. Raises WeightError where it was given up."""
        with self._lock:
            if self.done:
                raise WeightError(f"version {self.version} was given up")
            self.told = True

    def _give_up(self, error: BaseException) -> None:
        """Wait for it no longer, unless the server is told already: that has a deadline of its own."""
        with self._lock:
            if not self.told:
                self._failed(error)

    def wait(self, timeout_s: float = FETCH_S) -> Manifest:
        try:
            manifest = self._done.result(timeout_s)
        except FutureTimeout:
            if self._done.done():  # a deadline of the transport itself
                self._heard = True
                raise
            raise DeadlineExceeded(
                f"version {self.version} is not published after {timeout_s:g} s: it is {self.doing}"
            ) from None
        except BaseException:
            self._heard = self._done.done()
            raise
        if self._lost:
            raise WeightError(self._lost)
        return manifest
