"""Sandbox: run a program that a model wrote, without network, with limits of time, memory, processes and files.

sandbox = af.Sandbox(time_s=5.0, memory_bytes=256 << 20)
result = sandbox.run("print(2 + 3)")                      # in a reward function
assert (result.status, result.output) == (0, "5\\n")
results = sandbox.run_all(programs, at_once=8)
"""

from __future__ import annotations

import functools
import math
import os
import secrets
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..errors import ConfigError
from ..types.validation import UserConfig, check_above, check_fields, check_least

_FIRST_UID = 1 << 30
_TRIAL_S = 30.0
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_CHUNK = 1 << 16


@dataclass(frozen=True)
class SandboxResult:
    """The end of a program. ``status``: its exit status; negative: the signal that ended it.
    ``output``, ``errors``: what it wrote, cut at the limit. ``ended_by``: "time" or "output" if the
    sandbox ended it, else ""."""

    status: int
    output: str
    errors: str
    ended_by: str = ""


@dataclass(frozen=True, kw_only=True)
class Sandbox(UserConfig):
    """A place for untrusted programs, by bubblewrap: no network, no files but the system's and the
    interpreter's, read-only, and a private /tmp. It is empty, except for the interpreter if that is
    installed below /tmp. Raises ConfigError where bubblewrap is missing or may not make namespaces.

    ``time_s``: of the clock, with the start of the interpreter; all processes are then killed.
    ``memory_bytes``: address space of each process, not of all together. ``processes``: at once, with
    threads. ``file_bytes``: of all files in /tmp, and of one file. ``output_bytes``: of output and
    errors, each; a program that writes more is ended. ``python``: the interpreter; None: this one.

    A program shares the kernel and the processors of the host. Started by root, it runs as a user of
    its own, since the kernel does not limit root's processes.
    """

    time_s: float = 10.0
    memory_bytes: int = 512 << 20
    processes: int = 32
    file_bytes: int = 64 << 20
    output_bytes: int = 64 << 10
    python: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_above(0, time_s=self.time_s)
        check_least(
            1, memory_bytes=self.memory_bytes, processes=self.processes, file_bytes=self.file_bytes,
            output_bytes=self.output_bytes,
        )  # fmt: skip
        check_bubblewrap()

    def run(self, program: str, *, stdin: str = "") -> SandboxResult:
        """Run a Python program, and wait for its end. Thread-safe."""
        return self._execute([self.python or sys.executable, "-I", "-c", program], stdin.encode())

    def run_all(self, programs: Sequence[str], *, at_once: int | None = None) -> list[SandboxResult]:
        """Run several programs, ``at_once`` at a time (default: one a processor). Returns their results in
        order."""
        with ThreadPoolExecutor(at_once or len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(self.run, programs))

    def _execute(self, command: Sequence[str], stdin: bytes) -> SandboxResult:
        process = subprocess.Popen(
            [*self._bubblewrap(command[0]), *command], cwd="/", start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        with process:
            try:
                output, errors, ended_by = _transfer(process, stdin, self.time_s, self.output_bytes)
            finally:
                process.kill()  # its PID namespace dies with bubblewrap, and so does every process in it
        status = process.returncode
        return SandboxResult(128 - status if status > 128 else status, output, errors, ended_by)

    def _bubblewrap(self, python: str) -> list[str]:
        """Return the command before that of the program."""
        homes = [os.path.realpath(home) for home in (sys.prefix, sys.base_prefix)] if self.python is None else []
        homes.append(os.path.dirname(os.path.dirname(os.path.realpath(python))))
        trees = [path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
        trees += [home for home in dict.fromkeys(homes) if home not in ("/", "/usr") and not home.startswith("/usr/")]
        above = [str(each) for path in trees for each in reversed(Path(path).parents) if str(each) != "/"]
        shown = [arg for path in dict.fromkeys(above) for arg in ("--perms", "0755", "--dir", path)]
        shown += [arg for path in trees for arg in ("--ro-bind", path, path)]
        shown += [arg for path in _SYSTEM if os.path.islink(path) for arg in ("--symlink", os.readlink(path), path)]
        own = ("--size", str(self.file_bytes), "--perms", "1777", "--tmpfs")
        root = os.geteuid() == 0
        drop = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID") if root else ("--unshare-user",)
        user = str(_FIRST_UID + secrets.randbelow(1 << 28))  # an own one: the kernel counts processes by user
        become = ("setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--") if root else ()
        limits = {
            "as": self.memory_bytes, "nproc": self.processes, "fsize": self.file_bytes,
            "cpu": math.ceil(self.time_s) + 1, "core": 0, "nofile": 256,
        }  # fmt: skip
        return [
            "bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
            "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL", *drop, *own, "/tmp", *shown,
            "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--proc", "/proc", "--dev", "/dev",
            *own, "/dev/shm", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp",
            "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8", "--",
            *become, "prlimit", *(f"--{name}={most}:{most}" for name, most in limits.items()), "--",
        ]  # fmt: skip


@functools.cache
def check_bubblewrap() -> None:
    """Raise ConfigError with the reason if no sandbox can be made here."""
    for tool, package in (("bwrap", "bubblewrap"), ("prlimit", "util-linux"), ("setpriv", "util-linux")):
        if shutil.which(tool) is None:
            raise ConfigError(f"a sandbox needs {tool}, which is not installed: apt-get install {package}")
    command = Sandbox._bubblewrap(object.__new__(Sandbox), "/usr/bin/true")
    trial = subprocess.run([*command, "true"], capture_output=True, timeout=_TRIAL_S, text=True, check=False)
    if trial.returncode:
        raise ConfigError(f"bubblewrap cannot make a sandbox here: {trial.stderr.strip() or trial.returncode}")


def _transfer(process: subprocess.Popen[bytes], stdin: bytes, time_s: float, most: int) -> tuple[str, str, str]:
    """Write the input and read what a process writes until both ends close. Return output, errors, and
    "time" or "output" if a limit was reached before."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    until, ended_by = time.monotonic() + time_s, ""
    found: dict[Any, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for pipe in found:
            selector.register(pipe, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while any(key.fileobj is not process.stdin for key in selector.get_map().values()) and not ended_by:
            ready = selector.select(max(until - time.monotonic(), 0))
            ended_by = "" if time.monotonic() < until else "time"
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    stdin = _write(process.stdin, stdin)
                    if not stdin:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                elif part := os.read(key.fd, _CHUNK):
                    found[key.fileobj] += part
                    ended_by = "output" if len(found[key.fileobj]) > most else ended_by
                else:
                    selector.unregister(key.fileobj)
    if not ended_by:
        try:
            process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            ended_by = "time"
    output, errors = (bytes(written[:most]).decode(errors="replace") for written in found.values())
    return output, errors, ended_by


def _write(pipe: IO[bytes], left: bytes) -> bytes:
    """Write a part without blocking. Return the rest, none if nobody reads it."""
    try:
        return left[os.write(pipe.fileno(), left[:_CHUNK]) :] if left else b""
    except BlockingIOError:
        return left
    except BrokenPipeError:
        return b""
