"""The weights of a queue: kept versions, the publisher, and the version of each replica."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from ...ledger import StatusReport
from ...types.reports import SessionStatus, VersionStatus
from ..formats import duration, plural, printable, size
from .screen import Clipped, name, table

_NARROW = 70
_NORMAL = ("fetching", "loading", "staged")
_PATIENCE_S = 10.0
"""A replica that takes longer than this for a normal action is highlighted (seconds)."""


def weights_table(report: StatusReport, width: int, most: int, lines: int) -> tuple[list[RenderableType], int]:
    """Return tables of about ``most`` lines and their number of lines; none for a run without
    weights."""
    replicas = [session for session in report.sessions if session.replica]
    if not (report.versions or replicas or report.publisher or report.announced >= 0):
        return [], 0
    first = min(max([13, *(cell_len(printable(s.name)) + 2 for s in replicas)]), 24, max(width // 4, 10))
    behind = sorted((s for s in replicas if _is_behind(report, s)), key=_urgency)
    current = [s for s in replicas if not _is_behind(report, s)]
    free = most - 1
    versions = list(reversed(report.versions))[: max(free - min(len(behind), free // 2) - bool(current), 1)]
    free -= len(versions) + bool(current)
    shown = behind if len(behind) <= free else behind[: max(free - 1, 0)]
    head = f"published by {printable(report.publisher)}" if report.publisher else "nobody publishes"
    if report.announced >= 0:
        head += f", v{report.announced} being written for {duration(report.announced_s)}"
    above, below, parts = table("WEIGHTS", head, first=first), table("", "", first=first), list[RenderableType]()
    for version in versions:
        style = "bold" if version.version == report.version else ""
        source = f" = v{version.source}" if version.source != version.version else ""
        text = Clipped(_version(report, version, width), "" if style else "dim")
        above.add_row(Text(f"  v{version.version}{source}", style), text)
    parts.append(above)
    if shown:
        parts.append(_replicas(report, shown, first, width, min(lines, 4)))
    if len(shown) < len(behind):
        rest = f"and {plural(len(behind) - len(shown), 'more replica')} not on version {report.version}"
        parts.append(Text(rest, "yellow"))
    if current:
        names = ", ".join(session.name for session in current)
        single = len(current) == 1
        label = current[0].name if single else f"{len(current)} replicas"
        below.add_row(
            name(label, "green"), Clipped(f"v{report.version}" if single else f"v{report.version}: {names}")
        )
        parts.append(below)
    return parts, 1 + len(versions) + len(shown) + (len(shown) < len(behind)) + bool(current)


def _version(report: StatusReport, version: VersionStatus, width: int) -> str:
    """The details of a kept version."""
    parts = [f"{duration(version.age_s)} old"]
    if width >= _NARROW:
        parts += [size(version.nbytes), version.transport]
    on = [f"loaded by {version.on}"] if version.on else []
    on += [f"staged by {version.staged}"] if version.staged else []
    parts += [", ".join(on)] if on else []
    parts += ["committed"] if version.version == report.committed else []
    parts += [version.root[:12]] if width >= _NARROW + 20 and version.root else []
    return " · ".join(parts)


def _replicas(
    report: StatusReport, sessions: list[SessionStatus], first: int, width: int, lines: int
) -> RenderableType:
    """Replicas that are behind or busy with a version. The reason of a failure may take several
    lines."""
    full = width >= _NARROW
    made = table("", "", *([""] if full else []), "", "", first=first)
    for session in sessions:
        late = not session.weights.startswith(_NORMAL) or session.weights_s >= _PATIENCE_S
        style = "red" if session.weights.startswith("failed") else "yellow" if late else "green"
        lag = 0 if session.loaded is None else max(report.version - session.loaded, 0)
        made.add_row(
            name(session.name, style), "none" if session.loaded is None else f"v{session.loaded}",
            *([Text(f"{lag} behind" if lag else "", "yellow")] if full else []),
            Text(duration(session.weights_s) if session.weights else "", style),
            Clipped(session.weights or "has not asked for it", style, lines),
        )  # fmt: skip
    return made


def _is_behind(report: StatusReport, session: SessionStatus) -> bool:
    return bool(session.weights) or session.loaded != report.version


def _urgency(session: SessionStatus) -> tuple[bool, int, str]:
    """Sort failures first, then the oldest loaded version."""
    return not session.weights.startswith("failed"), -1 if session.loaded is None else session.loaded, session.name
