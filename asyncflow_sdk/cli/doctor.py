"""``asyncflow doctor``: check each interpreter's packages, this machine, and the links to a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from ..errors import AsyncFlowError, ConfigError
from ..interfaces.store import StorageHome
from ..types.reports import HomeStatus
from ..wire import probe
from ..workflow import Run, connect
from ..workflow.plan.toml import problems_of_file
from .formats import duration, plural, size
from .inspection import FAILS, FINE, NOTE, WARNING, EnvironmentReport, Finding
from .interpreters import Interpreter, inspect, interpreters_of
from .machine import address, gpus, keys, machine

CONNECT_S = 10.0
_STYLES = {FINE: "green", NOTE: "cyan", WARNING: "yellow", FAILS: "bold red"}


class Examination(msgspec.Struct, kw_only=True):
    """All findings. ``fine``: none of them fails."""

    fine: bool
    verdict: str
    findings: list[Finding]
    interpreters: dict[str, EnvironmentReport | None]

    def print(self, console: Console) -> None:
        """Print a block per place and a line per finding, with its hint below, and the verdict."""
        where = ""
        for each in self.findings:
            if each.where != where:
                where = each.where
                console.print(Text(f"\n{where}", style="bold"), soft_wrap=True)
            mark = Text(f"  {each.level:8}", style=_STYLES[each.level])
            subject = f"{each.subject}: " if each.subject else ""
            console.print(Text.assemble(mark, subject, each.message), soft_wrap=True)
            if each.hint:
                style = "dim" if each.level == NOTE else "cyan"
                console.print(Text(f"            {each.hint}", style=style), soft_wrap=True)
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
    files = [path for path in paths if path.suffix == ".toml"]
    keyed = [path for path in paths if path not in files]
    for path in keyed:
        if not path.is_dir() and path.suffix != ".key":
            raise ConfigError(f"{path} is neither a workflow (FILE.toml), a run directory nor a key (FILE.key)")
    interpreters = {each.name: each for each in [Interpreter(None)]}
    for each in [*(each for path in files for each in interpreters_of(path)), *map(Interpreter, pythons)]:
        interpreters.setdefault(each.name, Interpreter(each.program, [], each.host, each.config)).wants.extend(
            each.wants
        )
    names, gpu_finding = gpus()
    findings, seen = list[Finding](), dict[str, EnvironmentReport | None]()
    for interpreter in interpreters.values():
        found, more = inspect(interpreter, names)
        seen[interpreter.name if interpreter.host else interpreter.program or sys.executable] = found
        findings += more
    for path in files:
        findings += list(_workflow_problems(path, findings))
    findings += [*machine(), gpu_finding, *map(address, addresses)]
    findings += [finding for path in keyed for finding in keys(path)]
    findings += [finding for where in runs for finding in _links(where, key, insecure)]
    levels = [each.level for each in findings]
    fails, warns = levels.count(FAILS), levels.count(WARNING)
    verdict = (plural(fails, "problem") if fails else "no problems") + (
        f", {plural(warns, 'warning')}" if warns else ""
    )
    return Examination(fine=not fails, verdict=verdict, findings=findings, interpreters=seen)


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


def _links(address: str, key: Path | None, insecure: bool) -> Iterator[Finding]:
    """Check that a run and each storage unit of it answer here."""
    try:
        probe(address)
        run = connect(address, key=key, insecure=insecure, name="doctor", timeout_s=CONNECT_S)
    except AsyncFlowError as error:
        yield Finding(address, "run", FAILS, str(error), "is it served, and with the key given by --key?")
        return
    with run:
        yield Finding(address, "run", FINE, "its server answers")
        seen = {each.home: each for each in run.queue.status().homes}
        for home in run.homes():
            yield _link(address, run, home, seen[home.home])


def _link(address: str, run: Run, home: StorageHome, status: HomeStatus) -> Finding:
    subject = f"home {home.home} ({home.name})"
    if status.state == "lost":
        losses = f"{plural(status.rows_failed, 'row')} failed"
        return Finding(address, subject, NOTE, f"lost: {status.detail}; {losses} in all its losses")
    if status.state == "absent":
        message = f"no storage unit for {duration(status.absent_s)}"
        hint = f"start one on that host (asyncflow store {address}), or give it up (run.evict_home)"
        return Finding(address, subject, WARNING, message, hint)
    try:
        took_s = run.ping_home(home)
    except AsyncFlowError as error:
        return Finding(address, subject, FAILS, str(error), "open the port of the storage unit to this host")
    message = f"{size(status.payload_bytes)} of payload; {home.address} answers after {1000 * took_s:.1f} ms"
    return Finding(address, subject, FINE, message)
