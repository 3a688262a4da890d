"""Child processes that start at once: a server process has imported what they need, and forks them.

def consume(address): ...; say("ready"); hear()          # in a module that imports as little as it needs
with Child(consume, address) as child: child.hear(); child.stop(); child.resume(); child.say(1); child.kill()
subprocess.run([warm_python(), "script.py"])             # or -m MODULE, or -c CODE, as sys.executable takes them

A client sends its arguments, variables, directory, descriptors and namespaces to the server, which forks the process that
runs them there.
The server passes on signals and the exit status, and kills the process if its client is killed. All processes that run tests
share one server with torch and one without. Each imports its modules at its first request.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib.util
import json
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from processes import state
from waiting import until

LIMIT_S = 200.0
"""Only ends a test that would hang."""
_CALL = """\
print(number, flush=True)
import importlib, json, multiprocessing, sys
sys.executable, folders, module, function, arguments = sys.argv[1:]
multiprocessing.set_executable(sys.executable)
sys.path[1:1] = json.loads(folders)
getattr(importlib.import_module(module), function)(*json.loads(arguments))
"""
_PROGRAM = """\
#!{python} -IS
import _signal as signal, _socket, marshal, os, struct, sys  # the module signal takes as long to import as the rest
fds = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + fd)]
line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
line.connect({address!r})
request = (sys.argv[0], sys.argv[1:], fds[:], dict(os.environ), os.getcwd(), sorted(os.sched_getaffinity(0)))
fds += [os.open("/proc/self/ns/" + each, os.O_RDONLY) for each in ("pid", "net", "uts", "mnt")]
rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{{len(fds)}}i", *fds))]
line.sendmsg([marshal.dumps(request)], rights)
for fd in fds:
    os.close(fd)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: line.send(b"%d" % number))
line.recv(9)
try:
    status = line.recv(9)
except ConnectionResetError:  # reported once, if the child ended with a signal unread; its status follows
    status = line.recv(9)
status = int(status or -9)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -9 else None
    os.kill(os.getpid(), -status)  # which the first process of a host ignores
os._exit(status if status >= 0 else 128 - status)
"""
_TORCH = [
    "torch", "transformers.models.qwen3.modeling_qwen3", "asyncflow_torch.train", "asyncflow_torch.rollout",
    "asyncflow_torch.demo.run", "asyncflow_torch.demo.model", "asyncflow_sdk.workflow.run", "asyncflow_sdk.cli.app",
    "asyncflow_sdk.cli.report.page", "matplotlib.backends.backend_svg", "asyncflow_sdk.testing",
]  # fmt: skip
"""What `warm_python` has imported, and the children of tests/adapters; a module that is missing is left out."""
_IMPORTED = {"SDK": ["asyncflow_sdk.workflow", "pytest"], "TORCH": _TORCH}


def say(value: Any) -> None:
    """In a child: send a value to its test."""
    print(json.dumps(value), flush=True)


def hear() -> Any:
    """In a child: receive a value from its test."""
    return json.loads(sys.stdin.readline())


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call, or the name and text of its error."""
    try:
        return call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def answer(known: dict[str, Any]) -> None:
    """In a child: say what each expression of its test gives."""
    while True:
        say(msgspec.to_builtins(outcome(eval, hear(), known)))


class Child:
    """A process that runs ``function``. With ``within`` that command starts it. It is killed when the block ends."""

    def __init__(self, function: Callable[..., None], *arguments: Any, within: Sequence[str] = ()) -> None:
        path = Path(function.__code__.co_filename)
        program = _python("TORCH" if path.parent.name == "adapters" else "SDK")
        python = program if within else sys.executable  # of those that it starts; here tests look at their numbers
        folders = json.dumps([str(path.parent), str(Path(__file__).parent)])
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the child
        self._process = subprocess.Popen(
            [*within, program, "-c", _CALL, python, folders, path.stem, function.__name__, json.dumps(arguments)], bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
        )  # fmt: skip
        self._said = b""  # received, and not returned by hear() yet

    @functools.cached_property
    def pid(self) -> int:
        """Its number here, also if it has another one where it runs. The first that it says."""
        return int(self._line())

    def hear(self) -> Any:
        assert self.pid
        return json.loads(self._line())

    def _line(self) -> bytes:
        ready = select.poll()  # select takes no descriptor past 1023
        ready.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._said:
            more = self._process.stdout.read(1 << 16) if ready.poll(LIMIT_S * 1000) else b""
            assert more, f"the child said nothing; it ended with {self._process.poll()}:\n{self.errors()}"
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return line

    def say(self, value: Any) -> None:
        self._process.stdin.write(json.dumps(value).encode() + b"\n")

    def __call__(self, value: Any) -> Any:
        """Say a value, and return the next one that it says."""
        self.say(value)
        return self.hear()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, number)

    def stop(self) -> None:
        """Freeze it, as a debugger or a laptop's lid does."""
        self.signal(signal.SIGSTOP)
        until(lambda: state(self.pid) == "T", "the child to stand still")

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and be sure that it is gone."""
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
            self.wait()

    def wait(self) -> int:
        return self._process.wait(LIMIT_S)

    def errors(self) -> str:
        """Return the text it wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        for each in (self._process.stdin, self._process.stdout, self._errors):
            each.close()


