"""LiveView: readable lines in a pipe, a picture that fits on a terminal, and a terminal left as it was."""

from __future__ import annotations

import io
import itertools
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import BATCH, START_S, synthetic_run

from asyncflow_sdk.cli.board import Board
from asyncflow_sdk.cli.frame import frame
from asyncflow_sdk.cli.lines import duration, number, sparkline
from asyncflow_sdk.cli.live import LiveView
from asyncflow_sdk.types.events import Event, Note, RowsEnded, Status, StepTrained, WorkerState

HERE = Path(__file__).parent
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def piped(events: list[Event], total_steps: int = 300) -> list[str]:
    out = io.StringIO()
    with LiveView(total_steps, "demo", Console(file=out)) as view:
        for event in events:
            view(event)
    return out.getvalue().splitlines()


def terminal(width: int = 80, height: int = 24) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, _environ={"TERM": "xterm"})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def seconds(line: str) -> int:
    found = re.match(r"\[ *(?:(\d+):)?(\d+)(?: s)?\]", line)
    assert found is not None, line
    return int(found[1] or 0) * 60 + int(found[2])


def test_a_pipe_gets_a_line_every_ten_steps_and_ten_seconds() -> None:
    lines = [line for line in piped(synthetic_run()) if "] step " in line]

    steps = [int(re.search(r"step (\d+)/300", line)[1]) for line in lines]  # type: ignore[index]
    assert steps == sorted(set(steps))
    assert steps[-1] == 300
    assert 15 < len(lines) <= 31
    assert all(seconds(later) - seconds(earlier) >= 9 for earlier, later in itertools.pairwise(lines[:-1]))
    assert re.search(
        r"reward 0\.\d{3} \(mean of 20: 0\.\d{3}\)  staleness \d\.\d\d \(max 1\)  lag \d  \d+ tokens/s  left ",
        lines[len(lines) // 2],
    )


def test_a_pipe_hears_of_long_steps_one_by_one() -> None:
    steps = [StepTrained(time_s=100.0 * k, step=k, version=k, metrics={"reward": 0.5}) for k in range(5)]
    lines = piped(list(steps), total_steps=50)
    assert [line.split("step ")[1].split("/")[0] for line in lines] == ["1", "2", "3", "4", "5"]


def test_a_pipe_hears_of_workers_and_warnings_at_once_and_in_order() -> None:
    lines = [line.split("] ", 1)[1] for line in piped(synthetic_run()) if "] step " not in line]
    assert lines == [
        "worker rollout-0: starting",
        "worker rollout-0: ready",
        "worker train-0: starting",
        "worker train-0: ready",
        "worker reward-0: starting",
        "worker reward-0: ready",
        "worker rollout-0: failed: killed by signal 9",
        "warning: 64 rows of rollout-0 went back to task rollout",
        "worker rollout-0: restarting: attempt 1 of 3",
        "worker rollout-0: ready",
        "worker rollout-0: stopped",
        "worker train-0: stopped",
        "worker reward-0: stopped",
    ]


def test_a_state_that_is_repeated_is_said_once() -> None:
    ready = [WorkerState(time_s=k, worker="a", state="ready") for k in range(3)]
    assert len(piped(list(ready))) == 1


def test_the_traceback_of_a_failed_worker_is_printed_whole() -> None:
    detail = "Traceback (most recent call last):\n  File x\nValueError: bad"
    text = "\n".join(piped([WorkerState(time_s=0, worker="a", state="failed", detail=detail)]))
    assert "worker a: failed: Traceback" in text
    assert "ValueError: bad" in text


def test_what_a_worker_wrote_cannot_drive_the_terminal() -> None:
    evil = Note(time_s=0, text="\x1b[2Jgone\x07", level="error", worker="a")
    assert "\x1b" not in "\n".join(piped([evil]))
    board = Board(1)
    board.add(Note(time_s=0, text="\x1b[2Jgone"))
    board.add(Status(time_s=0, rows={"a\x1bb": {"ready": 1}}, ended={}, waiting={"w\x1b": "x\x1b\ny"}))
    drawn = frame(board, title="t\x1b", now_s=1, width=80, height=24)
    assert not any("\x1b" in line.plain for line in drawn)
    console = terminal()
    with LiveView(1, "demo", console) as view:
        view(evil)
    assert "[2Jgone" in written(console)
    assert "\x1b[2J" not in written(console)


def test_a_pipe_whose_reader_left_does_not_stop_the_run() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with LiveView(300, "demo", Console(file=Closed())) as view:
        for event in synthetic_run(20, None):
            view(event)
    assert view.board.done == 20


def test_events_from_many_threads_are_all_counted() -> None:
    view = LiveView(10, "demo", Console(file=io.StringIO()))
    event = RowsEnded(time_s=0, state="consumed", count=1)
    threads = [threading.Thread(target=lambda: [view(event) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert view.board.ended == {"consumed": 4_000}


def half_way() -> Board:
    board = Board(300)
    for event in synthetic_run()[:1756]:
        board.add(event)
    return board


def test_the_picture_at_80_by_24_shows_everything() -> None:
    board = half_way()
    lines = [line.plain for line in frame(board, title="demo", now_s=board.now_s, width=80, height=23)]
    text = "\n".join(lines)
    assert f"step {board.done} of 300" in text
    assert re.search(r"about \d:\d\d left", lines[0])
    assert re.search(r"reward +0\.\d{3} +mean of 20  0\.\d{3} +▁.*█", text)
    assert re.search(r"published +v\d+ +lag +\d", text)
    assert re.search(r"rollout +0 +128 +0 +64 +64", text)
    assert re.search(r"ended +consumed [\d,]+ · filtered \d+", text)
    assert re.search(r"● rollout-0 +ready +v\d+ +generate \d\d%", text)
    assert re.search(r"● reward-0 +ready +waiting [\d.]+ s: 64 rows are leased in task", text)
    assert "weights: transport shm" in lines[-1]


def test_columns_are_aligned() -> None:
    board = half_way()
    lines = [line.plain for line in frame(board, title="demo", now_s=board.now_s, width=80, height=23)]
    head = next(i for i, line in enumerate(lines) if "ROWS" in line)
    ends = {len(line) for line in lines[head : head + 4]}
    assert len(ends) == 1
    workers = next(i for i, line in enumerate(lines) if "WORKERS" in line)
    state = lines[workers].index("state")
    assert all(lines[workers + i][state:].startswith("ready") for i in (1, 3, 4))


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize(("width", "height"), [(20, 5), (40, 12), (80, 23), (128, 30), (200, 60)])
def test_the_picture_fits_whatever_there_is_to_show(width: int, height: int, ascii_only: bool) -> None:
    board = half_way()
    for i in range(40):
        board.add(WorkerState(time_s=board.now_s, worker=f"replica-of-some-engine-{i}", state="ready"))
    board.add(WorkerState(time_s=board.now_s, worker="broken", state="failed", detail="x\n" * 5 + "y" * 300))
    rows = {f"task-{i}-工作": dict.fromkeys(("waiting", "ready", "odd"), 10**7) for i in range(20)}
    ended = {f"state-{i}": 10**6 for i in range(9)}
    board.add(Status(time_s=board.now_s, rows=rows, ended=ended, waiting={"broken": "w" * 300}))

    lines = frame(board, title="t" * 100, now_s=board.now_s, width=width, height=height, ascii_only=ascii_only)

    assert len(lines) <= height
    assert all(line.cell_len <= width - 1 for line in lines)
    assert not ascii_only or all(line.plain.isascii() for line in lines)
    if height >= 23:
        text = "\n".join(line.plain for line in lines)
        assert "broken" in text, "who needs attention is not what is cut off"
        assert re.search(r"and \d+ more tasks", text) or text.count("task-") == 20
        assert re.search(r"and \d+ more workers", text) or text.count("replica-of") == 40


def test_an_empty_board_can_be_drawn() -> None:
    lines = frame(Board(0), title="demo", now_s=0, width=80, height=24)
    assert "step 0 of 0" in lines[1].plain


def test_a_terminal_gets_the_picture_and_what_must_not_be_missed() -> None:
    console = terminal()
    with LiveView(300, "demo", console, clock=lambda: START_S + 250) as view:
        for event in synthetic_run():
            view(event)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", written(console))
    assert "step 300 of 300" in text
    assert "warning: 64 rows of rollout-0 went back to task rollout" in text
    assert "worker rollout-0: failed: killed by signal 9" in text
    assert "worker train-0: starting" not in text
    assert written(console).rindex(SHOW_CURSOR) > written(console).rindex(HIDE_CURSOR)


def test_a_view_that_was_closed_goes_on_listening_silently() -> None:
    console = terminal()
    with LiveView(300, "demo", console) as view:
        pass
    before = written(console)
    view(RowsEnded(time_s=1, state="consumed", count=BATCH))
    view(Note(time_s=1, text="late", level="warning"))
    assert written(console) == before
    assert view.board.ended == {"consumed": BATCH}


def test_a_terminal_that_vanishes_does_not_stop_the_run() -> None:
    console = terminal()
    view = LiveView(300, "demo", console)
    with view:

        def gone(*_: object, **__: object) -> None:
            raise OSError(5, "Input/output error")

        view._live.update = gone  # type: ignore[union-attr, method-assign, assignment]
        view._live.stop = gone  # type: ignore[union-attr, method-assign]
        for event in synthetic_run(5, None):
            view(event)
    assert view.board.done == 5


def test_ctrl_c_leaves_the_terminal_sane() -> None:
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from synthetic_run import synthetic_run\n"
        "from asyncflow_sdk.cli.live import LiveView\n"
        "with LiveView(300, 'demo') as view:\n"
        "    for event in synthetic_run(50, None): view(event)\n"
        "    view.board.note = 'drawn'\n"
        "    time.sleep(60)\n"
    )
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen([sys.executable, "-c", program, str(HERE)], stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    seen = b""
    try:
        while b"drawn" not in seen:
            seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux says EIO when the other end has closed
                break
            if not piece:
                break
            seen += piece
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    text = seen.decode()
    assert "KeyboardInterrupt" in text
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    assert "step 50 of 300" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (59.4, "59 s"), (65, "1:05"), (3_725, "1:02:05"), (float("nan"), "–"), (-1, "0 s")],
)
def test_durations(value: float, text: str) -> None:
    assert duration(value) == text


def test_numbers_and_sparklines() -> None:
    assert (number(0.12345, 3), number(float("inf"))) == ("0.123", "–")
    assert sparkline([0, 1, 2], 0, 2) == "▁▅█"
    assert sparkline([5, 5], 5, 5) == "▁▁"
