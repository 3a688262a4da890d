"""Launchers: made by name, each once for its options; and ProcessLauncher: workers in processes of this host, each
with its own interpreter.

A worker's standard input is a socket: its first line is the WorkerSpec, its end stops the worker,
and the worker's last report returns on it (``worker.main`` is the other end).
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from ..._version import __version__
from ...errors import ConfigError, PluginError
from ...interfaces import FATAL_STATUS, Launcher, Placement, WorkerExit, WorkerHandle, WorkerSpec
from ...memory import make_private_directory, private_opener
from ...plugins import registry
from ...queue.protocol import FRAMES, SDK

LOG_BYTES = 32 << 20  # size limit of a log; a full one is renamed to ``NAME.log.1``, in place of the one before
TAIL_BYTES = 64 << 10
REPORT_BYTES = 32 << 10
"""Length limit of a worker's last report. It fits into the buffer of a socket without a reader."""
COMPLETED = "through"  # the last report of a worker that ended with the stream. A foreign exit with status 0 lacks it
_COPY_S = 2.0  # limit of the wait for the rest of an output (seconds)
_NO_MODULE = re.compile(r"No module named '?[\w.]+'?(?=\)?\s*$)")


class Launchers:
    """Makes the launchers of placements, each once for its name and options, and closes them. Thread-safe."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, bytes], Launcher] = {}
        self._lock = threading.Lock()

    def of(self, place: Placement) -> Launcher:
        """Return the launcher of a placement. Raises PluginError if it is missing or no Launcher,
        ConfigError for unknown options."""
        name, options = place.launcher, place.launcher_options
        key = name, msgspec.json.encode(options, order="deterministic")
        with self._lock:
            if key not in self._made:
                factory = registry().get("launcher", name).load()
                try:
                    inspect.signature(factory).bind(**options)
                except TypeError as error:
                    raise ConfigError(f"launcher_options= of launcher {name!r}: {error}") from None
                made = factory(**options)
                if not isinstance(made, Launcher):
                    kind = type(made).__name__
                    raise PluginError(f"launcher {name!r} is a {kind}, no asyncflow_sdk.interfaces.Launcher")
                self._made[key] = made
            return self._made[key]

    def close(self) -> None:
        """Close all launchers, after their workers have ended. New ones can be made."""
        with self._lock:
            made, self._made = self._made, {}
        for launcher in made.values():
            launcher.close()


def reaches_hosts(place: Placement) -> bool:
    """True if the launcher of a placement may start workers on other hosts."""
    return registry().declared("launcher", place.launcher, "hosts") == ("many",)


class ProcessLauncher(Launcher):
    """Local processes. ``cpus``: their CPU affinity; ``gpus``: CUDA_VISIBLE_DEVICES."""

    def check(self, placement: Placement) -> None:
        """Check the interpreter, and the CPUs and GPUs of this host. Raises ConfigError."""
        if placement.hosts:
            raise ConfigError('hosts= needs a launcher that starts workers on them, as launcher="ssh"')
        if placement.python is not None and shutil.which(placement.python) is None:
            text = f"cannot start {placement.python!r}: there is no such program; python= names an interpreter"
            raise ConfigError(text)
        odd = sorted(set(placement.cpus) - os.sched_getaffinity(0))
        if odd:
            there = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
            text = f"cpus={list(placement.cpus)}: this process may not use CPU {odd[0]}; it may use {there}"
            raise ConfigError(text)
        names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia[0-9]*"))
        known = sorted(int(name[1]) for name in names if name)
        odd = sorted(set(placement.gpus) - set(known))
        if odd:
            there = f"it has {', '.join(map(str, known))}" if known else "it has no NVIDIA GPU"
            raise ConfigError(f"gpus={list(placement.gpus)}: this host has no GPU {odd[0]}; {there}")
        if placement.gpus and "CUDA_VISIBLE_DEVICES" in placement.env:
            raise ConfigError("gpus= sets CUDA_VISIBLE_DEVICES, which env= sets, too: give one of them")

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start a process and send it the spec. Raises ConfigError."""
        with WorkerOutput.opened(spec) as output:
            return start_process(spec, output)


