"""``asyncflow doctor``: interpreter by interpreter what is installed, and what on this machine a run depends on."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from ..errors import ConfigError
from ..plugins.inspection import EnvironmentReport
from ..workflow.toml import problems_of_file
from .findings import FAILS, FINE, Finding, show, verdict
from .interpreters import Interpreter, look, wanted_by
from .machine import address, gpus, keys, machine


class Examination(msgspec.Struct, kw_only=True):
    """All that was found. ``fine``: nothing of it will fail."""

    fine: bool
    verdict: str
    findings: list[Finding]
    interpreters: dict[str, EnvironmentReport | None]

    def json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    def print(self, console: Console) -> None:
        show(self.findings, console)
        console.print(Text(f"\n{self.verdict}", style="green" if self.fine else "bold red"), soft_wrap=True)


def examine(what: Sequence[Path], pythons: Sequence[str], addresses: Sequence[str]) -> Examination:
    """``what``: workflows as TOML, directories of runs, key files. Raises ConfigError for what is none of them."""
    interpreters: dict[str | None, Interpreter] = {None: Interpreter(None)}
    runs: list[Path] = []
    files: list[Path] = []
    for path in what:
        if path.suffix == ".toml":
            files.append(path)
            for program, each in wanted_by(path).items():
                interpreters.setdefault(program, Interpreter(program)).wants += each.wants
        elif path.is_dir() or path.suffix == ".key":
            runs.append(path)
        else:
            raise ConfigError(f"{path} is no workflow (FILE.toml), no directory of a run, and no key (FILE.key)")
    for program in pythons:
        interpreters.setdefault(program, Interpreter(program))
    names, said = gpus()
    findings, seen = [], {}
    for interpreter in interpreters.values():
        found, told = look(interpreter, names)
        seen[interpreter.program or sys.executable] = found
        findings += told
    for path in files:
        findings += list(_refused(path, findings))
    findings += [*machine(), said]
    findings += [address(each) for each in addresses]
    for path in runs:
        findings += keys(path)
    fine = all(each.level != FAILS for each in findings)
    return Examination(fine=fine, verdict=verdict(findings), findings=findings, interpreters=seen)


def _refused(file: Path, findings: Sequence[Finding]) -> Iterator[Finding]:
    """What ``asyncflow run`` refuses of a workflow, by its own checks, beyond what an interpreter's findings say already."""
    problems = problems_of_file(file)
    if not problems:
        yield Finding(str(file), "workflow", FINE, "everything that is known before it starts fits together")
    told = [each.said for each in findings if each.level == FAILS]
    for problem in problems:
        if not any(said in problem for said in told):
            yield Finding(str(file), "workflow", FAILS, problem)
