"""Supervision of a worker, the same for every launcher: restarts with back-off and a limit, and a
named failure."""

from __future__ import annotations

import abc
import signal
import threading
import time

from ...errors import WorkerFailed
from ...interfaces import Launcher, WorkerExit, WorkerHandle, WorkerSpec
from ...queue.protocol import plain_text
from ...types import Event
from ...types import events as ev
from .ranks import RankExit, RankHandles, exit_of

BACKOFF_S = 0.5
BACKOFF_MOST_S = 30.0
FORGIVEN = 10
"""The back-off resets once a worker has run this many times its last restart delay."""
FORGIVEN_S = FORGIVEN * BACKOFF_MOST_S
"""The count of restarts resets once a worker has run this long (seconds)."""
GRACE_S = 2.0
"""A stopped worker is killed after this, and abandoned after this once more (seconds)."""


class WorkerObserver(abc.ABC):
    """Is informed of workers, each in the worker's own thread. The methods must not raise."""

    @property
    @abc.abstractmethod
    def over(self) -> bool:
        """True if the run was closed: workers are not restarted."""

    @abc.abstractmethod
    def renewed(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the spec for another start of a worker, with the key that new clients need now."""

    @abc.abstractmethod
    def report(self, event: Event) -> None:
        """Called when the worker changes its state."""

    @abc.abstractmethod
    def gone(self, worker: Worker, why: str) -> bool:
        """Called when the worker's process has ended, maybe without a message to the queue. Return True if rows that
        it held may be the cause: each such end costs them an attempt, so that it cannot happen for ever."""

    @abc.abstractmethod
    def failed(self, worker: Worker, error: WorkerFailed) -> None:
        """Called when the worker ended for good with an error."""

    @abc.abstractmethod
    def ended(self, worker: Worker) -> None:
        """Called when the worker ended for good."""


class Worker:
    """A supervised worker. ``role``: its task, shared with other workers. ``ended``: set at its end
    for good; ``lost``: True if with an error. Thread-safe. Raises the launcher's error at the first
    start."""

    def __init__(self, launcher: Launcher, spec: WorkerSpec, role: str, observer: WorkerObserver) -> None:
        self.name, self.role, self.spec = spec.name, role, spec
        self._launcher, self._observer = launcher, observer
        self._stopping = threading.Event()
        self._last = threading.Event()  # no restart any more
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self.leaving = False
        self.lost = False
        self._handle: WorkerHandle = launcher.start(spec)
        threading.Thread(target=self._supervise, name=f"supervise-{self.name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its current process, as numbered on its host; of several ranks the first one's."""
        return self._handle.pid

    @property
    def pids(self) -> dict[str, int]:
        """Its current processes by name: one, or one for each rank."""
        handle = self._handle
        return dict(handle.pids) if isinstance(handle, RankHandles) else {self.name: handle.pid}

    @property
    def host(self) -> str:
        """The host of its process; "" if unknown."""
        return self._handle.host

    def stop(self) -> None:
        """Ask the worker to end at once; its leases return to the queue. Does not wait."""
        self._stopping.set()
        self._last.set()
        with self._lock:
            self._handle.stop()

    def leave(self, grace_s: float) -> None:
        """Stop the worker after ``grace_s``, and restart it no more. The caller dismissed it from
        the queue. Does not wait."""
        self.finish()
        threading.Thread(target=self._stop_after, args=(grace_s,), name=f"leave-{self.name}", daemon=True).start()

    def finish(self) -> None:
        """Restart the worker no more: its run is over."""
        self.leaving = True
        self._last.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the worker's end, and kill it after ``timeout_s``. Returns True if it ended by
        itself."""
        if self.ended.wait(timeout_s):
            return True
        self.kill()
        self.ended.wait(GRACE_S)
        return False

    def kill(self) -> None:
        """End the worker by force. Does not wait."""
        self._stopping.set()
        self._last.set()
        with self._lock:
            self._handle.kill()

    def _stop_after(self, grace_s: float) -> None:
        if not self.ended.wait(grace_s):
            self.stop()
            self.join(GRACE_S)

    def _supervise(self) -> None:
        try:
            self._keep_running()
        except Exception as error:
            self._fail(f"cannot be started again: {type(error).__name__}: {error}", "")
        finally:
            self.ended.set()
            self._observer.ended(self)

    def _keep_running(self) -> None:
        most, restarts, wait_s = self.spec.placement.max_restarts, 0, 0.0
        while True:
            began, ending = time.monotonic(), exit_of(self._handle)
            lived_s = time.monotonic() - began
            if ending.status or self._stopping.is_set():
                how = f"{_described(ending)}: {ending.text.strip()}" if ending.status else "was stopped"
                if self._observer.gone(self, plain_text(f"its worker {how}".removesuffix(": "))):
                    restarts, wait_s = 0, 0.0
            if not ending.status or self._stopping.is_set() or self.leaving:
                self._report("stopped")
                return
            if lived_s > FORGIVEN_S:
                restarts = 0
            if ending.fatal or restarts >= most or self._observer.over:
                again = f" after {restarts} restarts" if restarts else ""
                self._fail(_described(ending) + again, ending.text)
                return
            wait_s = back_off(wait_s, lived_s)
            restarts += 1
            again = f"restart {restarts} of {most} in {wait_s:g} s"
            self._report("restarting", f"{_described(ending)}; {again}")
            if self._last.wait(wait_s):
                self._report("stopped")
                return
            self.spec = self._observer.renewed(self.spec)
            handle = self._launcher.start(self.spec)
            with self._lock:
                self._handle = handle
                if self._stopping.is_set():  # stopped while it was being started
                    handle.stop()

    def _fail(self, how: str, text: str) -> None:
        self.lost = True
        error = WorkerFailed(f"worker {self.name!r} {how}", self.name, text)
        self._report("failed", str(error))
        self._observer.failed(self, error)

    def _report(self, state: str, detail: str = "") -> None:
        for name, pid in self.pids.items():
            self._observer.report(
                ev.WorkerState(time_s=time.monotonic(), worker=name, state=state, pid=pid, detail=detail)
            )


def back_off(waited_s: float, lived_s: float) -> float:
    """Return the delay before a restart (seconds). ``waited_s``: the last delay, 0 at first;
    ``lived_s``: time the worker ran since."""
    if not waited_s or lived_s > FORGIVEN * waited_s:
        return BACKOFF_S
    return min(BACKOFF_MOST_S, 2 * waited_s)


def _described(ending: WorkerExit) -> str:
    status, who = ending.status, f"rank {ending.rank} " if isinstance(ending, RankExit) else ""
    if status < 0:
        try:
            return f"{who}was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"{who}was killed by signal {-status}"
    return f"{who}ended with status {status}"
