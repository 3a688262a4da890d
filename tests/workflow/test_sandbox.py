"""Programs that a model wrote, attacked: network, files, processes, loops, memory and output stay within their limits."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
from processes import with_mark
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError

MIB = 1 << 20
LONG_S = 120.0
"""Ends only a program that would hang."""


@pytest.fixture(scope="module")
def sandbox() -> af.Sandbox:
    try:
        return af.Sandbox(time_s=LONG_S, memory_bytes=512 * MIB, processes=16, file_bytes=8 * MIB, output_bytes=4096)
    except ConfigError as error:
        pytest.skip(f"{error}")


def test_a_program_has_its_input_output_and_status(sandbox: af.Sandbox) -> None:
    result = sandbox.run("import sys; print(input()[::-1]); print('é', file=sys.stderr); sys.exit(3)", stdin="abc\n")
    assert result == af.SandboxResult(3, "cba\n", "é\n")
    assert sandbox.run("import os; os.kill(os.getpid(), 9)").status in (-9, 137 - 256)
    results = sandbox.run_all([f"print({n} ** 2)" for n in range(4)], at_once=2)
    assert [each.output for each in results] == ["0\n", "1\n", "4\n", "9\n"]
    assert "SyntaxError" in sandbox.run("print(").errors


def test_there_is_no_network(sandbox: af.Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = sandbox.run(
            f"import socket\nfor host in ('127.0.0.1', '8.8.8.8'):\n    try: socket.create_connection((host, {port}), 2)\n"
            "    except OSError as error: print('refused')\n"
            "print(sorted(name for _, name in socket.if_nameindex()))"
        )
    assert result.output == "refused\nrefused\n['lo']\n"


def test_files_of_the_host_are_neither_seen_nor_written(sandbox: af.Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    secret.chmod(0o644)
    found = Path("/usr/asyncflow-was-here")
    result = sandbox.run(
        f"""
import os
def attempt(what):
    try: return what()
    except OSError as error: return type(error).__name__
print(attempt(lambda: open({str(secret)!r}).read()))
print(attempt(lambda: open('/etc/passwd').read()), attempt(lambda: os.listdir('/home')))
for path in ({str(found)!r}, '/here', '/dev/here', '/proc/sys/kernel/hostname', os.__file__):
    print(attempt(lambda: open(path, 'w').write('x')))
print(sorted(os.environ), os.getcwd(), [pid for pid in os.listdir('/proc') if pid.isdigit()].__len__() < 5)
open('mine', 'w').write('x'); print(sorted(os.listdir('.')))
"""
    )
    assert result.status == 0, result
    first, second, *writes, environment, listed = result.output.splitlines()
    assert first == "FileNotFoundError"
    assert second in ("FileNotFoundError FileNotFoundError", "PermissionError FileNotFoundError")
    assert set(writes) <= {"OSError", "PermissionError", "FileNotFoundError"}
    assert len(writes) == 5
    assert "HF_TOKEN" not in environment
    assert "'HOME', 'LANG'" in environment
    assert environment.endswith("/tmp True")
    homes = {Path(home).parts[2] for home in (sys.prefix, sys.base_prefix) if home.startswith("/tmp/")}
    assert listed == f"{sorted({'mine', *homes})}"
    assert not found.exists()
    assert f"{sorted(homes)}" in sandbox.run("import os; print(sorted(os.listdir('.')))").output, (
        "each program has a folder of its own"
    )


def test_a_fork_bomb_reaches_its_limit_and_nothing_of_it_stays(sandbox: af.Sandbox) -> None:
    mark = f"bomb-{os.getpid()}"
    result = sandbox.run(
        f"""
import os, sys, time
mark, made = {mark!r}, 0
while made < 10_000:
    try: pid = os.fork()
    except OSError: break
    if not pid: time.sleep(10_000)
    made += 1
print(made, flush=True)
os._exit(0)
"""
    )
    assert 0 < int(result.output) <= 17
    until(lambda: not with_mark(mark, "cmdline"), "the end of all processes of the bomb")


def test_an_endless_loop_is_ended_and_so_are_its_children() -> None:
    mark = f"loop-{os.getpid()}"
    try:
        short = af.Sandbox(time_s=1.5)
    except ConfigError as error:
        pytest.skip(f"{error}")
    result = short.run(f"import os\nmark = {mark!r}\nos.fork()\nwhile True: pass")
    assert result.ended_by == "time"
    until(lambda: not with_mark(mark, "cmdline"), "the end of the loop")
    assert short.run("import os, time\nos.close(1); os.close(2); time.sleep(10_000)").ended_by == "time"


def test_ten_gigabytes_of_memory_are_refused(sandbox: af.Sandbox) -> None:
    assert "MemoryError" in sandbox.run("bytearray(10 << 30)").errors
    assert "MemoryError" in sandbox.run("held = []\nwhile True: held.append(bytearray(16 << 20))").errors


def test_files_have_a_limit_together(sandbox: af.Sandbox) -> None:
    program = """
import errno, os
for folder in ("/tmp", "/dev/shm"):
    try:
        for number in range(64):
            with open(f"{folder}/{number}", "wb") as file: file.write(bytes(1 << 20))
    except OSError as error: print(folder, errno.errorcode[error.errno], number)
"""
    assert sandbox.run(program).output == "/tmp ENOSPC 8\n/dev/shm ENOSPC 8\n"


def test_endless_output_is_cut(sandbox: af.Sandbox) -> None:
    for stream in ("stdout", "stderr"):
        result = sandbox.run(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
        assert result.ended_by == "output"
        assert len(result.output + result.errors) == 4096
    assert sandbox.run("print('x' * 4000)").ended_by == ""


def test_a_missing_bubblewrap_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    from asyncflow_sdk.workflow import sandbox as module

    module.check_bubblewrap.cache_clear()
    with pytest.raises(
        ConfigError, match="a sandbox needs bwrap, which is not installed: apt-get install bubblewrap"
    ):
        af.Sandbox()
