"""A mooncake_master of a test."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path


class Master:
    """``kill`` it, and ``start`` another at the same port, which has forgotten all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port, self._metrics = free_port(), free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        program = shutil.which("mooncake_master", path=Path(sys.executable).parent) or "mooncake_master"
        with open(self._folder / "master.log", "ab") as log:
            self._process = subprocess.Popen(
                [program, f"--rpc_port={self._port}", f"--metrics_port={self._metrics}"], stdout=log, stderr=log
            )
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            assert time.monotonic() < end, "the master did not start"
            time.sleep(0.1)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
