"""A run that is served from a terminal goes on while that is held."""

import contextlib
import os
import time
from pathlib import Path

from rich.console import Console
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.cli.serving import Lines, Watch
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
        watch = Watch(Lines(Console(file=file)))
        # when there is something to be shown
        with af.serve(tmp_path, on_event=watch) as run:
            run.tell(Note(time_s=time.monotonic(), text="look here", level="warning"))
            # then whoever works for the run is answered
            assert run.audit().put == 0
            # and it is shown when somebody reads again
            os.set_blocking(out, False)
            said = bytearray()
            until(lambda: said.extend(reader.read1() or b"") or b"look here" in said, "what was to be shown")
        watch.close()
