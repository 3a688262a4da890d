"""``asyncflow doctor``: check each interpreter's packages, and this machine, before a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from ..errors import ConfigError
from ..workflow.plan.toml import problems_of_file
from .findings import FAILS, FINE, Finding, show, verdict
from .inspection import EnvironmentReport
from .interpreters import Interpreter, inspect, interpreters_of
from .links import links
from .machine import address, gpus, keys, machine


class Examination(msgspec.Struct, kw_only=True):
    """All findings. ``fine``: none of them fails."""

    fine: bool
    verdict: str
    findings: list[Finding]
    interpreters: dict[str, EnvironmentReport | None]

    def json(self) -> str:
        """Return the examination as JSON."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    def print(self, console: Console) -> None:
        """Print all findings and the verdict."""
        show(self.findings, console)
        console.print(Text(f"\n{self.verdict}", style="green" if self.fine else "bold red"), soft_wrap=True)


def examine(
    paths: Sequence[Path],
    pythons: Sequence[str],
    addresses: Sequence[str],
    runs: Sequence[str] = (),
    key: Path | None = None,
    insecure: bool = False,
) -> Examination:
    """Examine interpreters and machine. ``paths``: TOML workflows, run directories, key files.
    ``runs``: addresses of running runs, reached with ``key`` or ``insecure``. Raises ConfigError for
    other paths."""
    interpreters = {each.name: each for each in [Interpreter(None)]}
    keyed: list[Path] = []
    files: list[Path] = []
    for path in paths:
        if path.suffix == ".toml":
            files.append(path)
            for each in interpreters_of(path):
                known = interpreters.setdefault(each.name, each)
                known.wants += each.wants if known is not each else []
        elif path.is_dir() or path.suffix == ".key":
            keyed.append(path)
        else:
            raise ConfigError(f"{path} is neither a workflow (FILE.toml), a run directory nor a key (FILE.key)")
    for each in map(Interpreter, pythons):
        interpreters.setdefault(each.name, each)
    names, gpu_finding = gpus()
    findings, seen = [], {}
    for interpreter in interpreters.values():
        found, more = inspect(interpreter, names)
        seen[interpreter.name if interpreter.host else interpreter.program or sys.executable] = found
        findings += more
    for path in files:
        findings += list(_workflow_problems(path, findings))
    findings += [*machine(), gpu_finding]
    findings += [address(each) for each in addresses]
    for path in keyed:
        findings += keys(path)
    for where in runs:
        findings += links(where, key, insecure)
    fine = all(each.level != FAILS for each in findings)
    return Examination(fine=fine, verdict=verdict(findings), findings=findings, interpreters=seen)


def _workflow_problems(file: Path, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Run the checks of ``asyncflow run`` on a workflow; skip problems already found in an
    interpreter."""
    problems = problems_of_file(file)
    if not problems:
        yield Finding(str(file), "workflow", FINE, "valid: its parts fit together")
    known = [each.message for each in findings if each.level == FAILS]
    for problem in problems:
        if not any(message in problem for message in known):
            yield Finding(str(file), "workflow", FAILS, problem)
