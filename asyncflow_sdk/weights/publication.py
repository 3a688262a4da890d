"""TransportPublication: one version on its way from the trainer: hashed, sent, and made current."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from ..errors import AsyncFlowError, DeadlineExceeded, WeightError
from ..interfaces import Publication
from ..types import Manifest
from ..types.defaults import FETCH_S


class TransportPublication(Publication):
    """A version that a ``TransportPublisher`` delivers.

    ``stage``: the current stage of its delivery, for messages. ``reported``: True once the server was asked to make
    it current. ``raised``: True once its result was raised or returned by ``wait``.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self._stage = "being hashed"
        self.reported = self.raised = False
        self._result: Future[Manifest] = Future()
        self._lost = ""
        self._lock = threading.RLock()

    @property
    def done(self) -> bool:
        """True once the version is current, or has failed."""
        return self._result.done()

    def wait(self, timeout_s: float = FETCH_S) -> Manifest:
        """Return the manifest once the version is published; see ``Publication.wait``."""
        try:
            manifest = self._result.result(timeout_s)
        except FutureTimeout:
            if self._result.done():  # a timeout inside the transport
                self.raised = True
                raise
            raise DeadlineExceeded(
                f"version {self.version} is not published after {timeout_s:g} s: it is {self._stage}"
            ) from None
        except BaseException:
            self.raised = self._result.done()
            raise
        if self._lost:
            raise WeightError(self._lost)
        return manifest

    # ---- called by the publisher

    def enter(self, stage: str) -> None:
        """Note what is done with the version now, for errors."""
        self._stage = stage

    def succeed(self, manifest: Manifest) -> None:
        """Set the result: the version is current."""
        self._result.set_result(manifest)

    def fail(self, error: BaseException) -> None:
        """Set ``error`` as the result. No effect once there is one."""
        what = f"version {self.version} failed while it was {self._stage}"
        try:
            if not isinstance(error, AsyncFlowError):
                raise WeightError(f"{what}: {type(error).__name__}: {error}") from error
            if f"version {self.version}" not in str(error):
                raise type(error)(f"{what}: {error}") from error
            explained: BaseException = error
        except AsyncFlowError as named:
            explained = named
        with self._lock:
            if not self.done:
                self._result.set_exception(explained)

    def lose(self, reason: str) -> None:
        """Note that another rank withdrew the version. ``reason`` names the rank."""
        self._lost = reason

    def start_report(self) -> None:
        """Note that only the server's reply decides now. Raises WeightError after ``give_up``."""
        with self._lock:
            if self.done:
                raise WeightError(f"version {self.version} was given up")
            self.reported = True

    def give_up(self, error: BaseException) -> None:
        """Fail, unless the server was asked already: that request has its own deadline."""
        with self._lock:
            if not self.reported:
                self.fail(error)
