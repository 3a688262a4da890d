"""Interpreters of workers, and what each has: SDK, plugins, engines and their versions, and what a workflow wants of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .._version import __version__
from ..errors import ConfigError
from ..plugins.inspection import EnvironmentReport, inspect_environment
from .findings import FAILS, FINE, NOTE, WARNING, Finding

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROBE_S = 60.0
TORCH_S = 180.0
_BARE = """
import importlib.metadata as m, json, platform, sys
try: sdk = m.version("asyncflow-sdk")
except m.PackageNotFoundError: sdk = ""
print(json.dumps({"python": platform.python_version(), "executable": sys.executable, "sdk": sdk}))
"""


@dataclass
class Interpreter:
    """``program``: as it was named; None: this one. ``wants``: (kind, name, where) of adapters that a workflow needs there."""

    program: str | None
    wants: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"this interpreter, {sys.executable}" if self.program is None else self.program


def look(interpreter: Interpreter, gpus: Sequence[str]) -> tuple[EnvironmentReport | None, list[Finding]]:
    """What it has, and what is to be said of that."""
    seen, problem = _probed(interpreter)
    if seen is None or not seen.sdk or problem is not None:
        return seen, [problem] if problem is not None else []
    return seen, [*_findings(interpreter, seen), *_torch(interpreter, seen, gpus)]


def _probed(interpreter: Interpreter) -> tuple[EnvironmentReport | None, Finding | None]:
    if interpreter.program is None:
        return inspect_environment(), None
    program, where = interpreter.program, interpreter.name
    if shutil.which(program) is None:
        return None, Finding(where, "", FAILS, "there is no such program", "python= names an interpreter")
    try:
        done = _run(program, "-m", "asyncflow_sdk.plugins.inspection")
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout.splitlines()[-1], type=EnvironmentReport), None
        bare = _run(program, "-c", _BARE)
        seen = msgspec.json.decode(bare.stdout, type=EnvironmentReport)
    except (OSError, IndexError, msgspec.MsgspecError, subprocess.TimeoutExpired) as error:
        return None, Finding(where, "", FAILS, f"it cannot be asked: {type(error).__name__}: {error}"[:300])
    how = f"{program} -m pip install asyncflow-sdk=={__version__}"
    if not seen.sdk:
        return seen, Finding(
            where, f"Python {seen.python}", FAILS, "it has no AsyncFlow SDK, which its workers need", how
        )
    last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
    said = f"its asyncflow-sdk {seen.sdk} cannot be asked ({last}); this one is {__version__}"
    return seen, Finding(where, f"Python {seen.python}", FAILS, said, how)


def _run(program: str, *arguments: str, timeout_s: float = PROBE_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)


def _findings(interpreter: Interpreter, seen: EnvironmentReport) -> Iterator[Finding]:
    where = interpreter.name
    kinds = f"{len(seen.adapters)} adapters"
    yield Finding(where, f"Python {seen.python}", FINE, f"asyncflow-sdk {seen.sdk}, {kinds}")
    if seen.sdk != __version__:
        said = f"asyncflow-sdk {seen.sdk}, and this one is {__version__}: a server refuses workers of another version"
        cure = f"{interpreter.program} -m pip install asyncflow-sdk=={__version__}"
        yield Finding(where, "versions", FAILS, said, cure)
    for problem in seen.problems:
        said, _, cure = problem.partition("; ")
        yield Finding(where, "", FAILS, said, cure)
    for blocked in seen.blocked:
        yield Finding(where, "blocked", NOTE, blocked)
    for issue in seen.issues:
        yield Finding(where, issue.installed, issue.level, issue.reason, issue.hint)
    yield from _engines(interpreter, seen)
    yield from _wanted(interpreter, seen)


def _engines(interpreter: Interpreter, seen: EnvironmentReport) -> Iterator[Finding]:
    where = interpreter.name
    wanted = {(kind, name) for kind, name, _ in interpreter.wants}
    told: dict[tuple[str, str], list[str]] = {}
    for adapter in seen.adapters:
        name = f"{adapter.kind} {adapter.name}"
        versions = ", ".join(f"{package} {version}" for package, version in adapter.installed.items())
        if adapter.missing:
            if (adapter.kind, adapter.name) not in wanted:
                told.setdefault((f"needs {'; '.join(adapter.missing)}", adapter.install), []).append(name)
        elif adapter.untested:
            yield Finding(where, name, NOTE, f"tested with {'; '.join(adapter.untested)}")
        elif versions:
            tested = (
                f"as tested ({adapter.tested})"
                if adapter.compared
                else f"tested with: {adapter.tested or 'it does not say'}"
            )
            yield Finding(where, name, FINE, f"{versions}; {tested}")
    for (said, install), names in told.items():
        yield Finding(where, ", ".join(names), NOTE, said, install)


def _wanted(interpreter: Interpreter, seen: EnvironmentReport) -> Iterator[Finding]:
    there = {(adapter.kind, adapter.name): adapter for adapter in seen.adapters}
    for kind, name, of in interpreter.wants:
        adapter = there.get((kind, name))
        if adapter is None:
            known = ", ".join(n for k, n in there if k == kind) or "none"
            cure = f"install the plugin that has it there; installed: {known}"
            yield Finding(interpreter.name, of, FAILS, f"no {kind} adapter is named {name!r}", cure)
        elif adapter.missing:
            yield Finding(
                interpreter.name, of, FAILS, f"{kind} {name} needs {'; '.join(adapter.missing)}", adapter.install
            )
        else:
            yield Finding(interpreter.name, of, FINE, f"{kind} {name} of {adapter.source}")


def _torch(interpreter: Interpreter, seen: EnvironmentReport, gpus: Sequence[str]) -> Iterator[Finding]:
    """Whether its torch can use the GPUs. Asked in a process of its own, and only where there are some."""
    if seen.torch_cuda is None or not gpus:
        return
    if not seen.torch_cuda:
        said = f"it is built for CPUs, and this machine has {len(gpus)} GPU{'s' * (len(gpus) > 1)}"
        yield Finding(
            interpreter.name, "torch", WARNING, said, "install a torch for CUDA there, unless CPUs are meant"
        )
        return
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    try:
        done = _run(interpreter.program or sys.executable, "-c", code, timeout_s=TORCH_S)
        count, why = int(done.stdout.split()[-1]), (done.stderr.strip().splitlines() or [""])[-1]
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        count, why = 0, f"{type(error).__name__}: {error}"
    if count:
        yield Finding(interpreter.name, "torch", FINE, f"for CUDA {seen.torch_cuda}, sees {count} GPUs")
    else:
        said = f"it is built for CUDA {seen.torch_cuda} and sees no GPU: {why or 'no reason given'}"
        yield Finding(interpreter.name, "torch", FAILS, said, "compare its CUDA with the driver's (nvidia-smi)")


# ---- what a workflow's file wants


def wanted_by(file: Path) -> dict[str | None, Interpreter]:
    """The interpreters that a workflow's file names, with what it needs of each. Raises ConfigError for what is no TOML."""
    try:
        tables: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no TOML: {error}") from None
    found: dict[str | None, Interpreter] = {None: Interpreter(None)}

    def want(table: Any, kind: str, name: Any, of: str, *, here: bool = False) -> None:
        program = None if here or not isinstance(table, dict) else table.get("python")
        if isinstance(program, str) and "/" in program:
            program = os.path.abspath(file.parent / program)
        each = found.setdefault(program, Interpreter(program))
        if isinstance(name, str) and name and ":" not in name:  # a path needs no plugin
            each.wants.append((kind, name, f"{file.name}, {of}"))

    for number, table in enumerate(_tables(tables.get("rollout"))):
        want(table, "rollout", table.get("engine"), f"rollout {number}")
        want(table, "launcher", table.get("launcher"), f"rollout {number}", here=True)
    for number, table in enumerate(_tables(tables.get("stages"))):
        work = table.get("work")
        for key, kind in (("logprobs", "train"), ("generate", "rollout")):
            want(table, kind, work.get(key) if isinstance(work, dict) else None, f"stage {number}")
    for table in _tables(tables.get("train")):
        want(table, "train", table.get("engine"), "train")
        want(table, "algorithm", _name(table.get("algorithm")), "train.algorithm")
        want(table, "launcher", table.get("launcher"), "train", here=True)
    trackers = tables.get("trackers", [])
    for tracker in trackers if isinstance(trackers, list) else [trackers]:
        want(None, "tracker", _name(tracker), "trackers", here=True)
    for table in _tables(tables.get("weights")):
        transport = table.get("transport")
        want(None, "transport", None if transport == "auto" else transport, "weights", here=True)
    return found


def _tables(value: Any) -> list[dict[str, Any]]:
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]


def _name(value: Any) -> Any:
    return value.get("name") if isinstance(value, dict) else value
