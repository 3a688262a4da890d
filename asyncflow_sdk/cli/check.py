"""``asyncflow check``: run the conformance kit on engines, check by check, and explain failures: a line
for each check, then the probable causes."""

from __future__ import annotations

import difflib
import json
import os
import sys
import textwrap
from collections import Counter
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
from ..testing.kit import TIERS, CheckResult, Conformance, ProbableCause, Report, checks_of
from ..testing.kit.check import follows
from ..testing.kit.conformance import KINDS
from ..types.defaults import CHECK_S
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
    stopped = False
    for kind, engine in _named(name, options.kind, console):
        path = [os.getcwd(), *sys.path]  # as for `python -m`
        spec = {"kind": kind, "engine": engine, "tiers": TIERS, "path": path, **_settings(options)}
        with SubprocessRunner(spec) as runner:
            kit = _kit(runner, engine, options, alone=name is not None, console=console)
            if kit is not None:
                write = lambda so_far: _write(json_path, [*reports, so_far])  # noqa: E731
                reports.append(_run(kit, runner, options.fail_fast, console, write))
                print_report(reports[-1], runner.left, console)
        if stopped := options.fail_fast and bool(reports) and not reports[-1].ok:
            break
    if not reports:
        raise PluginError("there was nothing to check")
    _write(json_path, reports, complete=not stopped)
    if not any(result.outcome != "not asked" for report in reports for result in report.results):
        raise PluginError("no check could run")
    ok = all(report.ok for report in reports)
    if len(reports) > 1:
        bad = ", ".join(f"{report.kind} {report.engine}" for report in reports if not report.ok)
        _print(console, Text(f"{len(reports)} engines; not right: {bad or 'none'}", "green" if ok else "bold red"))
    return ok


def _write(path: Path | None, reports: Sequence[Report], *, complete: bool = False) -> None:
    """Replace the JSON file of results, atomically, after each check. ``ok`` is true only if also ``complete``."""
    if path is None:
        return
    ok = complete and all(report.ok for report in reports)
    content = {"ok": ok, "complete": complete, "engines": [report.to_dict() for report in reports]}
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(content, indent=2) + "\n")
    beside.replace(path)


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
            _print(console, Text(text, "dim"))
            continue
        yield adapter.spec.kind, adapter.spec.name


def _settings(options: CheckOptions) -> dict[str, Any]:
    """Return the settings of the kit."""
    names = ("options", "policy", "model", "dtype", "tolerance", "limit_s", "seed", "world_size")
    return {name: getattr(options, name) for name in names}


def _kit(
    runner: SubprocessRunner, engine: str, options: CheckOptions, *, alone: bool, console: Console
) -> Conformance | None:
    """Return the kit for an engine; None if none of the chosen checks applies to it and no engine was named."""
    if not runner.kind:
        runner.start()
    expected = dict(each.partition("=")[::2] for each in options.expected)
    names, only = {each.name for each in checks_of(runner.kind)}, options.only
    if not alone:  # options are for checks of any kind
        only, expected = [n for n in only if n in names], {n: why for n, why in expected.items() if n in names}
        if options.only and not only:
            return None
    kind: Any = runner.kind
    tiers = TIERS[: TIERS.index(options.tier) + 1]
    kit = Conformance(kind, engine, tiers=tiers, only=only, expected=expected, **_settings(options))
    if not (why := runner.start()):
        return kit
    if alone:
        raise ConfigError(f"{runner.kind} {engine}: {why}")
    _print(console, Text(f"{runner.kind} {engine}: not checked, {why}", "dim"))
    return None


def _run(
    kit: Conformance, runner: SubprocessRunner, fail_fast: bool, console: Console, on_result: Callable[[Report], None]
) -> Report:
    """Run each check and print its result. Checks with an engine of their own run last; the others share one."""
    _print(console, Text(f"{kit.kind} {kit.engine}: {len(kit.checks)} check{'s' * (len(kit.checks) != 1)}", "bold"))
    report = Report(kit.kind, kit.engine, ())
    on_result(report)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal or console.is_dumb_terminal,
    )
    with progress:
        for each in sorted(kit.checks, key=lambda check: check.alone):
            task = progress.add_task(f"{each.name}: {each.question}")
            result = kit.judged(runner.ask(each))
            progress.remove_task(task)
            report = Report(kit.kind, kit.engine, (*report.results, result), runner.asked)
            on_result(report)
            _print_result(result, console, consequence=follows(each, report.results, checks_of(kit.kind)))
            if fail_fast and result.bad:
                break
        closing = progress.add_task("closing the engine")
        runner.close()
        progress.remove_task(closing)
    return report


_MARKS = {
    "passed": ("✓", "ok", "green"), "failed": ("✗", "FAILED", "bold red"),
    "does not apply": ("·", "n/a", "dim"), "failed as expected": ("~", "expected", "yellow"),
    "not asked": ("?", "not asked", "yellow"), "passed unexpectedly": ("✗", "PASSED", "bold red"),
}  # fmt: skip
_CONSEQUENCE = ("↳", "follows", "red")


def _print_result(result: CheckResult, console: Console, *, consequence: bool) -> None:
    """Print one line. ``consequence``: a check presupposed by this one has failed, too."""
    sign, plain, style = _CONSEQUENCE if consequence and result.outcome == "failed" else _MARKS[result.outcome]
    mark = plain.ljust(8) if console.options.ascii_only or not console.is_terminal else f" {sign} "
    rest = f"{result.seconds:6.1f} s" if result.seconds else "        "
    why = f"  {result.detail}" if result.detail and not result.bad else ""
    _print(console, Text.assemble((mark, style), f" {result.check.name:20}", (rest, "dim"), (why, "dim")))


def print_report(report: Report, left: Sequence[str], console: Console) -> None:
    """Print each probable cause once, then the counts and the level. ``left``: processes killed
    after the engine was closed."""
    causes = report.causes
    for number, cause in enumerate(causes):
        head = "Probable cause" if len(causes) == 1 else f"Probable cause {number + 1} of {len(causes)}"
        _print_cause(head, cause, console)
    if left:
        running = f"\nleft running when the engine was closed, and killed: {'; '.join(left)}"
        _print(console, Text(running, "yellow"))
    counts = Counter(result.outcome for result in report.results)
    summed = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    every = len(checks_of(report.kind))
    part = f" ({len(report.results)} of {every} checks were asked)" if len(report.results) < every else ""
    level = f"level reached: {report.level or f'none{part}'}"
    _print(
        console, Text(f"\n{report.kind} {report.engine}: {summed}; {level}\n", "green" if report.ok else "bold red")
    )


def _print_cause(head: str, cause: ProbableCause, console: Console) -> None:
    result, check = cause.evidence, cause.evidence.check
    _print(console, Text.assemble(f"\n{head}: ", (cause.title, "bold red")))
    lines = [("asks", f"{check.question} (check {check.name})")]
    if result.detail not in cause.title:
        lines.append(("seen", result.detail))
    if result.outcome == "failed":
        lines += [("impact", check.impact), ("hint", result.hint or check.hint)]
    if cause.same:
        lines.append(("same in", ", ".join(each.check.name for each in cause.same)))
    for name, text in lines:
        _print(console, Text.assemble((f"  {name:8}", "dim"), text))
    for number, each in enumerate(cause.consequences):
        text = textwrap.shorten(f"{each.check.name}: {each.detail}", max(console.width - 10, 40), placeholder=" ...")
        _print(console, Text.assemble((f"  {'' if number else 'follows':8}", "dim"), text))


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)
