"""SshLauncher: workers on a list of hosts, by the ssh of this host.

af.Rollout("vllm", hosts=["gpu1", "gpu2"], launcher="ssh", python="/opt/venv/bin/python")
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence

from ...errors import ConfigError
from ...interfaces import FATAL_STATUS, Placement, WorkerExit, WorkerSpec
from .command_launcher import CommandLauncher, no_program

CONNECT_S = 20
_FAILED = 255
_CAUSES = (
    (r"Could not resolve hostname", "it is unknown; correct hosts=, or describe it in ssh's configuration"),
    (r"Permission denied", "it refuses the keys of this user; ssh must connect without a password: ssh-copy-id {host}"),
    (r"Host key verification failed", "its host key is unknown or has changed; check it by: ssh {host}"),
)  # fmt: skip


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
    """Explain a failure of ssh, or the lack of ``program`` on a host. ``lines``: what was printed. None: it
    is another failure."""
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
    return [
        "ssh", "-T", *options, "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "--", host,
        f"exec sh -c {shlex.quote(script)}",
    ]  # fmt: skip
