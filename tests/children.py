"""Child processes for tests: real ones, which say things and are told things, a line of JSON at a time.

def consume(address): ...; say("ready"); hear()          # in a module that imports as little as it needs
with Child(consume, address) as child: child.hear(); child.stop(); child.resume(); child.say(1); child.kill()
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_BOOT = (
    "import importlib, json, sys; sys.path[1:1] = sys.argv[1].split(':');"
    "getattr(importlib.import_module(sys.argv[2]), sys.argv[3])(*json.loads(sys.argv[4]))"
)
LIMIT_S = 60.0
"""Only ends a test that would hang."""


def say(value: Any) -> None:
    """In a child: to its test."""
    print(json.dumps(value), flush=True)


def hear() -> Any:
    """In a child: from its test."""
    return json.loads(sys.stdin.readline())


class Child:
    """A process that runs ``function``, started by the command ``within``. It is killed when the block ends."""

    def __init__(self, function: Callable[..., None], *arguments: Any, within: Sequence[str] = ()) -> None:
        path = Path(function.__code__.co_filename)
        folders = f"{path.parent}:{Path(__file__).parent}"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the child
        self._process = subprocess.Popen(
            [*within, sys.executable, "-c", _BOOT, folders, path.stem, function.__name__, json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, bufsize=1,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._out, self._in = self._process.stdout, self._process.stdin
        self._said = b""  # and not heard yet: a stream's own buffer would hide it from select
        self.pid = self._process.pid

    def hear(self) -> Any:
        """The next thing it says."""
        while b"\n" not in self._said:
            ready = select.poll()  # select takes no descriptor past 1023
            ready.register(self._out, select.POLLIN)
            more = os.read(self._out.fileno(), 1 << 16) if ready.poll(LIMIT_S * 1000) else b""
            assert more, f"the child said nothing; it ended with {self._process.poll()}:\n{self.errors()}"
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return json.loads(line)

    def say(self, value: Any) -> None:
        self._in.write(json.dumps(value) + "\n")
        self._in.flush()

    def stop(self) -> None:
        """Freeze it, as a debugger or a laptop's lid does."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and be sure that it is gone."""
        self._process.kill()
        self._process.wait(LIMIT_S)

    def wait(self) -> int:
        return self._process.wait(LIMIT_S)

    def errors(self) -> str:
        """What it wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self._in.close()
        self._out.close()
        self._errors.close()
