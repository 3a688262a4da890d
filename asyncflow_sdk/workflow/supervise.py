"""Supervision, the same for every launcher: a worker that dies is started again, with back-off and a limit; one that fails
for good is named, with its traceback."""

from __future__ import annotations

import signal
import threading
import time
from typing import Protocol

from ..errors import PluginError, WorkerFailed
from ..interfaces import Launcher, WorkerExit, WorkerHandle, WorkerSpec
from ..plugins import registry
from ..types import Event
from ..types import events as ev
from .ranks import GroupEnding, Together

BACKOFF_S = 0.5
BACKOFF_MOST_S = 30.0
FORGIVEN = 10
"""A worker that ran so many times as long as it was waited for is started again as soon as one that died for the first time."""
FORGIVEN_S = FORGIVEN * BACKOFF_MOST_S
"""A worker that ran for so long has its restarts back (seconds)."""
GRACE_S = 2.0
"""How long workers may take to end once they were told to stop, before they are killed; and then to be gone (seconds)."""


def launcher_named(name: str) -> Launcher:
    """A new launcher. Raises PluginError for one that is not installed, and for what is none."""
    made = registry().get("launcher", name).load()()
    if not isinstance(made, Launcher):
        raise PluginError(f"launcher {name!r} is a {type(made).__name__}, which is no asyncflow_sdk.Launcher")
    return made


class Boss(Protocol):
    """Who is told of a worker, in the worker's own thread. None of it may raise."""

    @property
    def over(self) -> bool:
        """Whether the run was closed for good: nobody is there for whom a worker could be started again."""

    def report(self, event: Event) -> None:
        """The worker changed its state."""

    def gone(self, worker: Worker, why: str) -> None:
        """Its process has ended, perhaps without a word to the queue."""

    def failed(self, worker: Worker, error: WorkerFailed) -> None:
        """It ended for good with an error."""

    def ended(self, worker: Worker) -> None:
        """It ended for good."""


class Worker:
    """A worker that is kept running. ``role``: what it does, as others may do, too. ``ended`` is set when it has, for good;
    ``lost``: with an error. Thread-safe. Raises what the launcher raises at the first start."""

    def __init__(self, launcher: Launcher, order: WorkerSpec, role: str, boss: Boss) -> None:
        self.name, self.role, self.order = order.name, role, order
        self._launcher, self._boss = launcher, boss
        self._stopping = threading.Event()
        self._last = threading.Event()  # it is not started again
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self.leaving = False
        self.lost = False
        self._handle: WorkerHandle = launcher.start(order)
        threading.Thread(target=self._supervise, name=f"supervise-{self.name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process as it is now, on its host; of several ranks that of the first."""
        return self._handle.pid

    @property
    def pids(self) -> dict[str, int]:
        """Its processes as they are now, by the names that the run knows them by: one, or those of its ranks."""
        handle = self._handle
        return dict(handle.pids) if isinstance(handle, Together) else {self.name: handle.pid}

    @property
    def host(self) -> str:
        """Where it runs; "" where nobody knows."""
        return self._handle.host

    def stop(self) -> None:
        """Tell the worker to end at once: what it holds goes back. Does not wait."""
        self._stopping.set()
        self._last.set()
        with self._lock:
            self._handle.stop()

    def leave(self, grace_s: float) -> None:
        """It has been told that it will be given nothing more: it is not started again, and ended after ``grace_s``."""
        self.finish()

        def see_out() -> None:
            if not self.ended.wait(grace_s):
                self.stop()
                self.join(GRACE_S)

        threading.Thread(target=see_out, name=f"leave-{self.name}", daemon=True).start()

    def finish(self) -> None:
        """What it works for is over: it is not started again, nor waited for where it has died."""
        self.leaving = True
        self._last.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the worker's end; kill it when that takes longer. Returns whether it ended by itself."""
        if self.ended.wait(timeout_s):
            return True
        self.kill()
        self.ended.wait(GRACE_S)
        return False

    def kill(self) -> None:
        """End the worker without asking. Does not wait."""
        self._stopping.set()
        self._last.set()
        with self._lock:
            self._handle.kill()

    def _supervise(self) -> None:
        try:
            self._keep_running()
        except Exception as error:  # it cannot be started again
            self._fail(f"cannot be started again: {type(error).__name__}: {error}", "")
        finally:
            self.ended.set()
            self._boss.ended(self)

    def _keep_running(self) -> None:
        place, restarts, wait_s = self.order.placement, 0, 0.0
        while True:
            began, ending = time.monotonic(), self._wait()
            lived_s = time.monotonic() - began
            if ending.status or self._stopping.is_set():
                self._boss.gone(self, f"its worker {_how(ending)}" if ending.status else "its worker was stopped")
            if not ending.status or self._stopping.is_set() or self.leaving:
                self._say("stopped")
                return
            if lived_s > FORGIVEN_S:
                restarts = 0
            if ending.fatal or restarts >= place.max_restarts or self._boss.over:
                again = f" after {restarts} restarts" if restarts else ""
                self._fail(_how(ending) + again, ending.text)
                return
            wait_s = back_off(wait_s, lived_s)
            restarts += 1
            again = f"restart {restarts} of {place.max_restarts} in {wait_s:g} s"
            self._say("restarting", f"{_how(ending)}; {again}")
            if self._last.wait(wait_s):
                self._say("stopped")
                return
            handle = self._launcher.start(self.order)
            with self._lock:
                self._handle = handle
                if self._stopping.is_set():  # it was told before there was anyone to tell
                    handle.stop()

    def _wait(self) -> WorkerExit:
        try:
            return self._handle.wait()
        except Exception as error:
            return WorkerExit(1, f"its launcher lost it: {type(error).__name__}: {error}")

    def _fail(self, how: str, text: str) -> None:
        self.lost = True
        self._say("failed", f"{how}\n{text}".strip())
        self._boss.failed(self, WorkerFailed(f"worker {self.name!r} {how}", self.name, text))

    def _say(self, state: str, detail: str = "") -> None:
        for name, pid in self.pids.items():
            self._boss.report(
                ev.WorkerState(time_s=time.monotonic(), worker=name, state=state, pid=pid, detail=detail)
            )


def back_off(waited_s: float, lived_s: float) -> float:
    """How long to wait before a worker that has died is started again (seconds). ``waited_s``: the time before, 0 at first;
    ``lived_s``: how long it ran since."""
    if not waited_s or lived_s > FORGIVEN * waited_s:
        return BACKOFF_S
    return min(BACKOFF_MOST_S, 2 * waited_s)


def _how(ending: WorkerExit) -> str:
    status, who = ending.status, f"rank {ending.rank} " if isinstance(ending, GroupEnding) else ""
    if status < 0:
        try:
            return f"{who}was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"{who}was killed by signal {-status}"
    return f"{who}ended with status {status}"
