"""Guarded: a child process that ends together with its starter, as do all processes started below it.

    child = Guarded("package.module:function")               # function(line, stacks), in a process of its own
    child.line.sendall(b"...")                               # a socket; its end stops the function
    child.kill()

A guard process stands between the two and only waits, so that no engine can keep it from detecting either end: the
starter's by the socket, which the kernel closes also after kill -9, the function's as its parent. Processes that the
function leaves behind become children of the guard, are named, and killed. The guard imports little, since it forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SETTLE_S, KILL_S = 2.0, 10.0
_SUBREAPER, _IS_SUBREAPER = 36, 37  # prctl(2)
_END_WITH_THEIR_PROCESS = (
    b"multiprocessing.resource_tracker",
    b"multiprocessing.forkserver",
    b"torch._inductor.compile_worker",
)
"""Helpers that an interpreter has once started, and that end when it does."""


class Guarded:
    """A process that runs ``function(line, stacks)``: the other end of ``line``, and a file for its stacks.

    ``line``: a socket. Its last line, as JSON, tells how the process ended: ``ended`` (its wait status; None: it was
    stopped because this end was closed), ``left`` (its remaining processes, as "pid command", now killed), ``stacks``.
    """

    def __init__(self, function: str) -> None:
        self.line, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asyncflow_sdk._guard", function],
                stdin=theirs.fileno(), start_new_session=True,  # Ctrl-C is the starter's to handle
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip

    def kill(self) -> None:
        """End it, and all processes below it."""
        self.line.close()
        try:
            self.process.wait(2 * KILL_S)
        except subprocess.TimeoutExpired:
            self.process.kill()


def main() -> None:
    line = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    adopt_orphans(True)
    with tempfile.TemporaryFile() as stacks:
        pid = os.fork()
        if not pid:
            faulthandler.enable(stacks)
            module, _, name = sys.argv[1].partition(":")
            getattr(importlib.import_module(module), name)(line, stacks)
            return
        status = _watch(pid, line)
        left = [] if status is None else _left_over()
        _kill_below()
        words = {
            "ended": status,
            "left": left,
            "stacks": os.pread(stacks.fileno(), 1 << 16, 0).decode(errors="replace"),
        }
        with contextlib.suppress(OSError):
            line.sendall(json.dumps(words).encode() + b"\n")
    os._exit(0)


def _watch(pid: int, line: socket.socket) -> int | None:
    """Return the wait status of the process; None if the other end of ``line`` was closed before its end. From now on
    ended orphans are reaped, too: a process may wait until they are gone."""
    status: list[int] = []
    end, ended = os.pipe()

    def reap() -> None:
        with contextlib.suppress(ChildProcessError):
            while found := os.wait():
                if found[0] == pid:
                    status.append(found[1])
                    os.close(ended)

    threading.Thread(target=reap, name="reaping", daemon=True).start()
    poller = select.poll()
    for each in (line, end):
        poller.register(each, 0)  # POLLHUP alone: what comes on the line is for the process
    return status[0] if end in dict(poller.poll()) else None


def _left_over() -> list[str]:
    """Return the processes that are still there a moment after."""
    until = time.monotonic() + SETTLE_S
    while (left := living_below()) and time.monotonic() < until:
        time.sleep(0.02)
    return [f"{pid} {command}" for pid, command in left.items()]


def _kill_below() -> None:
    until = time.monotonic() + KILL_S
    while (below := descendants(os.getpid())) and time.monotonic() < until:
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def adopt_orphans(on: bool) -> bool:
    """Set whether this process becomes the parent of orphans below it. Return the previous setting."""
    prctl: Any = ctypes.CDLL(None, use_errno=True).prctl
    before = ctypes.c_int(0)
    prctl(_IS_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_SUBREAPER, ctypes.c_ulong(on), 0, 0, 0)
    return bool(before.value)


def descendants(pid: int) -> list[int]:
    """Return the visible processes below a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def living_below() -> dict[int, str]:
    """Return the running processes below this one, with their commands, without those that only wait for its end."""
    living: dict[int, str] = {}
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError, IndexError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state not in "ZX" and not any(each in command for each in _END_WITH_THEIR_PROCESS):
                living[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    return living


def stack_of(stacks: str, within: str) -> str:
    """Return the stack of the thread with the fault, or of the threads that did not only wait: the
    innermost call first, down to its callers in folder ``within``; "" if unknown."""
    last = stacks[max(stacks.rfind("Timeout ("), stacks.rfind("Fatal Python error"), 0) :]
    threads = [part.splitlines() for part in last.split("\n\n") if " (most recent call first):" in part]
    faulty = [part for part in threads if any(line.startswith("Current thread") for line in part)]
    said = []
    for lines in faulty or threads:
        frames = [line for line in lines if line.startswith("  File ")]
        inner = list(itertools.takewhile(lambda line: f"/{within}/" not in line, frames))
        if len(inner) < len(frames) and (faulty or not all(map(_of_python, inner))):
            said.append(" < ".join(map(_call, inner[:5])))
    return "; ".join(dict.fromkeys(said))


def _of_python(frame: str) -> bool:
    """True for code of the standard library: all waiting threads are in it, also those that wait
    for the interpreter's lock."""
    return f'"{Path(os.__file__).parent}/' in frame and "/site-packages/" not in frame


def _call(frame: str) -> str:
    """Return 'f (b.py:3)' for '  File "/a/b.py", line 3 in f'."""
    path, _, rest = frame.strip().removeprefix('File "').partition('", line ')
    number, _, name = rest.partition(" in ")
    return f"{name} ({path.rsplit('/', 1)[-1]}:{number})"


if __name__ == "__main__":
    main()
