"""SGLangProcess: an SGLang server of this worker, in a process group that ends with the worker."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncflow_sdk.errors import DeadlineExceeded, EngineError

from .launch import in_group, remove, shared_memory

TAIL_BYTES, TAIL_LINES = 64 << 10, 30
POLL_S, END_S = 0.1, 10.0
_NOISE = re.compile(r"nanobind: | - (?:leaked|\.\.\. skipped) ")
"""Printed by libraries at the end of every Python."""


class SGLangProcess:
    """Starts ``sglang.launch_server`` with this interpreter. ``env``: added to this process's
    environment. ``log``: file to append its output to; None keeps the output only for errors."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], log: str | None = None) -> None:
        self._log = tempfile.TemporaryFile() if log is None else Path(log).open("a+b")  # noqa: SIM115
        self._began = self._log.seek(0, os.SEEK_END)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "asyncflow_sglang.launch"],
            stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, env={**os.environ, **env},
            start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid
        self._shared: set[str] = set()
        assert self._process.stdin is not None
        self._line = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it died already, which wait_ready reports
            self._line.write(json.dumps(list(arguments)).encode() + b"\n")
            self._line.flush()

    def wait_ready(self, port: int, timeout_s: float) -> None:
        """Wait until the server takes requests. Ends it and raises EngineError with the end of
        its log if it has ended, DeadlineExceeded after ``timeout_s``."""
        until = time.monotonic() + timeout_s
        while not _is_ready(port):
            if self._process.poll() is not None:
                words = self.last_words()
                self.close()
                raise EngineError(f"the SGLang server did not start: {words}")
            if time.monotonic() > until:
                tail = self._tail()
                self.close()
                raise DeadlineExceeded(
                    f"the SGLang server took no requests in {timeout_s:g} s since it was started; the end of its"
                    f" log:\n{tail}"
                )
            time.sleep(POLL_S)
        self._shared = shared_memory(in_group(self.pid))

    def ended(self, within_s: float) -> bool:
        """Return True if the process ends within this time."""
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_words(self) -> str:
        """Return how the process ended, with the end of its log."""
        status = self._process.poll()
        how = f"signal {signal.Signals(-status).name}" if status is not None and status < 0 else f"status {status}"
        return f"it ended with {how}; the end of its log:\n{self._tail()}"

    def close(self) -> None:
        """End the process and its children. Idempotent."""
        with contextlib.suppress(BrokenPipeError):
            self._line.close()
        until = time.monotonic() + END_S
        if not self.ended(END_S):
            self._signal(signal.SIGKILL)
        while self._signal(0) and time.monotonic() < until:  # its children end after it
            time.sleep(POLL_S / 5)
        self._signal(signal.SIGKILL)
        self._process.wait(END_S)
        remove(self._shared)
        self._log.close()

    def _signal(self, number: int) -> bool:
        """Send a signal to the process group. Return False if the group is empty."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
            return True
        return False

    def _tail(self) -> str:
        end = os.fstat(self._log.fileno()).st_size
        start = max(self._began, end - TAIL_BYTES)
        text = os.pread(self._log.fileno(), end - start, start).decode(errors="replace")
        return "\n".join([line for line in text.splitlines() if not _NOISE.match(line)][-TAIL_LINES:])


def _is_ready(port: int) -> bool:
    """Return True if GET /ready, which needs no key, returns status 200."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as line:
        line.sendall(b"GET /ready HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        return b" 200 " in line.recv(64)
    return False
