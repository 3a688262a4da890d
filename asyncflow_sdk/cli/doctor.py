"""``asyncflow doctor``: check each interpreter's packages, this machine, and the links to a run."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from ..errors import AsyncFlowError, ConfigError
from ..interfaces.store import StorageHome
from ..memory.directory import SMALL_BYTES
from ..memory.segment import SHM, free_memory
from ..types.reports import HomeStatus
from ..wire import probe
from ..wire.keys import RunKey, ServerKeys
from ..workflow import Run, connect
from ..workflow.plan.toml import problems_of_file
from .formats import duration, plural, size
from .inspection import FAILS, FINE, NOTE, WARNING, EnvironmentReport, Finding
from .interpreters import Interpreter, inspect, interpreters_of

CONNECT_S, NVIDIA_S = 10.0, 20.0
HERE = "this machine"
FEW_FILES, LEAST_FILES = 1024, 256
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
    interpreters: dict[str, Interpreter] = {}
    of_files = [each for path in files for each in interpreters_of(path)]
    for each in [Interpreter(None), *of_files, *map(Interpreter, pythons)]:
        known = interpreters.setdefault(each.name, each)
        known.wants.extend(each.wants if known is not each else ())
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
    warned = f", {plural(warns, 'warning')}" if warns else ""
    verdict = (plural(fails, "problem") if fails else "no problems") + warned
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


def machine() -> Iterator[Finding]:
    """Check shared memory, limits and the loopback device."""
    yield from _shared_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = f"{soft} open files" + ("" if hard == soft else f", {hard} at most")
    if soft < FEW_FILES:
        level = FAILS if soft < LEAST_FILES else WARNING
        yield Finding(HERE, "ulimit -n", level, f"{files}: every worker and segment uses some", "ulimit -n 65536")
    else:
        yield Finding(HERE, "ulimit -n", FINE, files)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memory = "unlimited" if locked == resource.RLIM_INFINITY else f"{size(locked)} of locked memory"
    yield Finding(HERE, "ulimit -l", NOTE, f"{memory}; the SDK locks none, engines with RDMA or pinned memory may")
    try:
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
        yield Finding(HERE, "ports", FINE, "ports of 127.0.0.1 can be used")
    except OSError as error:
        message = f"no port of 127.0.0.1 can be used: {error.strerror}"
        yield Finding(HERE, "ports", FAILS, message, "enable the loopback device")


def gpus() -> tuple[list[str], Finding]:
    """Return the names of the NVIDIA GPUs, and the finding about them."""
    program = shutil.which("nvidia-smi")
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if program is None:
        if devices:
            message = f"{', '.join(devices)} exist, but nvidia-smi is not installed"
            return devices, Finding(HERE, "GPUs", WARNING, message, "install the driver's tools to check the GPUs")
        return [], Finding(HERE, "GPUs", NOTE, "no NVIDIA GPU; engines run on CPUs")
    query = [program, "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_S, check=False)
        text, failed = (done.stdout or done.stderr).strip(), done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        text, failed = f"{type(error).__name__}: {error}", True
    if failed:
        level = FAILS if devices else NOTE
        return devices, Finding(HERE, "GPUs", level, f"nvidia-smi fails: {text.splitlines()[0] if text else '?'}")
    found = text.splitlines()
    return found, Finding(HERE, "GPUs", FINE, "; ".join(found) or "none")


def _shared_memory() -> Iterator[Finding]:
    temporary, free, state = Path(tempfile.gettempdir()), 0, "does not exist"
    with contextlib.suppress(OSError):
        room = shutil.disk_usage(SHM)
        state = f"has {size(room.free)} free"
        if os.access(SHM, os.W_OK):
            free = room.free
        else:
            state = "is not writable"
    if free >= SMALL_BYTES:
        yield Finding(HERE, "/dev/shm", FINE, f"{size(free)} of {size(room.total)} free")
        if free_memory() < free:
            message = (
                f"{size(free_memory())} of memory are free, but /dev/shm allows {size(free)}: its content is memory"
            )
            yield Finding(HERE, "memory", NOTE, message)
    elif os.access(temporary, os.W_OK):
        message = f"it {state}; segments go to mapped files in {temporary}, and are slower"
        hint = "in a container: --shm-size=8g, or enough for rows and weights"
        yield Finding(HERE, "/dev/shm", WARNING, message, hint)
    else:
        message = f"neither it nor {temporary} is writable: segments cannot be stored"
        yield Finding(HERE, "/dev/shm", FAILS, message, "mount a tmpfs at /dev/shm, or set TMPDIR")


def address(text: str) -> Finding:
    """Check that a run can be served at an address now. Raises ConfigError if it is none."""
    matched = re.fullmatch(r"tcp://(\[[\w:.]+\]|[\w.*-]+):(\d+|\*)", text)
    port = 0 if matched is None or matched[2] == "*" else int(matched[2])
    if matched is None or port > 65535:
        raise ConfigError(f"{text!r} is no address: use tcp://HOST:PORT, for example tcp://0.0.0.0:7000")
    host = {"*": "0.0.0.0"}.get(matched[1], matched[1].strip("[]"))
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(target)
            trial.listen()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        hint = "use another port, or stop its owner (ss -ltnp)" if taken else "use an address of this host"
        return Finding(HERE, text, FAILS, f"a run cannot be served there: {error.strerror or error}", hint)
    alone = host.startswith("127.") or host in ("::1", "localhost")
    reach = "only this host can reach it" if alone else "other hosts can reach it"
    return Finding(HERE, text, FINE, f"free; {reach}; a run there is served with keys")


def keys(path: Path) -> Iterator[Finding]:
    """Check the keys in a run's directory, or one key file."""
    files = [path / "server.key", path / "run.key"] if path.is_dir() else [path]
    found = [file for file in files if os.path.lexists(file)]
    if not found:
        yield Finding(str(path), "keys", NOTE, "none; a run has keys if it is served over tcp")
    for file in found:
        kind: type[RunKey] | type[ServerKeys] = ServerKeys if file.name == "server.key" else RunKey
        try:
            kind.load(file)
        except AsyncFlowError as error:
            message, _, hint = str(error).partition("; ")
            yield Finding(str(path), file.name, FAILS, message, hint)
        else:
            yield Finding(str(path), file.name, FINE, "readable only by its owner")
