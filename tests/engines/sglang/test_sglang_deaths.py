"""Workers that are killed before their SGLang is there. Those of a run that are killed later are the conformance kit's."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import one_server

ENGINES = {
    "asyncflow_sglang.server:SGLangServer": one_server.OWN,
    "asyncflow_sglang.engine:SGLangEngine": one_server.INSIDE,
}
STARTS = """
import importlib, json, sys
if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), name)(sys.argv[2], **json.loads(sys.argv[3]))
"""


def with_mark(mark: str) -> dict[int, str]:
    """The processes that have it in their environment, wherever they hang, with their commands."""
    found = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                found[int(name)] = Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ")
    return found


def test_workers_that_are_killed_while_sglang_starts_leave_no_process(tmp_path: Path) -> None:
    """SGLang's processes import for seconds before they ask the kernel to end with who has started them."""
    (tmp_path / "starts.py").write_text(STARTS)
    workers: dict[str, subprocess.Popen[bytes]] = {}
    with contextlib.ExitStack() as stack:
        for factory, options in ENGINES.items():
            mark = secrets.token_hex(8)
            command = [sys.executable, str(tmp_path / "starts.py"), factory, one_server.model(), json.dumps(options)]
            worker = stack.enter_context(subprocess.Popen(command, env={**os.environ, "ASYNCFLOW_TEST_MARK": mark}))
            stack.callback(worker.kill)
            workers[mark] = worker
        for mark, worker in workers.items():
            while sum("spawn_main" in command for command in with_mark(mark).values()) < 2:
                assert worker.poll() is None
                time.sleep(0.05)
            worker.kill()

    until = time.monotonic() + 120.0
    while left := {pid: command for mark in workers for pid, command in with_mark(mark).items()}:
        assert time.monotonic() < until, left
        time.sleep(0.1)
