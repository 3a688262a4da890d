"""``asyncflow check``: engines held to their interface, one question after another; then a verdict in words."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..errors import ConfigError, PluginError
from ..plugins import registry
from ..testing.kit import TIERS, Conformance, Report, checks_of
from ..testing.kit.causes import follows
from ..testing.kit.conformance import KINDS
from .apart import Apart
from .check_report import print_report, print_result

ENGINES = ("rollout", "train")
"""What is checked where nothing is named."""


@dataclass(frozen=True)
class Asked:
    """What is to be checked, as the command line says it. ``tier``: those below it too. ``expected``: "check=reason". ``fail_fast``: stop after
    the first failure."""

    kind: str = ""
    tier: str = "full"
    only: Sequence[str] = ()
    model: str | None = None
    policy: str | None = None
    options: Mapping[str, Any] | None = None
    expected: Sequence[str] = ()
    limit_s: float = 100.0
    seed: int | None = None
    tolerance: float | None = None
    dtype: str | None = None
    world_size: int = 1
    fail_fast: bool = False


def check(name: str | None, asked: Asked, console: Console, json_path: Path | None) -> bool:
    """Check one engine by name, or every one that is installed; True if nothing is wrong. Raises ConfigError and PluginError."""
    if asked.tier not in TIERS:
        raise ConfigError(f"--tier is one of {', '.join(TIERS)}, not {asked.tier!r}")
    reports: list[Report] = []
    told, stopped = _Told(json_path), False
    for kind, engine in _named(name, asked.kind, console):
        with Apart(_spec(kind, engine, asked)) as apart:
            kit = _kit(apart, engine, asked, alone=name is not None, console=console)
            if kit is not None:
                reports.append(
                    _run(kit, apart, asked.fail_fast, console, lambda so_far: told.write([*reports, so_far]))
                )
                print_report(reports[-1], apart.left, console)
        if stopped := asked.fail_fast and bool(reports) and not reports[-1].ok:
            break
    if not reports:
        raise PluginError("there was nothing to check")
    told.write(reports, complete=not stopped)
    if not any(result.outcome != "not asked" for report in reports for result in report.results):
        raise PluginError("nothing could be asked")
    ok = all(report.ok for report in reports)
    if len(reports) > 1:
        bad = ", ".join(f"{report.kind} {report.engine}" for report in reports if not report.ok)
        console.print(Text(f"{len(reports)} engines; not right: {bad or 'none'}", "green" if ok else "bold red"))
    return ok


class _Told:
    """The file of results: at any moment whole, with what is known then. ``ok`` is said of what is ``complete`` only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, reports: Sequence[Report], *, complete: bool = False) -> None:
        if self._path is None:
            return
        ok = complete and all(report.ok for report in reports)
        told = {"ok": ok, "complete": complete, "engines": [report.to_dict() for report in reports]}
        beside = self._path.with_name(f"{self._path.name}.new")
        beside.write_text(json.dumps(told, indent=2) + "\n")
        beside.replace(self._path)


def show_checks(console: Console, *, markdown: bool) -> None:
    """All checks there are, with what they ask."""
    every = [each for kind in KINDS for each in checks_of(kind)]
    if markdown:
        rows = ["| kind | tier | check | asks |", "|---|---|---|---|"]
        rows += [f"| {each.kind} | {each.tier} | `{each.name}` | {each.question} |" for each in every]
        sys.stdout.write("\n".join(rows) + "\n")
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for head in ("kind", "tier", "check", "asks"):
        table.add_column(head, overflow="fold")
    for each in every:
        table.add_row(each.kind, each.tier, Text(each.name, style="bold"), Text(each.question))
    console.print(table)


