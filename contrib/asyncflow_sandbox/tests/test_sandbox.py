"""Programs that a model wrote attack a sandbox, as the user of the tests and, if that is root, as an ordinary user."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes import with_mark
from waiting import until

import asyncflow_sdk as af
from asyncflow_sandbox import Sandbox, SandboxResult, cgroups

MIB = 1 << 20
MEMORY = 256
"""MiB of each sandbox here."""
TOKEN = "token-of-the-driver"
USER = 54_321
PYTHON = "/usr/bin/python3"
"""The interpreter of the ordinary user: the one of root may be in a folder of root's own."""
LONG_S = 120.0
"""Ends only a program that would hang."""
NO_CGROUP = "this process may make no cgroup"
Attempt = Callable[..., SandboxResult]

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def attempted(program: str, stdin: str = "", **limits: Any) -> SandboxResult:
    os.environ["HF_TOKEN"] = TOKEN
    given = {"time_s": LONG_S, "memory_bytes": MEMORY * MIB, "processes": 16, "file_bytes": 8 * MIB} | limits
    return Sandbox(**{"output_bytes": 4096} | given).run(program, stdin=stdin)


def become_ordinary(entered: list[Path]) -> None:
    for cgroup in entered:
        (cgroup / "cgroup.procs").write_text("0")
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)


def ordinary_user(entered: list[Path]) -> ProcessPoolExecutor:
    """A process of an ordinary user, forked: it could not import from folders of root's own."""
    fork = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(1, fork, become_ordinary, (entered,))


@contextlib.contextmanager
def delegated() -> Iterator[list[Path]]:
    """Give the ordinary user a cgroup. Yield where its process is."""
    made = [parent / f"asyncflow-tests-{os.getpid()}" for parent in cgroups.parents()]
    entered = list(made)
    for cgroup in made:
        cgroup.mkdir()
        if (control := cgroup / "cgroup.subtree_control").exists():  # version 2: processes are in leaves only
            control.write_text("+memory +pids")
            entered = [cgroup / "driver"]
            entered[0].mkdir()
        for path in (cgroup, cgroup / "cgroup.procs"):
            os.chown(path, USER, USER)
    yield entered
    for cgroup in dict.fromkeys([*entered, *made]):
        cgroup.rmdir()


@pytest.fixture(scope="module", params=["this user", "an ordinary user"])
def attempt(request: pytest.FixtureRequest) -> Iterator[Attempt]:
    if not cgroups.parents():
        pytest.skip(NO_CGROUP)
    if request.param == "this user":
        yield attempted
    elif os.geteuid():
        pytest.skip("this user is an ordinary one")
    else:
        with delegated() as entered:
            with ordinary_user(entered) as user:
                yield lambda *args, **given: user.submit(attempted, *args, **{"python": PYTHON} | given).result()
            left = [path for cgroup in entered for path in cgroup.glob("asyncflow-*")]
        assert left == []


def test_a_program_has_its_input_output_and_status(attempt: Attempt) -> None:
    result = attempt("import sys; print(input()[::-1]); print('é', file=sys.stderr); sys.exit(3)", "abc\n")
    assert result == SandboxResult(3, "cba\n", "é\n")
    assert attempt("import os; os.kill(os.getpid(), 9)").status == -9
    assert "SyntaxError" in attempt("print(").errors
    assert attempt(f"print(len({'x' * 300_000!r}))").output == "300000\n", "longer than an argument of a command"
    assert attempt("print(1)\0").ended_by == ""
    assert "SyntaxError" in attempt("print('\ud800')").errors


def test_several_programs_keep_their_order() -> None:
    sandbox = Sandbox(time_s=LONG_S, unbounded=True)
    results = sandbox.run_all([f"print({n} ** 2)" for n in range(4)], at_once=2)
    assert [each.output for each in results] == ["0\n", "1\n", "4\n", "9\n"]


