"""Queue frame: a status report as lines of text that fit a terminal. Who waits for what, since when, is its heart.

for line in queue_frame(report, flow, title="runs/x", width=80, height=24): ...
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from ..ledger import StatusReport
from ..types.reports import ParkedStatus, SessionStatus
from .flow import Flow
from .frame import STATES
from .lines import Cell, duration, fit, head, laid_out, printable, rate, size, sparkline, to_ascii, wrapped
from .weights_frame import weights_lines

_UNLIMITED = 1 << 39
_PATIENCE_S = 1.0
_WIDE, _NARROW = 100, 70


def queue_frame(
    report: StatusReport, flow: Flow, *, title: str, width: int, height: int, foot: str = "", ascii_only: bool = False
) -> list[Text]:
    """The picture in at most ``height`` lines of at most ``width`` cells. ``foot``: the last line."""
    width = max(width, 20)
    inner = width - 2  # a line that fills the last cell makes some terminals wrap
    top = [*_header(report, flow, title, inner), []]
    below: list[list[Cell]] = [[], [(foot, "dim")]] if foot and height >= 16 else []
    room = max(height - len(top) - len(below), 6)
    tasks = _tasks(report, flow, inner, max(room // 2, 3))
    weights = weights_lines(report, inner, max(room // 3, 3))
    weights = [[], *weights] if weights and room >= len(tasks) + len(weights) + 6 else []
    who = _who(report, inner, max(room - len(tasks) - len(weights) - 1, 2))
    body = [*top, *tasks, *weights, [], *who]
    if below:
        body += [[]] * (height - len(below) - len(body))  # the last line is the terminal's
    lines = [laid_out(line, inner) for line in [*body, *below]][:height]
    return [Text(to_ascii(line.plain), no_wrap=True) for line in lines] if ascii_only else lines


def _header(report: StatusReport, flow: Flow, title: str, width: int) -> list[list[Cell]]:
    state = "stream ended" if report.over else ""
    title = printable(title)
    first: list[Cell] = [(fit(title, max(width - cell_len(state), 8)), "bold"), (state, "dim")]
    limited = report.capacity_rows < _UNLIMITED
    full = limited and report.live >= report.capacity_rows
    live = f"{report.live:,} rows live" + (f" of {report.capacity_rows:,}" if limited else "")
    rows: list[Cell] = [(live, "yellow" if full else "bold"), (f" · {report.put:,} put", "")]
    if math.isfinite(flow.put):
        rows.append((f", {rate(flow.put)}/s", ""))
    memory = f"{size(report.payload_bytes)} payload in {size(report.held_bytes)} of memory"
    if math.isfinite(flow.written) and flow.written:
        memory += f", {size(flow.written)}/s"
    both = sum(cell_len(str(text)) for text, _ in rows) + cell_len(memory) + 3
    joined: list[Cell] = [*rows, (f" · {memory}", "")]
    lines: list[list[Cell]] = [first, joined] if both <= width else [first, rows, [(memory, "")]]
    if report.step >= 0:
        lines.append(_step(report, width))
        if report.ages is not None:
            lines.append([(_ages(report), "")])
    elif report.version >= 0:
        lines.append([(_version(report), "")])
    if report.garbage:
        lines.append([(f"{report.garbage:,} messages were no requests", "yellow")])
    return lines


def _step(report: StatusReport, width: int) -> list[Cell]:
    """The step being filled, as a bar, the version that is current, and, where there is room, the staleness policy."""
    filled = report.batch_rows - report.free_slots
    words = f"step {report.step}" + (f" of {report.steps}" if report.steps else "")
    count = f" {filled:,} of {report.batch_rows:,} rows"
    version = f" · {_version(report)}" if report.version >= 0 else ""
    if report.max_staleness >= 0:
        rule = f" · policy {printable(report.staleness)}, max_staleness {report.max_staleness}"
        version += rule if cell_len(words + count + version + rule) + 12 <= width else ""
    length = min(max(width - cell_len(words + count + version) - 1, 0), 30)
    done = length * filled // max(report.batch_rows, 1)
    bar: list[Cell] = [(" " + "━" * done, "cyan"), ("─" * (length - done), "dim")] if length >= 4 else []
    return [(words, "bold"), *bar, (count, ""), (version, "")]


def _ages(report: StatusReport) -> str:
    """How stale the rows of the newest step are, and how far replicas are behind."""
    ages, loaded = report.ages, [s.loaded for s in report.sessions if s.replica and s.loaded is not None]
    assert ages is not None
    parts = [
        f"staleness of step {ages.step}: {ages.in_flight_mean:.2f} in flight (at most {ages.in_flight_max})",
        f"{ages.in_queue_mean:.2f} in the queue (at most {ages.in_queue_max})",
    ]
    if loaded:
        parts.append(f"publish lag {max(max(report.version - version, 0) for version in loaded)}")
    return " · ".join(parts)


def _version(report: StatusReport) -> str:
    return f"version {report.version}, {duration(report.version_age_s)} old"


def _tasks(report: StatusReport, flow: Flow, width: int, room: int) -> list[list[Cell]]:
    """A line a task: rows by state, rates in and out, and where there is room the last of the rate."""
    states = [s for s in STATES if s != "selected" or any(counts.get(s) for counts in report.rows.values())]
    names = list(report.rows)
    shown = names if len(names) <= room - 2 else names[: max(room - 3, 1)]
    first = min(max([9, *(cell_len(name) + 1 for name in shown)]), 24, max(width // 4, 8))
    wide = max(min((width - first) // (len(states) + 2), 9), 6)
    heads = [*states, "in/s", "out/s"]
    lines: list[list[Cell]] = [[head("TASK", first), *((f"{h[: wide - 1]:>{wide}}", "dim") for h in heads)]]
    came, passed = flow.came, flow.passed
    spare = width - first - wide * len(heads) - 2
    for name in shown:
        counts = report.rows[name]
        cells: list[Cell] = [
            (f"{_count(counts.get(s, 0), wide):>{wide}}", "" if counts.get(s) else "dim") for s in states
        ]
        rates = (came.get(name, math.nan), passed.get(name, math.nan))
        cells += [(f"{rate(value):>{wide}}", "" if value > 0 else "dim") for value in rates]
        past = list(flow.history.get(name, ()))[-spare:] if spare >= 12 else []
        if len(past) > 1 and max(past):
            cells.append(("  " + sparkline(past, 0.0, max(past)), "cyan"))
        lines.append([(fit(name, first), ""), *cells])
    if len(shown) < len(names):
        lines.append([(f"and {len(names) - len(shown)} more tasks", "dim")])
    if not names:
        lines.append([("none is declared yet", "dim")])
    ended = [f"{state} {count:,}" for state, count in sorted(report.ended.items(), key=lambda e: -e[1]) if count]
    if ended:
        if math.isfinite(flow.ended):
            ended.append(f"{rate(flow.ended)}/s")
        for i, text in enumerate(wrapped(ended, width - first)):
            lines.append([(fit("" if i else "ended", first), "dim"), (text, "")])
    return lines


def _count(count: int, wide: int) -> str:
    text = f"{count:,}"
    return text if len(text) < wide else rate(float(count))


@dataclass(frozen=True)
class _Line:
    """Somebody, since when, doing what."""

    session: SessionStatus | None
    name: str
    since_s: float
    text: str
    style: str
    mark: str = "●"
    waits: bool = False


def _who(report: StatusReport, width: int, room: int) -> list[list[Cell]]:
    """Who waits, the longest first; who holds rows, the longest first; who does neither."""
    entries = _entries(report)
    names = max((cell_len(e.name) for e in entries), default=0)
    first = min(max(names + 3, 10), 26, max(width // 4, 10))
    loaded = any(session.loaded is not None for session in report.sessions)
    place = (
        min(max((cell_len(_place(report, e.session)) for e in entries), default=0) + 2, 24) if width >= _NARROW else 0
    )
    weights = 6 if loaded and width >= _NARROW else 0
    title: list[Cell] = [head("WHO", first)]
    title += [(f"{'pid':<{place}}", "dim")] if place else []
    title += [(f"{'loaded':<{weights}} ", "dim")] if weights else []
    title.append((f"{'since':<9}", "dim"))
    aside = sum(_aside(report, parked) for parked in report.parked)
    doing = f"{report.parked_count - aside:,} waiting, {_so_many(report.lease_count, 'lease')}, {_so_many(report.session_count, 'client')}"
    title.append((doing, "dim"))
    weights += 1 if weights else 0
    left = max(width - first - place - weights - 9, 12)
    shown = entries if len(entries) <= room - 1 else entries[: max(room - 2, 1)]
    spare = room - 1 - len(shown) - (len(shown) < len(entries))
    texts = _wrapped_texts([entry.text if entry.waits else "" for entry in shown], left, spare)
    lines = [title]
    for entry, (text, *more) in zip(shown, texts, strict=True):
        version = entry.session.loaded if entry.session is not None else None
        cells: list[Cell] = [(f"{entry.mark} ", entry.style), (fit(entry.name, first - 2), "")]
        cells += [(fit(_place(report, entry.session), place), "dim")] if place else []
        cells += [(f"{'' if version is None else f'v{version}':<{weights}}", "")] if weights else []
        cells += [(f"{duration(entry.since_s):<9}", entry.style), (text if entry.waits else entry.text, entry.style)]
        lines.append(cells)
        lines += [[(" " * (first + place + weights + 9), ""), (part, entry.style)] for part in more]
    if len(shown) < len(entries):
        waiting = sum(entry.waits for entry in entries[len(shown) :])
        lines.append(
            [(f"and {len(entries) - len(shown)} more" + (f", {waiting} of them waiting" * bool(waiting)), "dim")]
        )
    return lines


def _wrapped_texts(texts: list[str], width: int, spare: int) -> list[list[str]]:
    """Each text in one line, and in up to six as long as there are lines to spare, all alike."""
    allowed = [1] * len(texts)
    needed = [min(len(textwrap.wrap(text, width)), 6) for text in texts]
    for wanted in range(2, 7):
        for i, lines in enumerate(needed):
            if spare > 0 and lines >= wanted == allowed[i] + 1:
                allowed[i] += 1
                spare -= 1
    return [
        textwrap.wrap(text, width, max_lines=most, placeholder="…", break_on_hyphens=False) or [""]
        for text, most in zip(texts, allowed, strict=True)
    ]


def _entries(report: StatusReport) -> list[_Line]:
    sessions = {session.id: session for session in report.sessions}
    alike: dict[str, list[ParkedStatus]] = {}
    waits = [parked for parked in report.parked if not _aside(report, parked)]
    for parked in waits:  # the longest waiting first
        alike.setdefault(f"waits: {parked.verb}: {_short(parked)}", []).append(parked)
    waiting = [_waits(text, same, sessions.get(same[0].session)) for text, same in alike.items()]
    busy = {parked.session for parked in waits}
    holders = sorted((s for s in report.sessions if s.rows), key=lambda s: -s.held_s)
    idle = sorted(
        (s for s in report.sessions if not s.rows and s.id not in busy), key=lambda s: (not s.prepares, -s.age_s)
    )
    return [
        *waiting,
        *map(_holds, holders),
        *map(_idles, idle),
    ]


def _aside(report: StatusReport, parked: ParkedStatus) -> bool:
    """Whether it is a replica that has weights, and hears of newer ones while it works: it waits for nothing."""
    if parked.verb == "lost":  # it hears of rows that end while it works
        return True
    if not parked.verb.startswith("weights "):
        return False
    return any(s.id == parked.session and s.replica and s.loaded is not None for s in report.sessions)


def _waits(text: str, same: list[ParkedStatus], session: SessionStatus | None) -> _Line:
    """One line for all who wait for the same thing."""
    first = same[0]
    more = f" +{len(same) - 1}" if len(same) > 1 else ""
    style = "yellow" if first.since_s >= _PATIENCE_S else ""
    return _Line(session, printable(first.name) + more, first.since_s, printable(text), style, waits=True)


def _short(parked: ParkedStatus) -> str:
    """The reason, without the words that say again which task it is."""
    start, _, rest = parked.why.partition("; ")
    return rest if rest and start.startswith("task ") and start.endswith("has nothing to give") else parked.why


def _holds(session: SessionStatus) -> _Line:
    more = f" in {session.leases} leases" if session.leases > 1 else ""
    text = f"holds {session.rows:,} rows of {session.task}{more}"
    return _Line(session, printable(session.name), session.held_s, printable(text), "green")


def _idles(session: SessionStatus) -> _Line:
    if session.prepares:
        return _Line(session, printable(session.name), session.prepares_s, printable(session.prepares), "cyan")
    return _Line(session, printable(session.name), session.age_s, "idle", "dim", "○")


def _so_many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _place(report: StatusReport, session: SessionStatus | None) -> str:
    if session is None or not session.pid:
        return ""
    away = f"{session.host}:" if session.host and session.host != report.host else ""
    return printable(f"{away}{session.pid}")