def warm_python() -> str:
    """Return the path of a program that is used as ``sys.executable`` is, and has imported torch already.

    Skips the test where torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        import pytest

        pytest.skip("needs torch")
    return _python("TORCH")


def share_servers() -> None:
    """Start both servers. xdist's workers find them by variables; without these, each process starts its own."""
    for name in _IMPORTED:
        os.environ[f"ASYNCFLOW_TEST_PYTHON_{name}"] = _start_server(name)


@functools.cache
def _python(name: str) -> str:
    """Return the program of the clients of a server. The server has imported its modules."""
    program = os.environ.get(f"ASYNCFLOW_TEST_PYTHON_{name}") or _start_server(name)
    subprocess.run([program, "-c", "pass"], check=True)
    return program


def _start_server(name: str) -> str:
    """Start a server, which ends with this process. Return the program of its clients."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    program, address = folder / "python", str(folder / "socket")
    program.write_text(_PROGRAM.format(python=sys.executable, address=address))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        number = listener.fileno()
        command = [sys.executable, __file__, str(number), *_IMPORTED[name]]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number], start_new_session=True)
    atexit.register(_end_server, server)
    return str(program)


def _end_server(server: subprocess.Popen[bytes]) -> None:
    """End a server, and every forked process with it."""
    server.stdin.close()
    try:
        server.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        server.kill()


# ---- the server


def _enter(space: int) -> None:
    """Enter a namespace; one of processes only with the next fork. Others than its own are there for root only."""
    ctypes.CDLL(None).setns(space, 0)


def _serve(listener: socket.socket) -> tuple[list[int], bytes, int]:
    """Fork for each client, pass its signals on to its process, and the exit status back. Returns in the forked processes
    only: the client's descriptors, its request, and the number of the process here."""
    clients: dict[int, tuple[int, socket.socket]] = {}  # by a descriptor of the process
    here = os.open("/proc/self/ns/pid", os.O_RDONLY)
    while True:
        lines = [line for _, line in clients.values()]
        ready = select.select([0, listener, *clients, *lines], [], [])[0]
        if 0 in ready:  # standard input ends with the test
            os._exit(0)
        for ended, (pid, line) in list(clients.items()):
            with contextlib.suppress(OSError):  # the client was killed, or its process is younger than its session
                if ended in ready:
                    os.close(ended)
                    del clients[ended]
                    line.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    line.close()
                elif line in ready:
                    said = line.recv(9)
                    os.kill(pid, int(said or signal.SIGKILL))
                    if not said:  # the client was killed
                        os.killpg(pid, signal.SIGKILL)
        if listener in ready:
            line, _ = listener.accept()
            line.settimeout(LIMIT_S)  # a client that was stopped here must not stop all others for ever
            try:
                request, fds, _, _ = socket.recv_fds(line, 1 << 20, 250)
            except OSError:
                line.close()
                continue
            line.settimeout(None)
            *fds, numbers, net, uts, mounts = fds
            _enter(numbers)
            try:
                pid = os.fork()
            except OSError:  # the first process of the namespace has ended, and the client with it
                pid = -1
            if not pid:
                number = int(os.readlink("/proc/self"))
                for space in (net, uts, mounts):
                    _enter(space)
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the server
                for each in (listener, line, *lines):
                    each.close()
                return fds, request, number
            _enter(here)
            for fd in (*fds, numbers, net, uts, mounts):
                os.close(fd)
            if pid < 0:
                line.close()
                continue
            clients[os.pidfd_open(pid)] = pid, line
            with contextlib.suppress(OSError):
                line.send(b"%d" % pid)


def _run(libraries: list[str], fds: list[int], request: bytes, own_number: int) -> None:
    """Run what the client was told to run, as its interpreter would."""
    program, arguments, numbers, environment, directory, cpus = marshal.loads(request)  # noqa: S302 - of our own client
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.sched_setaffinity(0, cpus)
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 512) for fd in fds]
    os.closerange(3, 512)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(directory)
    vars(multiprocessing.process)["ORIGINAL_DIR"] = directory  # where spawned processes look for the script
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
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "number": own_number})
    else:
        runpy.run_path(how, run_name="__main__")


_status = 0


def _end() -> None:
    """End without taking down torch: that takes as long as importing it. The last that is called at exit."""
    if "torch" not in sys.modules:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if _status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(_status)


if __name__ == "__main__":
    atexit.register(_end)  # before what is imported registers more
    own = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    _libraries = [path for path in sys.path if path not in own]
    _listener = socket.socket(fileno=int(sys.argv[1]))
    if 0 in select.select([0, _listener], [], [])[0]:  # nobody asked for a process
        os._exit(0)
    for _name in sys.argv[2:]:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(_name)
    os.dup2(2, 1)
    gc.freeze()  # so that collections in forked processes copy none of its pages
    _forked = _serve(_listener)
    try:
        _run(_libraries, *_forked)
    except SystemExit as end:
        _status = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        raise
    except BaseException as error:
        _status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        raise
