"""Terminals: a run that is served from one goes on while that is held, and Ctrl-C gives it back."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.types.events import Note


def test_a_pipe_that_nobody_reads_does_not_hold_the_server(tmp_path: Path) -> None:
    # given an output that takes nothing more
    out, into = os.pipe()
    os.set_blocking(into, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(into, b"x" * 4096):
            pass
    os.set_blocking(into, True)
    with open(into, "w") as file, open(out, "rb") as reader:
        # when there is something to be shown
        with af.LiveView(0, "held", Console(file=file)) as view, af.serve(tmp_path, on_event=view) as run:
            run.report(Note(time_s=time.monotonic(), text="look here", level="warning"))
            # then whoever works for the run is answered
            assert run.audit().put == 0
            # and it is shown when somebody reads again
            os.set_blocking(out, False)
            said = bytearray()
            until(lambda: said.extend(reader.read1() or b"") or b"look here" in said, "what was to be shown")


def test_ctrl_c_leaves_the_terminal_sane() -> None:
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from synthetic_run import synthetic_run\n"
        "from asyncflow_sdk import LiveView\n"
        "with LiveView(300, 'demo') as view:\n"
        "    for event in synthetic_run(50, None): view(event)\n"
        "    time.sleep(60)\n"
    )
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(Path(__file__).parent)], stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    seen = b""
    try:
        while b"step 50 of 300" not in seen:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # Linux says EIO when the other end has closed
                raise AssertionError(f"the program ended early:\n{seen.decode()}") from None
        process.send_signal(signal.SIGINT)
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux says EIO when the other end has closed
                break
            if not piece:
                break
            seen += piece
        process.wait(250)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    text = seen.decode()
    assert "KeyboardInterrupt" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
