"""The common form of every benchmark's result."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One measured piece of work: ours beside a peer and beside what the machine allows; None where there is none."""

    work: str
    unit: str
    ours: float
    peer: float | None = None
    ratio_to_peer: float | None = None
    limit: float | None = None
    ratio_to_limit: float | None = None


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def show_options(parser: argparse.ArgumentParser) -> None:
    """How the table is to be shown: for ``finish``."""
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown, too")
    parser.add_argument("--json", type=Path)


def finish(title: str, rows: list[Row], arguments: argparse.Namespace) -> None:
    if arguments.markdown:
        print(markdown(rows))
    show(title, rows, arguments.json)


def show(title: str, rows: list[Row], path: Path | None) -> None:
    table = Table(title=title)
    for name in ("work", "unit", "ours", "peer", "ratio to peer", "limit", "ratio to limit"):
        table.add_column(name, justify="left" if name in ("work", "unit") else "right")
    for row in rows:
        table.add_row(*_cells(row))
    Console(width=140).print(table)
    if path is not None:
        plain = [{k: v if isinstance(v, str) else finite(v) for k, v in asdict(row).items()} for row in rows]
        path.write_text(json.dumps(plain, indent=2, allow_nan=False))


def markdown(rows: list[Row]) -> str:
    """The table as the documents show it."""
    lines = [
        "| work | unit | ours | peer | ratio to peer | limit | ratio to limit |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [f"| {' | '.join(_cells(row))} |" for row in rows])


def _cells(row: Row) -> list[str]:
    work, unit, *numbers = asdict(row).values()
    return [work, unit, *("" if n is None else f"{n:,.0f}" if abs(n) >= 1000 else f"{n:.3g}" for n in numbers)]


def finite(value: float | None) -> float | None:
    """The value, or None where there is none: a goal never reached, a ratio to it."""
    return value if value is not None and math.isfinite(value) else None
