"""What is installed under an interpreter, for ``asyncflow doctor``: ``PYTHON -m asyncflow_sdk.plugins.probing`` prints it as JSON.

Nothing heavy is imported: versions come from what pip wrote, and whether torch was built for GPUs from its version file.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from pathlib import Path

import msgspec

from .._version import __version__
from .choice import plugin_choice
from .finding import find_plugins
from .known import KNOWN
from .requirements import installed, unmet


class AdapterSeen(msgspec.Struct, kw_only=True):
    """An adapter. ``installed``: versions of what it requires; ``missing``: requirements that are not met, ``untested``: versions it
    was not tested with, each with why. ``compared``: whether what it was tested with can be compared."""

    kind: str
    name: str
    source: str
    installed: dict[str, str] = {}
    missing: list[str] = []
    install: str = ""
    tested: str = ""
    compared: bool = False
    untested: list[str] = []


class KnownSeen(msgspec.Struct, kw_only=True):
    found: str
    level: str
    reason: str
    cure: str


class Seen(msgspec.Struct, kw_only=True):
    """``sdk``: its version, "" where it is not installed. ``torch_cuda``: what torch was built for, "" for CPUs; None without torch."""

    python: str
    executable: str
    sdk: str = ""
    adapters: list[AdapterSeen] = []
    problems: list[str] = []
    blocked: list[str] = []
    choice: dict[str, str] = {}
    known: list[KnownSeen] = []
    torch_cuda: str | None = None


def look() -> Seen:
    """Of this interpreter."""
    found = find_plugins()
    seen = []
    for adapter in sorted(found.adapters, key=lambda a: (a.spec.kind, a.spec.name)):
        spec = adapter.spec
        here = {name: version for each in spec.requires for name, version in installed(each).items()}
        seen.append(
            AdapterSeen(
                kind=spec.kind, name=spec.name, source=adapter.source, installed=here, missing=adapter.missing,
                install=adapter.cure if spec.requires else "", tested=spec.tested_text, compared=not isinstance(spec.tested, str),
                untested=[] if adapter.missing or isinstance(spec.tested, str) else _untested(spec.tested),
            )
        )  # fmt: skip
    known = [KnownSeen(found=k.found(), level=k.level, reason=k.reason, cure=k.cure) for k in KNOWN if k.here()]
    return Seen(
        python=platform.python_version(), executable=sys.executable, sdk=__version__, adapters=seen,
        problems=list(found.problems), blocked=list(found.blocked), choice=plugin_choice(), known=known,
        torch_cuda=_torch_cuda(),
    )  # fmt: skip


def _untested(tested: object) -> list[str]:
    why = []
    for requirement in tested if isinstance(tested, (list, tuple)) else ():
        try:
            why.append(unmet(requirement))
        except ValueError:  # a text for people
            continue
    return [each for each in why if each]


def _torch_cuda() -> str | None:
    """From torch's own file, which says ``cuda: Optional[str] = '12.8'`` or None."""
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
    sys.stdout.buffer.write(msgspec.json.encode(look()) + b"\n")
