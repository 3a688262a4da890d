"""CommandLauncher: workers started by a command that reaches another host, as ssh or srun.

    class Ssh(CommandLauncher):
        def command(self, spec):
            return ["ssh", spec.host, shlex.join(self.far_command(spec))]

The far end of the command is an agent, ``python -m asyncflow_sdk.workflow remote``. It starts the worker on its host
as the launcher "process" does. Standard input carries the WorkerSpec, with its key, and then "stop". At its end, or
after a silence of ``SILENCE_S``, the agent kills the worker with its children, so a worker outlives neither its driver
nor the connection. Standard output carries the start and the end of the worker as lines of JSON; standard error is
the worker's log.
"""

from __future__ import annotations

import abc
import contextlib
import os
import queue
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from ...errors import ConfigError, ServerLost
from ...interfaces import FATAL_STATUS, Launcher, Placement, WorkerExit, WorkerHandle, WorkerSpec
from ...wire import probe
from .launchers import ProcessLauncher, WorkerOutput, start_process

BEAT_S = 10.0  # each end sends an empty line this often (seconds)
SILENCE_S = 120.0  # an end that receives nothing for so long gives up the worker (seconds)
STOP = b"stop\n"
MAX_LINE_BYTES = 1 << 20
PIECE = 128  # characters of a text in one line. srun mixes lines of several ranks if they have over 1024 bytes
CONNECT_S = 20
_LAST_S = 5.0
_NOT_FOUND = (126, 127)  # of a shell
_FAILED = 255  # of ssh
_CAUSES = (
    (r"Could not resolve hostname", "it is unknown; correct hosts=, or describe it in ssh's configuration"),
    (
        r"Permission denied",
        "it refuses the keys of this user; ssh must connect without a password: ssh-copy-id {host}",
    ),
    (r"Host key verification failed", "its host key is unknown or has changed; check it by: ssh {host}"),
)


class AgentMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of an agent: the worker's ``pid`` and ``host`` at its start, then pieces of ``text``, and its exit
    ``status`` at its end. ``rank``: the number of the agent among several with one command."""

    rank: int = 0
    pid: int = 0
    host: str = ""
    status: int | None = None
    text: str = ""


class CommandLauncher(Launcher):
    """Starts each worker by a command. Ranks are started one by one, unless ``start_ranks`` calls
    ``start_together``."""

    answer_s: float = SILENCE_S
    """Limit of the wait for the first answer of an agent (seconds)."""
    kill_signal: int = signal.SIGKILL
    """Ends the command and the worker."""

    @abc.abstractmethod
    def command(self, spec: WorkerSpec) -> Sequence[str]:
        """Return the local command that runs ``far_command`` on the worker's host, and connects its standard input,
        output and error. It must end the far command if it is killed."""

    def explain(self, spec: WorkerSpec, status: int, lines: str) -> WorkerExit | None:
        """Return the exit for a command that failed before the agent answered, from the last ``lines`` of its log;
        None: an error with these lines."""
        return None

    def far_command(self, spec: WorkerSpec) -> list[str]:
        """Return the command of the agent: the worker's interpreter with this SDK."""
        return [spec.placement.python or sys.executable, "-m", "asyncflow_sdk.workflow", "remote"]

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start the command and send it the spec. Raises ConfigError."""
        return self.start_together([spec], self.command(spec))[0]

    def start_together(self, specs: Sequence[WorkerSpec], command: Sequence[str]) -> Sequence[WorkerHandle]:
        """Start the ranks of a worker by one command. All agents have its standard input and output, and find their
        rank in the variable named by the last argument of ``far_command``. The log of rank 0 is the command's
        standard error. Raises ConfigError."""
        with contextlib.ExitStack() as files:
            outputs = [files.enter_context(WorkerOutput.opened(spec)) for spec in specs]
            try:
                pipe, log = subprocess.PIPE, outputs[0].file  # a session of its own: Ctrl-C is for the driver only
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True)
            except OSError as error:
                raise ConfigError(f"worker {specs[0].name!r}: cannot start {command[0]!r}: {error}") from None
        shared = _Command(self, process, len(specs))
        shared.send(b"".join(spec.config + b"\n" for spec in specs))
        started = enumerate(zip(specs, outputs, strict=True))
        return [_CommandHandle(self, spec, shared, rank, output) for rank, (spec, output) in started]


def no_program(host: str, program: str, status: int, lines: str) -> WorkerExit | None:
    """Explain the exit status of a shell that has not found ``program``; None for another cause."""
    if status not in _NOT_FOUND:
        return None
    text = f"has no program {program!r}: python= names an interpreter there ({lines})"
    return WorkerExit(FATAL_STATUS, f"{f'host {host!r}' if host else 'there'} {text}")


class _Command:
    """A running command, shared by the handles of its ranks. Thread-safe."""

    def __init__(self, launcher: CommandLauncher, process: subprocess.Popen[bytes], ranks: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._input, self._output = process, process.stdin, process.stdout
        self._kill_signal, self._answer_s = launcher.kill_signal, launcher.answer_s
        self._lock = threading.Lock()
        self._messages = [queue.SimpleQueue[AgentMessage | None]() for _ in range(ranks)]
        self._waited, self._over = ranks, False
        threading.Thread(target=self._read, name=f"command-{process.pid}", daemon=True).start()

    def messages(self, rank: int) -> Iterator[AgentMessage]:
        """Yield the messages of an agent until the agents are silent, or the command ends."""
        return iter(self._messages[rank].get, None)

    def send(self, data: bytes) -> None:
        """Write to the standard input of all agents."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # the command has ended
            self._input.write(data)
            self._input.flush()

    def kill(self) -> None:
        """End the command; the agents then kill their workers."""
        self._process.send_signal(self._kill_signal)

    def leave(self) -> int:
        """Return the exit status of the command, 0 while other ranks run. Called once a rank."""
        with self._lock:
            self._waited -= 1
            if self._waited and not self._over:
                return 0
            with contextlib.suppress(OSError):
                self._input.close()
            try:
                self._process.wait(_LAST_S)
            except subprocess.TimeoutExpired:  # a process left on the other host may keep it open
                self._process.kill()
                self._process.wait()
            return self._process.returncode

    def _read(self) -> None:
        output, heard, received, limit_s = self._output.fileno(), time.monotonic(), b"", self._answer_s
        try:
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
                        message = msgspec.json.decode(line, type=AgentMessage)
                        if 0 <= message.rank < len(self._messages):
                            self._messages[message.rank].put(message)
        finally:
            self._output.close()
            self._over = True
            for messages in self._messages:
                messages.put(None)


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
        status, python = self._command.leave(), self._launcher.far_command(self._spec)[0]
        if ended is not None and (text or not ended):
            return WorkerExit(ended, text)
        if ended is None:
            lines, status = self._output.text(), status or 1
            if self.pid:
                return WorkerExit(status, f"the connection to host {self.host!r} was lost: {lines}")
            explained = self._launcher.explain(self._spec, status, lines)
            if explained := explained or no_program(self.host, python, status, lines):
                return explained
        return self._output.exit(ended or status, f"{python} of host {self.host!r}" if self.host else python)

    def stop(self) -> None:
        """Ask the agent to stop the worker."""
        self._command.send(STOP)

    def kill(self) -> None:
        """Kill the command; the agent then kills the worker."""
        self._command.kill()


# ---- ssh


