"""The screen of ``asyncflow top``: a queue's status report as lines of text, with every waiting
client and its reason.

for line in queue_screen(report, rates, title="runs/x", width=80, height=24): ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from ...ledger import StatusReport
from ...types.events import Evaluated
from ...types.reports import ParkedStatus, SessionStatus
from ..formats import duration, plural, printable, rate, size, sparkline
from .homes_table import homes_table
from .queue_rates import QueueRates
from .run_screen import STATES
from .screen import PATIENCE_S, Clipped, Sparkline, bar, fit, more, name, table
from .weights_table import weights_table

_UNLIMITED = 1 << 39
_NARROW, _WIDE = 70, 90


def queue_screen(
    report: StatusReport, rates: QueueRates, *, title: str, width: int, height: int, foot: str = "",
    ascii_only: bool = False, evaluations: Sequence[Evaluated] = (), warnings: Sequence[str] = (),
) -> list[Text]:  # fmt: skip
    """Return at most ``height`` lines of fewer than ``width`` cells. ``foot``: the text of the last
    line. ``warnings``: about the whole run."""
    width = max(width, 20)
    header: list[RenderableType] = [Clipped(each, "yellow") for each in warnings[-2:]]
    header = [*_header(report, rates, title, width - 2), *_evaluated(evaluations, width - 2), *header, Text()]
    foot = foot if height >= 16 else ""
    room = max(height - len(header) - (2 if foot else 0), 6)
    task_lines = min(len(report.rows) + 2, max(room // 2, 3))

    def _draw(most: int) -> list[RenderableType]:
        free = room
        tasks = _tasks(report, rates, width - 2, max(free // 2, 3))
        weights, lines = weights_table(report, width - 2, max(free // 3, 3), most)
        between: list[RenderableType] = []
        for part, count in ((weights, lines), homes_table(report, max(free // 4, 3), most)):
            if count and free >= task_lines + count + 7:
                between += [Text(), *part]
                free -= count + 1
        clients = _clients(report, width - 2, max(free - task_lines - 1, 2), most)
        return [*header, *tasks, *between, Text(), *clients]

    lines = fit(_draw, width, height - (2 if foot else 0), most=6, ascii_only=ascii_only)
    if foot:
        lines += [Text()] * (height - 1 - len(lines)) + [Text(f" {foot}", "dim")]
    return lines


def _header(report: StatusReport, rates: QueueRates, title: str, width: int) -> list[Text]:
    limited = report.capacity_rows < _UNLIMITED
    full = limited and report.live >= report.capacity_rows
    live = f"{report.live:,} rows live" + (f" of {report.capacity_rows:,}" if limited else "")
    put = f" · {report.put:,} put" + (f", {rate(rates.put)}/s" if math.isfinite(rates.put) else "")
    memory = f"{size(report.payload_bytes)} payload in {size(report.held_bytes)} of memory"
    if math.isfinite(rates.written_bytes) and rates.written_bytes:
        memory += f", {size(rates.written_bytes)}/s"
    rows = Text.assemble((live, "yellow" if full else "bold"), put)
    name = Text.assemble((printable(title), "bold"), (" · stream ended" if report.over else "", "dim"))
    one_line = cell_len(rows.plain) + cell_len(memory) + 3 <= width
    lines = [name, rows.append(f" · {memory}")] if one_line else [name, rows, Text(memory)]
    if report.step >= 0:
        lines.append(_step(report, width))
        if report.ages is not None:
            lines.append(Text(_staleness(report)))
    elif report.version >= 0:
        lines.append(Text(_version(report)))
    if report.garbage:
        lines.append(Text(f"{report.garbage:,} messages were no requests", "yellow"))
    return lines


def _step(report: StatusReport, width: int) -> Text:
    """The step being filled, the current version and, if it fits, the staleness policy."""
    filled = report.batch_rows - report.free_slots
    step = f"step {report.step}" + (f" of {report.steps}" if report.steps else "")
    count = f" {filled:,} of {report.batch_rows:,} rows"
    for number, rows in report.in_parts[:1]:  # the oldest
        count += f" · {rows:,} delivered" + (f" of step {number}" if number != report.step else "")
    version = f" · {_version(report)}" if report.version >= 0 else ""
    if report.max_staleness >= 0:
        policy = f" · policy {printable(report.staleness)}, max_staleness {report.max_staleness}"
        version += policy if cell_len(step + count + version + policy) + 12 <= width else ""
    length = min(max(width - cell_len(step + count + version) - 1, 0), 30)
    drawn = bar(filled, report.batch_rows, length) if length >= 4 else ""
    return Text.assemble((step, "bold"), " ", drawn, count, version)


def _staleness(report: StatusReport) -> str:
    """The staleness of the newest step's rows, and the publish lag of the slowest replica."""
    ages, loaded = report.ages, [s.loaded for s in report.sessions if s.replica and s.loaded is not None]
    assert ages is not None
    parts = [
        f"staleness of step {ages.step}: {ages.in_flight_mean:.2f} in flight (at most {ages.in_flight_max})",
        f"{ages.in_queue_mean:.2f} in the queue (at most {ages.in_queue_max})",
    ]
    if loaded:
        parts.append(f"publish lag {max(max(report.version - version, 0) for version in loaded)}")
    return " · ".join(parts)


