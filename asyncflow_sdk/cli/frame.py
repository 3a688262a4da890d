"""Frame: a Board as lines of text that fit a terminal.

    for line in frame(board, title="demo", now_s=time.monotonic(), width=80, height=24): ...

Lines are laid out by hand: a table of rich costs more CPU than all of this, second after second for hours.
"""

from __future__ import annotations

import math
import re
import textwrap

from rich.cells import cell_len
from rich.text import Text

from .board import Board, Worker, by_name
from .lines import LABEL, Cell, duration, fit, head, label, laid_out, number, printable, sparkline, to_ascii, wrapped

STATES = ("waiting", "ready", "selected", "leased", "done")
_WIDE, _ROWS_WIDTH = 128, 57
_TALL = 20
_PATIENCE_S = 1.0
_STATE_STYLE = {"ready": "green", "failed": "bold red", "stopped": "dim"}


def frame(board: Board, *, title: str, now_s: float, width: int, height: int, ascii_only: bool = False) -> list[Text]:
    """The picture in at most ``height`` lines of at most ``width`` cells."""
    width = max(width, 20)
    # A column is left free: a line that fills the last cell makes some terminals wrap.
    inner = width - 2
    top = [*_header(board, title, now_s, inner), [], *_numbers(board, inner), []]
    foot: list[list[Cell]] = []
    if board.note and height >= _TALL:
        foot = [[], [(printable(board.note), "dim")]]
    room = max(height - len(top) - len(foot), 4)
    if width >= _WIDE:
        left = _rows(board, _ROWS_WIDTH, room)
        right = _workers(board, now_s, inner - _ROWS_WIDTH - 3, room)
        body = _beside(left, right, _ROWS_WIDTH)
    else:
        rows = _rows(board, inner, max(room // 2, 3))
        body = [*rows, [], *_workers(board, now_s, inner, max(room - len(rows) - 1, 2))]
    lines = [laid_out(line, inner) for line in [*top, *body, *foot]][:height]
    return [Text(to_ascii(line.plain), no_wrap=True) for line in lines] if ascii_only else lines


def _header(board: Board, title: str, now_s: float, width: int) -> list[list[Cell]]:
    clock = f"{duration(now_s - board.start_s)} elapsed"
    if math.isfinite(board.seconds_left) and board.done < board.total_steps:
        clock += f" · about {duration(board.seconds_left)} left"
    title = printable(title)
    gap = width - cell_len(title) - cell_len(clock)
    first: list[Cell] = [(title, "bold")]
    if gap > 0:
        first += [(" " * gap, ""), (clock, "dim")]
    count = f"  step {board.done:,} of {board.total_steps:,}"
    length = max(width - len(count), 4)
    filled = min(length * board.done // max(board.total_steps, 1), length)
    bar: list[Cell] = [("━" * filled, "cyan"), ("─" * (length - filled), "dim"), (count, "")]
    return [first, bar]


def _numbers(board: Board, width: int) -> list[list[Cell]]:
    reward: list[Cell] = [
        label("reward"),
        (f"{number(board.reward, 3):<9}", "bold"),
        (f"mean of 20  {number(board.reward_mean, 3):<9}", ""),
    ]
    points = board.rewards.sampled(max(min(width - 52, 60), 0))
    if len(points) > 1:
        low, high = min(points), max(points)
        reward += [(sparkline(points, low, high), "cyan"), (f" {low:.2f}–{high:.2f}", "dim")]
    stale: list[Cell] = [
        label("staleness"),
        (f"{number(board.staleness_mean):<9}", "bold"),
        (f"at most     {number(board.staleness_max, 0):<9}", ""),
        (_parts(board) or "versions, in the last step", "dim"),
    ]
    version = "–" if board.published is None else f"v{board.published}"
    behind = "–" if board.lag is None else str(board.lag)
    weights: list[Cell] = [
        label("published"),
        (f"{version:<9}", "bold"),
        (f"lag         {behind:<9}", ""),
        ("versions, of the slowest replica", "dim"),
    ]
    rate: list[Cell] = [label("generated"), (f"{board.tokens_per_s:,.0f} ", "bold"), ("tokens/s", "")]
    return [reward, stale, weights, rate]


def _parts(board: Board) -> str:
    """Where the versions of the last step's staleness passed."""
    if not math.isfinite(board.in_flight):
        return ""
    return f"{number(board.in_flight)} in flight + {number(board.in_queue)} in the queue"


def _rows(board: Board, width: int, room: int) -> list[list[Cell]]:
    found = {state for counts in board.rows.values() for state in counts}
    states = [*(s for s in STATES if s in found or not found), *sorted(found.difference(STATES))]
    tasks = list(board.rows)
    shown = tasks if len(tasks) <= room - 2 else tasks[: max(room - 3, 1)]
    first = min(max([LABEL, *(cell_len(t) + 2 for t in shown)]), 24)
    wide = 9
    if first + wide * len(states) > width:
        first = 8
        wide = 8 if first + 8 * len(states) <= width else 7
    lines: list[list[Cell]] = [[head("ROWS", first), *((f"{s[: wide - 1]:>{wide}}", "dim") for s in states)]]
    for task in shown:
        counts = board.rows[task]
        cells = [(f"{counts.get(s, 0):>{wide},}", "" if counts.get(s) else "dim") for s in states]
        lines.append([(fit(task, first), ""), *cells])
    if len(shown) < len(tasks):
        lines.append([(f"and {len(tasks) - len(shown)} more tasks", "dim")])
    ended = [f"{state} {count:,}" for state, count in sorted(board.ended.items(), key=lambda e: -e[1]) if count]
    returned = [f"{board.returned:,}"] if board.returned else []
    for name, parts in (("ended", ended or ["–"]), ("returned", returned)):
        for i, text in enumerate(wrapped(parts, width - first)):
            lines.append([(fit("" if i else name, first), "dim"), (text, "")])
    return lines


def _workers(board: Board, now_s: float, width: int, room: int) -> list[list[Cell]]:
    names = [*board.workers, *(name for name in board.waiting if name not in board.workers)]
    # Who needs attention comes first, so that it is not what is cut off.
    names.sort(key=lambda n: (_calm(board.workers.get(n, Worker()).state), by_name(n)))
    shown = names if len(names) <= room - 1 else names[: max(room - 2, 1)]
    first = min(max([LABEL + 2, *(cell_len(n) + 4 for n in shown)]), 28, max(width // 3, 13))
    lines: list[list[Cell]] = [
        [head("WORKERS", first), (f"{'state':<12}", "dim"), (f"{'weights':<9}", "dim"), ("doing", "dim")]
    ]
    left = max(width - first - 21, 8)
    spare = room - 2 - len(shown)
    for name in shown:
        worker = board.workers.get(name, Worker())
        style = _STATE_STYLE.get(worker.state, "yellow" if worker.state else "dim")
        version = "" if worker.version is None else f"v{worker.version}"
        text, tone = _doing(worker, board.waiting.get(name, ""), now_s, left)
        parts = textwrap.wrap(text, left, max_lines=2 if spare > 0 else 1, placeholder="…") or [""]
        spare -= len(parts) - 1
        lines.append(
            [
                ("● " if worker.state not in ("stopped", "") else "○ ", style),
                (fit(name, first - 2), ""),
                (f"{worker.state or '–':<12}", style),
                (f"{version:<9}", ""),
                (parts[0], tone),
            ]
        )
        lines += [[(" " * (first + 21), ""), (part, tone)] for part in parts[1:]]
    if len(shown) < len(names):
        lines.append([(f"and {len(names) - len(shown)} more workers", "dim")])
    return lines


def _calm(state: str) -> int:
    return {"failed": 0, "restarting": 1, "starting": 2, "stopped": 4}.get(state, 3)


def _doing(worker: Worker, waiting: str, now_s: float, width: int) -> tuple[str, str]:
    if worker.state not in ("ready", ""):
        why = [printable(line) for line in worker.detail.strip().splitlines()[-1:]]
        since = f"for {duration(now_s - worker.since_s)}"
        return f"{since}: {why[0]}" if why else since, "dim" if worker.state == "stopped" else ""
    whole = math.fsum(worker.seconds.values())
    kinds = sorted(worker.seconds.items(), key=lambda item: -item[1])[:3]
    shares = [f"{kind} {100 * seconds / whole:.0f}%" for kind, seconds in kinds if seconds > 0.005 * whole]
    if waiting and (not shares or _waited_s(waiting) >= _PATIENCE_S):
        return _why(printable(waiting), width), "yellow"
    return printable(" · ".join(shares)) or "–", ""


def _waited_s(waiting: str) -> float:
    """The ledger's words begin "after 1.5 s: "; others count as a long wait."""
    found = re.match(r"after ([\d.]+) s: ", waiting)
    return float(found[1]) if found else math.inf


def _why(text: str, width: int) -> str:
    """What is waited for; where it does not fit, the reason goes before the name of the task."""
    text = text if text.startswith("wait") else f"waiting {text.removeprefix('after ')}"
    since, colon, rest = text.partition(": ")
    if colon and cell_len(text) > width and "; " in rest:
        text = f"{since}: {rest.partition('; ')[2]}"
    return text


def _beside(left: list[list[Cell]], right: list[list[Cell]], width: int) -> list[list[Cell]]:
    lines: list[list[Cell]] = []
    for i in range(max(len(left), len(right))):
        cells = left[i] if i < len(left) else []
        start = laid_out(cells, width, indent="", pad=True)
        lines.append([(start, ""), ("   ", ""), *(right[i] if i < len(right) else [])])
    return lines