def test_there_is_no_network(attempt: Attempt) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = """
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_VSOCK):
    try: print(socket.socket(family).connect(('127.0.0.1', PORT)))
    except OSError as error: print('refused')
import asyncio, multiprocessing
print(len(socket.socketpair()), asyncio.run(asyncio.sleep(0, 'asyncio')), multiprocessing.Lock().acquire())
try: print(socket.socket(socket.AF_UNIX).connect('NAME'))
except OSError: print('refused')
"""
        with socket.socket(socket.AF_UNIX) as local:
            name = f"\0asyncflow-{os.getpid()}"
            local.bind(name)
            local.listen()
            port = server.getsockname()[1]
            result = attempt(program.replace("PORT", f"{port}").replace("NAME", name.replace("\0", "\\0")))
    assert result.output == "refused\n" * 5 + "2 asyncio True\nrefused\n", result


def test_files_of_the_host_are_neither_seen_nor_written(attempt: Attempt, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    secret.chmod(0o644)
    found = Path("/usr/asyncflow-was-here")
    result = attempt(
        f"""
import os
def attempt(what):
    try: return what()
    except OSError as error: return type(error).__name__
print(attempt(lambda: open({str(secret)!r}).read()))
print(attempt(lambda: open('/etc/passwd').read()), attempt(lambda: os.listdir('/home')))
for path in ({str(found)!r}, '/here', '/dev/here', '/proc/sys/kernel/hostname', os.__file__, __file__):
    print(attempt(lambda: open(path, 'w').write('x')))
print(os.getcwd(), [pid for pid in os.listdir('/proc') if pid.isdigit()].__len__() < 5, len(os.listdir('/proc/self/fd')))
open('mine', 'w').write('x'); print(sorted(os.listdir('.')), os.listdir('/dev/shm') == os.listdir('/tmp'))
"""
    )
    assert result.status == 0, result
    first, second, *writes, rest, listed = result.output.splitlines()
    assert first in ("FileNotFoundError", "PermissionError")
    assert second in ("FileNotFoundError FileNotFoundError", "PermissionError FileNotFoundError")
    assert set(writes) <= {"OSError", "PermissionError", "FileNotFoundError"}
    assert len(writes) == 6
    assert rest == "/tmp True 4", "three streams, and the folder that it lists"
    homes = {Path(home).parts[2] for home in (sys.prefix, sys.base_prefix) if home.startswith("/tmp/")}
    assert listed in (f"{sorted({'mine', *homes})} True", "['mine'] True")
    assert not found.exists()
    assert "mine" not in attempt("import os; print(os.listdir('.'))").output, "each program has a folder of its own"


def test_variables_of_the_driver_are_in_no_process(attempt: Attempt) -> None:
    program = """
import glob, os
for path in ['/proc/self/environ', *glob.glob('/proc/[0-9]*/environ'), *glob.glob('/proc/[0-9]*/cmdline')]:
    try: found = open(path).read()
    except OSError: found = 'HOME=/tmp'
    print(TOKEN in found)
print(sorted(set(os.environ) - {'PWD', 'LC_CTYPE'}))
"""
    *found, names = attempt(program.replace("TOKEN", repr(TOKEN))).output.splitlines()
    assert set(found) == {"False"}
    assert len(found) >= 4
    assert names == "['HOME', 'LANG', 'PATH']"


HOLDERS = """
import ctypes, glob, os, re, time
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
def memfd():
    file = os.memfd_create('x')
    for _ in range(4): os.write(file, bytes(1 << 20))
def segment():
    place = libc.shmat(libc.shmget(0, 4 << 20, 0o1600), None, 0)
    ctypes.memset(place, 1, 4 << 20)
    libc.shmdt(ctypes.c_void_p(place))
def process():
    read, write = os.pipe()
    if not os.fork():
        memory = b'x' * (64 << 20)
        os.write(write, b'x')
        time.sleep(10_000)
    os.close(write)
    os.read(read, 1)
def held():  # of a killed process: none
    found = [re.search(r'RssAnon:\\s+(\\d+)', open(path).read()) for path in glob.glob('/proc/[0-9]*/status')]
    return 64 * sum(int(each[1]) > 60_000 for each in found if each)
"""


@pytest.mark.parametrize(
    ("way", "held"), [("memfd()", "4 * number"), ("segment()", "4 * number"), ("process()", "held()")]
)
def test_all_memory_together_has_a_limit(attempt: Attempt, way: str, held: str) -> None:
    tries = 12 if "process" in way else 3 * MEMORY // 4
    result = attempt(f"{HOLDERS}\nfor number in range(1, {tries + 1}): {way}; print({held}, flush=True)\n")
    assert 0 < max(map(int, result.output.split())) < MEMORY, result


def test_one_process_gets_an_error_beyond_the_limit(attempt: Attempt) -> None:
    assert "MemoryError" in attempt("bytearray(10 << 30)").errors
    assert "MemoryError" in attempt("held = []\nwhile True: held.append(bytearray(16 << 20))", unbounded=True).errors


def test_files_have_a_limit_together(attempt: Attempt) -> None:
    program = """
import errno, os
written = 0
for folder in ("/tmp", "/dev/shm", "/tmp", "/var/tmp", "/run", "/dev", "/"):
    try:
        for number in range(64):
            with open(f"{folder}/{number}-{written}", "wb") as file: file.write(bytes(1 << 20))
            written += 1 << 20
    except OSError as error: print(errno.errorcode[error.errno])
print(written >> 20)
"""
    *errors, written = attempt(program).output.split()
    assert errors[:3] == ["ENOSPC"] * 3
    assert len(errors) == 7
    assert int(written) <= 8


def test_there_are_no_user_namespaces_and_no_keys(attempt: Attempt) -> None:
    numbers = {"x86_64": (272, 56, 250, 425), "aarch64": (97, 220, 219, 425)}
    program = """
import ctypes, errno, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
unshare, clone, keyctl, io_uring = NUMBERS
USER = 0x10000000
def called(*args):
    if libc.syscall(*map(ctypes.c_long, args)) >= 0:
        return 'made'
    return errno.errorcode[ctypes.get_errno()]
print(called(unshare, USER), called(unshare, USER | 0x20000), called(clone, USER | 17, 0, 0, 0, 0), called(keyctl, 0, -3, 1), called(io_uring, 1, 0))
arguments = (ctypes.c_uint64 * 8)(USER, 0, 0, 0, 17)
print(called(435, ctypes.addressof(arguments), 64))
if sys.argv[0] and os.uname().machine == 'x86_64':
    print(called(0x40000000 | unshare, USER))
    code = mmap.mmap(-1, 4096, prot=7)  # push rbx; eax = unshare of 32 bits; ebx = USER; int 0x80; pop rbx; ret
    code.write(bytes.fromhex('53b836010000bb00000010cd805bc3'))
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
try: os.setuid(0); print('root')
except OSError: print('not root')
print([line.split()[1].strip('0') for line in open('/proc/self/status') if line.startswith('Cap') and 'Bnd' not in line])
import threading; threading.Thread(target=print, args=('threads',)).start()
"""
    first, clone3, *others, privileges, capabilities, threads = attempt(
        program.replace("NUMBERS", str(numbers[platform.machine()]))
    ).output.splitlines()
    assert first == "EPERM EPERM EPERM EPERM EPERM"
    assert clone3 == "ENOSYS"
    assert others == (["EPERM", "-1"] if platform.machine() == "x86_64" else [])
    assert (privileges, capabilities, threads) == ("not root", "['', '', '', '']", "threads")


@pytest.mark.parametrize("unbounded", [False, True])
def test_a_fork_bomb_reaches_its_limit_and_nothing_of_it_stays(attempt: Attempt, unbounded: bool) -> None:
    mark = f"bomb-{os.getpid()}"
    program = f"""
import contextlib, os, threading, time
os.posix_spawn('/usr/bin/env', ['env', 'MARK={mark}', 'sleep', '10000'], {{}})
made = 2
with contextlib.suppress(OSError):
    while made < 200:
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=time.sleep, args=(10_000,), daemon=True).start()
            made += 1
        if not os.fork(): time.sleep(10_000)
        made += 1
print(made, flush=True)
os._exit(0)
"""
    assert 4 <= int(attempt(program, unbounded=unbounded).output) <= 16
    until(lambda: not with_mark(mark), "the end of all processes of the bomb")


def test_an_endless_loop_is_ended_and_so_are_its_children(attempt: Attempt) -> None:
    mark = f"loop-{os.getpid()}"
    program = f"import os\nos.posix_spawn('/usr/bin/env', ['env', 'MARK={mark}', 'sleep', '10000'], {{}})\n"
    result = attempt(f"{program}os.fork()\nwhile True: pass", time_s=2.5)
    assert result.ended_by == "time"
    assert with_mark(mark) == {}
    result = attempt("import os, time\nos.close(1); os.close(2); time.sleep(10_000)", time_s=2.5)
    assert result.ended_by == "time"


def test_endless_output_is_cut(attempt: Attempt) -> None:
    for stream in ("stdout", "stderr"):
        result = attempt(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
        assert result.ended_by == "output"
        assert len(result.output + result.errors) == 4096
    assert attempt("print('x' * 4000)").ended_by == ""


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "/var/tmp"])
def test_an_interpreter_may_be_anywhere_and_behind_links(attempt: Attempt, folder: str) -> None:
    place = Path(folder) / f"asyncflow-venv-{os.getpid()}"
    try:
        subprocess.run([PYTHON, "-m", "venv", "--without-pip", place / "made"], check=True)
        (place / "made" / "bin" / "other").symlink_to(place / "hop")
        (place / "hop").symlink_to(PYTHON)
        (place / "link").symlink_to("made")
        for python in (place / "made" / "bin" / "python", place / "link" / "bin" / "other"):
            result = attempt("import sys; print(sys.prefix)\nopen('/tmp/x', 'w').write('x')", python=str(python))
            assert result == SandboxResult(0, f"{python.parent.parent}\n", "")
    finally:
        shutil.rmtree(place)


