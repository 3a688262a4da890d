"""The interpreters of workers: their SDK, plugins and engines, compared with the needs of a
workflow."""

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
from ..workflow.workers.ssh_launcher import explained, ssh_command
from .findings import FAILS, FINE, NOTE, WARNING, Finding
from .formats import plural
from .inspection import EnvironmentReport, inspect_environment

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
    """``program``: as given by the user; None: this one. ``wants``: (kind, name, where) of adapters
    needed by a workflow. ``host``: reached by ssh, with the configuration file ``config``; "": this one."""

    program: str | None
    wants: list[tuple[str, str, str]] = field(default_factory=list)
    host: str = ""
    config: str = ""

    @property
    def name(self) -> str:
        """The interpreter as printed."""
        if self.host:
            return f"host {self.host}, {self.program}"
        return f"this interpreter, {sys.executable}" if self.program is None else self.program

    def run(self, *arguments: str, timeout_s: float = PROBE_S) -> subprocess.CompletedProcess[str]:
        """Run it, and return its output."""
        command = [self.program or sys.executable, *arguments]
        if self.host:
            command = ssh_command(self.host, command, self.config)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def inspect(interpreter: Interpreter, gpus: Sequence[str]) -> tuple[EnvironmentReport | None, list[Finding]]:
    """Inspect an interpreter. Return its environment, None if it cannot run, and the findings."""
    seen, problem = _probe(interpreter)
    if seen is None or not seen.sdk or problem is not None:
        return seen, [problem] if problem is not None else []
    return seen, [*_findings(interpreter, seen), *_torch(interpreter, seen, gpus)]


def _probe(interpreter: Interpreter) -> tuple[EnvironmentReport | None, Finding | None]:
    if interpreter.program is None:
        return inspect_environment(), None
    program, where = interpreter.program, interpreter.name
    if not interpreter.host and shutil.which(program) is None:
        return None, Finding(where, "", FAILS, "there is no such program", "python= names an interpreter")
    try:
        done = interpreter.run("-m", "asyncflow_sdk.cli.inspection")
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout.splitlines()[-1], type=EnvironmentReport), None
        failed = explained(interpreter.host, program, done.returncode, done.stderr) if interpreter.host else None
        if failed is not None:
            return None, Finding(where, "", FAILS, failed.text)
        bare = interpreter.run("-c", _BARE)
        seen = msgspec.json.decode(bare.stdout, type=EnvironmentReport)
    except (OSError, IndexError, msgspec.MsgspecError, subprocess.TimeoutExpired) as error:
        return None, Finding(where, "", FAILS, f"it cannot be inspected: {type(error).__name__}: {error}"[:300])
    how = f"{program} -m pip install asyncflow-sdk=={__version__}"
    if not seen.sdk:
        return seen, Finding(where, f"Python {seen.python}", FAILS, "it has no AsyncFlow SDK; workers need it", how)
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    message = f"its asyncflow-sdk {seen.sdk} cannot be inspected ({last}); this one is {__version__}"
    return seen, Finding(where, f"Python {seen.python}", FAILS, message, how)


def _findings(interpreter: Interpreter, seen: EnvironmentReport) -> Iterator[Finding]:
    where = interpreter.name
    yield Finding(where, f"Python {seen.python}", FINE, f"asyncflow-sdk {seen.sdk}, {len(seen.adapters)} adapters")
    if seen.sdk != __version__:
        message = (
            f"asyncflow-sdk {seen.sdk}, but this one is {__version__}: a server refuses workers of another version"
        )
        hint = f"{interpreter.program} -m pip install asyncflow-sdk=={__version__}"
        yield Finding(where, "versions", FAILS, message, hint)
    for problem in seen.problems:
        message, _, hint = problem.partition("; ")
        yield Finding(where, "", FAILS, message, hint)
    for blocked in seen.blocked:
        yield Finding(where, "blocked", NOTE, blocked)
    for issue in seen.issues:
        yield Finding(where, issue.installed, issue.level, issue.reason, issue.hint)
    yield from _engines(interpreter, seen)
    yield from _wanted(interpreter, seen)


def _engines(interpreter: Interpreter, seen: EnvironmentReport) -> Iterator[Finding]:
    where = interpreter.name
    wanted = {(kind, name) for kind, name, _ in interpreter.wants}
    missing: dict[tuple[str, str], list[str]] = {}
    for adapter in seen.adapters:
        name = f"{adapter.kind} {adapter.name}"
        versions = ", ".join(f"{package} {version}" for package, version in adapter.installed.items())
        if adapter.missing:
            if (adapter.kind, adapter.name) not in wanted:
                missing.setdefault((f"needs {'; '.join(adapter.missing)}", adapter.install), []).append(name)
        elif adapter.untested:
            yield Finding(where, name, NOTE, f"tested with {'; '.join(adapter.untested)}")
        elif versions:
            tested = (
                f"as tested ({adapter.tested})" if adapter.compared else f"tested with: {adapter.tested or 'unknown'}"
            )
            yield Finding(where, name, FINE, f"{versions}; {tested}")
    for (message, install), names in missing.items():
        yield Finding(where, ", ".join(names), NOTE, message, install)


