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
from ..workflow.processes.command_launcher import explained, ssh_command
from .formats import plural
from .inspection import FAILS, FINE, NOTE, WARNING, EnvironmentReport, Finding, inspect_environment

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
_WANTS = (
    ("rollout", "engine", "rollout", "rollout {}"),
    ("rollout", "launcher", "launcher", "rollout {}"),
    ("train", "engine", "train", "train"),
    ("train", "algorithm", "algorithm", "train.algorithm"),
    ("train", "launcher", "launcher", "train"),
    ("weights", "transport", "transport", "weights"),
)
"""Adapters named in a workflow file: table, key, kind, and the place as printed."""
_LOCAL = ("launcher", "transport", "tracker")
"""Kinds that the driver itself uses."""


@dataclass
class Interpreter:
    """``program``: the path given by the user; None: this one. ``wants``: (kind, name, where) of adapters
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
    if seen is None or problem is not None:
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
    message = "it has no AsyncFlow SDK; workers need it"
    if seen.sdk:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        message = f"its asyncflow-sdk {seen.sdk} cannot be inspected ({last}); this one is {__version__}"
    return seen, Finding(where, f"Python {seen.python}", FAILS, message, _install(interpreter))


def _install(interpreter: Interpreter) -> str:
    return f"{interpreter.program} -m pip install asyncflow-sdk=={__version__}"


def _findings(interpreter: Interpreter, seen: EnvironmentReport) -> Iterator[Finding]:
    where = interpreter.name
    yield Finding(where, f"Python {seen.python}", FINE, f"asyncflow-sdk {seen.sdk}, {len(seen.adapters)} adapters")
    if seen.sdk != __version__:
        message = (
            f"asyncflow-sdk {seen.sdk}, but this one is {__version__}: a server refuses workers of another version"
        )
        yield Finding(where, "versions", FAILS, message, _install(interpreter))
    for problem in seen.problems:
        message, _, hint = problem.partition("; ")
        yield Finding(where, "", FAILS, message, hint)
    for blocked in seen.blocked:
        yield Finding(where, "blocked", NOTE, blocked)
    for issue in seen.issues:
        yield msgspec.structs.replace(issue, where=where)
    wanted = {(kind, name) for kind, name, _ in interpreter.wants}
    missing: dict[tuple[str, str], list[str]] = {}
    for adapter in seen.adapters:
        name, tested = f"{adapter.kind} {adapter.name}", f"tested with: {adapter.tested or 'unknown'}"
        versions = ", ".join(f"{package} {version}" for package, version in adapter.installed.items())
        if adapter.missing:
            if (adapter.kind, adapter.name) not in wanted:
                missing.setdefault((f"needs {'; '.join(adapter.missing)}", adapter.install), []).append(name)
        elif adapter.untested:
            yield Finding(where, name, NOTE, f"tested with {'; '.join(adapter.untested)}")
        elif versions:
            tested = f"as tested ({adapter.tested})" if adapter.compared else tested
            yield Finding(where, name, FINE, f"{versions}; {tested}")
    for (message, install), names in missing.items():
        yield Finding(where, ", ".join(names), NOTE, message, install)
    present = {(adapter.kind, adapter.name): adapter for adapter in seen.adapters}
    for kind, name, of in interpreter.wants:
        wants = present.get((kind, name))
        if wants is None:
            known = ", ".join(n for k, n in present if k == kind) or "none"
            hint = f"install its plugin there; installed: {known}"
            yield Finding(where, of, FAILS, f"no {kind} adapter is named {name!r}", hint)
        elif wants.missing:
            yield Finding(where, of, FAILS, f"{kind} {name} needs {'; '.join(wants.missing)}", wants.install)
        else:
            yield Finding(where, of, FINE, f"{kind} {name} of {wants.source}")


def _torch(interpreter: Interpreter, seen: EnvironmentReport, gpus: Sequence[str]) -> Iterator[Finding]:
    """Check that torch can use the GPUs, in a subprocess; only on this machine, and if it has some."""
    where, cuda = interpreter.name, seen.torch_cuda
    if cuda is None or not gpus or interpreter.host:
        return
    if not cuda:
        message = f"it is built for CPUs, and this machine has {plural(len(gpus), 'GPU')}"
        yield Finding(where, "torch", WARNING, message, "install a torch for CUDA there, to use the GPUs")
        return
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    try:
        done = interpreter.run("-c", code, timeout_s=TORCH_S)
        count, why = int(done.stdout.split()[-1]), (done.stderr.strip().splitlines() or [""])[-1]
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        count, why = 0, f"{type(error).__name__}: {error}"
    if count:
        yield Finding(where, "torch", FINE, f"for CUDA {cuda}, sees {plural(count, 'GPU')}")
    else:
        message = f"it is built for CUDA {cuda} and sees no GPU: {why or 'no reason given'}"
        yield Finding(where, "torch", FAILS, message, "compare its CUDA with the driver's (nvidia-smi)")


def interpreters_of(file: Path) -> list[Interpreter]:
    """Return the interpreters in a workflow file, also on its hosts, with the adapters needed in each.
    Raises ConfigError for invalid TOML."""
    try:
        tables: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None
    wants = [
        (table, kind, table.get(key), of.format(number))
        for name, key, kind, of in _WANTS
        for number, table in enumerate(_tables(tables.get(name)))
    ]
    for number, table in enumerate(_tables(tables.get("stages"))):
        work = table["work"] if isinstance(table.get("work"), dict) else {}
        wants += [(table, "train", work.get("logprobs"), f"stage {number}")]
        wants += [(table, "rollout", work.get("generate"), f"stage {number}")]
    trackers = tables.get("track", [])
    wants += [({}, "tracker", each, "track") for each in (trackers if isinstance(trackers, list) else [trackers])]
    found = {"": Interpreter(None)}
    for table, kind, name, of in wants:
        name = name.get("name") if isinstance(name, dict) else name
        for each in [Interpreter(None)] if kind in _LOCAL else _placed(table, file.parent):
            known = found.setdefault(each.name if each.program else "", each)
            if isinstance(name, str) and name not in ("", "auto") and ":" not in name:  # a path needs no plugin
                known.wants.append((kind, name, f"{file.name}, {of}"))
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
