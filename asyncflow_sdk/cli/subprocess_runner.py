"""Run the checks of an engine in a subprocess, so that a crash or a hang of the engine fails one check only.

with SubprocessRunner(spec) as runner:
    result = runner.ask(check)                   # a crash is a failed check; the next check gets a new process

The process keeps its engine between checks. It and its descendants are killed after a failed check, and with this
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Mapping
from typing import Any

from .. import errors
from .._guard import Guarded, stack_of
from ..errors import PluginError
from ..testing.kit import Check, CheckResult

START_S, CLOSE_S, GRACE_S = 600.0, 30.0, 5.0
"""Limits for importing the engine's library and making the engine, for closing it, and for its own
report of a timeout."""

_KIT = "asyncflow_sdk/testing/kit"


class SubprocessRunner:
    """``spec``: the arguments of `Conformance` for `kit.process`, as plain values. ``asked``: the
    kit's settings, known after the first check. ``left``: processes alive after engines were
    closed, as "pid command"; they have been killed."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.spec = dict(spec)
        self.kind = str(spec["kind"])
        self.asked: dict[str, Any] = {}
        self.left: list[str] = []
        self._process: _CheckProcess | None = None
        self._start_errors: list[str] = []

    def start(self) -> str:
        """Start the process, and learn the kind. Return the reason if the engine's correct answers cannot
        be known, else "". Raises PluginError if it cannot be loaded."""
        hello = self._started().hello
        self.kind = str(hello["kind"])
        return str(hello["unknowable"])

    def ask(self, check: Check) -> CheckResult:
        """Run one check. It fails, too, if its process ended or had to be killed."""
        if len(self._start_errors) > 1 and self._start_errors[-2] == self._start_errors[-1]:
            cause = f"the engine cannot be made: {self._start_errors[-1]}"
            return CheckResult(check, "failed", self._start_errors[-1], cause=cause)  # making it may take minutes
        used = self._process is not None and self._process.made
        result = self._ask(check)
        if used and check.alone and result.outcome == "failed":
            result = self._ask(check)  # some engines can be made only once in a process
        return result

    def _ask(self, check: Check) -> CheckResult:
        process, began = self._started(), time.monotonic()
        try:
            reply = process.ask(check, how=not self.asked)
        except _ProcessEnded as ended:
            cause = "" if process.made else f"the engine cannot be made: {ended}"
            result = CheckResult(check, "failed", str(ended), time.monotonic() - began, cause)
            self.left += process.left
            self._kill()
        else:
            self.asked = self.asked or reply["asked"]
            result = CheckResult(
                check, reply["outcome"], reply["detail"], reply["seconds"], reply["cause"], reply["hint"]
            )
            if result.outcome == "failed":
                self.close()
        if result.outcome == "failed" and not process.made:
            self._start_errors.append(result.detail)
        return result

    def close(self) -> None:
        """Close the engine and end its process with all descendants. Idempotent."""
        if self._process is not None:
            self.left += self._process.close_engine()
        self._kill()

    def _started(self) -> _CheckProcess:
        if self._process is None:
            self._process = _CheckProcess(self.spec)
        return self._process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def __enter__(self) -> SubprocessRunner:
        return self

    def __exit__(self, *exc: object) -> None:
        self._kill()


class _ProcessEnded(Exception):
    """Raised when the process ended, or was killed after a timeout; the text says how."""


class _CheckProcess:
    """The subprocess: one JSON object per line in each direction."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._guarded = Guarded("asyncflow_sdk.testing.kit.process:main")
        self._limit_s = float(spec["limit_s"])
        self._received = b""
        self._until = time.monotonic() + START_S
        self._allowed_s = START_S
        self.pid, self.made = 0, False
        self.left: list[str] = []
        try:
            self._send(spec)
            self.hello = self._receive("hello")
        except _ProcessEnded as ended:
            self.kill()
            raise PluginError(f"{spec['engine']}: when it was imported, {ended}") from None
        except BaseException:
            self.kill()
            raise

    def ask(self, check: Check, *, how: bool) -> dict[str, Any]:
        """Run a check and return its result. ``how``: with the kit's settings. Raises _ProcessEnded."""
        self._allow(START_S)
        self._send({"ask": check.name, "how": how})
        result: dict[str, Any] = self._receive("result")
        return result

    def close_engine(self) -> list[str]:
        """Close the engine. Return the processes still alive."""
        self._allow(min(CLOSE_S, self._limit_s + GRACE_S))
        with contextlib.suppress(OSError):
            self._guarded.line.shutdown(1)  # SHUT_WR
        with contextlib.suppress(_ProcessEnded):
            self._receive("nothing more")
        return self.left

    def kill(self) -> None:
        """Kill the process and its descendants."""
        self._guarded.kill()

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the process ended; receiving reports it
            self._guarded.line.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self, wanted: str) -> Any:
        """Return the next message with this key; handle the others. Raises _ProcessEnded, or the engine's error."""
        while True:
            message = self._message()
            if message is None:
                raise _ProcessEnded(self._kill_hung())
            if "pid" in message:
                self.pid = message["pid"]
            self.made = message.get("made", self.made)
            if "within_s" in message:
                self._allow(message["within_s"] + GRACE_S)
            if "refused" in message:
                name, text = message["refused"]
                raise getattr(errors, name)(text)
            if "ended" in message:
                raise _ProcessEnded(self._exit_text(message))
            if wanted in message:
                return message[wanted]

    def _exit_text(self, message: Mapping[str, Any]) -> str:
        self.left = message["left"]
        status = message["ended"]
        if status is None:
            return "its process was ended"
        code = os.waitstatus_to_exitcode(status)
        how = f"ended with status {code}" if code >= 0 else f"was ended by {_signal_name(-code)}"
        where = stack_of(message["stacks"], _KIT)
        return f"the engine's process {how}{where and f'; it was in {where}'}"

    def _kill_hung(self) -> str:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._until = time.monotonic() + CLOSE_S
        where = ""
        while (message := self._message()) is not None:
            if "ended" in message:
                self.left, where = message["left"], stack_of(message["stacks"], _KIT)
                break
        return f"it did not end within {self._allowed_s:g} s, and its process was killed{where and f'; it was in {where}'}"

    def _allow(self, seconds: float) -> None:
        self._until, self._allowed_s = time.monotonic() + seconds, seconds

    def _message(self) -> dict[str, Any] | None:
        """Return the next message, or None after the time limit."""
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._guarded.line], [], [], max(self._until - time.monotonic(), 0.0))
            if not ready:
                return None
            data = b""
            with contextlib.suppress(ConnectionError):
                data = self._guarded.line.recv(1 << 16)
            if not data:  # the guarding process died, too
                return {"ended": None, "left": [], "stacks": ""}
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
