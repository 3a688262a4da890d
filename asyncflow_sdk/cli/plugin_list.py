"""``asyncflow plugins``: all adapters, their missing requirements, and broken plugins."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..plugins import find_plugins
from .formats import plural


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter. ``missing``: missing requirements, with reasons; ``install``: the pip command."""

    kind: str
    name: str
    source: str
    factory: str
    requires: list[str]
    missing: list[str]
    install: str
    tested: str


@dataclass(frozen=True)
class PluginList:
    """All adapters, problems and blocked plugins."""

    adapters: list[AdapterEntry]
    problems: list[str]
    blocked: list[str]

    @classmethod
    def of_this_environment(cls) -> PluginList:
        """Return the plugins installed for this interpreter."""
        found, entries = find_plugins(), list[AdapterEntry]()
        for adapter in sorted(found.adapters, key=lambda a: (a.spec.kind, a.spec.name)):
            spec = adapter.spec
            install = adapter.install_command if spec.requires or spec.install else ""
            entries.append(
                AdapterEntry(
                    kind=spec.kind, name=spec.name, source=adapter.source, factory=spec.factory, requires=list(spec.requires),
                    missing=adapter.missing, install=install, tested=spec.tested_text,
                )
            )  # fmt: skip
        return cls(entries, list(found.problems), list(found.blocked))

    def json(self) -> str:
        """Return the list as JSON."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    def print(self, console: Console) -> None:
        """Print the table, then missing requirements with their pip commands, and problems in red."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
        for head in ("kind", "name", "from", "engine", "tested with"):
            table.add_column(head, overflow="fold", no_wrap=head in ("kind", "name", "from"))
        for entry in self.adapters:
            table.add_row(
                entry.kind, Text(entry.name, style="bold"), Text(entry.source), _engine(entry), Text(entry.tested)
            )
        console.print(table if self.adapters else Text("No adapter was found.", style="yellow"))
        lacking: dict[tuple[str, str], list[str]] = {}
        for entry in self.adapters:
            if entry.missing:
                why = "; ".join(entry.missing)
                lacking.setdefault((why, entry.install), []).append(f"{entry.kind} {entry.name}")
        for (why, install), names in lacking.items():
            console.print(Text.assemble((", ".join(names), "bold"), (" needs ", "yellow"), why), soft_wrap=True)
            console.print(Text(f"  {install}", style="cyan"), soft_wrap=True)
        for blocked in self.blocked:
            console.print(Text(f"blocked: {blocked}", style="yellow"), soft_wrap=True)
        if self.problems:
            console.print(Text(f"\n{plural(len(self.problems), 'problem').upper()}", style="bold red"))
            for problem in self.problems:
                console.print(Text(f"  {problem}", style="red"), soft_wrap=True)


def _engine(entry: AdapterEntry) -> Text:
    if entry.missing:
        return Text("see below", style="yellow")
    ours = entry.source.split()[0] == "asyncflow-sdk" and not entry.requires
    return Text("built in" if ours else "present", style="green")