def _named(name: str | None, kind: str, console: Console) -> Iterator[tuple[str, str]]:
    """Kind and name of each engine that is meant."""
    kinds = [kind] if kind else list(KINDS if name else ENGINES)
    if kind and kind not in KINDS:
        raise ConfigError(f"there are no checks of kind {kind!r}; there are of {', '.join(KINDS)}")
    if name is not None and ":" in name:
        yield kind, name  # "" where its class says it
        return
    found = [a for a in registry().adapters if a.spec.kind in kinds and name in (None, a.spec.name)]
    if name is not None and not found:
        near = difflib.get_close_matches(name, [a.spec.name for a in registry().adapters if a.spec.kind in kinds])
        if near:
            raise PluginError(
                f"no adapter is named {name!r}; did you mean {near[0]!r}? `asyncflow plugins` lists them"
            )
        registry().get(kinds[0], name)  # type: ignore[arg-type]  # raises, and lists what there is
    for adapter in found:
        if name is None and adapter.missing:
            said = f"{adapter.spec.kind} {adapter.spec.name}: not checked, it needs {'; '.join(adapter.missing)}"
            console.print(Text(said, "dim"), soft_wrap=True)
            continue
        yield adapter.spec.kind, adapter.spec.name


def _spec(kind: str, engine: str, asked: Asked) -> dict[str, Any]:
    """What the process that asks makes its kit of."""
    return {
        "kind": kind, "engine": engine, "options": dict(asked.options or {}), "policy": asked.policy, "model": asked.model,
        "dtype": asked.dtype, "tolerance": asked.tolerance, "limit_s": asked.limit_s, "seed": asked.seed, "tiers": TIERS,
        "world_size": asked.world_size,
        "path": [os.getcwd(), *sys.path],  # as `python -m` has it
    }  # fmt: skip


def _kit(apart: Apart, engine: str, asked: Asked, *, alone: bool, console: Console) -> Conformance | None:
    """What is asked; None for one of all that has nothing to check."""
    known = None if apart.kind else apart.unknowable
    pairs = dict(each.partition("=")[::2] for each in asked.expected)
    names = {each.name for each in checks_of(apart.kind)}
    if alone or not asked.only or names & set(asked.only):
        kit = Conformance(
            apart.kind, engine,  # type: ignore[arg-type]
            tiers=TIERS[: TIERS.index(asked.tier) + 1], only=asked.only if alone else [n for n in asked.only if n in names],
            expected=pairs if alone else {n: reason for n, reason in pairs.items() if n in names},
            tolerance=asked.tolerance, dtype=asked.dtype, world_size=asked.world_size,
        )  # fmt: skip
        why = apart.unknowable if known is None else known
        if not why:
            return kit
        if alone:
            raise ConfigError(f"{apart.kind} {engine}: {why}")
        console.print(Text(f"{apart.kind} {engine}: not checked, {why}", "dim"), soft_wrap=True)
    return None


def _run(
    kit: Conformance, apart: Apart, fail_fast: bool, console: Console, on_result: Callable[[Report], None]
) -> Report:
    """Ask each check, and say what came of it. Those that make an engine anew come last, so that one serves the others."""
    console.print(
        Text(f"{kit.kind} {kit.engine}: {len(kit.checks)} check{'s' * (len(kit.checks) != 1)}", "bold"),
        soft_wrap=True,
    )
    report = Report(kit.kind, kit.engine, ())
    on_result(report)
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True,
        disable=not console.is_terminal or console.is_dumb_terminal,
    )  # fmt: skip
    with progress:
        for each in sorted(kit.checks, key=lambda check: check.alone):
            task = progress.add_task(f"{each.name}: {each.question}")
            result = kit.judged(apart.ask(each))
            progress.remove_task(task)
            report = Report(kit.kind, kit.engine, (*report.results, result), apart.asked)
            on_result(report)
            consequence = follows(each, report.results, checks_of(kit.kind))
            print_result(result, console, consequence=consequence)
            if fail_fast and result.bad:
                break
        closing = progress.add_task("closing the engine")
        apart.close()
        progress.remove_task(closing)
    return report