def _wanted(interpreter: Interpreter, seen: EnvironmentReport) -> Iterator[Finding]:
    there = {(adapter.kind, adapter.name): adapter for adapter in seen.adapters}
    for kind, name, of in interpreter.wants:
        adapter = there.get((kind, name))
        if adapter is None:
            known = ", ".join(n for k, n in there if k == kind) or "none"
            hint = f"install its plugin there; installed: {known}"
            yield Finding(interpreter.name, of, FAILS, f"no {kind} adapter is named {name!r}", hint)
        elif adapter.missing:
            yield Finding(
                interpreter.name, of, FAILS, f"{kind} {name} needs {'; '.join(adapter.missing)}", adapter.install
            )
        else:
            yield Finding(interpreter.name, of, FINE, f"{kind} {name} of {adapter.source}")


def _torch(interpreter: Interpreter, seen: EnvironmentReport, gpus: Sequence[str]) -> Iterator[Finding]:
    """Check that torch can use the GPUs, in a subprocess; only on this machine, and if it has some."""
    if seen.torch_cuda is None or not gpus or interpreter.host:
        return
    if not seen.torch_cuda:
        message = f"it is built for CPUs, and this machine has {plural(len(gpus), 'GPU')}"
        yield Finding(interpreter.name, "torch", WARNING, message, "install a torch for CUDA there, to use the GPUs")
        return
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    try:
        done = interpreter.run("-c", code, timeout_s=TORCH_S)
        count, why = int(done.stdout.split()[-1]), (done.stderr.strip().splitlines() or [""])[-1]
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        count, why = 0, f"{type(error).__name__}: {error}"
    if count:
        yield Finding(interpreter.name, "torch", FINE, f"for CUDA {seen.torch_cuda}, sees {plural(count, 'GPU')}")
    else:
        message = f"it is built for CUDA {seen.torch_cuda} and sees no GPU: {why or 'no reason given'}"
        yield Finding(interpreter.name, "torch", FAILS, message, "compare its CUDA with the driver's (nvidia-smi)")


def interpreters_of(file: Path) -> list[Interpreter]:
    """Return the interpreters in a workflow file, also on its hosts, with the adapters needed in each.
    Raises ConfigError for invalid TOML."""
    try:
        tables: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None
    found = {"": Interpreter(None)}

    def _want(table: Any, kind: str, name: Any, of: str, *, here: bool = False) -> None:
        for each in [Interpreter(None)] if here or not isinstance(table, dict) else _placed(table, file.parent):
            known = found.setdefault(each.name if each.program else "", each)
            if isinstance(name, str) and name and ":" not in name:  # a path needs no plugin
                known.wants.append((kind, name, f"{file.name}, {of}"))

    for number, table in enumerate(_tables(tables.get("rollout"))):
        _want(table, "rollout", table.get("engine"), f"rollout {number}")
        _want(table, "launcher", table.get("launcher"), f"rollout {number}", here=True)
    for number, table in enumerate(_tables(tables.get("stages"))):
        work = table.get("work")
        for key, kind in (("logprobs", "train"), ("generate", "rollout")):
            _want(table, kind, work.get(key) if isinstance(work, dict) else None, f"stage {number}")
    for table in _tables(tables.get("train")):
        _want(table, "train", table.get("engine"), "train")
        _want(table, "algorithm", _name(table.get("algorithm")), "train.algorithm")
        _want(table, "launcher", table.get("launcher"), "train", here=True)
    trackers = tables.get("track", [])
    for tracker in trackers if isinstance(trackers, list) else [trackers]:
        _want(None, "tracker", _name(tracker), "track", here=True)
    for table in _tables(tables.get("weights")):
        transport = table.get("transport")
        _want(None, "transport", None if transport == "auto" else transport, "weights", here=True)
    return list(found.values())


def _placed(table: dict[str, Any], folder: Path) -> list[Interpreter]:
    """Return the interpreter of a role: one, or one on each of its hosts."""
    program, hosts, options = table.get("python"), table.get("hosts"), table.get("launcher_options")
    if isinstance(program, str) and "/" in program:
        program = os.path.abspath(folder / program)
    if table.get("launcher") != "ssh" or not isinstance(hosts, list):
        return [Interpreter(program)]
    config = options.get("config", "") if isinstance(options, dict) else ""
    config = str(folder / config) if config.startswith(("./", "../")) else config
    return [Interpreter(program or sys.executable, host=str(host), config=config) for host in hosts]


def _tables(value: Any) -> list[dict[str, Any]]:
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]


def _name(value: Any) -> Any:
    return value.get("name") if isinstance(value, dict) else value
