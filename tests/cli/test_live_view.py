"""LiveView: readable lines in a pipe, a picture that fits on a terminal, and it does not grow with the run."""

from __future__ import annotations

import io
import itertools
import math
import re
import threading

import pytest
from rich.cells import cell_len
from rich.console import Console
from synthetic_run import BATCH, START_S, synthetic_run

from asyncflow_sdk import LiveView
from asyncflow_sdk.types.events import (
    Evaluated,
    Event,
    Loaded,
    Note,
    Published,
    RowsEnded,
    Span,
    Status,
    StepTrained,
    WorkerState,
)

pytestmark = pytest.mark.fast
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


def test_without_a_last_step_each_step_is_a_line_with_all_metrics() -> None:
    steps = [StepTrained(time_s=k, step=k, version=k, metrics={"reward": 0.5, "loss": 0.25}) for k in range(3)]
    lines = piped(list(steps), total_steps=0)
    assert [line.split("] ")[1] for line in lines[:3]] == [f"step {k}: reward 0.5, loss 0.25" for k in range(3)]


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
    status = Status(time_s=0, rows={"a\x1bb": {"ready": 1}}, ended={}, waiting={"w\x1b": "x\x1b\ny"})
    assert not any("\x1b" in line for line in picture([Note(time_s=0, text="\x1b[2Jgone"), status], title="t\x1b"))
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
    assert "step 20 of 300" in text_of(view)