def test_an_interpreter_that_runs_no_program_is_refused_with_the_reason(attempt: Attempt) -> None:
    for python, reason in (
        ("/usr/bin/true", "/usr/bin/true does not run a program: status 0"),
        ("/usr/bin/false", "/usr/bin/false is no Python that runs: .* status 1"),
        ("/nowhere/python", "no interpreter '/nowhere/python' that this user may run"),
    ):
        with pytest.raises(af.ConfigError, match=reason):
            attempt("print(1)", python=python)
    with pytest.raises(af.ConfigError, match=r"does not run a program: .* raise memory_bytes"):
        attempt("print(1)", memory_bytes=4 * MIB)
    with pytest.raises(af.ConfigError, match="file_bytes must be above 0, not 0"):
        attempt("print(1)", file_bytes=0)


def test_without_a_cgroup_a_sandbox_is_refused_unless_unbounded() -> None:
    if os.geteuid():
        pytest.skip("needs root, to leave the cgroups of this user")
    with ordinary_user([]) as user:
        with pytest.raises(af.ConfigError, match=r"may make no cgroup.*systemd-run --user --scope.*unbounded=True"):
            user.submit(attempted, "print(1)", python=PYTHON).result()
        assert user.submit(attempted, "print(1)", python=PYTHON, unbounded=True).result().output == "1\n"
        if cgroups.parents():
            with pytest.raises(af.ConfigError, match=NO_CGROUP):
                user.submit(Sandbox(python=PYTHON).run, "print(1)").result()


def test_a_missing_bubblewrap_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    message = "a sandbox needs bwrap, which is not installed: apt-get install bubblewrap"
    with pytest.raises(af.ConfigError, match=message):
        Sandbox(time_s=LONG_S + 1)


@pytest.mark.skipif(not cgroups.parents(), reason=NO_CGROUP)
@pytest.mark.starts("contrib/asyncflow_sandbox/README.md: [python] from asyncflow_sandbox import Sandbox")
def test_the_example_scores_no_program_that_writes_its_own_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.S)
    names: dict[str, Any] = {}
    exec(block, names)
    assert capsys.readouterr().out == "[1.0, 1.0, 0.0, 0.0]\n"
    assert names["passes"](["True)#", "5) or print(True"], ["5", "5"]) == [0.0, 0.0]
