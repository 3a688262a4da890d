"""CommandLauncher: workers started by a command that reaches another host, as ssh or srun.

    class Ssh(CommandLauncher):
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
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec

from ...errors import ConfigError
from ...interfaces import FATAL_STATUS, Launcher, WorkerExit, WorkerHandle, WorkerSpec
from .process_launcher import WorkerOutput

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
    """A line of an agent: the worker's ``pid`` and ``host`` at its start, then pieces of ``text``, and its
    end. ``status``: None: not ended. ``rank``: number of the agent, of several with one command."""

    rank: int = 0
    pid: int = 0
    host: str = ""
    status: int | None = None
    text: str = ""


class CommandLauncher(Launcher):
    """Starts each worker by a command. Its ranks are started one by one, unless ``start_ranks`` calls
    ``start_together``."""

    answer_s: float = SILENCE_S
    """Limit of the wait for the first answer of an agent (seconds)."""
    kill_signal: int = signal.SIGKILL
    """Ends the command and the worker."""

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
        return self.start_together([spec], self.command(spec))[0]

    def start_together(self, specs: Sequence[WorkerSpec], command: Sequence[str]) -> Sequence[WorkerHandle]:
        """Start the ranks of a worker by one command. All agents have its standard input and output, and
        find their rank in the variable named by the last argument of ``far_command``. The log of
        rank 0 is the command's standard error. Raises ConfigError."""
        with contextlib.ExitStack() as files:
            outputs = [files.enter_context(WorkerOutput.opened(spec)) for spec in specs]
            try:
                process = subprocess.Popen(
                    list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=outputs[0].file,
                    start_new_session=True,  # Ctrl-C is for the driver only
                )  # fmt: skip
            except OSError as error:
                raise ConfigError(f"worker {specs[0].name!r}: cannot start {command[0]!r}: {error}") from None
        shared = _Command(self, process, len(specs))
        shared.send(b"".join(spec.config + b"\n" for spec in specs))
        return [
            _CommandHandle(self, spec, shared, rank, output)
            for rank, (spec, output) in enumerate(zip(specs, outputs, strict=True))
        ]


def no_program(host: str, program: str, status: int, lines: str) -> WorkerExit | None:
    """Explain the exit status of a shell that has not found ``program``. None: it has another cause."""
    if status not in _NOT_FOUND:
        return None
    where = f"host {host!r}" if host else "there"
    text = f"{where} has no program {program!r}: python= names an interpreter there ({lines})"
    return WorkerExit(FATAL_STATUS, text)


class _Command:
    """A running command, shared by the handles of its ranks. Thread-safe."""

    def __init__(self, launcher: CommandLauncher, process: subprocess.Popen[bytes], ranks: int) -> None:
        self._process, self._kill_signal, self._answer_s = process, launcher.kill_signal, launcher.answer_s
        self._lock = threading.Lock()
        self._messages = [queue.SimpleQueue[AgentMessage | None]() for _ in range(ranks)]
        self._waited = ranks
        self._over = False
        threading.Thread(target=self._read, name=f"command-{process.pid}", daemon=True).start()

    def messages(self, rank: int) -> Iterator[AgentMessage]:
        """Yield the messages of an agent until the agents are silent, or the command ends."""
        return iter(self._messages[rank].get, None)

    def send(self, data: bytes) -> None:
        """Write to the standard input of all agents."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # the command has ended
            assert self._process.stdin is not None
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def kill(self) -> None:
        """End the command; the agents then kill their workers."""
        self._process.send_signal(self._kill_signal)

    def leave(self) -> int:
        """Return the exit status of the command, 0 while other ranks run. Called once a rank."""
        with self._lock:
            self._waited -= 1
            if self._waited and not self._over:
                return 0
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(_LAST_S)
            except subprocess.TimeoutExpired:  # a process left on the other host may keep it open
                self._process.kill()
                self._process.wait()
            return self._process.returncode

    def _read(self) -> None:
        try:
            for message in self._received():
                if 0 <= message.rank < len(self._messages):
                    self._messages[message.rank].put(message)
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._over = True
            for messages in self._messages:
                messages.put(None)

    def _received(self) -> Iterator[AgentMessage]:
        assert self._process.stdout is not None
        output, heard, received, limit_s = self._process.stdout.fileno(), time.monotonic(), b"", self._answer_s
        while time.monotonic() - heard < limit_s:
            if not has_input(output):
                self.send(b"\n")
                continue
            more = os.read(output, 1 << 16)
            if not more:
                return
            *lines, received = (received + more).split(b"\n")
            received, heard, limit_s = received[-MAX_LINE_BYTES:], time.monotonic(), SILENCE_S
            for line in lines:
                with contextlib.suppress(msgspec.MsgspecError):  # a beat, or a greeting of the shell there
                    yield msgspec.json.decode(line, type=AgentMessage)


class _CommandHandle(WorkerHandle):
    def __init__(
        self, launcher: CommandLauncher, spec: WorkerSpec, command: _Command, rank: int, output: WorkerOutput
    ) -> None:
        self.host = spec.host
        self._launcher, self._spec, self._command, self._rank, self._output = launcher, spec, command, rank, output

    def wait(self) -> WorkerExit:
        """Wait for the worker. Its exit is the agent's, or else that of the command."""
        ended, text = None, ""
        for message in self._command.messages(self._rank):
            self.pid, self.host = message.pid or self.pid, message.host or self.host
            text += message.text
            if message.status is not None:
                ended = message.status
                break
        status = self._command.leave()
        if ended is not None:
            return WorkerExit(ended, text) if text or not ended else self._logged(ended)
        lines = self._output.text()
        if self.pid:
            return WorkerExit(status or 1, f"the connection to host {self.host!r} was lost: {lines}")
        return self._launcher.explain(self._spec, status, lines) or self._unanswered(status, lines)

    def stop(self) -> None:
        """Ask the agent to stop the worker."""
        self._command.send(STOP)

    def kill(self) -> None:
        """Kill the command; the agent then kills the worker."""
        self._command.kill()

    def _unanswered(self, status: int, lines: str) -> WorkerExit:
        python = self._launcher.far_command(self._spec)[0]
        return no_program(self.host, python, status, lines) or self._logged(status or 1)

    def _logged(self, status: int) -> WorkerExit:
        python = self._launcher.far_command(self._spec)[0]
        return self._output.exit(status, f"{python} of host {self.host!r}" if self.host else python)