def test_events_from_many_threads_are_all_counted() -> None:
    view = LiveView(10, "demo", Console(file=io.StringIO()))
    event = RowsEnded(time_s=0, state="consumed", count=1)
    threads = [threading.Thread(target=lambda: [view(event) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "consumed 4,000" in text_of(view)


def text_of(view: LiveView) -> str:
    return "\n".join(line.plain for line in view.lines())


def picture(
    events: list[Event], total_steps: int = 300, *, title: str = "demo", now_s: float | None = None,
    width: int = 80, height: int = 24, encoding: str = "utf-8",
) -> list[str]:  # fmt: skip
    """The lines that are drawn once ``events`` have come, of which the last is now."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    clock = now_s if now_s is not None else events[-1].time_s
    view = LiveView(total_steps, title, Console(file=out, width=width, height=height), lambda: clock)
    for event in events:
        view(event)
    return [line.plain for line in view.lines()]


HALF_WAY = synthetic_run()[:1756]


def test_the_picture_shows_the_last_and_the_best_evaluation() -> None:
    scored = [
        Evaluated(time_s=1.0, version=20, score=0.5, rows=8, best=True),
        Evaluated(time_s=2.0, version=40, score=0.25, rows=8),
    ]

    (line,) = [line for line in picture(scored) if line.strip().startswith("evaluation")]
    assert "0.250" in line
    assert "best" in line
    assert "0.500" in line
    assert "of version 20" in line


def test_the_picture_shows_the_part_that_a_trainer_is_at() -> None:
    ready = WorkerState(time_s=0.0, worker="train-0", state="ready")
    part = Span(
        time_s=1.0, worker="train-0", kind="train", seconds=1.0, rows=32, version=7, detail="part 3 of step 7"
    )
    wait = Span(time_s=2.0, worker="train-0", kind="wait", seconds=1.0)
    assert "% · part 3 of step 7" in "\n".join(picture([ready, part, wait]))
    whole = Span(time_s=3.0, worker="train-0", kind="train", seconds=1.0, rows=256, version=8)
    assert "part 3" not in "\n".join(picture([ready, part, wait, whole]))


def test_the_picture_at_80_by_24_shows_everything() -> None:
    lines = picture(HALF_WAY)
    text = "\n".join(lines)
    rewards = [event.metrics["reward"] for event in HALF_WAY if isinstance(event, StepTrained)]
    assert f"step {len(rewards)} of 300" in text
    assert re.search(r"about \d:\d\d left", lines[0])
    mean = sum(rewards[-20:]) / 20
    assert re.search(rf"reward +{rewards[-1]:.3f} +mean of 20  {mean:.3f} +▁.*█", text)
    assert re.search(r"published +v\d+ +lag +\d", text)
    assert re.search(r"rollout +0 +128 +0 +64 +64", text)
    assert re.search(rf"ended +consumed {len(rewards) * (BATCH - 2):,} · filtered {len(rewards) * 2}", text)
    assert re.search(r"● rollout-0 +ready +v\d+ +generate \d\d%", text)
    assert re.search(r"● reward-0 +ready +waiting [\d.]+ s: 64 rows are leased in task", text)
    assert "weights: transport shm" in lines[-1]


def test_the_speed_is_that_of_the_last_while_and_the_rest_is_estimated_by_it() -> None:
    events = [event for event in synthetic_run(restart_at=None) if event.time_s < START_S + 100]
    text = "\n".join(picture(events))
    done = sum(isinstance(event, StepTrained) for event in events)
    tokens = sum(event.tokens for event in events if isinstance(event, Span) and event.kind == "generate")
    (speed,) = re.findall(r"generated +([\d,]+) tokens/s", text)
    assert int(speed.replace(",", "")) == pytest.approx(tokens / 98, rel=0.1)
    minutes, seconds = map(int, re.findall(r"about (\d+):(\d\d) left", text)[0])
    assert 60 * minutes + seconds == pytest.approx((300 - done) * 98 / done, rel=0.15)


def test_the_speed_falls_when_nothing_comes_and_counts_what_is_told_late() -> None:
    spans: list[Event] = [Span(time_s=s, worker="r", kind="generate", seconds=1, tokens=100) for s in range(60)]
    spans.append(spans.pop(40))

    drawn = ["\n".join(picture([*spans, Note(time_s=now, text="")])) for now in (60.0, 75.0, 600.0)]

    now, later, end = (int(re.findall(r"(\d+) tokens/s", text)[0]) for text in drawn)
    assert now == pytest.approx(100, rel=0.11)
    assert now > later > end == 0


def test_columns_are_aligned() -> None:
    lines = picture(HALF_WAY)
    head = next(i for i, line in enumerate(lines) if "ROWS" in line)
    assert len({len(line) for line in lines[head : head + 4]}) == 1
    workers = next(i for i, line in enumerate(lines) if "WORKERS" in line)
    state = lines[workers].index("state")
    assert all(lines[workers + i][state:].startswith("ready") for i in (1, 3, 4))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize(("width", "height"), [(20, 5), (40, 12), (80, 24), (128, 30), (200, 60)])
def test_the_picture_fits_whatever_there_is_to_show(width: int, height: int, encoding: str) -> None:
    now_s = HALF_WAY[-1].time_s
    events: list[Event] = [
        *HALF_WAY,
        *(WorkerState(time_s=now_s, worker=f"replica-of-some-engine-{i}", state="ready") for i in range(40)),
        WorkerState(time_s=now_s, worker="broken", state="failed", detail="x\n" * 5 + "y" * 300),
        Status(
            time_s=now_s,
            rows={f"task-{i}-工作": dict.fromkeys(("waiting", "ready", "odd"), 10**7) for i in range(20)},
            ended={f"state-{i}": 10**6 for i in range(9)},
            waiting={"broken": "w" * 300},
        ),
    ]

    lines = picture(events, title="t" * 100, width=width, height=height, encoding=encoding)

    assert len(lines) < height
    assert all(cell_len(line) <= width - 1 for line in lines)
    assert encoding != "ascii" or all(line.isascii() for line in lines)
    if height >= 24:
        text = "\n".join(lines)
        assert "broken" in text, "who needs attention is not what is cut off"
        assert re.search(r"and \d+ more tasks", text) or text.count("task-") == 20
        assert re.search(r"and \d+ more workers", text) or text.count("replica-of") == 40


def test_before_anything_happened() -> None:
    text = "\n".join(picture([], 0, now_s=0.0))
    assert "step 0" in text
    assert "nan" not in text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (65, "1:05"), (3_725, "1:02:05")])
def test_how_long_it_took_is_told_as_people_say_it(seconds: float, text: str) -> None:
    began: list[Event] = [Note(time_s=100, text="")]
    assert f"{text} elapsed" in "\n".join(picture([*began, Note(time_s=100 + seconds, text="")]))


@pytest.mark.parametrize(("first", "last"), [(0, 9), (1, 10)])
def test_steps_are_counted_whether_from_zero_or_one(first: int, last: int) -> None:
    assert "step 10 of 10" in "\n".join(picture([trained(k) for k in range(first, last + 1)], 10))


def trained(step: int, **metrics: float) -> StepTrained:
    return StepTrained(time_s=1.0, step=step, version=step, metrics={"reward": 0.5, **metrics})


def test_nan_is_shown_but_not_averaged() -> None:
    text = "\n".join(picture([trained(0, reward=0.4), trained(1, reward=0.6), trained(2, reward=math.nan)]))
    assert re.search(r"reward +– +mean of 20  0\.500", text)


def test_staleness_is_shown_in_parts_once_a_step_tells_them_apart() -> None:
    metrics = {"staleness_mean": 1.0, "staleness_in_flight_mean": 0.75, "staleness_in_queue_mean": 0.25}
    assert "0.75 in flight + 0.25 in the queue" in "\n".join(picture([trained(0, **metrics)], width=100))


def test_lag_is_of_the_slowest_living_replica() -> None:
    assert re.search(r"published +v0", "\n".join(picture([Loaded(time_s=0, worker="a", version=0, lag=0)])))
    events: list[Event] = [
        Published(time_s=1, version=5, nbytes=1, root=""),
        Loaded(time_s=2, worker="a", version=5, lag=0),
        Loaded(time_s=2, worker="b", version=3, lag=2),
    ]
    assert re.search(r"published +v5 +lag +2", "\n".join(picture(events)))
    events.append(WorkerState(time_s=3, worker="b", state="failed"))
    assert re.search(r"published +v5 +lag +0", "\n".join(picture(events)))
    events.append(Published(time_s=4, version=6, nbytes=1, root=""))
    assert re.search(r"published +v6 +lag +1", "\n".join(picture(events)))


def test_a_status_corrects_the_count_of_ended_rows() -> None:
    events: list[Event] = [
        RowsEnded(time_s=1, state="consumed", count=8),
        RowsEnded(time_s=1, state="failed", count=1),
        Status(time_s=2, rows={}, ended={"consumed": 16}, waiting={}),
        RowsEnded(time_s=3, state="consumed", count=8),
    ]
    text = "\n".join(picture(events))
    assert "consumed 24" in text
    assert "failed 1" in text


def test_only_information_is_kept_as_the_note() -> None:
    text = "\n".join(picture([Note(time_s=1, text="shm"), Note(time_s=2, text="careful", level="warning")]))
    assert "shm" in text
    assert "careful" not in text


def test_workers_that_come_and_go_are_forgotten_the_gone_ones_first() -> None:
    events: list[Event] = [WorkerState(time_s=0, worker="trainer", state="ready")]
    for i in range(2_000):
        events.append(WorkerState(time_s=i, worker=f"replica-{i}", state="ready"))
        events.append(WorkerState(time_s=i, worker=f"replica-{i}", state="stopped"))
    text = "\n".join(picture(events, height=400))
    assert text.count("replica-") <= 256
    assert "trainer" in text
    assert "replica-1999" in text


def test_the_curve_of_rewards_keeps_its_shape_however_long_the_run() -> None:
    events: list[Event] = [trained(k, reward=k / 10_000) for k in range(10_000)]
    (curve,) = re.findall(r"[▁▂▃▄▅▆▇█]{10,}", "\n".join(picture(events, 10_000)))
    assert list(curve) == sorted(curve)
    assert set(curve) == set("▁▂▃▄▅▆▇█")


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
    assert f"consumed {BATCH}" in text_of(view)


def test_a_terminal_that_vanishes_does_not_stop_the_run() -> None:
    class Vanishing(io.StringIO):
        def write(self, text: str) -> int:
            if "step" in text:
                raise OSError(5, "Input/output error")
            return super().write(text)

    console = Console(file=Vanishing(), force_terminal=True, width=80, height=24, _environ={"TERM": "xterm"})
    with LiveView(300, "demo", console) as view:
        for event in synthetic_run(5, None):
            view(event)
    assert "step 5 of 300" in text_of(view)
