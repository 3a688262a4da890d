"""Launching workers as local processes, each under its own interpreter, and starting them again when they die."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..errors import ConfigError, WorkerFailed
from ..types import Event
from ..types import events as ev
from .specs import Place
from .worker import EXIT_FATAL, WorkerConfig

BACKOFF_S = 0.5
BACKOFF_MOST_S = 30.0
GRACE_S = 5.0


class LocalProcess:
    """A supervised worker. ``on_event`` hears of its states; ``on_failure`` is called once if it ends for good
    with an error. Thread-safe."""

    def __init__(
        self,
        config: WorkerConfig,
        place: Place,
        log: Path,
        on_event: Callable[[Event], None],
        on_failure: Callable[[WorkerFailed], None],
        on_end: Callable[[], None],
    ) -> None:
        self.name = config.name
        self._config, self._place, self._log = config, place, log
        self._on_event, self._on_failure, self._on_end = on_event, on_failure, on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self._start()
        self._thread = threading.Thread(target=self._supervise, name=f"supervise-{self.name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The process as it is now."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """Tell the worker to end at once. Does not wait."""
        self._stopping.set()
        with self._lock:
            if self._process is not None:
                self._close_stdin()

    def join(self, timeout_s: float) -> bool:
        """Wait for the worker's end; kill it when that takes longer. Returns whether it ended by itself."""
        if self.ended.wait(timeout_s):
            return True
        self._stopping.set()
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self.ended.wait(GRACE_S)
        return False

    def _start(self) -> None:
        python = self._place.python or sys.executable
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **self._place.env}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            try:
                process = subprocess.Popen(
                    [python, "-m", "asyncflow_sdk.workflow"],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, env=env,
                    start_new_session=True,  # Ctrl-C is the driver's to handle
                )  # fmt: skip
            except OSError as error:
                raise ConfigError(f"worker {self.name!r}: cannot start {python!r}: {error}") from None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died already; the supervisor sees that and says so
            process.stdin.write(msgspec.json.encode(self._config) + b"\n")
            process.stdin.flush()
        self._process = process

    def _supervise(self) -> None:
        try:
            self._keep_running()
        except Exception as error:  # it cannot be started again, or its log not be read
            self._on_failure(
                WorkerFailed(f"worker {self.name!r} cannot be supervised any more: {error!r}", self.name)
            )
        finally:
            self.ended.set()
            self._on_end()

    def _keep_running(self) -> None:
        restarts = 0
        while True:
            assert self._process is not None
            began = time.monotonic()
            status = self._process.wait()
            with contextlib.suppress(ProcessLookupError):  # what the worker started ends with it
                os.killpg(self._process.pid, signal.SIGKILL)
            with self._lock:
                self._close_stdin()
            if status == 0 or self._stopping.is_set():
                self._say("stopped")
                return
            if time.monotonic() - began > 10 * BACKOFF_MOST_S:
                restarts = 0
            if status == EXIT_FATAL or restarts >= self._place.max_restarts:
                self._fail(status, restarts)
                return
            wait_s = min(BACKOFF_MOST_S, BACKOFF_S * 2**restarts)
            restarts += 1
            again = f"restart {restarts} of {self._place.max_restarts} in {wait_s:g} s"
            self._say("restarting", f"{_how(status)}; {again}")
            if self._stopping.wait(wait_s):
                return
            with self._lock:
                self._start()

    def _close_stdin(self) -> None:
        assert self._process is not None
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _fail(self, status: int, restarts: int) -> None:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-25:])
        again = f" after {restarts} restarts" if restarts else ""
        self._say("failed", _how(status) + again)
        self._on_failure(
            WorkerFailed(
                f"worker {self.name!r} {_how(status)}{again}; the end of its log {self._log}:", self.name, tail
            )
        )

    def _say(self, state: str, detail: str = "") -> None:
        self._on_event(
            ev.WorkerState(time_s=time.monotonic(), worker=self.name, state=state, pid=self.pid, detail=detail)
        )


def _how(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