class WorkerOutput:
    """The output of a worker's process, copied to the worker's log by a thread, which rotates the log.
    ``file``: to write to, until the block of ``opened`` ends. A full disk loses what it has no room for."""

    def __init__(self, log: Path, file: IO[bytes], copied: int) -> None:
        self.log, self.file, self._tail = log, file, b""
        self._thread = threading.Thread(target=self._copy, args=(copied,), name=f"log {log.stem}", daemon=True)
        self._thread.start()

    @classmethod
    @contextlib.contextmanager
    def opened(cls, spec: WorkerSpec) -> Iterator[WorkerOutput]:
        """Open the log of a worker."""
        make_private_directory(spec.log.parent)
        open(spec.log, "ab", opener=private_opener).close()
        copied, into = os.pipe()
        with open(into, "wb", buffering=0) as file:
            yield cls(spec.log, file, copied)

    def _copy(self, copied: int) -> None:
        with open(copied, "rb", buffering=0) as output:
            while block := output.read(TAIL_BYTES):
                self._tail = (self._tail + block)[-TAIL_BYTES:]
                with contextlib.suppress(OSError):
                    if self.log.is_file() and self.log.stat().st_size + len(block) > LOG_BYTES:
                        self.log.replace(f"{self.log}.1")
                    with open(self.log, "ab", opener=private_opener) as file:
                        file.write(block)

    def text(self) -> str:
        """Return the last lines, once all is copied; of a call that took too long the innermost frames of each
        thread, without the SDK's. Call after the process's end."""
        self._thread.join(_COPY_S)  # a process left behind may hold it open
        lines = self._tail.decode(errors="replace").splitlines()
        hung = [at for at, line in enumerate(lines) if line.startswith("Timeout (")]  # of faulthandler
        if not hung:
            return "\n".join(lines[-25:])
        kept, frame = list[str](), 0
        for line in lines[hung[-1] :]:
            frame = frame + 1 if line.startswith("  ") else 0
            if frame <= FRAMES and SDK not in line:
                kept.append(line)
        return "\n".join(kept)

    def exit(self, status: int, python: str) -> WorkerExit:
        """Return the exit of a process without a last report: the last lines are its text."""
        lines = self.text()
        lacks = _NO_MODULE.search(lines)
        if lacks:  # a worker with the SDK sends a report
            how = f"{python} -m pip install asyncflow-sdk=={__version__}"
            return WorkerExit(FATAL_STATUS, f"{python} cannot load the AsyncFlow SDK: {lacks[0]}; run: {how}")
        # a library or a user's function ended the process; its status says nothing of the next start
        status = 1 if status == FATAL_STATUS else status
        return WorkerExit(status, f"\nthe end of its log {self.log}:\n{lines}" if lines else "")


def start_process(spec: WorkerSpec, output: WorkerOutput | None) -> ProcessHandle:
    """Start a worker on this host, and send it the spec. It writes to ``output``; None: to stderr. Raises
    ConfigError."""
    placement = spec.placement
    python = placement.python or sys.executable
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **placement.env}
    if placement.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, placement.gpus))
    file = sys.stderr if output is None else output.file
    ours, theirs = socket.socketpair()
    with theirs, _affinity(placement.cpus):
        try:
            command = [python, "-m", "asyncflow_sdk.workflow"]
            process = subprocess.Popen(  # with a session of its own: Ctrl-C is for the driver only
                command, stdin=theirs.fileno(), stdout=file, stderr=file, env=env, start_new_session=True
            )
        except OSError as error:
            ours.close()
            raise ConfigError(f"worker {spec.name!r}: cannot start {python!r}: {error}") from None
    with contextlib.suppress(OSError):  # it died already: wait() returns its exit
        ours.sendall(spec.config + b"\n")
    return ProcessHandle(process, ours, output, python)


class ProcessHandle(WorkerHandle):
    """A process with a session of its own."""

    def __init__(
        self, process: subprocess.Popen[bytes], line: socket.socket, output: WorkerOutput | None, python: str
    ) -> None:
        self.pid, self.host = process.pid, socket.gethostname()
        self._process, self._line, self._output, self._python = process, line, output, python
        self._lock = threading.Lock()
        self._ended = self._stopped = False

    def wait(self) -> WorkerExit:
        """Wait for the process. Its exit has its last report, or else the end of its log."""
        status = self._process.wait()
        with self._lock:
            self._ended = True
            self._kill()  # the worker's children end with it
            report = self._last_report()
            self._line.close()
        ended = WorkerExit(status) if self._output is None else self._output.exit(status, self._python)
        if not status:
            if self._stopped or report == COMPLETED:
                return WorkerExit(0)
            return WorkerExit(1, "its process exited with status 0 before the stream had ended")
        return WorkerExit(status, report) if report else ended

    def stop(self) -> None:
        """End the socket, on which the worker ends."""
        with self._lock, contextlib.suppress(OSError):
            if not self._ended:
                self._stopped = True
                self._line.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Kill the process and its children."""
        with self._lock:
            if not self._ended:
                self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _last_report(self) -> str:
        """Read without blocking: other processes with the worker's end of the socket may live on."""
        report = b""
        self._line.setblocking(False)
        with contextlib.suppress(OSError):
            while len(report) < REPORT_BYTES and (more := self._line.recv(1 << 16)):
                report += more
        return report.decode(errors="replace").strip()


@contextlib.contextmanager
def _affinity(cpus: Sequence[int]) -> Iterator[None]:
    """Run this thread on ``cpus``. A process started here inherits them from its first instruction."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
