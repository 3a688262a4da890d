"""Hosts on one machine: network namespaces on a bridge, each with its own address, /dev/shm, /tmp/ray, host name and process numbers.

Needs root and iproute2. Nothing of the machine's own network is touched. Processors and files are shared.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

NET = "10.78.0"
MOUNT = """\
mount --bind "$1" /dev/shm; mount --bind "$1/../hosts" /etc/hosts; mkdir -p /dev/shm/ray /tmp/ray; mount --bind /dev/shm/ray /tmp/ray
hostname "$2"; shift 2; exec "$@"
"""


def unavailable() -> str:
    """Why no hosts can be made here; "" if they can."""
    if os.geteuid():
        return "hosts are network namespaces, which only root can make"
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed (iproute2, util-linux)"
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip()


class Network:
    """``count`` hosts, numbered from 1, with links of ``rate`` ("500mbit"; "": unlimited) both ways, bursts and queues of
    ``shape``, and ``memory`` (as mount takes it) in /dev/shm."""

    def __init__(
        self, count: int, rate: str = "", memory: str = "1g", shape: tuple[str, str] = ("1mb", "8mb")
    ) -> None:
        self._size, self._shape = memory, shape
        self._prefix = f"afb{os.getpid()}-"
        self._switch = f"{self._prefix}switch"
        self.switch = ["ip", "netns", "exec", self._switch]  # the command that runs another one beside the bridge
        self._folder = Path(tempfile.mkdtemp(prefix="asyncflow-hosts-"))
        self._hosts = [f"{self._prefix}{number}" for number in range(1, count + 1)]
        names = ["127.0.0.1 localhost", *(f"{NET}.{number} host{number}" for number in range(1, count + 1))]
        (self._folder / "hosts").write_text("\n".join([*names, ""]))
        try:
            self._make(rate)
        except BaseException:
            self.close()
            raise

    def _make(self, rate: str) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for number, host in enumerate(self._hosts, 1):
            _run("ip", "netns", "add", host)
            _run(
                "ip", "-n", self._switch, "link", "add", f"to{number}", "type", "veth", "peer", "eth0", "netns", host
            )
            _run("ip", "-n", self._switch, "link", "set", f"to{number}", "master", "br0", "up")
            _run("ip", "-n", host, "addr", "add", f"{NET}.{number}/24", "dev", "eth0")
            _run("ip", "-n", host, "link", "set", "lo", "up")
            _run("ip", "-n", host, "link", "set", "eth0", "up")
            _run("ip", "-n", host, "route", "add", "default", "via", f"{NET}.254")
            (self._folder / host).mkdir()
            self._mount(number)
            if rate:  # at both ends: tbf limits what is sent
                limit = ("root", "tbf", "rate", rate, "burst", self._shape[0], "limit", self._shape[1])
                _run("ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", "eth0", *limit)
                _run("ip", "netns", "exec", self._switch, "tc", "qdisc", "add", "dev", f"to{number}", *limit)

    def address(self, number: int) -> str:
        return f"{NET}.{number}"

    def start(self, number: int, arguments: Sequence[str], python: str = sys.executable) -> subprocess.Popen[str]:
        """Start a Python on a host, with pipes."""
        return subprocess.Popen(
            [*self.within(number), python, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def within(self, number: int) -> list[str]:
        """The command that runs another one on a host. A signal kills both."""
        inside = ["bash", "-c", MOUNT, "-", str(self.memory(number)), f"host{number}"]
        spaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
        return ["ip", "netns", "exec", self._hosts[number - 1], *spaces, *inside]

    def memory(self, number: int) -> Path:
        """The /dev/shm of a host, as this process sees it."""
        return self._folder / self._hosts[number - 1]

    def cut(self, number: int) -> None:
        """Pull a host's cable: its packets vanish."""
        _run("ip", "-n", self._switch, "link", "set", f"to{number}", "nomaster")

    def mend(self, number: int) -> None:
        """Put a host's cable back."""
        _run("ip", "-n", self._switch, "link", "set", f"to{number}", "master", "br0")

    def kill(self, number: int) -> None:
        """End a host as a power failure does: its processes and its memory are gone, its cable is not."""
        host = self._hosts[number - 1]
        while pids := _run("ip", "netns", "pids", host, check=False).split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.01)
        _run("umount", "-l", str(self.memory(number)))
        self._mount(number)

    def _mount(self, number: int) -> None:
        _run("mount", "-t", "tmpfs", "-o", f"size={self._size}", "tmpfs", str(self.memory(number)))

    def link_bytes(self, number: int) -> tuple[int, int]:
        """Bytes that a host has received and sent on its link."""
        table = _run("ip", "netns", "exec", self._hosts[number - 1], "cat", "/proc/net/dev")
        fields = next(line for line in table.splitlines() if "eth0:" in line).partition(":")[2].split()
        return int(fields[0]), int(fields[8])

    def close(self) -> None:
        """End all processes on the hosts, and remove them."""
        for host in self._hosts:
            for pid in _run("ip", "netns", "pids", host, check=False).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _run("umount", "-l", str(self._folder / host), check=False)
            _run("ip", "netns", "del", host, check=False)
        _run("ip", "netns", "del", self._switch, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def line_of(stream: IO[str] | None) -> str:
    """The next line that a process prints. Ends this program if the process has ended."""
    line = stream.readline() if stream is not None else ""
    if not line:
        raise SystemExit("a process of the benchmark ended early; see its output above")
    return line.strip()
