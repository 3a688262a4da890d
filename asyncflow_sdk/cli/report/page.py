"""The page of a run: rewards, staleness, and how each worker spent its time; of a running one also its queue.

path = write_report(Path("runs/demo"))      # runs/demo/report.html, one file, no network
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from ...errors import ConfigError, PluginError
from ...memory import private_opener
from ...types.events import LeaseReturned, Note, RowsEnded, WorkerState
from ..figures import QueueFigures, WorkerFigures
from ..formats import by_name, duration, number
from ..live_view import shares
from ..top import queue_screen
from .run_record import WAIT, RunRecord, read_record
from .summary import accounting, facts, outcome

_LOG_LINES = 200
_QUEUE_WIDTH, _QUEUE_LINES = 120, 300


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run directory and return its path.

    Raises ConfigError if the directory holds no events or is not writable, PluginError if
    matplotlib or jinja2 is not installed.
    """
    record = read_record(run_dir)
    target = run_dir / "report.html"
    # Renamed into place: a reloading browser never reads half a page.
    draft = target.with_suffix(".html.part")
    html = render_page(record)
    try:
        with open(draft, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(html)
        os.replace(draft, target)
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {target}: {error.strerror}") from error
    return target


def page_policy() -> str:
    """Return the content security policy of a live page: its own style and script, and nothing else."""
    hashes = (hashlib.sha256(_resource(name).encode()).digest() for name in ("page.css", "refresh.js"))
    style, script = (f"'sha256-{base64.b64encode(each).decode()}'" for each in hashes)
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def render_page(record: RunRecord, queue: QueueFigures | None = None, *, live: bool = False) -> str:
    """Return the page of a run as HTML. ``queue``: the figures of its queue, if it is running. ``live``: True for a
    page that refreshes itself. Raises PluginError without matplotlib or jinja2."""
    try:
        import jinja2

        from . import charts
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("matplotlib", "jinja2"):
            raise
        raise PluginError(
            f"the report page needs {missing}, which is not installed."
            " Install with: pip install 'asyncflow-sdk[report]'"
        ) from error
    now_s = time.monotonic()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    head, balance, remarks, lines = outcome(record.summary), accounting(record.summary), record.remarks, list[Text]()
    if queue is not None:
        head, balance, remarks = ("running", "good", _clock(record, now_s)), ("", "", ""), [*remarks, *queue.warnings]
        lines = queue_screen(queue, width=_QUEUE_WIDTH, height=_QUEUE_LINES)
    if len(record.spans) > charts.LANES:
        remarks = [*remarks, f"Pictures show {charts.LANES} of {len(record.spans):,} workers; the table has all."]
    drawn, zoom_steps = charts.drawn(record, now_s if queue is not None else None)
    page = environment.from_string(_resource("report.html.j2")).render(
        style=_resource("page.css"),
        script=_resource("refresh.js") if live else "",
        record=record,
        outcome=head,
        remarks=remarks,
        tiles=_tiles(record, queue),
        charts=drawn,
        zoom_steps=zoom_steps,
        queue="\n".join(line.plain for line in lines),
        lengths=_lengths(record),
        balance=balance,
        rows=_rows(record),
        workers=_workers(record),
        facts=_Table(["", ""], facts(record.summary), names=(0,)),
        log=_log(record, live),
        drawn_at=time.strftime("%H:%M:%S"),
    )
    return page.lstrip()


@functools.cache
def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


class _Table(NamedTuple):
    """A table of the page. ``numbers``: columns aligned right. ``names``: columns never wrapped."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()
    names: Sequence[int] = ()


def _clock(record: RunRecord, now_s: float) -> str:
    run = record.figures
    left = f" · about {duration(run.seconds_left)} left" if math.isfinite(run.seconds_left) else ""
    return f"{duration(now_s - run.start_s)} elapsed{left}" if record.events else ""


def _tiles(record: RunRecord, queue: QueueFigures | None) -> list[tuple[str, str, str]]:
    summary, run, steps = record.summary, record.figures, len(record.steps)
    whole_s = float(summary.get("wall_s", run.now_s - run.start_s))
    rewards = [reward for reward in record.metric("reward") if math.isfinite(reward)]
    first = summary.get("reward_first", rewards[0] if rewards else math.nan)
    last = summary.get("reward_last", run.reward_mean)
    stale = [most for most in record.metric("staleness_max") if math.isfinite(most)]
    most = float(summary.get("staleness_max", max(stale, default=math.nan)))
    parts, of = f"at most; mean of the last step {number(run.metric('staleness_mean'))}", summary.get("staleness")
    if isinstance(of, dict) and of.get("in_flight", {}).get("mean") is not None:
        parts = f"at most; mean {of['in_flight']['mean']:.2f} in flight, {of['in_queue']['mean']:.2f} in queue"
    tokens = sum(span.tokens for spans in record.spans.values() for span in spans if span.kind == "generate")
    rows = (f"{sum(_ended(record).values()):,}", accounting(summary)[2])
    generated = (f"{tokens / whole_s if whole_s > 0 else 0:,.0f}", "tokens/s overall")
    if queue is not None:
        rows = (f"{queue.report.live:,}", f"live; {queue.report.put:,} put")
        generated = (f"{run.tokens_per_s:,.0f}", "tokens/s, of the last 30 s")
    change = f"from {number(float(first), 3)}; last step {number(run.metric('reward'), 3)}"
    wanted = f"of {record.total_steps:,}" if record.total_steps else "trained"
    found = [
        ("Reward", number(float(last), 3), change),
        ("Steps", f"{summary.get('steps', steps):,}", wanted),
        ("Wall time", duration(whole_s), f"{number(whole_s / steps)} s a step" if steps else ""),
        ("Staleness", number(most, 0), parts),
        ("Rows", *rows),
        ("Generated", *generated),
    ]
    if run.published is not None:
        lag = f"slowest replica {run.lag} behind" if run.lag is not None else "published"
        found.append(("Weights", f"v{run.published}", lag))
    if run.evaluated is not None:
        best = f"best {number(run.best.score, 3)}, version {run.best.version}" if run.best is not None else ""
        found.append(("Evaluation", number(run.evaluated.score, 3), best))
    return found


def _rows(record: RunRecord) -> _Table:
    ended = _ended(record)
    reasons: dict[str, Counter[str]] = {}
    for event in record.events:
        if isinstance(event, RowsEnded) and event.reason:
            reasons.setdefault(event.state, Counter())[event.reason] += event.count
    total = sum(ended.values())
    lines = [
        [
            state,
            f"{count:,}",
            f"{100 * count / total:.1f}%",
            ", ".join(f"{reason} ({n:,})" for reason, n in reasons.get(state, Counter()).most_common(5)),
        ]
        for state, count in sorted(ended.items(), key=lambda item: -item[1])
        if count
    ]
    if lines:
        lines.append(["all", f"{total:,}", "", ""])
    return _Table(["state", "rows", "share", "reason"], lines, numbers=(1, 2), names=(0,))


def _lengths(record: RunRecord) -> _Table:
    plain, names = record.lengths.plain(), ["mean", "p50", "p90", "p99"]
    lines: list[list[str]] = []
    if plain:
        found = [(what, plain[what]) for what in ("generated", "trained")]
        for end, kinds in plain["ended"].items():
            found += [
                (end if kind == "whole" else f"{end}, unfinished, tokens so far", of) for kind, of in kinds.items()
            ]
        lines = [
            [what, f"{of['rows']:,}", *("" if of[n] is None else f"{of[n]:,.1f}" for n in names)]
            for what, of in found
        ]
        ratio = plain["ratio"]
        lines.insert(2, ["trained / generated", "", *(f"{ratio[n]:.2f}" if n in ratio else "" for n in names)])
    return _Table(["", "rows", *names], lines, numbers=(1, 2, 3, 4, 5))


def _ended(record: RunRecord) -> dict[str, int]:
    ended = record.summary.get("rows")
    return ended if isinstance(ended, dict) else dict(record.figures.ended)


def _workers(record: RunRecord) -> _Table:
    run = record.figures
    whole_s = max(run.now_s - run.start_s, 1e-9)
    lines = []
    for name in sorted({*run.workers, *record.spans}, key=by_name):
        worker, spans = run.workers.get(name, WorkerFigures()), record.spans.get(name, [])
        busy_s = sum(each.end - each.start for each in record.intervals.get(name, ()) if each.kind != WAIT)
        cpu_s, rows, tokens = (sum(getattr(each, field) for each in spans) for field in ("cpu_s", "rows", "tokens"))
        lines.append(
            [
                name,
                worker.state or "–",
                f"{worker.restarts:,}",
                f"{100 * busy_s / whole_s:.0f}%",
                f"{cpu_s:,.0f} s" if cpu_s else "",
                f"{rows:,}" if rows else "",
                f"{tokens:,}" if tokens else "",
                "" if worker.version is None else f"v{worker.version}",
                shares(worker) if worker.state == "ready" else "",
                worker.detail,
            ]
        )
    head = ["worker", "last state", "restarts", "busy", "CPU", "rows", "tokens", "weights", "of late", "detail"]
    return _Table(head, lines, numbers=(2, 3, 4, 5, 6), names=(0,))


def _log(record: RunRecord, live: bool) -> _Table:
    """The first lines of the log; of a running run the newest, these first."""
    lines = []
    for event in record.events:
        at = duration(event.time_s - record.figures.start_s)
        match event:
            case Note() if event.level != "info":
                lines.append([at, event.worker or "run", f"{event.level}: {event.text}"])
            case WorkerState(state="failed" | "restarting"):
                lines.append([at, event.worker, f"{event.state}{f': {event.detail}' if event.detail else ''}"])
            case LeaseReturned():
                text = f"{event.count:,} rows returned to {event.task}: {event.reason}"
                lines.append([at, event.worker or "run", text])
    left = len(lines) - _LOG_LINES
    lines = (lines[::-1] if live else lines)[:_LOG_LINES]
    more = [["", "", f"and {left:,} more in events.jsonl"]] if left > 0 else []
    return _Table(["at", "worker", "event"], lines + more, numbers=(0,), names=(1,))