class SshLauncher(CommandLauncher):
    """``config``: a configuration file of ssh (its option -F); default: the user's. Workers run in the
    same directory as the driver if their host has it, else in the home directory."""

    def __init__(self, config: str = "") -> None:
        self._config = config

    def check(self, placement: Placement) -> None:
        """Check that there are hosts, and ssh. Raises ConfigError."""
        if not placement.hosts:
            raise ConfigError('launcher="ssh" needs hosts=, as hosts=["gpu1", "gpu2"]')
        if shutil.which("ssh") is None:
            raise ConfigError('launcher="ssh" needs the program ssh on this host')

    def command(self, spec: WorkerSpec) -> list[str]:
        """Return the command."""
        return ssh_command(spec.host, self.far_command(spec), self._config)

    def explain(self, spec: WorkerSpec, status: int, lines: str) -> WorkerExit | None:
        """Explain a failed connection. One that may succeed later is no fatal error."""
        return explained(spec.host, self.far_command(spec)[0], status, lines)


def explained(host: str, program: str, status: int, lines: str) -> WorkerExit | None:
    """Explain a failure of ssh, or the lack of ``program`` on a host, from the ``lines`` printed; None for another
    failure."""
    if status != _FAILED:
        return no_program(host, program, status, lines)
    said = (lines.strip().splitlines() or ["no reason given"])[-1]
    for pattern, cause in _CAUSES:
        if re.search(pattern, lines):
            return WorkerExit(FATAL_STATUS, f"host {host!r}: {cause.format(host=host)} ({said})")
    return WorkerExit(status, f"host {host!r} cannot be reached by ssh: {said}")


def ssh_command(host: str, command: Sequence[str], config: str = "") -> list[str]:
    """Return the command that runs ``command`` on a host, without a terminal or questions."""
    script = f"cd {shlex.quote(os.getcwd())} 2>/dev/null; exec {shlex.join(command)}"
    options = ["-F", config] if config else []
    options += ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"]
    return ["ssh", "-T", *options, "--", host, f"exec sh -c {shlex.quote(script)}"]


# ---- the far end


def run_agent() -> int:
    """Run the worker given by standard input, or the one of this rank. Returns the exit status of the agent."""
    rank, received = int(os.environ[sys.argv[2]]) if len(sys.argv) > 2 else 0, b""
    while received.count(b"\n") <= rank:
        more = os.read(0, 1 << 16)
        if not more:  # the driver died before it sent the spec
            return 0
        received += more
    *lines, received = received.split(b"\n", rank + 1)
    spec = WorkerSpec.decoded(lines[rank])
    spec = replace(spec, placement=replace(spec.placement, hosts=(), launcher="process", launcher_options={}))
    host = socket.gethostname()
    try:
        ProcessLauncher().check(spec.placement)
        probe(spec.address)
        handle = start_process(spec, None)
    except ConfigError as error:
        _say_end(rank, FATAL_STATUS, f"host {host!r}: {error}")
        return 0
    except ServerLost as error:
        text = f"from host {host!r} the run cannot be reached: {error}"
        _say_end(rank, 1, f"{text}; is its port open, and its address right (advertise=)?")
        return 0
    _say(AgentMessage(rank, handle.pid, host))
    threading.Thread(target=_follow, args=(handle, received), daemon=True).start()
    ending = handle.wait()
    _say_end(rank, ending.status, ending.text)
    return 0


def _follow(handle: WorkerHandle, received: bytes) -> None:
    """Stop the worker as standard input says; kill it at the input's end, or if it is silent."""
    heard = time.monotonic()
    while time.monotonic() - heard < SILENCE_S:
        if STOP in received:
            handle.stop()
        if not has_input(0):
            os.write(1, b"\n")
            continue
        more, heard = os.read(0, 1 << 12), time.monotonic()
        if not more:
            break
        received = received[-len(STOP) :] + more
    handle.kill()


def _say_end(rank: int, status: int, text: str) -> None:
    for start in range(0, len(text), PIECE):
        _say(AgentMessage(rank, text=text[start : start + PIECE]))
    _say(AgentMessage(rank, status=status))


def _say(message: AgentMessage) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def has_input(descriptor: int) -> bool:
    """Wait up to ``BEAT_S`` for input. Return True if there is some, or its end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(BEAT_S * 1000))
