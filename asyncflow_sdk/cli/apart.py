"""Checks of one engine asked in a process of their own, so that nothing an engine does to a process ends or spoils what comes after.

with Apart(spec, kit) as apart:
    result = apart.ask(check)                    # a crash is a failed check, and the next one gets a new process

The process keeps its engine from check to check. It is ended, with all that it has started, after a check that failed; whoever
kills this process ends that one, too.
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
from ..testing.kit import Check, Result

MAKING_S, CLOSING_S, GRACE_S = 600.0, 30.0, 5.0
"""To import the engine's library; to close an engine; for what is to say by itself that it took too long."""

_KIT = "asyncflow_sdk/testing/kit"


class Apart:
    """``spec``: what `kit.process` makes its `Conformance` of, as plain values. ``asked``: how that one asks, as soon as it has.
    ``left``: processes that engines left behind when they were closed, as "pid command"; they have been killed."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.spec = dict(spec)
        self.kind = str(spec["kind"])
        self.asked: dict[str, Any] = {}
        self.left: list[str] = []
        self._process: _Process | None = None
        self._unmade: list[str] = []

    @property
    def unknowable(self) -> str:
        """Why nobody can know the engine's right answers; "" where somebody can. Raises PluginError where it cannot be loaded."""
        hello = self._started().hello
        self.kind = str(hello["kind"])
        return str(hello["unknowable"])

    def ask(self, check: Check) -> Result:
        """What comes of one check. It has failed, too, when its process ended, or had to be killed."""
        if len(self._unmade) > 1 and self._unmade[-2] == self._unmade[-1]:
            cause = f"the engine cannot be made: {self._unmade[-1]}"
            return Result(check, "failed", self._unmade[-1], cause=cause)  # making it may take minutes
        used = self._process is not None and self._process.made
        result = self._ask(check)
        if used and check.alone and result.outcome == "failed":
            result = self._ask(check)  # perhaps since a process can make one engine only
        return result

    def _ask(self, check: Check) -> Result:
        process, began = self._started(), time.monotonic()
        try:
            said = process.ask(check, how=not self.asked)
        except _Ended as ended:
            cause = "" if process.made else f"the engine cannot be made: {ended}"
            result = Result(check, "failed", str(ended), time.monotonic() - began, cause)
            self.left += process.left
            self._drop()
        else:
            self.asked = self.asked or said["asked"]
            result = Result(check, said["outcome"], said["detail"], said["seconds"], said["cause"], said["hint"])
            if result.outcome == "failed":
                self.close()
        if result.outcome == "failed" and not process.made:
            self._unmade.append(result.detail)
        return result

    def close(self) -> None:
        """Close the engine, and end its process and all below it. Idempotent."""
        if self._process is not None:
            self.left += self._process.end()
        self._drop()

    def _started(self) -> _Process:
        if self._process is None:
            self._process = _Process(self.spec)
        return self._process

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *exc: object) -> None:
        self._drop()


class _Ended(Exception):
    """Raised when the process is no more, or was killed since it did not answer; how it ended."""


class _Process:
    """The process, by its line."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._guarded = Guarded("asyncflow_sdk.testing.kit.process:main")
        self._limit_s = float(spec["limit_s"])
        self._heard = b""
        self._until = time.monotonic() + MAKING_S
        self._allowed_s = MAKING_S
        self.pid, self.made = 0, False
        self.left: list[str] = []
        try:
            self._say(spec)
            self.hello = self._hear("hello")
        except _Ended as ended:
            self.kill()
            raise PluginError(f"{spec['engine']}: when it was imported, {ended}") from None
        except BaseException:
            self.kill()
            raise

    def ask(self, check: Check, *, how: bool) -> dict[str, Any]:
        self._allow(MAKING_S)
        self._say({"ask": check.name, "how": how})
        result: dict[str, Any] = self._hear("result")
        return result

    def end(self) -> list[str]:
        """Have the engine closed. Returns the processes that it left."""
        self._allow(min(CLOSING_S, self._limit_s + GRACE_S))
        with contextlib.suppress(OSError):
            self._guarded.line.shutdown(1)  # SHUT_WR
        with contextlib.suppress(_Ended):
            self._hear("nothing more")
        return self.left

    def kill(self) -> None:
        self._guarded.kill()

    def _say(self, what: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended; that is heard
            self._guarded.line.sendall(json.dumps(what).encode() + b"\n")

    def _hear(self, wanted: str) -> Any:
        """The next message of this name; others are heeded. Raises _Ended, and what the engine could not be had for."""
        while True:
            message = self._message()
            if message is None:
                raise _Ended(self._end_of_a_hang())
            if "pid" in message:
                self.pid = message["pid"]
            self.made = message.get("made", self.made)
            if "within_s" in message:
                self._allow(message["within_s"] + GRACE_S)
            if "refused" in message:
                name, text = message["refused"]
                raise getattr(errors, name)(text)
            if "ended" in message:
                raise _Ended(self._how(message))
            if wanted in message:
                return message[wanted]

    def _how(self, message: Mapping[str, Any]) -> str:
        self.left = message["left"]
        status = message["ended"]
        if status is None:
            return "its process was ended"
        code = os.waitstatus_to_exitcode(status)
        how = f"ended with status {code}" if code >= 0 else f"was ended by {_signal_name(-code)}"
        where = stack_of(message["stacks"], _KIT)
        return f"the process that the engine is in {how}{where and f'; it was in {where}'}"

    def _end_of_a_hang(self) -> str:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._allow(CLOSING_S, of="")
        where = ""
        while (message := self._message()) is not None:
            if "ended" in message:
                self.left, where = message["left"], stack_of(message["stacks"], _KIT)
                break
        return f"it did not end within {self._allowed_s:g} s, and its process was killed{where and f'; it was in {where}'}"

    def _allow(self, seconds: float, of: str = "it") -> None:
        self._until = time.monotonic() + seconds
        if of:
            self._allowed_s = seconds

    def _message(self) -> dict[str, Any] | None:
        """None when none comes in time."""
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._guarded.line], [], [], max(self._until - time.monotonic(), 0.0))
            if not ready:
                return None
            more = b""
            with contextlib.suppress(ConnectionError):
                more = self._guarded.line.recv(1 << 16)
            if not more:  # the process that stands between died, too
                return {"ended": None, "left": [], "stacks": ""}
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
