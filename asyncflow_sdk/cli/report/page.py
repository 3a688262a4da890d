"""The report page of a run: rewards, staleness, and how each worker spent its time.

path = write_report(Path("runs/demo"))      # runs/demo/report.html, one file, no network
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ...errors import ConfigError, PluginError
from ...memory import private_opener
from ...types.events import LeaseReturned, Note, RowsEnded, Span, WorkerState
from ..formats import by_name, duration, number
from .run_record import RunRecord, read_record
from .summary import accounting, facts, outcome
from .timeline import WAIT, flatten

_LOG_LINES = 200


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run directory and return its path.

    Raises ConfigError if the directory holds no events or is not writable, PluginError if
    matplotlib or jinja2 is not installed.
    """
    record = read_record(run_dir)
    target = run_dir / "report.html"
    # Renamed into place: a reloading browser never reads half a page.
    draft = target.with_suffix(".html.part")
    html = _page(record)
    try:
        with open(draft, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(html)
        os.replace(draft, target)
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {target}: {error.strerror}") from error
    return target


@dataclass
class _Table:
    """A table of the page. ``numbers``: columns aligned right. ``names``: columns never wrapped."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()
    names: Sequence[int] = ()

    @property
    def columns(self) -> list[int]:
        """The columns with any text."""
        return [i for i in range(len(self.head)) if any(row[i] for row in self.rows)]

    def style(self, column: int) -> Any:
        """The class attribute of a column's cells, as markup."""
        from markupsafe import Markup

        style = "n" if column in self.numbers else "w" if column in self.names else ""
        return Markup(f' class="{style}"') if style else ""


def _page(record: RunRecord) -> str:
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
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    template, style = (
        resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
        for name in ("report.html.j2", "page.css")
    )
    status, tone, sentence = outcome(record.summary)
    balance, balance_tone, _ = accounting(record.summary)
    zoomed, zoom_steps = charts.zoom(record)
    log, remarks = list(_log(record)), record.remarks
    if len(record.spans) > charts.LANES:
        remarks = [*remarks, f"Pictures show {charts.LANES} of {len(record.spans):,} workers; the table has all."]
    drawn = {
        "reward": charts.reward_curve(record), "staleness": charts.staleness_and_lag(record),
        "lengths": charts.length_histograms(record), "whole_run": charts.whole_run(record), "zoom": zoomed,
        "shares": charts.time_shares(record), "metrics": charts.small_multiples(record),
    }  # fmt: skip
    return environment.from_string(template).render(
        style=style, name=record.name, status=status, tone=tone, sentence=sentence, error=record.summary.get("error"),
        remarks=remarks, tiles=_tiles(record), charts=drawn, zoom_steps=zoom_steps,
        length_bias=record.progress.lengths.bias, lengths=_lengths(record), balance=balance, balance_tone=balance_tone,
        rows=_rows(record), workers=_workers(record), facts=_Table(["", ""], facts(record.summary), names=(0,)),
        log=_Table(["at", "worker", "event"], log[:_LOG_LINES], numbers=(0,), names=(1,)),
        log_rest=f"{len(log) - _LOG_LINES:,}" if len(log) > _LOG_LINES else "",
        footer=f"{len(record.events):,} events read, {record.skipped:,} left out.",
    ).lstrip()  # fmt: skip


def _tiles(record: RunRecord) -> list[tuple[str, str, str]]:
    """The key figures: name, figure, remark."""
    summary, run = record.summary, record.progress
    rewards = [r for r in record.metric("reward") if math.isfinite(r)]
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if first is None or last is None:
        first, last = (rewards[0], rewards[-1]) if rewards else (math.nan, math.nan)
    most = summary.get("staleness_max")
    if most is None:
        most = max((m for m in record.metric("staleness_max") if math.isfinite(m)), default=math.nan)
    whole_s = run.now_s - run.start_s
    steps = summary.get("steps", len(record.steps))
    tokens = sum(s.tokens for spans in record.spans.values() for s in spans if s.kind == "generate")
    parts, of = "versions at most", summary.get("staleness")
    if isinstance(of, dict) and of.get("in_flight", {}).get("mean") is not None:
        parts = f"at most; mean {of['in_flight']['mean']:.2f} in flight, {of['in_queue']['mean']:.2f} in queue"
    step_time = f"{number(whole_s / len(record.steps))} s a step" if record.steps else ""
    return [
        ("Reward", number(float(last), 3), f"from {number(float(first), 3)}"),
        ("Steps", f"{steps:,}", f"of {summary['steps_wanted']:,}" if "steps_wanted" in summary else "trained"),
        ("Wall time", duration(float(summary.get("wall_s", whole_s))), step_time),
        ("Staleness", number(float(most), 0), parts),
        ("Rows", f"{sum(_ended(record).values()):,}", accounting(summary)[2]),
        ("Generated", f"{tokens / whole_s if whole_s > 0 else 0:,.0f}", "tokens/s overall"),
    ]


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
    plain = record.progress.lengths.plain()
    names = ["mean", "p50", "p90", "p99"]
    lines: list[list[str]] = []
    if plain:
        found = [(what, plain[what]) for what in ("generated", "trained")]
        ratio = plain["ratio"]
        for end, kinds in plain["ended"].items():
            found += [
                (end if kind == "whole" else f"{end}, unfinished, tokens so far", of) for kind, of in kinds.items()
            ]
        lines = [
            [what, f"{of['rows']:,}", *("" if of[n] is None else f"{of[n]:,.1f}" for n in names)]
            for what, of in found
        ]
        lines.insert(2, ["trained / generated", "", *(f"{ratio[n]:.2f}" if n in ratio else "" for n in names)])
    return _Table(["", "rows", *names], lines, numbers=(1, 2, 3, 4, 5))


def _ended(record: RunRecord) -> dict[str, int]:
    ended = record.summary.get("rows")
    return ended if isinstance(ended, dict) else record.progress.ended


def _workers(record: RunRecord) -> _Table:
    whole_s = max(record.progress.now_s - record.progress.start_s, 1e-9)
    names = sorted({*record.progress.workers, *record.spans}, key=by_name)
    lines = []
    for name in names:
        worker, spans = record.progress.workers.get(name), record.spans.get(name, [])
        busy_s = sum(p.end - p.start for p in flatten(spans) if p.kind != WAIT)
        cpu_s = sum(span.cpu_s for span in spans)
        lines.append(
            [
                name,
                (worker.state if worker else "") or "–",
                f"{worker.restarts if worker else 0:,}",
                f"{100 * busy_s / whole_s:.0f}%",
                f"{cpu_s:,.0f} s" if cpu_s else "",
                _sum(spans, "rows"),
                _sum(spans, "tokens"),
                worker.detail if worker else "",
            ]
        )
    head = ["worker", "last state", "restarts", "busy", "CPU", "rows", "tokens", "detail"]
    return _Table(head, lines, numbers=(2, 3, 4, 5, 6), names=(0,))


def _sum(spans: list[Span], what: str) -> str:
    total = sum(getattr(span, what) for span in spans)
    return f"{total:,}" if total else ""


def _log(record: RunRecord) -> Iterator[list[str]]:
    for event in record.events:
        at = duration(event.time_s - record.progress.start_s)
        if isinstance(event, Note) and event.level != "info":
            yield [at, event.worker or "run", f"{event.level}: {event.text}"]
        elif isinstance(event, WorkerState) and event.state in ("failed", "restarting"):
            yield [at, event.worker, f"{event.state}{f': {event.detail}' if event.detail else ''}"]
        elif isinstance(event, LeaseReturned):
            yield [at, event.worker or "run", f"{event.count:,} rows returned to {event.task}: {event.reason}"]
