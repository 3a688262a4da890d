"""Child processes for tests: real ones, which exchange lines of JSON with their test.

def consume(address): ...; say("ready"); hear()          # in a module that imports as little as it needs
with Child(consume, address) as child: child.hear(); child.stop(); child.resume(); child.say(1); child.kill()

They are forked from one process that has imported the SDK and started no thread: a new interpreter takes twenty times as long.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 60.0
"""Only ends a test that would hang."""
_FRESH = "import sys; sys.path[1:1] = sys.argv[1].split(':'); import children; children.run(*sys.argv[2:])"
_starting = threading.Lock()


def say(value: Any) -> None:
    """In a child: send a value to its test."""
    print(json.dumps(value), flush=True)


def hear() -> Any:
    """In a child: receive a value from its test."""
    return json.loads(sys.stdin.readline())


def run(module: str, function: str, arguments: str) -> None:
    """In a child: do what it was started for."""
    getattr(importlib.import_module(module), function)(*json.loads(arguments))


class Child:
    """A process that runs ``function``. With ``within`` that command starts it, in a new interpreter. It is killed when the
    block ends."""

    def __init__(self, function: Callable[..., None], *arguments: Any, within: Sequence[str] = ()) -> None:
        path = Path(function.__code__.co_filename)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the child
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        self._in, self._out = ours_in, ours_out
        self._said = b""  # received, and not returned by hear() yet
        self._code: int | None = None
        self._ending = threading.Lock()
        task = {
            "within": list(within), "folders": f"{path.parent}:{Path(__file__).parent}", "environment": dict(os.environ),
            "directory": os.getcwd(), "run": [path.stem, function.__name__, json.dumps(arguments)],
        }  # fmt: skip
        sys.audit("os.fork")
        self.pid = _fork(task, [theirs_in, theirs_out, self._errors.fileno()])
        os.close(theirs_in)
        os.close(theirs_out)

    def hear(self) -> Any:
        """The next value that it says."""
        while b"\n" not in self._said:
            more = os.read(self._out, 1 << 16) if _readable(self._out) else b""
            assert more, f"the child said nothing; it ended with {self._ended(0)}:\n{self.errors()}"
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return json.loads(line)

    def say(self, value: Any) -> None:
        os.write(self._in, json.dumps(value).encode() + b"\n")

    def stop(self) -> None:
        """Freeze it, as a debugger or a laptop's lid does."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and be sure that it is gone."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        code = self._ended(LIMIT_S)
        assert code is not None, f"the child does not end:\n{self.errors()}"
        return code

    def errors(self) -> str:
        """What it wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read()

    def _ended(self, seconds: float) -> int | None:
        with self._ending:
            if self._code is None:
                process = os.pidfd_open(self.pid)
                if _readable(process, seconds):
                    self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                os.close(process)
            return self._code

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        if not self._errors.closed:
            os.close(self._in)
            os.close(self._out)
            self._errors.close()


def _readable(descriptor: int, seconds: float = LIMIT_S) -> bool:
    ready = select.poll()  # select takes no descriptor past 1023
    ready.register(descriptor, select.POLLIN)
    return bool(ready.poll(seconds * 1000))


# ---- the process that forks them


def _fork(task: dict[str, Any], streams: list[int]) -> int:
    """A new process, a child of this one: its parent ends at once, and this one adopts it."""
    with _starting:
        forker = _forker()
        _adopt(True)
        socket.send_fds(forker, [json.dumps(task).encode()], streams)
        pid = int(forker.recv(100))
        _adopt(False)
        return pid


@functools.cache
def _forker() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]).returncode = 0
    return ours


def _adopt(orphans: bool) -> None:
    assert ctypes.CDLL(None).prctl(36, orphans, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER


def _serve_forks(control: socket.socket) -> None:
    """Return in each child; end when the tests do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        task, streams, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not task:
            sys.exit()
        begun, told = os.pipe()
        if not (between := os.fork()):
            if not (pid := os.fork()):
                break
            os.write(told, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        control.send(os.read(begun, 100))
        for descriptor in (begun, told, *streams):
            os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    control.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for descriptor in (begun, told, *streams):
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    found = json.loads(task)
    os.chdir(found["directory"])
    os.environ.clear()
    os.environ.update(found["environment"])
    if found["within"]:
        command = [*found["within"], sys.executable, "-c", _FRESH, found["folders"], *found["run"]]
        os.execvp(command[0], command)
    sys.path[1:1] = found["folders"].split(":")
    run(*found["run"])


if __name__ == "__main__":
    importlib.import_module("asyncflow_sdk.workflow")
    _serve_forks(socket.socket(fileno=int(sys.argv[1])))
