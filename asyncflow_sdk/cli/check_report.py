"""Print the results of ``asyncflow check``: a line for each check, then the probable causes of
failures."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ..testing.kit import CheckResult, ProbableCause, Report, checks_of

_MARKS = {
    "passed": ("✓", "ok", "green"), "failed": ("✗", "FAILED", "bold red"),
    "does not apply": ("·", "n/a", "dim"), "failed as expected": ("~", "expected", "yellow"),
    "not asked": ("?", "not asked", "yellow"), "passed unexpectedly": ("✗", "PASSED", "bold red"),
}  # fmt: skip
_CONSEQUENCE = ("↳", "follows", "red")


def print_result(result: CheckResult, console: Console, *, consequence: bool) -> None:
    """Print one line. ``consequence``: a check that this one presupposes has failed, too."""
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
