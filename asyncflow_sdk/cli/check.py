"""``asyncflow check``: run the conformance kit on engines, check by check, and explain failures."""

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
from ..types.defaults import CHECK_S
from .check_report import print_report, print_result
from .subprocess_runner import SubprocessRunner

ENGINES = ("rollout", "train")
"""The kinds checked if no engine is named."""


@dataclass(frozen=True)
class CheckOptions:
    """The options of the command. ``tier``: lower tiers run, too. ``fail_fast``: stop after
    the first failure. ``expected``: "check=reason"."""

    kind: str = ""
    tier: str = "full"
    only: Sequence[str] = ()
    model: str | None = None
    policy: str | None = None
    options: Mapping[str, Any] | None = None
    expected: Sequence[str] = ()
    limit_s: float = CHECK_S
    seed: int | None = None
    tolerance: float | None = None
    dtype: str | None = None
    world_size: int = 1
    fail_fast: bool = False


def run_checks(name: str | None, options: CheckOptions, console: Console, json_path: Path | None) -> bool:
    """Check one engine by name, or all installed ones. Return True if no check failed. Raises
    ConfigError and PluginError."""
    if options.tier not in TIERS:
        raise ConfigError(f"--tier is one of {', '.join(TIERS)}, not {options.tier!r}")
    reports: list[Report] = []
    results, stopped = _ResultsFile(json_path), False
    for kind, engine in _named(name, options.kind, console):
        with SubprocessRunner(_spec(kind, engine, options)) as runner:
            kit = _kit(runner, engine, options, alone=name is not None, console=console)
            if kit is not None:
                write = lambda so_far: results.write([*reports, so_far])  # noqa: E731
                reports.append(_run(kit, runner, options.fail_fast, console, write))
                print_report(reports[-1], runner.left, console)
        if stopped := options.fail_fast and bool(reports) and not reports[-1].ok:
            break
    if not reports:
        raise PluginError("there was nothing to check")
    results.write(reports, complete=not stopped)
    if not any(result.outcome != "not asked" for report in reports for result in report.results):
        raise PluginError("no check could run")
    ok = all(report.ok for report in reports)
    if len(reports) > 1:
        bad = ", ".join(f"{report.kind} {report.engine}" for report in reports if not report.ok)
        console.print(Text(f"{len(reports)} engines; not right: {bad or 'none'}", "green" if ok else "bold red"))
    return ok


class _ResultsFile:
    """The JSON file of results, replaced atomically after each check. ``ok`` is true only if also
    ``complete``."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, reports: Sequence[Report], *, complete: bool = False) -> None:
        """Write the results so far."""
        if self._path is None:
            return
        ok = complete and all(report.ok for report in reports)
        content = {"ok": ok, "complete": complete, "engines": [report.to_dict() for report in reports]}
        beside = self._path.with_name(f"{self._path.name}.new")
        beside.write_text(json.dumps(content, indent=2) + "\n")
        beside.replace(self._path)


def show_checks(console: Console, *, markdown: bool) -> None:
    """Print all checks and their questions."""
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
    """Yield kind and name of each chosen engine."""
    kinds = [kind] if kind else list(KINDS if name else ENGINES)
    if kind and kind not in KINDS:
        raise ConfigError(f"there are no checks of kind {kind!r}; there are of {', '.join(KINDS)}")
    if name is not None and ":" in name:
        yield kind, name  # kind "": the class decides
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
            text = f"{adapter.spec.kind} {adapter.spec.name}: not checked, it needs {'; '.join(adapter.missing)}"
            console.print(Text(text, "dim"), soft_wrap=True)
            continue
        yield adapter.spec.kind, adapter.spec.name


def _spec(kind: str, engine: str, options: CheckOptions) -> dict[str, Any]:
    """Return the arguments of the kit in the subprocess."""
    return {
        "kind": kind, "engine": engine, "options": dict(options.options or {}), "policy": options.policy, "model": options.model,
        "dtype": options.dtype, "tolerance": options.tolerance, "limit_s": options.limit_s, "seed": options.seed, "tiers": TIERS,
        "world_size": options.world_size,
        "path": [os.getcwd(), *sys.path],  # as for `python -m`
    }  # fmt: skip


def _kit(
    runner: SubprocessRunner, engine: str, options: CheckOptions, *, alone: bool, console: Console
) -> Conformance | None:
    """Return the kit for an engine; None if none of the chosen checks applies to it and no engine
    was named."""
    known = None if runner.kind else runner.unknowable
    pairs = dict(each.partition("=")[::2] for each in options.expected)
    names = {each.name for each in checks_of(runner.kind)}
    if alone or not options.only or names & set(options.only):
        kit = Conformance(
            runner.kind, engine,  # type: ignore[arg-type]
            tiers=TIERS[: TIERS.index(options.tier) + 1], only=options.only if alone else [n for n in options.only if n in names],
            expected=pairs if alone else {n: reason for n, reason in pairs.items() if n in names},
            tolerance=options.tolerance, dtype=options.dtype, world_size=options.world_size,
        )  # fmt: skip
        why = runner.unknowable if known is None else known
        if not why:
            return kit
        if alone:
            raise ConfigError(f"{runner.kind} {engine}: {why}")
        console.print(Text(f"{runner.kind} {engine}: not checked, {why}", "dim"), soft_wrap=True)
    return None


def _run(
    kit: Conformance, runner: SubprocessRunner, fail_fast: bool, console: Console, on_result: Callable[[Report], None]
) -> Report:
    """Run each check and print its result. Checks with an engine of their own run last; the others
    share one."""
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
            result = kit.judged(runner.ask(each))
            progress.remove_task(task)
            report = Report(kit.kind, kit.engine, (*report.results, result), runner.asked)
            on_result(report)
            consequence = follows(each, report.results, checks_of(kit.kind))
            print_result(result, console, consequence=consequence)
            if fail_fast and result.bad:
                break
        closing = progress.add_task("closing the engine")
        runner.close()
        progress.remove_task(closing)
    return report
