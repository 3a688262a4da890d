"""Sandbox: run a program that a model wrote, without network, with limits of time, memory, processes and files.

sandbox = Sandbox(time_s=5.0, memory_bytes=256 << 20)
result = sandbox.run("print(2 + 3)")                      # in a reward function
assert (result.status, result.output) == (0, "5\\n")
results = sandbox.run_all(programs, at_once=8)
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

import asyncflow_sdk as af

from . import cgroups, interpreter, seccomp

_FIRST_UID = 1 << 30
_TRIAL_S = 60.0
_CHUNK = 1 << 16
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_STREAMS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
_BWRAP_PROCESSES = 2
_NO_CGROUP = (
    "Sandbox: this process may make no cgroup, so nothing bounds the memory and processes of a program together. "
    "Run it as root of a host, or by `systemd-run --user --scope`; or accept limits of each process by unbounded=True"
)


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
class Sandbox:
    """A place for untrusted programs, by bubblewrap: no network, no variables of the driver, no user
    namespaces, no files but the system's and the interpreter's, read-only, and a private /tmp, which
    /dev/shm leads to. Raises ConfigError if a program does not run in it here, or is not bounded.

    ``time_s``: of the clock, with the start of the interpreter; all processes are then killed.
    ``memory_bytes``: memory of all processes together, with their files; address space of each.
    ``processes``: the limit of processes and threads at a time. ``file_bytes``: bytes of all files
    together. ``output_bytes``: bytes of output and of errors, each; a program that writes more is
    ended. ``python``: the interpreter; default: this one. ``unbounded``: True to do without a cgroup;
    memory_bytes then bounds each process, and memory that is in none has no limit.

    A program shares the kernel and the processors of the host. Started by root, it runs as a user of
    its own.
    """

    time_s: float = 10.0
    memory_bytes: int = 512 << 20
    processes: int = 32
    file_bytes: int = 64 << 20
    output_bytes: int = 64 << 10
    python: str | None = None
    unbounded: bool = False

    def __post_init__(self) -> None:
        for name in ("time_s", "memory_bytes", "processes", "file_bytes", "output_bytes"):
            if not getattr(self, name) > 0:
                raise af.ConfigError(f"Sandbox: {name} must be above 0, not {getattr(self, name)}")
        _try(self)

    def run(self, program: str, *, stdin: str = "") -> SandboxResult:
        """Run a Python program, and wait for its end. Thread-safe."""
        return self._execute(program, stdin, self.time_s)

    def run_all(self, programs: Sequence[str], *, at_once: int | None = None) -> list[SandboxResult]:
        """Run several programs, ``at_once`` at a time (default: one a processor). Returns their results in
        order."""
        with ThreadPoolExecutor(at_once or len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(self.run, programs))

    def _execute(self, program: str, stdin: str, time_s: float) -> SandboxResult:
        parents = [] if self.unbounded else cgroups.parents()
        if not parents and not self.unbounded:  # a copy from another process was not tried here
            raise af.ConfigError(_NO_CGROUP)
        with (
            _file(seccomp.compiled()) as filter_file,
            _file(program.encode(errors="surrogatepass")) as program_file,
            cgroups.bounded(parents, self.memory_bytes, self.processes + _BWRAP_PROCESSES) as entered,
        ):
            process = subprocess.Popen(
                ["/bin/sh", "-c", cgroups.ENTER, "sh", *entered, "--", *self._command(filter_file, program_file)],
                cwd="/", env=_ENVIRONMENT, start_new_session=True, pass_fds=(filter_file, program_file),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            with process:
                try:
                    output, errors, ended_by = _transfer(process, stdin.encode(), time_s, self.output_bytes)
                finally:
                    process.kill()  # its PID namespace dies with bubblewrap, and so does every process in it
        status = process.returncode
        return SandboxResult(128 - status if status > 128 else status, output, errors, ended_by)

    def _command(self, filter_file: int, program_file: int) -> list[str]:
        python, mounts = interpreter.located(self.python)
        root = os.geteuid() == 0
        drop = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID") if root else ("--unshare-user",)
        user = str(_FIRST_UID + secrets.randbelow(1 << 28))  # an own one: the kernel counts processes by user
        become = [
            shutil.which("setpriv") or "setpriv",
            "--reuid",
            user,
            "--regid",
            user,
            "--clear-groups",
            "--inh-caps=-all",
            "--",
        ] * root
        limits = {
            "as": self.memory_bytes, "fsize": self.file_bytes, "cpu": math.ceil(self.time_s) + 1, "core": 0, "nofile": 256,
        } | ({"nproc": self.processes} if self.unbounded else {})  # fmt: skip
        return [
            shutil.which("bwrap") or "bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts",
            "--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL", *drop,
            "--seccomp", f"{filter_file}", "--size", f"{self.file_bytes}", "--perms", "1777", "--tmpfs", "/tmp",
            "--perms", "0755", "--dir", "/dev", "--symlink", "../tmp", "/dev/shm", *mounts,
            "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--proc", "/proc",
            *(arg for path in _DEVICES for arg in ("--dev-bind", path, path)),
            *(arg for name, path in _STREAMS.items() for arg in ("--symlink", f"/proc/self/fd{path}", f"/dev/{name}")),
            "--perms", "0644", "--file", f"{program_file}", "/program.py", "--remount-ro", "/", "--chdir", "/tmp", "--",
            *become, shutil.which("prlimit") or "prlimit", *(f"--{name}={most}:{most}" for name, most in limits.items()), "--",
            python, "-I", "/program.py",
        ]  # fmt: skip


@functools.cache
def _try(sandbox: Sandbox) -> None:
    """Raise ConfigError with the reason if a program does not run in a sandbox here."""
    for tool, package in (("bwrap", "bubblewrap"), ("prlimit", "util-linux"), ("setpriv", "util-linux")):
        if shutil.which(tool) is None:
            raise af.ConfigError(f"a sandbox needs {tool}, which is not installed: apt-get install {package}")
    python, _ = interpreter.located(sandbox.python)
    result = sandbox._execute("print(6 * 7)", "", _TRIAL_S)
    if result.output == "42\n":
        return
    why = result.errors.strip() or f"status {result.status} {result.ended_by}".strip()
    if why.startswith("bwrap: "):
        raise af.ConfigError(f"bubblewrap cannot make a sandbox here: {why}; it needs user namespaces, or root")
    raise af.ConfigError(
        f"Sandbox: {python} does not run a program: {why}. It sees its own prefix and the system's folders only: "
        "choose another by python=, or raise memory_bytes"
    )


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[int]:
    """Yield the descriptor of a file without a name."""
    with open(os.memfd_create("asyncflow"), "w+b", buffering=0) as file:
        file.write(data)
        file.seek(0)
        yield file.fileno()


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
