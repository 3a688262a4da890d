"""The launcher "thread": workers in threads of the driver, for tests and notebooks, and for functions that no other
process can import. They share its interpreter, and its GIL; nothing can kill one: it is left behind."""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Callable

from ..errors import ConfigError
from ..interfaces import Launcher, Placement, WorkerExit, WorkerHandle, WorkerSpec
from .worker import WorkerMain

Start = Callable[[bytes], WorkerMain]


class ThreadLauncher(Launcher):
    """Threads of this process. ``make``: what a worker is, from its configuration."""

    def __init__(self, make: Start = WorkerMain) -> None:
        self._make = make

    def check(self, place: Placement) -> None:
        given = [name for name in ("python", "env", "cpus", "gpus") if getattr(place, name)]
        if given:
            raise ConfigError(
                f"{given[0]}= is for workers in processes; a thread has the interpreter, the environment and the CPUs of"
                " its driver"
            )

    def start(self, order: WorkerSpec) -> WorkerHandle:
        return _Thread(order.name, self._make(order.config))


class _Thread(WorkerHandle):
    def __init__(self, name: str, worker: WorkerMain) -> None:
        self.pid, self.host = os.getpid(), socket.gethostname()
        self._worker = worker
        self._ending = WorkerExit(1, "its thread was left behind")
        self._over = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._ending = self._worker.run()
        except BaseException as error:  # such as the KeyboardInterrupt of a user's function: it ends the thread only
            self._ending = WorkerExit(1, "".join(traceback.format_exception(error)))
        finally:
            self._over.set()

    def wait(self) -> WorkerExit:
        self._over.wait()
        return self._ending

    def stop(self) -> None:
        """It ends when it is through with what it holds."""
        self._worker.leave()

    def kill(self) -> None:
        """Nothing ends a thread that does not end by itself: it is waited for no longer, and ends with its process."""
        self._over.set()
