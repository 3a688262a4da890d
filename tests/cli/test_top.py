"""``asyncflow top`` against a real server: once, as JSON, and live in a terminal."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from children import Child, warm_python
from held_rows import serve_held_rows
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.types.events import Evaluated


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Child]:
    with Child(serve_held_rows, str(tmp_path / "run")) as child:
        assert child.hear() == 2
        yield child
        child.say("end")
        assert child.wait() == 0


def top(tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [warm_python(), "-m", "asyncflow_sdk.cli", "top", *arguments]
    return subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True, timeout=250, check=False
    )  # fmt: skip


def test_once_by_the_runs_directory(tmp_path: Path, served: Child) -> None:
    scored = [
        Evaluated(time_s=1.0, version=20 * n, score=score, rows=3) for n, score in ((1, 0.25), (2, 0.5), (3, 0.375))
    ]
    (tmp_path / "run" / "evaluations.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, scored)))
    done = top(tmp_path, "run", "--once", "--every", "0.1")
    assert done.returncode == 0, done.stderr
    assert "evaluation of v60: 0.375 · best 0.5 of v40 ▁█▅" in done.stdout
    flat = " ".join(done.stdout.split())
    assert "3 rows live of 100,000 · 3 put" in flat
    assert f"● driver {served.pid} " in flat
    assert "holds 2 rows of work" in flat
    assert "1 lease, 1 client" in flat  # who only looks is not counted


def test_json_for_programs_by_address(tmp_path: Path, served: Child) -> None:
    address = (tmp_path / "run" / "address").read_text().split()[0]
    done = top(tmp_path, address, "--json", "--every", "0.1")
    said = json.loads(done.stdout)
    assert said["address"] == address
    assert said["rows"]["work"] == {"waiting": 0, "ready": 1, "selected": 0, "leased": 2, "done": 0}
    assert said["oldest"]["name"] == said["sessions"][0]["name"] == "driver"
    assert said["per_second"]["completed"] == {"work": 0.0}
    assert said["step"] == -1


def test_versions_and_replicas_of_a_real_run(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run", name="driver") as run, run.weight_publisher("shm") as publisher:
        with af.connect(tmp_path / "run", name="replica") as there:
            updates = iter(there.weight_updates(timeout_s=250))
            publisher.publish(1, {"w": np.ones(1000, np.float32)}.items())
            with next(updates) as update:
                dict(update.arrays())
            publisher.publish(2, {"w": np.zeros(1000, np.float32)}.items())
            publisher.flush()
            publisher.rollback(1, "it was better")
            until(lambda: any(each.weights.endswith(" 3") for each in run.queue.status().sessions), "its turn to 3")
            # when
            said = json.loads(top(tmp_path, "run", "--json", "--every", "0.1").stdout)
            shown = " ".join(top(tmp_path, "run", "--once", "--every", "0.1").stdout.split())
    # then
    assert [(v["version"], v["source"], v["transport"]) for v in said["versions"]] == [(2, 2, "shm"), (3, 1, "shm")]
    assert said["publisher"] == "driver"
    assert said["announced"] == -1
    (there_said,) = (s for s in said["sessions"] if s["replica"])
    assert (there_said["name"], there_said["loaded"]) == ("replica", 1)
    assert "replica" not in said["waiting"]  # it hears of newer ones while it works
    assert "WEIGHTS published by driver v3 = v1" in shown
    assert re.search(r"● replica v1 2 behind .*(fetching|staged|waits to load|loading) 3", shown)


@pytest.mark.starts("asyncflow top")
def test_a_server_with_keys_asks_for_one(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run", address="tcp://127.0.0.1:0", key=tmp_path / "run" / "server.key") as run:
        address = next(a for a in (tmp_path / "run" / "address").read_text().split() if a.startswith("tcp"))
        run.queue.declare("work", needs=["x"])
        with_key = top(tmp_path, address, "--once", "--every", "0.1", "--key", "run/run.key")
        assert with_key.returncode == 0, with_key.stderr
        assert "work" in with_key.stdout
        found = top(tmp_path, address, "--once", "--every", "0.1")
        assert found.returncode == 0, found.stderr
        without = top(tmp_path, address, "--once", "--every", "0.1", "--insecure")
        assert without.returncode == 2
        assert "key" in without.stderr
        assert "Traceback" not in without.stderr


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("nowhere", "neither an address"),
        (".", "is not being served"),
        ("ipc:///no/such/socket", "nobody listens at ipc:///no/such/socket"),
        ("tcp://127.0.0.1:1", "nobody listens at tcp://127.0.0.1:1"),
        ("tcp://127.0.0.1", "is no address"),
        ("udp://127.0.0.1:5", "is no address"),
    ],
)
def test_where_nothing_is_served(tmp_path: Path, where: str, error: str) -> None:
    done = top(tmp_path, where)
    assert done.returncode == 2
    assert error in done.stderr
    assert "Traceback" not in done.stderr


class Terminal:
    """A terminal with ``asyncflow top`` in it."""

    def __init__(self, directory: Path) -> None:
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.environ["TERM"] = "xterm-256color"
            os.environ.pop("COLUMNS", None)
            os.chdir(directory)
            os.execv(sys.executable, [sys.executable, "-m", "asyncflow_sdk.cli", "top", "run", "--every", "0.2"])
        self.shown = ""

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, key: bytes) -> None:
        os.write(self._fd, key)

    def read(self, text: str) -> None:
        """Until it has shown ``text``, or ended."""
        end = time.monotonic() + 100  # only ends a test that would hang
        while text not in self.shown:
            assert time.monotonic() < end, self.shown[-3000:]
            if select.select([self._fd], [], [], 1.0)[0]:
                try:
                    self.shown += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:
                    assert text in self.shown, self.shown[-3000:]

    def end(self) -> int:
        """Its exit code."""
        with open(self._fd, "rb", buffering=0) as rest:
            try:
                while data := rest.read(65536):
                    self.shown += data.decode(errors="replace")
            except OSError:  # the other side is closed
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.starts("asyncflow top")
def test_live_in_a_terminal_that_changes_its_size(tmp_path: Path, served: Child) -> None:
    terminal = Terminal(tmp_path)
    terminal.read("holds 2 rows of work")
    terminal.resize(120, 40)
    terminal.shown = ""
    terminal.read("holds 2 rows of work")
    terminal.press(b"q")
    assert terminal.end() == 0
    assert "\x1b[?1049l" in terminal.shown  # the terminal is as it was
    assert "\x1b[?25h" in terminal.shown


def test_ctrl_c_gives_the_terminal_back(tmp_path: Path, served: Child) -> None:
    terminal = Terminal(tmp_path)
    terminal.read("holds 2 rows of work")
    os.kill(terminal.pid, signal.SIGINT)
    assert terminal.end() == 130
    assert "\x1b[?25h" in terminal.shown


def test_a_run_that_ends_while_one_looks(tmp_path: Path) -> None:
    with Child(serve_held_rows, str(tmp_path / "run")) as child:
        assert child.hear() == 2
        terminal = Terminal(tmp_path)
        terminal.read("holds 2 rows of work")
        child.say("end")
        assert terminal.end() == 0
    assert "run has ended" in terminal.shown
