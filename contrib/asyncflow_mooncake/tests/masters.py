"""A mooncake_master of a test."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from asyncflow_sdk.workflow.processes.ranks import free_port


class Master:
    """``kill`` it, and ``start`` another at the same ``address``, which has forgotten all."""

    def __init__(self, folder: Path, address: str = "") -> None:
        self._folder = folder
        self.address = address or f"127.0.0.1:{free_port()}"
        self._port, self._metrics = int(self.address.rpartition(":")[2]), free_port()
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
