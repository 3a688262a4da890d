"""``asyncflow check``: engines held to their interface, one question after another; then a verdict in words."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..errors import ConfigError, PluginError
from ..interfaces import RolloutEngine, TrainEngine
from ..plugins import import_name, registry
from ..testing.kit import TIERS, Conformance, Report, Result, checks_of
from ..testing.kit.conformance import KINDS

_SIGNS = {
    "passed": ("✓", "ok", "green"), "failed": ("✗", "FAILED", "bold red"),
    "does not apply": ("·", "n/a", "dim"), "failed as expected": ("~", "expected", "yellow"),
    "passed unexpectedly": ("✗", "PASSED", "bold red"),
}  # fmt: skip
_CLOSING_S = 5.0
ENGINES = ("rollout", "train")
"""What is checked where nothing is named."""


@dataclass(frozen=True)
class Asked:
    """What is to be checked, as the command line says it. ``tier``: those below it too. ``expected``: "check=reason"."""

    kind: str = ""
    tier: str = "full"
    only: Sequence[str] = ()
    model: str | None = None
    policy: str | None = None
    options: Mapping[str, Any] | None = None
    expected: Sequence[str] = ()
    limit_s: float = 100.0
    seed: int | None = None


def check(name: str | None, asked: Asked, console: Console, json_path: Path | None) -> bool:
    """Check one engine by name, or every one that is installed; True if nothing is wrong. Raises ConfigError and PluginError."""
    if asked.tier not in TIERS:
        raise ConfigError(f"--tier is one of {', '.join(TIERS)}, not {asked.tier!r}")
    reports = []
    for kind, engine in _named(name, asked.kind, console):
        kit = _kit(kind, engine, asked, alone=name is not None, console=console)
        if kit is not None:
            reports.append(_run(kit, console))
            _say_verdict(reports[-1], console)
    if not reports:
        raise PluginError("there was nothing to check")
    ok = all(report.ok for report in reports)
    if json_path is not None:
        told = {"ok": ok, "engines": [report.to_dict() for report in reports]}
        json_path.write_text(json.dumps(told, indent=2) + "\n")
    if len(reports) > 1:
        bad = ", ".join(f"{report.kind} {report.engine}" for report in reports if not report.ok)
        console.print(Text(f"{len(reports)} engines; not right: {bad or 'none'}", "green" if ok else "bold red"))
    return ok


def show_checks(console: Console, *, markdown: bool) -> None:
    """All checks there are, with what they ask."""
    every = [each for kind in KINDS for each in checks_of(kind)]
    if markdown:
        rows = ["| kind | tier | check | asks |", "|---|---|---|---|"]
        rows += [f"| {each.kind} | {each.tier} | `{each.name}` | {each.asks} |" for each in every]
        sys.stdout.write("\n".join(rows) + "\n")
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for head in ("kind", "tier", "check", "asks"):
        table.add_column(head, overflow="fold")
    for each in every:
        table.add_row(each.kind, each.tier, Text(each.name, style="bold"), Text(each.asks))
    console.print(table)


def _named(name: str | None, kind: str, console: Console) -> Iterator[tuple[str, str]]:
    """Kind and name of each engine that is meant."""
    kinds = [kind] if kind else list(KINDS if name else ENGINES)
    if kind and kind not in KINDS:
        raise ConfigError(f"there are no checks of kind {kind!r}; there are of {', '.join(KINDS)}")
    if name is not None and ":" in name:
        sys.path.insert(0, os.getcwd())  # as `python -m` has
        yield kind or _kind_of(import_name(name), name), name
        return
    found = [a for a in registry().adapters if a.spec.kind in kinds and name in (None, a.spec.name)]
    if name is not None and not found:
        registry().get(kinds[0], name)  # type: ignore[arg-type]  # raises, and lists what there is
    for adapter in found:
        if name is None and adapter.missing:
            said = f"{adapter.spec.kind} {adapter.spec.name}: not checked, it needs {'; '.join(adapter.missing)}"
            console.print(Text(said, "dim"), soft_wrap=True)
            continue
        yield adapter.spec.kind, adapter.spec.name


def _kind_of(factory: Any, name: str) -> str:
    for kind, base in (("rollout", RolloutEngine), ("train", TrainEngine)):
        if inspect.isclass(factory) and issubclass(factory, base):
            return kind
    raise ConfigError(f"{name} is no subclass of an engine's interface: say --kind {' or --kind '.join(KINDS)}")


def _kit(kind: str, engine: str, asked: Asked, *, alone: bool, console: Console) -> Conformance | None:
    """None for one of all that has nothing to check."""
    pairs = dict(each.partition("=")[::2] for each in asked.expected)
    names = {each.name for each in checks_of(kind)}
    if alone or not asked.only or names & set(asked.only):
        kit = Conformance(
            kind, engine,  # type: ignore[arg-type]
            options=asked.options, policy=asked.policy, model=asked.model, tiers=TIERS[: TIERS.index(asked.tier) + 1],
            only=asked.only if alone else [n for n in asked.only if n in names], limit_s=asked.limit_s, seed=asked.seed,
            expected=pairs if alone else {n: reason for n, reason in pairs.items() if n in names},
        )  # fmt: skip
        why = kit.unknowable
        if not why:
            return kit
        if alone:
            raise ConfigError(f"{kind} {engine}: {why}")
        console.print(Text(f"{kind} {engine}: not checked, {why}", "dim"), soft_wrap=True)
    return None


def _run(kit: Conformance, console: Console) -> Report:
    """Ask each check, and say what came of it."""
    console.print(Text(f"{kit.kind} {kit.engine}: {len(kit.checks)} checks", "bold"), soft_wrap=True)
    results = []
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True,
        disable=not console.is_terminal or console.is_dumb_terminal,
    )  # fmt: skip
    try:
        with progress:
            for each in kit.checks:
                task = progress.add_task(f"{each.name}: {each.asks}")
                results.append(kit.ask(each))
                progress.remove_task(task)
                console.print(_line(results[-1], console), soft_wrap=True)
    finally:
        _close(kit)
    return Report(kit.kind, kit.engine, tuple(results))


def _close(kit: Conformance) -> None:
    """An engine that hangs does not keep the command: it is left to the end of the process."""

    def close() -> None:
        with contextlib.suppress(Exception):
            kit.close()

    closing = threading.Thread(target=close, daemon=True, name="closing the engine")
    closing.start()
    closing.join(_CLOSING_S)


def _line(result: Result, console: Console) -> Text:
    sign, plain, style = _SIGNS[result.outcome]
    mark = plain.ljust(8) if console.options.ascii_only or not console.is_terminal else f" {sign} "
    rest = f"{result.seconds:6.1f} s" if result.seconds else "        "
    why = f"  {result.detail}" if result.outcome in ("does not apply", "failed as expected") else ""
    return Text.assemble((mark, style), f" {result.check.name:20}", (rest, "dim"), (why, "dim"))


def _say_verdict(report: Report, console: Console) -> None:
    """What failed, each once with all checks that failed so; what it means, where to look; the level."""
    alike: dict[str, list[Result]] = {}
    for result in report.results:
        if result.bad:
            alike.setdefault(result.detail, []).append(result)
    for detail, results in alike.items():
        names = ", ".join(result.check.name for result in results)
        console.print(Text(f"\n{names}", "bold red"), soft_wrap=True)
        said = [("asks", results[0].check.asks)] if len(results) == 1 else []
        said += [("seen", detail)]
        if len(results) == 1 and results[0].outcome == "failed":
            said += [("means", results[0].check.means), ("look at", results[0].check.look)]
        for head, text in said:
            console.print(Text.assemble((f"  {head:8}", "dim"), text), soft_wrap=True)
    counts: dict[str, int] = {}
    for result in report.results:
        counts[result.outcome] = counts.get(result.outcome, 0) + 1
    summed = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    level = f"level reached: {report.level or 'none'}"
    console.print(
        Text(f"\n{report.kind} {report.engine}: {summed}; {level}\n", "green" if report.ok else "bold red"),
        soft_wrap=True,
    )
