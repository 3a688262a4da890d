"""CommandLauncher: workers started by a command that reaches another host, as ssh or srun.

    class Ssh(af.CommandLauncher):
        def command(self, spec):
            return ["ssh", spec.host, shlex.join(self.far_command(spec))]

The far end of the command is an agent (``remote_agent``), which starts the worker there. Standard
input carries the WorkerSpec, with its key, and then "stop"; the worker is killed at its end, or if
it is silent for ``SILENCE_S``. Standard output carries the start and the end of the worker as lines
of JSON; standard error is the worker's log.
"""

from __future__ import annotations

import abc
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec

from ...errors import ConfigError
from ...interfaces import FATAL_STATUS, Launcher, WorkerExit, WorkerHandle, WorkerSpec
from .process_launcher import LogEnd

BEAT_S = 10.0
"""Each end sends an empty line this often (seconds)."""
SILENCE_S = 120.0
"""An end that receives nothing for so long gives up the worker (seconds)."""
STOP = b"stop\n"
MAX_LINE_BYTES = 1 << 20
_LAST_S = 5.0
_NOT_FOUND = (126, 127)  # of a shell


def has_input(descriptor: int) -> bool:
    """Wait up to ``BEAT_S`` for input. Return True if there is some, or its end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(BEAT_S * 1000))


class AgentMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the agent: the worker's ``pid`` and ``host`` at its start, and its end. ``status``:
    None: not ended."""

    pid: int = 0
    host: str = ""
    status: int | None = None
    text: str = ""


class CommandLauncher(Launcher):
    """Starts each worker by a command. Its ranks are started one by one."""

    @abc.abstractmethod
    def command(self, spec: WorkerSpec) -> Sequence[str]:
        """Return the local command that runs ``far_command`` where the worker shall be, and connects
        its standard input, output and error. It must end the far command if it is killed."""

    def explain(self, spec: WorkerSpec, status: int, lines: str) -> WorkerExit | None:
        """Return the exit for a command that failed before the agent answered; ``lines``: the end of its
        log. None: an error with these lines."""
        return None

    def far_command(self, spec: WorkerSpec) -> list[str]:
        """Return the command of the agent: the worker's interpreter with this SDK."""
        return [spec.placement.python or sys.executable, "-m", "asyncflow_sdk.workflow", "remote"]

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start the command and send it the spec. Raises ConfigError."""
        command = list(self.command(spec))
        with LogEnd.opened(spec) as log:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.file,
                    start_new_session=True,  # Ctrl-C is for the driver only
                )  # fmt: skip
            except OSError as error:
                raise ConfigError(f"worker {spec.name!r}: cannot start {command[0]!r}: {error}") from None
        return _CommandHandle(self, spec, process, log)


class _CommandHandle(WorkerHandle):
    def __init__(
        self, launcher: CommandLauncher, spec: WorkerSpec, process: subprocess.Popen[bytes], log: LogEnd
    ) -> None:
        self.host = spec.host
        self._launcher, self._spec, self._process, self._log = launcher, spec, process, log
        self._lock = threading.Lock()
        self._send(spec.config + b"\n")

    def wait(self) -> WorkerExit:
        """Wait for the worker. Its exit is the agent's, or else that of the command."""
        end = None
        for message in self._messages():
            if message.status is not None:
                end = message
                break
            self.pid, self.host = message.pid, message.host
        self._close()
        status = self._process.returncode
        if end is not None and end.status is not None:
            return WorkerExit(end.status, end.text) if end.text or not end.status else self._logged(end.status)
        if self.pid:
            return WorkerExit(status or 1, f"the connection to host {self.host!r} was lost: {self._log.text()}")
        return self._launcher.explain(self._spec, status, self._log.text()) or self._unanswered(status)

    def stop(self) -> None:
        """Ask the agent to stop the worker."""
        self._send(STOP)

    def kill(self) -> None:
        """Kill the command; the agent then kills the worker."""
        self._process.kill()

    def _messages(self) -> Iterator[AgentMessage]:
        """Yield the agent's messages until it is silent, or the command ends."""
        assert self._process.stdout is not None
        output, heard, received = self._process.stdout.fileno(), time.monotonic(), b""
        while time.monotonic() - heard < SILENCE_S:
            if not has_input(output):
                self._send(b"\n")
                continue
            more = os.read(output, 1 << 16)
            if not more:
                return
            *lines, received = (received + more).split(b"\n")
            received, heard = received[-MAX_LINE_BYTES:], time.monotonic()
            for line in lines:
                with contextlib.suppress(msgspec.MsgspecError):  # a beat, or a greeting of the shell there
                    yield msgspec.json.decode(line, type=AgentMessage)

    def _unanswered(self, status: int) -> WorkerExit:
        where = f"host {self.host!r}" if self.host else "there"
        python = self._launcher.far_command(self._spec)[0]
        if status in _NOT_FOUND:
            text = f"{where} has no program {python!r}: python= names an interpreter there ({self._log.text()})"
            return WorkerExit(FATAL_STATUS, text)
        return self._logged(status or 1)

    def _logged(self, status: int) -> WorkerExit:
        python = self._launcher.far_command(self._spec)[0]
        return self._log.exit(status, f"{python} of host {self.host!r}" if self.host else python)

    def _send(self, data: bytes) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):  # the command has ended
            assert self._process.stdin is not None
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _close(self) -> None:
        """End the command. A process left on the other host may keep it open."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock, contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_LAST_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
