"""The screen of a running workflow: its progress as lines of text for a terminal.

for line in run_screen(progress, title="demo", now_s=time.monotonic(), width=80, height=24): ...
"""

from __future__ import annotations

import math
import re

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..formats import by_name, duration, number, printable, sparkline
from .run_progress import RunProgress, WorkerProgress
from .screen import PATIENCE_S, Clipped, bar, fit, more, name, table

STATES = ("waiting", "ready", "selected", "leased", "done")
_WIDE, _ROWS_WIDTH, _TALL = 128, 57, 20
_STATE_STYLE = {"ready": "green", "failed": "bold red", "stopped": "dim"}


def run_screen(
    run: RunProgress, *, title: str, now_s: float, width: int, height: int, ascii_only: bool = False
) -> list[Text]:
    """Return at most ``height`` lines of fewer than ``width`` cells."""
    width = max(width, 20)
    header: list[RenderableType] = [
        _title(run, title, now_s),
        _bar(run, width - 2),
        Text(),
        *_numbers(run, width - 2),
        Text(),
    ]
    foot = [Text(), Text(printable(run.note), "dim")] if run.note and height >= _TALL else []
    free = max(height - len(header) - len(foot), 4)

    def _draw(most: int) -> list[RenderableType]:
        if width >= _WIDE:
            beside = Table.grid(padding=(0, 3, 0, 0))
            beside.add_column(width=_ROWS_WIDTH)
            beside.add_row(
                Group(*_rows(run, free)), Group(*_workers(run, now_s, width - _ROWS_WIDTH - 5, free, most))
            )
            return [*header, beside, *foot]
        rows = _rows(run, max(free // 2, 3))
        used = 3 + min(len(run.rows), max(free // 2, 3) - 2) + bool(run.returned)
        return [*header, *rows, Text(), *_workers(run, now_s, width - 2, max(free - used, 2), most), *foot]

    return fit(_draw, width, height, most=2, ascii_only=ascii_only)


def _title(run: RunProgress, title: str, now_s: float) -> Table:
    clock = f"{duration(now_s - run.start_s)} elapsed"
    if math.isfinite(run.seconds_left) and run.done < run.total_steps:
        clock += f" · about {duration(run.seconds_left)} left"
    line = Table.grid(expand=True)
    line.add_column(style="bold", no_wrap=True, ratio=1)
    line.add_column(style="dim", no_wrap=True)
    line.add_row(Text(printable(title)), clock)
    return line


def _bar(run: RunProgress, width: int) -> Text:
    count = f"  step {run.done:,} of {run.total_steps:,}"
    return bar(run.done, run.total_steps, max(width - len(count), 4)).append(count)


def _numbers(run: RunProgress, width: int) -> list[Text]:
    parts = "versions, in the last step"
    if math.isfinite(run.in_flight):
        parts = f"{number(run.in_flight)} in flight + {number(run.in_queue)} in the queue"
    version = "–" if run.published is None else f"v{run.published}"
    lag = "–" if run.lag is None else str(run.lag)
    lines = [
        ("reward", number(run.reward, 3), "mean of 20", number(run.reward_mean, 3), ""),
        ("staleness", number(run.staleness_mean), "at most", number(run.staleness_max, 0), parts),
        ("published", version, "lag", lag, "versions, of the slowest replica"),
    ]
    if (last := run.evaluated) is not None:
        best = f"of version {run.best.version}" if run.best is not None else ""
        lines.append(
            ("evaluation", number(last.score, 3), "best", number(run.best.score, 3) if run.best else "", best)
        )
    made = [
        Text.assemble((f"{what:<11}", "dim"), (f"{value:<9}", "bold"), f"{second:<12}{more:<9}", (remark, "dim"))
        for what, value, second, more, remark in lines
    ]
    points = run.rewards.sampled(max(min(width - 52, 60), 0))
    if len(points) > 1:
        low, high = min(points), max(points)
        made[0].append(sparkline(points, low, high), "cyan").append(f" {low:.2f}–{high:.2f}", "dim")
    cut = f", {run.truncated:.0%} of the responses truncated" if math.isfinite(run.truncated) else ""
    speed = Text.assemble((f"{'generated':<11}", "dim"), (f"{run.tokens_per_s:,.0f} ", "bold"), f"tokens/s{cut}")
    return [*made, speed]


def _rows(run: RunProgress, most: int) -> list[RenderableType]:
    """The rows of each task by state, and the rows that ended, in about ``most`` lines."""
    found = {state for counts in run.rows.values() for state in counts}
    states = [*(s for s in STATES if s in found or not found), *sorted(found.difference(STATES))]
    tasks = list(run.rows)
    shown = tasks if len(tasks) <= most - 2 else tasks[: max(most - 3, 1)]
    first = min(max([9, *(cell_len(task) for task in shown)]), 22)
    rows, below = table("ROWS", *states, first=first, numbers=8), table("", "", first=first)
    for task in shown:
        counts = [run.rows[task].get(state, 0) for state in states]
        rows.add_row(printable(task), *(Text(f"{n:,}", "" if n else "dim") for n in counts))
    ended = [f"{state} {count:,}" for state, count in sorted(run.ended.items(), key=lambda e: -e[1]) if count]
    below.add_row(Text("ended", "dim"), Clipped(" · ".join(ended) or "–", lines=2))
    if run.returned:
        below.add_row(Text("returned", "dim"), f"{run.returned:,}")
    return [rows, *more(len(tasks) - len(shown), "task"), below]


def _workers(run: RunProgress, now_s: float, width: int, most: int, lines: int) -> list[RenderableType]:
    """Every worker; failed and starting ones first, so that they are not cut off."""
    names = [*run.workers, *(each for each in run.waiting if each not in run.workers)]
    names.sort(key=lambda n: (_calm(run.workers.get(n, WorkerProgress()).state), by_name(n)))
    shown = names if len(names) <= most - 1 else names[: max(most - 2, 1)]
    first = min(max([11, *(cell_len(n) + 2 for n in shown)]), 28, max(width // 3, 13))
    made = table("WORKERS", f"{'state':<10}", "weights", "doing", first=first)
    for each in shown:
        worker = run.workers.get(each, WorkerProgress())
        style = _STATE_STYLE.get(worker.state, "yellow" if worker.state else "dim")
        version = "" if worker.version is None else f"v{worker.version}"
        text, tone = doing(worker, run.waiting.get(each, ""), now_s, width - first - 21)
        mark = "○" if worker.state in ("stopped", "") else "●"
        state = Text(worker.state or "–", style)
        made.add_row(name(each, style, mark), state, version, Clipped(text, tone, lines))
    return [made, *more(len(names) - len(shown), "worker")]


def _calm(state: str) -> int:
    return {"failed": 0, "restarting": 1, "starting": 2, "stopped": 4}.get(state, 3)


def doing(worker: WorkerProgress, waiting: str, now_s: float, width: int) -> tuple[str, str]:
    """Return how the worker spends its time, or the cause of its state, with a style."""
    if worker.state not in ("ready", ""):
        why = worker.detail.strip().splitlines()[-1:]
        since = f"for {duration(now_s - worker.since_s)}"
        return f"{since}: {why[0]}" if why else since, "dim" if worker.state == "stopped" else ""
    whole = math.fsum(worker.seconds.values())
    kinds = sorted(worker.seconds.items(), key=lambda item: -item[1])[:3]
    shares = [f"{kind} {100 * seconds / whole:.0f}%" for kind, seconds in kinds if seconds > 0.005 * whole]
    if waiting and (not shares or _waited_s(waiting) >= PATIENCE_S):
        return _why(waiting, width), "yellow"
    return " · ".join([*shares, *([worker.part] if worker.part else [])]) or "–", ""


def _waited_s(waiting: str) -> float:
    """Parse the ledger's "after 1.5 s: "; other text counts as a long wait."""
    found = re.match(r"after ([\d.]+) s: ", waiting)
    return float(found[1]) if found else math.inf


def _why(text: str, width: int) -> str:
    """The reason of a wait; where it does not fit, drop the task's name."""
    text = text if text.startswith("wait") else f"waiting {text.removeprefix('after ')}"
    since, colon, rest = text.partition(": ")
    if colon and cell_len(text) > width and "; " in rest:
        text = f"{since}: {rest.partition('; ')[2]}"
    return text
