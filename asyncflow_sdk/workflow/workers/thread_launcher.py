"""ThreadLauncher: workers in threads of the driver, for tests, notebooks, and functions without an
import path.

They share the driver's interpreter and its GIL. A thread cannot be killed: it is abandoned.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from typing import cast

from ...errors import ConfigError
from ...interfaces import FATAL_STATUS, Launcher, Placement, WorkerExit, WorkerHandle, WorkerSpec
from ...queue.protocol import error_text
from ..specs import Stage
from .user_code import user_error_text
from .worker import WorkerRuntime


class ThreadLauncher(Launcher):
    """Threads of this process. ``stage``: every worker runs this object, in spite of its placement."""

    def __init__(self, stage: Stage | None = None) -> None:
        self._stage = stage

    def check(self, placement: Placement) -> None:
        """Refuse settings of a process. Raises ConfigError."""
        given = [name for name in ("python", "env", "cpus", "gpus", "hosts") if getattr(placement, name)]
        if given and self._stage is None:
            raise ConfigError(
                f"{given[0]}= is for workers in processes; a thread has the interpreter, the environment and the"
                " CPUs of its driver"
            )

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start a thread."""
        return _ThreadHandle(spec, self._stage)

    def start_ranks(self, specs: Sequence[WorkerSpec]) -> Sequence[WorkerHandle]:
        """Raise ConfigError: ranks need an environment each."""
        raise ConfigError("threads share the environment of their process, so they cannot be ranks")


class _ThreadHandle(WorkerHandle):
    def __init__(self, spec: WorkerSpec, stage: Stage | None) -> None:
        self.pid, self.host = os.getpid(), socket.gethostname()
        self._worker = WorkerRuntime(spec, stage, lambda reason: self._end(WorkerExit(FATAL_STATUS, reason)))
        self._exit: WorkerExit | None = None
        self._lock, self._ended = threading.Lock(), threading.Event()
        threading.Thread(target=self._run, name=spec.name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._end(self._worker.run())
        except BaseException as error:  # a user's function may raise KeyboardInterrupt: it ends this thread only
            self._end(WorkerExit(1, user_error_text(error_text(error), error)))

    def _end(self, how: WorkerExit) -> None:
        """Set how the worker ended, unless it has: a thread that was abandoned may still end."""
        with self._lock:
            self._exit = self._exit or how
        self._ended.set()

    def wait(self) -> WorkerExit:
        """Wait for the thread, or for ``kill``."""
        self._ended.wait()
        return cast("WorkerExit", self._exit)

    def stop(self) -> None:
        """Let the worker finish the rows it holds."""
        self._worker.leave()

    def kill(self) -> None:
        """Abandon the thread: it ends by itself or with its process."""
        self._end(WorkerExit(1, "its thread was left behind"))
