"""Findings: what ``asyncflow doctor`` says of a thing, how bad it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from rich.console import Console
from rich.text import Text

FINE, NOTE, WARNING, FAILS = "fine", "note", "warning", "fails"
_STYLES = {FINE: "green", NOTE: "cyan", WARNING: "yellow", FAILS: "bold red"}


class Finding(msgspec.Struct, frozen=True):
    """``where``: an interpreter, the machine, a file. ``level``: fine, note, warning or fails."""

    where: str
    about: str
    level: str
    said: str
    cure: str = ""


def show(findings: Iterable[Finding], console: Console) -> None:
    """A block for each place, a line for each finding."""
    where = ""
    for each in findings:
        if each.where != where:
            where = each.where
            console.print(Text(f"\n{where}", style="bold"), soft_wrap=True)
        mark = Text(f"  {each.level:8}", style=_STYLES[each.level])
        console.print(Text.assemble(mark, (f"{each.about}: " if each.about else ""), each.said), soft_wrap=True)
        if each.cure:
            console.print(
                Text(f"            {each.cure}", style="dim" if each.level == NOTE else "cyan"), soft_wrap=True
            )


def verdict(findings: Iterable[Finding]) -> str:
    """For people, in a line."""
    levels = [each.level for each in findings]
    fails, warns = levels.count(FAILS), levels.count(WARNING)
    if fails:
        return f"{fails} thing{'s' * (fails > 1)} will not work" + (f", {warns} to look at" if warns else "")
    return f"nothing stands in the way, {warns} thing{'s' * (warns > 1)} to look at" if warns else "all is fine"
