"""A worker's own process: ``python -m asyncflow_sdk.workflow``, started by the launcher "process".

Standard input is a socket to the driver. Its first line is the WorkerSpec. The process ends when
the socket ends, so a worker never outlives its driver, and writes its last report to the socket.

Exit status: 0: the stream ended; 3: an error that would recur, no restart; 1: any other error.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading

from ...interfaces import WorkerSpec
from ...memory import remove_if_ownerless
from .worker import WorkerRuntime

REPORT_BYTES = 32 << 10
"""Length limit of the last report. It fits into the buffer of a socket without a reader."""
COMPLETED = "through"
"""The last report of a worker that ended with the stream. A foreign exit with status 0 lacks it."""


def main() -> int:
    """Run the worker given by standard input. Returns the exit status."""
    # Hazard: for a few short texts tokenizers wakes one thread a core, slower than one thread alone. The placement may set it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    line = _first_line()
    if not line:  # the driver died before it sent the spec
        return 0
    worker = WorkerRuntime(WorkerSpec.decoded(line))
    threading.Thread(target=_end_with_driver, args=(worker,), daemon=True).start()
    ending = worker.run()
    with contextlib.suppress(OSError):  # a pipe cannot be written to
        os.write(0, (ending.text if ending.status else COMPLETED).encode()[-REPORT_BYTES:])
    return ending.status


def _first_line() -> bytes:
    """Read unbuffered: a thread in a buffered read at exit would abort the interpreter."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 65536)
        if not byte:
            break
        line += byte
    return line


def _end_with_driver(worker: WorkerRuntime) -> None:
    """End this process when the driver asks for it or is gone. If it is gone, remove the run's
    memory and this worker's children; a living driver does so itself."""
    while os.read(0, 4096):
        pass
    if _is_gone(0):
        if worker.directory is not None:
            remove_if_ownerless(worker.directory, wait_s=5.0)  # the driver's lock ends after its socket
        if os.getpgid(0) == os.getpid():  # the session of this worker's children
            os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _is_gone(line: int) -> bool:
    """True if no process holds the other end of a socket: a driver that only asks for the end still
    does."""
    poll = select.poll()
    poll.register(line, 0)
    return any(what & select.POLLHUP for _, what in poll.poll(0))
