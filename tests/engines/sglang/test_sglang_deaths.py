"""Workers that are killed before their SGLang is there, or after it. Those of a run, and with a server that is there, are the
conformance kit's."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import one_server
from processes import with_mark
from waiting import until

SERVER, ENGINE = "asyncflow_sglang.server:SGLangServer", "asyncflow_sglang.engine:SGLangEngine"
KILLED = [(SERVER, one_server.OWN, False), (ENGINE, one_server.INSIDE, False), (ENGINE, one_server.INSIDE, True)]
"""Engines, their options, and whether they have started."""
STARTS = """
import importlib, json, sys
if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    engine = getattr(importlib.import_module(module), name)(sys.argv[2], **json.loads(sys.argv[3]))
    print("STARTED", flush=True)
    sys.stdin.read()
"""


def test_workers_that_are_killed_leave_no_process(tmp_path: Path) -> None:
    """While SGLang starts, its processes import for seconds before they ask the kernel to end with who has started them; and once
    it is there."""
    (tmp_path / "starts.py").write_text(STARTS)
    marks: list[str] = []
    with contextlib.ExitStack() as stack:
        for factory, options, started in KILLED:
            mark = secrets.token_hex(8)
            command = [sys.executable, str(tmp_path / "starts.py"), factory, one_server.model(), json.dumps(options)]
            env = {**os.environ, "ASYNCFLOW_TEST_MARK": mark}
            worker = stack.enter_context(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
            stack.callback(worker.kill)
            marks.append(mark)
            if started:
                assert worker.stdout is not None
                assert any("STARTED" in line for line in worker.stdout)
            else:
                until(
                    lambda worker=worker, mark=mark: (  # type: ignore[misc]
                        worker.poll() is not None or sum("spawn_main" in each for each in with_mark(mark).values()) > 1
                    ),
                    "SGLang's processes", 600.0,
                )  # fmt: skip
            assert worker.poll() is None
            worker.kill()
    for mark in marks:
        until(lambda mark=mark: not with_mark(mark), "the end of all processes", 120.0)  # type: ignore[misc]
