"""The report page of a run: what it learned, how stale it trained, who worked and who waited.

path = write_report(Path("runs/demo"))      # runs/demo/report.html, one file, no network
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError, PluginError
from ..memory import private_opener
from ..types.events import LeaseReturned, Note, RowsEnded, Span, WorkerState
from . import page
from .board import by_name
from .lines import duration, number
from .record import Record, read_record
from .timeline import WAIT, flatten
from .wording import accounting, facts, outcome

_LOG_LINES = 200


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run directory and return its path.

    Raises ConfigError when the directory holds no events or cannot be written to, PluginError when
    matplotlib is not installed.
    """
    record = read_record(run_dir)
    target = run_dir / "report.html"
    # Renamed into place: a browser that reloads never sees half a page.
    draft = target.with_suffix(".html.part")
    html = _page(record)
    try:
        with open(draft, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(html)
        os.replace(draft, target)
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {target}: {error.strerror}") from error
    return target


def _page(record: Record) -> str:
    try:
        from . import pictures
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise PluginError(
            "the report page needs matplotlib, which is not installed."
            " Install with: pip install 'asyncflow-sdk[report]'"
        ) from error
    zoomed, zoom_steps = pictures.zoom(record)
    word, tone, sentence = outcome(record.summary)
    error_text = record.summary.get("error")
    return page.document(
        f"{record.name} · AsyncFlow run",
        [
            page.headline(record.name, word, tone, sentence),
            page.say(str(error_text), "bad") if error_text else "",
            *(page.say(remark, "warn") for remark in record.remarks),
            page.tiles(_tiles(record)),
            page.card(
                "Reward",
                "The mean reward of each step's rows, and its mean over the last 20 steps: it should rise.",
                page.scroll(pictures.reward_curve(record)) or _nothing("No step was trained."),
            ),
            page.card(
                "Staleness and publish lag",
                "Above: how many versions older than the trained one the weights were that wrote the tokens: those "
                "that were published while the row was generated (in flight), and before it was trained (in the queue). "
                "Below: how many published versions the slowest replica had not loaded yet.",
                page.scroll(pictures.staleness_and_lag(record)),
            ),
            page.card(
                "Response lengths",
                "What was generated, and what of it was trained. Responses that were given up before they were whole count "
                "as those that lasted longer than they did.",
                _lengths(record) + page.scroll(pictures.length_histograms(record)),
            ),
            page.card(
                "Who did what: the whole run",
                "One lane a worker; the height of a colour is its share of that slice of time, "
                "and a red mark is a failure.",
                page.scroll(pictures.whole_run(record)),
            ),
            page.card(
                f"Who did what: {zoom_steps} steps in the middle" if zoom_steps != 1 else "Who did what: one step",
                "Each bar is one stretch of work, with the version it used: bars above each other ran at the "
                "same time, and grey is waiting.",
                page.scroll(zoomed),
            ),
            page.card(
                "Where the time went",
                "The share of the whole run that each worker spent on each kind of work; the empty rest is "
                "what it did not report, such as starting up.",
                page.scroll(pictures.time_shares(record)),
            ),
            page.card(
                "Other metrics",
                "What else the training engine measured: each step, and the mean of the last 20 steps.",
                page.scroll(pictures.small_multiples(record)),
            ),
            page.card("Rows", "Every row put must end in exactly one state.", _rows(record)),
            page.card("Workers", "", _workers(record)),
            page.pair(
                page.card("Summary", "", page.table(["", ""], facts(record.summary), names=(0,))),
                page.card("What happened", "Warnings, errors, restarts and rows given back.", _log(record)),
            ),
            f"<footer>{len(record.events):,} events read, {record.skipped:,} left out.</footer>",
        ],
    )


def _tiles(record: Record) -> list[tuple[str, str, str]]:
    summary, board = record.summary, record.board
    rewards = [r for r in record.metric("reward") if math.isfinite(r)]
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if first is None or last is None:
        first, last = (rewards[0], rewards[-1]) if rewards else (math.nan, math.nan)
    most = summary.get("staleness_max")
    if most is None:
        most = max((m for m in record.metric("staleness_max") if math.isfinite(m)), default=math.nan)
    wall_s = summary.get("wall_s", board.now_s - board.start_s)
    steps = summary.get("steps", len(record.steps))
    tokens = sum(s.tokens for spans in record.spans.values() for s in spans if s.kind == "generate")
    whole_s = board.now_s - board.start_s
    return [
        ("Reward", number(float(last), 3), f"from {number(float(first), 3)}"),
        ("Steps", f"{steps:,}", f"of {summary['steps_wanted']:,}" if "steps_wanted" in summary else "trained"),
        (
            "Wall time",
            duration(float(wall_s)),
            f"{number(whole_s / len(record.steps))} s a step" if record.steps else "",
        ),
        ("Staleness", number(float(most), 0), _parts(record) or "versions at most"),
        ("Rows", f"{sum(_ended(record).values()):,}", accounting(summary)[2]),
        ("Generated", f"{tokens / whole_s if whole_s > 0 else 0:,.0f}", "tokens/s overall"),
    ]


def _parts(record: Record) -> str:
    of = record.summary.get("staleness")
    if not isinstance(of, dict) or of.get("in_flight", {}).get("mean") is None:
        return ""
    return f"at most; mean {of['in_flight']['mean']:.2f} in flight, {of['in_queue']['mean']:.2f} in queue"


def _rows(record: Record) -> str:
    text, tone, _ = accounting(record.summary)
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
    return page.say(text, tone) + page.table(
        ["ended as", "rows", "share", "because"], lines, numbers=(1, 2), names=(0,)
    )


def _lengths(record: Record) -> str:
    tally = record.board.lengths
    said = page.say(tally.bias, "warn") if tally.bias else ""
    plain = tally.plain()
    if not plain:
        return ""
    names = ["mean", "p50", "p90", "p99"]
    lines = [
        [what, f"{plain[what]['rows']:,}", *(_figure(plain[what][n]) for n in names)]
        for what in ("generated", "trained")
    ]
    lines.append(
        ["trained / generated", "", *(f"{plain['ratio'][n]:.2f}" if n in plain["ratio"] else "" for n in names)]
    )
    for end, kinds in plain["ended"].items():
        for kind, of in kinds.items():
            name = end if kind == "whole" else f"{end}, unfinished, tokens so far"
            lines.append([name, f"{of['rows']:,}", *(_figure(of[n]) for n in names)])
    return said + page.table(["", "rows", *names], lines, numbers=(1, 2, 3, 4, 5))


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _ended(record: Record) -> dict[str, int]:
    ended = record.summary.get("rows")
    return ended if isinstance(ended, dict) else record.board.ended


def _workers(record: Record) -> str:
    whole_s = max(record.board.now_s - record.board.start_s, 1e-9)
    names = sorted({*record.board.workers, *record.spans}, key=by_name)
    lines = []
    for name in names:
        worker, spans = record.board.workers.get(name), record.spans.get(name, [])
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
    head = ["worker", "at the end", "restarts", "busy", "CPU", "rows", "tokens", "detail"]
    return page.table(head, lines, numbers=(2, 3, 4, 5, 6), names=(0,))


def _sum(spans: list[Span], what: str) -> str:
    total = sum(getattr(span, what) for span in spans)
    return f"{total:,}" if total else ""


def _log(record: Record) -> str:
    lines = list(_said(record))
    table = page.table(["at", "who", "what"], lines[:_LOG_LINES], numbers=(0,), names=(1,))
    if len(lines) > _LOG_LINES:
        table += _nothing(f"and {len(lines) - _LOG_LINES:,} more in events.jsonl")
    return table or _nothing("Nothing out of the ordinary.")


def _said(record: Record) -> Iterator[list[str]]:
    for event in record.events:
        at = duration(event.time_s - record.board.start_s)
        if isinstance(event, Note) and event.level != "info":
            yield [at, event.worker or "run", f"{event.level}: {event.text}"]
        elif isinstance(event, WorkerState) and event.state in ("failed", "restarting"):
            yield [at, event.worker, f"{event.state}{f': {event.detail}' if event.detail else ''}"]
        elif isinstance(event, LeaseReturned):
            yield [at, event.worker or "run", f"{event.count:,} rows given back to {event.task}: {event.reason}"]


def _nothing(text: str) -> str:
    return f"<p>{text}</p>"