def _evaluated(evaluations: Sequence[Evaluated], width: int) -> Iterator[Text]:
    """Yield a line with the last score, the best one, and the curve of all."""
    if evaluations:
        last, best = evaluations[-1], max(evaluations, key=lambda each: each.score)
        line = Text(f"evaluation of v{last.version}: {last.score:.3g} · best {best.score:.3g} of v{best.version} ")
        scores = [each.score for each in evaluations][-max(width - line.cell_len, 1) :]
        yield line.append(sparkline(scores, min(scores), max(scores)), "cyan")


def _version(report: StatusReport) -> str:
    return f"version {report.version}, {duration(report.version_age_s)} old"


def _tasks(report: StatusReport, rates: QueueRates, width: int, most: int) -> list[RenderableType]:
    """Each task: its rows by state, its rates and, if there is room, the history of its rate."""
    states = [s for s in STATES if s != "selected" or any(counts.get(s) for counts in report.rows.values())]
    names = list(report.rows)
    shown = names if len(names) <= most - 2 else names[: max(most - 3, 1)]
    first = min(max([7, *(cell_len(name) for name in shown)]), 24, max(width // 4, 8))
    made = table("TASK", *states, "in/s", "out/s", first=first, numbers=8 if width >= _NARROW else 5)
    if width >= _WIDE:
        made.add_column(no_wrap=False)
    arrived, completed = rates.arrived, rates.completed
    for task in shown:
        counts = [report.rows[task].get(state, 0) for state in states]
        flow = [arrived.get(task, math.nan), completed.get(task, math.nan)]
        cells = [Text(f"{n:,}" if width >= _WIDE else rate(n), "" if n else "dim") for n in counts]
        cells += [Text(rate(value), "" if value > 0 else "dim") for value in flow]
        made.add_row(
            printable(task), *cells, Sparkline(list(rates.history.get(task, ()))) if width >= _WIDE else None
        )
    below = table("", "", first=first)
    ended = [f"{state} {count:,}" for state, count in sorted(report.ended.items(), key=lambda e: -e[1]) if count]
    if ended:
        ended_rate = [f"{rate(rates.ended)}/s"] if math.isfinite(rates.ended) else []
        below.add_row(Text("ended", "dim"), Clipped(" · ".join([*ended, *ended_rate]), lines=2))
    none = [] if names else [Text("none is declared yet", "dim")]
    return [made, *more(len(names) - len(shown), "task"), *none, *([below] if ended else [])]


@dataclass(frozen=True)
class ClientLine:
    """One line of the table of clients: a session, or several with the same reason to wait."""

    session: SessionStatus | None
    name: str
    since_s: float
    text: str
    style: str
    mark: str = "●"
    waits: bool = False
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its clients."""
        return self.others or (self.name,)


def _clients(report: StatusReport, width: int, most: int, lines: int) -> list[RenderableType]:
    """Waiting clients, the longest wait first; then clients with leases, the oldest lease first;
    then the others."""
    entries = client_lines(report)
    shown = entries if len(entries) <= most - 1 else entries[: max(most - 2, 1)]
    first = min(max([8, *(cell_len(entry.name) + 2 for entry in entries)]), 24, max(width // 4, 10))
    notified = sum(_is_notified_while_working(report, parked) for parked in report.parked)
    counts = [
        f"{report.parked_count - notified:,} waiting", plural(report.lease_count, "lease"), plural(report.session_count, "client"),
    ]  # fmt: skip
    full = width + 2 >= _NARROW
    made = table("WHO", *(("pid", "loaded") if full else ()), f"{'since':<7}", ", ".join(counts), first=first)
    for entry in shown:
        version = entry.session.loaded if entry.session is not None else None
        where = (
            (Text(_process(report, entry.session), "dim"), "" if version is None else f"v{version}") if full else ()
        )
        text = Clipped(entry.text, entry.style, lines if entry.waits else 1)
        made.add_row(
            name(entry.name, entry.style, entry.mark), *where, Text(duration(entry.since_s), entry.style), text
        )
    rest = more(len(entries) - len(shown), "client")
    if waiting := sum(entry.waits for entry in entries[len(shown) :]):
        rest[0].append(f", {waiting} of them waiting")
    return [made, *rest]


def client_lines(report: StatusReport) -> list[ClientLine]:
    """Return a line for each client, or for several with the same reason to wait; the longest waits first."""
    sessions = {session.id: session for session in report.sessions}
    alike: dict[str, list[ParkedStatus]] = {}
    waits = [parked for parked in report.parked if not _is_notified_while_working(report, parked)]
    for parked in waits:  # the longest waiting first
        alike.setdefault(f"waits: {parked.verb}: {_reason(parked)}", []).append(parked)
    waiting = [_waits(text, same, sessions.get(same[0].session)) for text, same in alike.items()]
    busy = {parked.session for parked in waits}
    holders = sorted((s for s in report.sessions if s.rows), key=lambda s: -s.held_s)
    idle = sorted(
        (s for s in report.sessions if not s.rows and s.id not in busy), key=lambda s: (not s.prepares, -s.age_s)
    )
    return [*waiting, *map(_holds, holders), *map(_idles, idle)]


def _is_notified_while_working(report: StatusReport, parked: ParkedStatus) -> bool:
    """True if the parked request is a notification, for lost rows or newer weights: its client
    works meanwhile."""
    if parked.verb == "lost":
        return True
    if not parked.verb.startswith("weights "):
        return False
    return any(s.id == parked.session and s.replica and s.loaded is not None for s in report.sessions)


def _waits(text: str, same: list[ParkedStatus], session: SessionStatus | None) -> ClientLine:
    """One line for all clients with the same reason to wait."""
    first = same[0]
    others = f" +{len(same) - 1}" if len(same) > 1 else ""
    style = "yellow" if first.since_s >= PATIENCE_S else ""
    return ClientLine(
        session, first.name + others, first.since_s, text, style, waits=True, others=tuple(each.name for each in same)
    )


def _reason(parked: ParkedStatus) -> str:
    """The reason of a wait, without the task's name that the verb already contains."""
    start, _, rest = parked.why.partition("; ")
    return rest if rest and start.startswith("task ") and start.endswith("has nothing to give") else parked.why


def _holds(session: SessionStatus) -> ClientLine:
    leases = f" in {session.leases} leases" if session.leases > 1 else ""
    text = f"holds {session.rows:,} rows of {session.task}{leases}"
    return ClientLine(session, session.name, session.held_s, text, "green")


def _idles(session: SessionStatus) -> ClientLine:
    if session.prepares:
        return ClientLine(session, session.name, session.prepares_s, session.prepares, "cyan")
    return ClientLine(session, session.name, session.age_s, "idle", "dim", "○")


def _process(report: StatusReport, session: SessionStatus | None) -> str:
    """The process id, after the host if it is another."""
    if session is None or not session.pid:
        return ""
    away = f"{session.host}:" if session.host and session.host != report.host else ""
    return printable(f"{away}{session.pid}")
