"""A Python that has imported torch already: each program that it runs is forked, and starts at once.

    subprocess.run([warm_python(), "script.py"])         # or -m MODULE, or -c CODE, as sys.executable takes them

The program sends its arguments, variables, directory and descriptors to a server process. That forks a keeper, and the keeper
forks the process that runs them. The keeper passes on signals and the exit status, and kills the process if the program is
killed. The forked process has its own pid; its ``sys.executable`` is the program, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib.util
import marshal
import multiprocessing
import os
import runpy
import select
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

_CLIENT = """\
#!{python} -IS
import _socket, marshal, os, signal, struct, sys
fds = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + fd)]
line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
line.connect({address!r})
request = marshal.dumps((fds, sys.argv[1:], dict(os.environ), os.getcwd(), sorted(os.sched_getaffinity(0))))
line.sendmsg([request], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{{len(fds)}}i", *fds))])
for fd in fds:
    os.close(fd)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: line.send(b"%d" % number))
status = int(line.recv(9) or -9)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -9 else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""
_IMPORTED = [
    "torch", "transformers.models.qwen3.modeling_qwen3", "asyncflow_torch.train", "asyncflow_torch.rollout",
    "asyncflow_torch.demo.run", "asyncflow_torch.demo.model", "asyncflow_sdk.workflow.run", "asyncflow_sdk.cli.app",
    "asyncflow_sdk.cli.report", "matplotlib.backends.backend_svg", "asyncflow_sdk.testing",
]  # fmt: skip
"""Modules that the server imports. One that is missing is left out."""


@functools.cache
def warm_python() -> str:
    """Start the server, once in a test process, and return the path of a program that is used as ``sys.executable`` is.

    Skips the test where torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    address, program = str(folder / "socket"), folder / "python"
    program.write_text(_CLIENT.format(python=sys.executable, address=address))
    program.chmod(0o755)
    command = [sys.executable, __file__, address, str(program)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"warm\n", f"the server ended with {server.wait()}"
    atexit.register(server.communicate)  # it ends, and every forked process with it
    return str(program)


def _serve(address: str) -> tuple[list[int], tuple[Any, ...]]:
    """Fork for each client. Returns in the forked process only: the client's descriptors, and its request."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    os.write(1, b"warm\n")
    while 0 not in (ready := select.select([0, listener], [], [])[0]):  # standard input ends with the test
        line, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not _fork():
            break
        line.close()
    if 0 in ready:
        os._exit(0)
    listener.close()
    request, fds, _, _ = socket.recv_fds(line, 1 << 20, 250)
    if pid := _fork():
        _keep(pid, line, fds)
    line.close()
    return fds, marshal.loads(request)  # noqa: S302 - of our own client


def _fork() -> int:
    """A process that ends with this one."""
    pid = os.fork()
    if not pid:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    return pid


def _keep(pid: int, line: socket.socket, fds: list[int]) -> None:
    """Pass signals from the client to the process ``pid``, and its exit status back."""
    for fd in fds:
        os.close(fd)
    ended = os.pidfd_open(pid)
    while ended not in select.select([ended, line], [], [])[0]:
        said = line.recv(9)
        os.kill(pid, int(said or signal.SIGKILL))
        if not said:  # the client was killed
            with contextlib.suppress(ProcessLookupError):  # it may be younger than its session
                os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        line.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _run(program: str, libraries: list[str], fds: list[int], request: tuple[Any, ...]) -> None:
    """Run what the client was told to run, as its interpreter would."""
    numbers, arguments, environment, directory, cpus = request
    os.setsid()
    os.sched_setaffinity(0, cpus)
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 512) for fd in fds]
    os.closerange(3, 512)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    if os.isatty(1) or "PYTHONUNBUFFERED" in environment:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.executable = program
    multiprocessing.set_executable(program)
    importlib.invalidate_caches()
    while arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):  # flags, which are the server's
        del arguments[0]
    how, *rest = arguments
    first = {"-m": directory, "-c": ""}.get(how, str(Path(how).resolve().parent))
    sys.path[:] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *libraries]
    sys.argv = rest if how == "-m" else [how, *rest[how == "-c" :]]
    for site_packages in Path(environment.get("VIRTUAL_ENV", "/none")).glob("lib/python*/site-packages"):
        site.addsitedir(str(site_packages))
    if how == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(how, run_name="__main__")


_status = 0


def _end() -> None:
    """End without taking down what was imported: that takes as long as importing it. The last that is called at exit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if _status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(_status)


if __name__ == "__main__":
    atexit.register(_end)  # before what is imported registers more
    _address, _program = sys.argv[1:]
    own = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    _libraries = [path for path in sys.path if path not in own]
    for _name in _IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(_name)
    gc.freeze()  # so that collections in forked processes copy none of its pages
    _forked = _serve(_address)
    try:
        _run(_program, _libraries, *_forked)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        _status = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        _status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
