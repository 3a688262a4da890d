"""Weights frame: the versions that are kept, who publishes, and how far each replica is, as lines that fit a terminal."""

from __future__ import annotations

import textwrap

from rich.cells import cell_len

from ..ledger import StatusReport
from ..types.reports import SessionStatus, VersionStatus
from .lines import Cell, duration, fit, head, printable, size

_NARROW = 70
_AT_ONCE = ("fetching", "loading", "staged")
"""What a replica does about a version when nothing is wrong, and for how many seconds that is nothing to look at."""
_PATIENCE_S = 10.0


def weights_lines(report: StatusReport, width: int, room: int) -> list[list[Cell]]:
    """At most ``room`` lines; none of a run without weights."""
    replicas = [session for session in report.sessions if session.replica]
    if not (report.versions or replicas or report.publisher or report.announced >= 0):
        return []
    names = [printable(session.name) for session in replicas]
    first = min(max([14, *(cell_len(name) + 3 for name in names)]), 26, max(width // 4, 10))
    odd = sorted((s for s in replicas if _odd(report, s)), key=_urgency)
    even = [s for s in replicas if not _odd(report, s)]
    left = room - 1
    versions = list(reversed(report.versions))[: max(left - min(len(odd), left // 2) - bool(even), 1)]
    lines = [_head(report, first, width), *(_version(report, version, first, width) for version in versions)]
    left -= len(versions) + bool(even)
    shown = odd if len(odd) <= left else odd[: max(left - 1, 0)]
    spare = left - len(shown) - (len(shown) < len(odd))
    for session in shown:
        made = _replica(report, session, first, width, min(spare + 1, 4))
        spare -= len(made) - 1
        lines += made
    if len(shown) < len(odd):
        behind = f"and {len(odd) - len(shown)} more replicas that are not on version {report.version}"
        lines.append([(behind, "yellow")])
    if even:
        lines.append(_all_well(report, even, first, width))
    return lines[:room]


def _head(report: StatusReport, first: int, width: int) -> list[Cell]:
    who = f"published by {printable(report.publisher)}" if report.publisher else "nobody publishes"
    if report.announced >= 0:
        who += f", v{report.announced} being written for {duration(report.announced_s)}"
    return [head("WEIGHTS", first), (fit(who, max(width - first, 1)).rstrip(), "dim")]


def _version(report: StatusReport, version: VersionStatus, first: int, width: int) -> list[Cell]:
    """A version that is kept: its number, and what is known of it."""
    current = version.version == report.version
    name = f"v{version.version}" + (f" = v{version.source}" if version.source != version.version else "")
    parts = [f"{duration(version.age_s)} old"]
    if width >= _NARROW:
        parts += [size(version.nbytes), printable(version.transport)]
    on = [f"loaded by {version.on}"] if version.on else []
    on += [f"staged by {version.staged}"] if version.staged else []
    parts += [", ".join(on)] if on else []
    if version.version == report.committed:
        parts.append("committed")
    if width >= _NARROW + 20 and version.root:
        parts.append(printable(version.root[:12]))
    return [(fit(f"  {name}", first), "bold" if current else ""), (" · ".join(parts), "" if current else "dim")]


def _replica(report: StatusReport, session: SessionStatus, first: int, width: int, lines: int) -> list[list[Cell]]:
    """One that is behind, or does something about a version. The reason of a failure may take more than one line."""
    failed = session.weights.startswith("failed")
    style = "red" if failed else "yellow" if _late(session) else "green"
    has = "none" if session.loaded is None else f"v{session.loaded}"
    lag = f"{behind} behind" if (behind := _lag(report, session)) else ""
    doing = printable(session.weights)
    since = duration(session.weights_s) if doing else ""
    before: list[Cell] = [("● ", style), (fit(printable(session.name), first - 2), ""), (f"{has:<6}", "")]
    before += [(f"{lag:<11}", "yellow" if lag else "")] if width >= _NARROW else []
    before.append((f"{since:<7}", style))
    taken = first + 13 + (11 if width >= _NARROW else 0)
    text = textwrap.wrap(
        doing, max(width - taken, 12), max_lines=lines, placeholder="…", break_on_hyphens=False
    ) or ["has not asked for it"]  # fmt: skip
    rest: list[list[Cell]] = [[(" " * taken, ""), (part, style)] for part in text[1:]]
    return [[*before, (text[0], style)], *rest]


def _all_well(report: StatusReport, sessions: list[SessionStatus], first: int, width: int) -> list[Cell]:
    if len(sessions) == 1:
        return [("● ", "green"), (fit(printable(sessions[0].name), first - 2), ""), (f"v{report.version}", "")]
    names = ", ".join(printable(session.name) for session in sessions)
    text = f"v{report.version}: {names}"
    return [("● ", "green"), (fit(f"{len(sessions)} replicas", first - 2), ""), (fit(text, width - first), "")]


def _odd(report: StatusReport, session: SessionStatus) -> bool:
    return bool(session.weights) or session.loaded != report.version


def _lag(report: StatusReport, session: SessionStatus) -> int:
    """Versions published since the one it has loaded."""
    return 0 if session.loaded is None else max(report.version - session.loaded, 0)


def _late(session: SessionStatus) -> bool:
    return not session.weights.startswith(_AT_ONCE) or session.weights_s >= _PATIENCE_S


def _urgency(session: SessionStatus) -> tuple[bool, int, str]:
    """Failures first, then who is furthest behind."""
    return not session.weights.startswith("failed"), -1 if session.loaded is None else session.loaded, session.name
