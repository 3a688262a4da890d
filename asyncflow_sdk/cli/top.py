"""``asyncflow top``: a running queue on the terminal. It reads the queue's status once a second and
changes nothing.

asyncflow top runs/x            # or an address; --once prints one screen, --json one object; q quits
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..errors import ServerLost
from ..ledger import StatusReport
from ..types.defaults import CALL_S
from ..types.events import Evaluated
from ..types.reports import HomeStatus, ParkedStatus, SessionStatus, VersionStatus
from ..wire import probe
from ..workflow import Run, connect
from ..workflow.evaluation import read_evaluations
from ..workflow.loops.record_files import EVENTS, lasting_notes
from .figures import QueueFigures, RateWindow
from .formats import duration, plural, printable, rate, size, sparkline
from .screen import (
    NARROW,
    PATIENCE_S,
    WIDE,
    Clipped,
    bar,
    cut,
    ended_rows,
    first_width,
    fit,
    name,
    render,
    table,
    task_table,
)

_UNLIMITED = 1 << 39
_HOME_STYLES = {"absent": "yellow", "lost": "red", "served": "green"}
"""By state, the most urgent first."""
_NORMAL = ("fetching", "loading", "staged")
_LOAD_PATIENCE_S = 10.0
"""A replica that takes longer than this for a normal action is highlighted (seconds)."""


class QueueMonitor:
    """Read the status of the queue at ``where``, an address or the directory of a run, every
    ``every_s`` seconds. ``key``, ``insecure``, ``timeout_s``: options of ``connect``."""

    def __init__(
        self,
        where: str,
        every_s: float = 1.0,
        key: Path | None = None,
        insecure: bool = False,
        timeout_s: float = CALL_S,
    ) -> None:
        if "://" in where:
            probe(where)  # connecting would wait for a server
        self._run: Run = connect(where, key=key, insecure=insecure, name="top", timeout_s=timeout_s)
        self.address = self._run.address
        self._title = where if where == self.address else f"{Path(where)} · {self.address}"
        self._directory = None if "://" in where else Path(where)
        self._warnings, self._read = list[str](), 0  # read so many bytes of the recorded events
        self._every_s = every_s
        self._window = RateWindow(max(5.0, 2 * every_s))

    def close(self) -> None:
        """Disconnect, unless the server has ended."""
        with contextlib.suppress(ServerLost):
            probe(self.address)
            self._run.close()

    def sample(self) -> QueueFigures:
        """Read the status once, without the session of this command. Raises ServerLost after the server has ended."""
        probe(self.address)  # a request to a lost server would wait for its deadline
        report = self._run.queue.status()
        sessions = tuple(session for session in report.sessions if session.id != self._run.session)
        report = msgspec.structs.replace(report, sessions=sessions, session_count=report.session_count - 1)
        if self._directory is not None:
            more, self._read = lasting_notes(self._directory / EVENTS, self._read)
            self._warnings += more
        return QueueFigures(
            title=self._title,
            report=report,
            rates=self._window.add(report),
            history=self._window.history,
            evaluations=read_evaluations(self._directory) if self._directory is not None else (),
            warnings=self._warnings,
        )

    def sample_twice(self) -> QueueFigures:
        """Read the status twice, to have rates, and return the second figures."""
        self.sample()
        time.sleep(self._every_s)
        return self.sample()

    def json(self, queue: QueueFigures) -> str:
        """Return the report, the rates and the scores as a JSON object. An unknown rate is null."""
        found = {
            "address": self.address,
            **_plain(queue.report),
            "per_second": _plain(queue.rates),
            "evaluations": {str(each.version): each.score for each in queue.evaluations},
            "warnings": queue.warnings,
        }
        return msgspec.json.encode(found).decode()

    def watch(self, console: Console) -> bool:
        """Draw until ``q`` is pressed or Ctrl-C. Return True if the server ended first."""
        foot = f"every {self._every_s:g} s · q quits"
        queue = self.sample()
        with _keys() as wait, Live(console=console, screen=True, auto_refresh=False) as screen:
            while True:
                due = time.monotonic() + self._every_s
                while (left := due - time.monotonic()) > 0:
                    screen.update(Group(*drawn(queue, console, foot)), refresh=True)  # its size may change
                    if wait(min(left, 1.0)) in ("q", "Q", "\x1b"):
                        return False
                try:
                    queue = self.sample()
                except ServerLost:
                    return True


def drawn(queue: QueueFigures, console: Console, foot: str = "") -> list[Text]:
    """Return a screen of the terminal's size; without a terminal, of any height."""
    height = console.size.height if console.is_terminal else 1000
    ascii_only = console.options.ascii_only
    return queue_screen(queue, width=console.size.width, height=height, foot=foot, ascii_only=ascii_only)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield ``wait(seconds)``: it returns a pressed key, or "" after the time."""
    files = [sys.stdin.fileno()] if sys.stdin is not None and sys.stdin.isatty() else []
    modes = [termios.tcgetattr(file) for file in files]
    for file in files:
        tty.setcbreak(file)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select(files, [], [], seconds)
        return os.read(ready[0], 1).decode("latin-1") if ready else ""

    try:
        yield wait
    finally:
        for file, mode in zip(files, modes, strict=True):
            termios.tcsetattr(file, termios.TCSADRAIN, mode)


def _plain(value: Any) -> Any:
    """Convert structs to objects (they travel as arrays), and infinite or nan numbers to null."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def queue_screen(
    queue: QueueFigures, *, width: int, height: int, foot: str = "", ascii_only: bool = False
) -> list[Text]:
    """Return at most ``height`` lines of fewer than ``width`` cells. ``foot``: the text of the last line."""
    width, report = max(width, 20), queue.report
    header = [*_header(queue, width - 2), *_evaluated(queue.evaluations, width - 2)]
    above: list[RenderableType] = [*header, *(Clipped(each, "yellow") for each in queue.warnings[-2:]), Text()]
    foot = foot if height >= 16 else ""
    room = max(height - len(above) - (2 if foot else 0), 6)

    def _draw(lines: int) -> list[RenderableType]:
        tasks = _tasks(queue, width - 2, max(room // 2, 3) - 1)
        parts, free = [*above, *tasks], room - len(render(tasks, width))
        for most, make in ((max(room // 3, 3), weights_table), (max(room // 4, 3), _homes_table)):
            made = make(report, width - 2, most, lines)
            if made and free >= (count := len(render(made, width))) + 7:
                parts += [Text(), *made]
                free -= count + 1
        return [*parts, Text(), *_clients(report, width - 2, max(free - 1, 2), lines)]

    lines = fit(_draw, width, height - (2 if foot else 0), most=6, ascii_only=ascii_only)
    if foot:
        lines += [Text()] * (height - 1 - len(lines)) + [Text(f" {foot}", "dim")]
    return lines


def _header(queue: QueueFigures, width: int) -> list[Text]:
    report, rates = queue.report, queue.rates
    limited = report.capacity_rows < _UNLIMITED
    full = limited and report.live >= report.capacity_rows
    live = f"{report.live:,} rows live" + (f" of {report.capacity_rows:,}" if limited else "")
    put = f" · {report.put:,} put" + (f", {rate(rates.put)}/s" if math.isfinite(rates.put) else "")
    memory = f"{size(report.payload_bytes)} payload in {size(report.held_bytes)} of memory"
    if math.isfinite(rates.written_bytes) and rates.written_bytes:
        memory += f", {size(rates.written_bytes)}/s"
    rows = Text.assemble((live, "yellow" if full else "bold"), put)
    title = Text.assemble((printable(queue.title), "bold"), (" · stream ended" if report.over else "", "dim"))
    one_line = cell_len(rows.plain) + cell_len(memory) + 3 <= width
    lines = [title, rows.append(f" · {memory}")] if one_line else [title, rows, Text(memory)]
    version = f"version {report.version}, {duration(report.version_age_s)} old" if report.version >= 0 else ""
    if report.step >= 0:
        lines += [_step(report, version, width), *_staleness(report)]
    elif version:
        lines.append(Text(version))
    if report.garbage:
        lines.append(Text(f"{report.garbage:,} messages were no requests", "yellow"))
    return lines


def _step(report: StatusReport, version: str, width: int) -> Text:
    """The step being filled, the current version and, if it fits, the staleness policy."""
    filled = report.batch_rows - report.free_slots
    step = f"step {report.step}" + (f" of {report.steps}" if report.steps else "")
    count = f" {filled:,} of {report.batch_rows:,} rows"
    for number, rows in report.in_parts[:1]:  # the oldest
        count += f" · {rows:,} delivered" + (f" of step {number}" if number != report.step else "")
    version = f" · {version}" if version else ""
    if report.max_staleness >= 0:
        policy = f" · policy {printable(report.staleness)}, max_staleness {report.max_staleness}"
        version += policy if cell_len(step + count + version + policy) + 12 <= width else ""
    length = min(max(width - cell_len(step + count + version) - 1, 0), 30)
    drawn = bar(filled, report.batch_rows, length) if length >= 4 else ""
    return Text.assemble((step, "bold"), " ", drawn, count, version)


def _staleness(report: StatusReport) -> Iterator[Text]:
    """The staleness of the newest step's rows, and the publish lag of the slowest replica."""
    if (ages := report.ages) is not None:
        line = (
            f"staleness of step {ages.step}: {ages.in_flight_mean:.2f} in flight (at most {ages.in_flight_max})"
            f" · {ages.in_queue_mean:.2f} in the queue (at most {ages.in_queue_max})"
        )
        loaded = [s.loaded for s in report.sessions if s.replica and s.loaded is not None]
        yield Text(line + (f" · publish lag {max(report.version - min(loaded), 0)}" if loaded else ""))


def _evaluated(evaluations: Sequence[Evaluated], width: int) -> Iterator[Text]:
    if evaluations:
        last, best = evaluations[-1], max(evaluations, key=lambda each: each.score)
        line = Text(f"evaluation of v{last.version}: {last.score:.3g} · best {best.score:.3g} of v{best.version} ")
        scores = [each.score for each in evaluations][-max(width - line.cell_len, 1) :]
        yield line.append(sparkline(scores, min(scores), max(scores)), "cyan")


def _tasks(queue: QueueFigures, width: int, most: int) -> list[RenderableType]:
    report = queue.report
    made = task_table(report.rows, width, most, queue.rates, queue.history)
    ended = [ended_rows(report.ended, 9, queue.rates.ended)] if any(report.ended.values()) else []
    return [*made, *ended]


def weights_table(report: StatusReport, width: int, most: int, lines: int) -> list[RenderableType]:
    """The kept versions, the publisher, and the version of each replica, in about ``most`` lines; nothing for a run
    without weights."""
    replicas = [session for session in report.sessions if session.replica]
    if not (report.versions or replicas or report.publisher or report.announced >= 0):
        return []
    first = first_width([each.name for each in replicas], 13, max(width // 4, 10))
    behind = [each for each in replicas if each.weights or each.loaded != report.version]
    behind.sort(key=lambda s: (not s.weights.startswith("failed"), -1 if s.loaded is None else s.loaded, s.name))
    current = [each.name for each in replicas if not each.weights and each.loaded == report.version]
    free = most - 1
    versions = list(reversed(report.versions))[: max(free - min(len(behind), free // 2) - bool(current), 1)]
    shown, rest = cut(behind, free - len(versions) - bool(current), "replica")
    head = f"published by {printable(report.publisher)}" if report.publisher else "nobody publishes"
    if report.announced >= 0:
        head += f", v{report.announced} being written for {duration(report.announced_s)}"
    above, below = table("WEIGHTS", head, first=first), table("", "", first=first)
    for version in versions:
        style = "bold" if version.version == report.version else ""
        source = f" = v{version.source}" if version.source != version.version else ""
        text = Clipped(_version(report, version, width), "" if style else "dim")
        above.add_row(Text(f"  v{version.version}{source}", style), text)
    if current:
        label = current[0] if len(current) == 1 else f"{len(current)} replicas"
        names = "" if len(current) == 1 else f": {', '.join(current)}"
        below.add_row(name(label, "green"), Clipped(f"v{report.version}{names}"))
    return [
        above,
        *([_replicas(report, shown, first, width, min(lines, 4))] if shown else []),
        *(line.append(f" not on version {report.version}", "yellow") for line in rest),
        *([below] if current else []),
    ]


def _version(report: StatusReport, version: VersionStatus, width: int) -> str:
    on = [f"loaded by {version.on}"] if version.on else []
    on += [f"staged by {version.staged}"] if version.staged else []
    parts = [
        f"{duration(version.age_s)} old",
        *([size(version.nbytes), version.transport] if width >= NARROW else []),
        *([", ".join(on)] if on else []),
        *(["committed"] if version.version == report.committed else []),
        *([version.root[:12]] if width >= WIDE and version.root else []),
    ]
    return " · ".join(parts)


def _replicas(
    report: StatusReport, sessions: Sequence[SessionStatus], first: int, width: int, lines: int
) -> RenderableType:
    """Replicas that are behind or busy with a version. The reason of a failure may take several
    lines."""
    full = width >= NARROW
    made = table("", "", *([""] if full else []), "", "", first=first)
    for session in sessions:
        late = not session.weights.startswith(_NORMAL) or session.weights_s >= _LOAD_PATIENCE_S
        style = "red" if session.weights.startswith("failed") else "yellow" if late else "green"
        lag = 0 if session.loaded is None else max(report.version - session.loaded, 0)
        made.add_row(
            name(session.name, style),
            "none" if session.loaded is None else f"v{session.loaded}",
            *([Text(f"{lag} behind" if lag else "", "yellow")] if full else []),
            Text(duration(session.weights_s) if session.weights else "", style),
            Clipped(session.weights or "has not asked for it", style, lines),
        )
    return made


def _homes_table(report: StatusReport, width: int, most: int, lines: int) -> list[RenderableType]:
    """The places of payload in about ``most`` lines, absent and lost ones first; nothing for a run with one home."""
    urgent = list(_HOME_STYLES)
    homes = sorted(report.homes, key=lambda home: (urgent.index(home.state), home.home))
    if not homes:
        return []
    shown, rest = cut(homes, most - 1, "home")
    made = table("PAYLOAD IN", "bytes", plural(len(homes), "home"), first=24)
    for home in shown:
        style = _HOME_STYLES[home.state]
        text = Clipped(_home(home), "" if style == "green" else style, lines)
        made.add_row(name(home.name, style), size(home.payload_bytes), text)
    return [made, *rest]


def _home(home: HomeStatus) -> str:
    states = {"lost": f"lost: {home.detail}", "absent": f"no storage unit for {duration(home.absent_s)}"}
    lost = f" · {plural(home.rows_failed, 'row')} lost" if home.rows_failed else ""
    return states.get(home.state, home.address or "this server's memory") + lost


class _ClientLine(NamedTuple):
    """A session, or several with the same reason to wait."""

    session: SessionStatus | None
    name: str
    since_s: float
    text: str
    style: str
    mark: str = "●"
    waits: bool = False


def _clients(report: StatusReport, width: int, most: int, lines: int) -> list[RenderableType]:
    """Waiting clients, the longest wait first; then clients with leases, the oldest lease first;
    then the others."""
    waits = [parked for parked in report.parked if not _works_meanwhile(report, parked)]
    entries = _client_lines(report, waits)
    shown, rest = cut(entries, most - 1, "client")
    waiting = report.parked_count - len(report.parked) + len(waits)
    counts = f"{waiting:,} waiting, {plural(report.lease_count, 'lease')}, {plural(report.session_count, 'client')}"
    full = width + 2 >= NARROW
    first = first_width([entry.name for entry in entries], 8, max(width // 4, 10))
    made = table("WHO", *(("pid", "loaded") if full else ()), f"{'since':<7}", counts, first=first)
    for entry in shown:
        version = entry.session.loaded if entry.session is not None else None
        process = Text(_process(report, entry.session), "dim")
        made.add_row(
            name(entry.name, entry.style, entry.mark),
            *((process, "" if version is None else f"v{version}") if full else ()),
            Text(duration(entry.since_s), entry.style),
            Clipped(entry.text, entry.style, lines if entry.waits else 1),
        )
    if left := sum(entry.waits for entry in entries[len(shown) :]):
        rest[0].append(f", {left} of them waiting")
    return [made, *rest]


def _client_lines(report: StatusReport, waits: Sequence[ParkedStatus]) -> list[_ClientLine]:
    sessions = {session.id: session for session in report.sessions}
    alike: dict[str, list[ParkedStatus]] = {}
    for parked in waits:  # the longest waiting first
        alike.setdefault(f"waits: {parked.verb}: {_reason(parked)}", []).append(parked)
    found = []
    for text, (first, *others) in alike.items():
        style, more = "yellow" if first.since_s >= PATIENCE_S else "", f" +{len(others)}" if others else ""
        session = sessions.get(first.session)
        found.append(_ClientLine(session, first.name + more, first.since_s, text, style, waits=True))
    for each in sorted((s for s in report.sessions if s.rows), key=lambda s: -s.held_s):
        leases = f" in {each.leases} leases" if each.leases > 1 else ""
        found.append(
            _ClientLine(each, each.name, each.held_s, f"holds {each.rows:,} rows of {each.task}{leases}", "green")
        )
    busy = {parked.session for parked in waits}
    idle = (s for s in report.sessions if not s.rows and s.id not in busy)
    for each in sorted(idle, key=lambda s: (not s.prepares, -s.age_s)):
        if each.prepares:
            found.append(_ClientLine(each, each.name, each.prepares_s, each.prepares, "cyan"))
        else:
            found.append(_ClientLine(each, each.name, each.age_s, "idle", "dim", "○"))
    return found


def _works_meanwhile(report: StatusReport, parked: ParkedStatus) -> bool:
    """True if the parked request is a notification, of lost rows or newer weights: its client does not wait."""
    loaded = any(s.id == parked.session and s.replica and s.loaded is not None for s in report.sessions)
    return parked.verb == "lost" or (parked.verb.startswith("weights ") and loaded)


def _reason(parked: ParkedStatus) -> str:
    """The reason of a wait, without the task's name that the verb already contains."""
    start, _, rest = parked.why.partition("; ")
    return rest if rest and start.startswith("task ") and start.endswith("has nothing to give") else parked.why


def _process(report: StatusReport, session: SessionStatus | None) -> str:
    if session is None or not session.pid:
        return ""
    away = f"{session.host}:" if session.host and session.host != report.host else ""
    return printable(f"{away}{session.pid}")
