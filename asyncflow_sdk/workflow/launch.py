"""The launcher "process": workers in processes of this host, each under its own interpreter.

A worker's standard input is a socket whose other end its driver holds: its first line says what to be, its end says to
stop, and the worker's last words come back on it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from .._version import __version__
from ..errors import ConfigError
from ..interfaces import FATAL_STATUS, Launcher, Placement, WorkerExit, WorkerHandle, WorkerSpec
from ..memory import make_private_directory, private_opener
from .worker import LAST_WORDS, THROUGH

TAIL_BYTES = 64 << 10
_NO_MODULE = re.compile(r"No module named '?[\w.]+'?(?=\)?\s*$)")


class ProcessLauncher(Launcher):
    """Local processes. ``cpus`` are those they are kept on, ``gpus`` those that CUDA shows them."""

    ranks = True

    def check(self, place: Placement) -> None:
        if place.python is not None and shutil.which(place.python) is None:
            raise ConfigError(
                f"cannot start {place.python!r}: there is no such program; python= names an interpreter"
            )
        odd = sorted(set(place.cpus) - os.sched_getaffinity(0))
        if odd:
            there = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
            raise ConfigError(f"cpus={list(place.cpus)}: this process may not use CPU {odd[0]}; it may use {there}")
        known = _gpus()
        odd = sorted(set(place.gpus) - set(known))
        if odd:
            there = f"it has {', '.join(map(str, known))}" if known else "it has no NVIDIA GPU"
            raise ConfigError(f"gpus={list(place.gpus)}: this host has no GPU {odd[0]}; {there}")
        if place.gpus and "CUDA_VISIBLE_DEVICES" in place.env:
            raise ConfigError("gpus= sets CUDA_VISIBLE_DEVICES, which env= sets, too: give one of them")

    def start(self, order: WorkerSpec) -> WorkerHandle:
        place = order.placement
        python = place.python or sys.executable
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **place.env}
        if place.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, place.gpus))
        make_private_directory(order.log.parent)
        ours, theirs = socket.socketpair()
        with theirs, open(order.log, "ab", opener=private_opener) as log, _kept_on(place.cpus):
            try:
                process = subprocess.Popen(
                    [python, "-m", "asyncflow_sdk.workflow"],
                    stdin=theirs.fileno(), stdout=log, stderr=log, env=env,
                    start_new_session=True,  # Ctrl-C is the driver's to handle
                )  # fmt: skip
            except OSError as error:
                ours.close()
                raise ConfigError(f"worker {order.name!r}: cannot start {python!r}: {error}") from None
        with contextlib.suppress(OSError):  # it died already; who waits for it sees that
            ours.sendall(order.config + b"\n")
        return _Process(process, ours, order.log, python)


class _Process(WorkerHandle):
    """A process in a session of its own."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket, log: Path, python: str) -> None:
        self.pid, self.host = process.pid, socket.gethostname()
        self._process, self._line, self._log, self._python = process, line, log, python
        self._lock = threading.Lock()
        self._began = log.stat().st_size
        self._ended = self._told = False

    def wait(self) -> WorkerExit:
        status = self._process.wait()
        with self._lock:
            self._ended = True
            self._kill()  # what the worker started ends with it
            words = self._last_words()
            self._line.close()
        if not status:
            if self._told or words == THROUGH:
                return WorkerExit(0)
            return WorkerExit(1, "its process exited with status 0 before the stream had ended")
        if words:
            return WorkerExit(status, words)
        tail = _tail(self._log, self._began)
        lacks = _NO_MODULE.search(tail)
        if lacks:  # a worker that got as far as working has a last word
            how = f"{self._python} -m pip install asyncflow-sdk=={__version__}"
            return WorkerExit(FATAL_STATUS, f"{self._python} cannot load the AsyncFlow SDK: {lacks[0]}; run: {how}")
        return WorkerExit(status, f"the end of its log {self._log}:\n{tail}" if tail else "")

    def stop(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if not self._ended:
                self._told = True
                self._line.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        with self._lock:
            if not self._ended:
                self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        """What it said before it ended; others who have its end of the socket may live."""
        words = b""
        self._line.setblocking(False)
        with contextlib.suppress(OSError):
            while len(words) < LAST_WORDS and (more := self._line.recv(1 << 16)):
                words += more
        return words.decode(errors="replace").strip()


@contextlib.contextmanager
def _kept_on(cpus: tuple[int, ...]) -> Iterator[None]:
    """What is started here is on these CPUs from its first instruction, with all of its threads: a process has the CPUs of
    the thread that starts it."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _gpus() -> list[int]:
    """Numbers of the NVIDIA GPUs of this host."""
    names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia[0-9]*"))
    return sorted(int(name[1]) for name in names if name)


def _tail(log: Path, since: int) -> str:
    """The last lines of a log, of those written from position ``since``."""
    with log.open("rb") as file:
        file.seek(max(since, log.stat().st_size - TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-25:])
