"""Inspection of an interpreter for ``asyncflow doctor``: ``PYTHON -m
asyncflow_sdk.plugins.inspection`` prints a JSON report.

Nothing heavy is imported: versions come from pip's metadata, and torch's CUDA version from torch's
version file.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from pathlib import Path

import msgspec

from .._version import __version__
from .choice import plugin_variables
from .discovery import find_plugins
from .known_issues import KNOWN_ISSUES
from .requirements import installed, unmet


class AdapterReport(msgspec.Struct, kw_only=True):
    """An adapter. ``installed``: versions of its requirements. ``missing``: unmet requirements with
    the reason. ``untested``: versions it was not tested with. ``compared``: True if its tested
    versions are requirements, which can be compared."""

    kind: str
    name: str
    source: str
    installed: dict[str, str] = {}
    missing: list[str] = []
    install: str = ""
    tested: str = ""
    compared: bool = False
    untested: list[str] = []


class IssueReport(msgspec.Struct, kw_only=True):
    """A known issue of the environment. ``installed``: the packages concerned, with versions."""

    installed: str
    level: str
    reason: str
    hint: str


class EnvironmentReport(msgspec.Struct, kw_only=True):
    """An interpreter's environment. ``sdk``: version of the SDK, "" if not installed.
    ``torch_cuda``: torch's CUDA version, "" for CPU builds; None without torch."""

    python: str
    executable: str
    sdk: str = ""
    adapters: list[AdapterReport] = []
    problems: list[str] = []
    blocked: list[str] = []
    choice: dict[str, str] = {}
    issues: list[IssueReport] = []
    torch_cuda: str | None = None


def inspect_environment() -> EnvironmentReport:
    """Inspect this interpreter."""
    found = find_plugins()
    adapters = []
    for adapter in sorted(found.adapters, key=lambda a: (a.spec.kind, a.spec.name)):
        spec = adapter.spec
        versions = {name: version for each in spec.requires for name, version in installed(each).items()}
        adapters.append(
            AdapterReport(
                kind=spec.kind, name=spec.name, source=adapter.source, installed=versions, missing=adapter.missing,
                install=adapter.install_command if spec.requires else "", tested=spec.tested_text,
                compared=not isinstance(spec.tested, str),
                untested=[] if adapter.missing else _untested(spec.tested),
            )
        )  # fmt: skip
    return EnvironmentReport(
        python=platform.python_version(), executable=sys.executable, sdk=__version__, adapters=adapters,
        problems=list(found.problems), blocked=list(found.blocked), choice=plugin_variables(),
        issues=[
            IssueReport(installed=issue.installed(), level=issue.level, reason=issue.reason, hint=issue.hint)
            for issue in KNOWN_ISSUES
            if issue.applies()
        ],
        torch_cuda=_torch_cuda(),
    )  # fmt: skip


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


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(inspect_environment()) + b"\n")
