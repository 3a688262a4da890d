"""Findings of ``asyncflow doctor``: subject, level, message and hint."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from rich.console import Console
from rich.text import Text

from .formats import plural

FINE, NOTE, WARNING, FAILS = "fine", "note", "warning", "fails"
_STYLES = {FINE: "green", NOTE: "cyan", WARNING: "yellow", FAILS: "bold red"}


class Finding(msgspec.Struct, frozen=True):
    """One fact. ``where``: an interpreter, the machine, a file. ``level``: fine, note, warning or
    fails."""

    where: str
    subject: str
    level: str
    message: str
    hint: str = ""


def show(findings: Iterable[Finding], console: Console) -> None:
    """Print a block per place and a line per finding, with its hint below."""
    where = ""
    for each in findings:
        if each.where != where:
            where = each.where
            console.print(Text(f"\n{where}", style="bold"), soft_wrap=True)
        mark = Text(f"  {each.level:8}", style=_STYLES[each.level])
        console.print(
            Text.assemble(mark, (f"{each.subject}: " if each.subject else ""), each.message), soft_wrap=True
        )
        if each.hint:
            style = "dim" if each.level == NOTE else "cyan"
            console.print(Text(f"            {each.hint}", style=style), soft_wrap=True)


def verdict(findings: Iterable[Finding]) -> str:
    """Return the number of problems as a sentence."""
    levels = [each.level for each in findings]
    fails, warns = levels.count(FAILS), levels.count(WARNING)
    if fails:
        return f"{plural(fails, 'problem')}" + (f", {plural(warns, 'warning')}" if warns else "")
    return f"no problems, {plural(warns, 'warning')}" if warns else "no problems"
