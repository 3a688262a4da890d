"""The machine, as far as a run depends on it: shared memory, limits, GPUs, ports, and the keys of runs."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import AsyncFlowError, ConfigError
from ..memory.directory import SMALL_BYTES
from ..memory.free_space import SHM, free_memory
from .findings import FAILS, FINE, NOTE, WARNING, Finding
from .lines import size

HERE = "this machine"
FEW_FILES, LEAST_FILES = 1024, 256
NVIDIA_S = 20.0


def machine() -> Iterator[Finding]:
    """All but what was asked for by name."""
    yield from _shared_memory()
    yield from _limits()
    yield _loopback()


def gpus() -> tuple[list[str], Finding]:
    """Names of the NVIDIA GPUs, and what is said of them."""
    program = shutil.which("nvidia-smi")
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if program is None:
        if devices:
            said = f"{', '.join(devices)} are there, and nvidia-smi is not"
            return devices, Finding(
                HERE, "GPUs", WARNING, said, "install the driver's tools, to see whether they work"
            )
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
    temporary = Path(tempfile.gettempdir())
    try:
        room = os.statvfs(SHM)
        free, whole = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
        writable = os.access(SHM, os.W_OK)
    except OSError:
        free, whole, writable = 0, 0, False
    if free >= SMALL_BYTES and writable:
        yield Finding(HERE, "/dev/shm", FINE, f"{size(free)} of {size(whole)} free")
        if free_memory() < free:
            said = f"{size(free_memory())} of memory are free, and /dev/shm would take {size(free)}"
            yield Finding(HERE, "memory", NOTE, f"{said}: what a run keeps there is memory")
    elif os.access(temporary, os.W_OK):
        state = (
            "cannot be written" if whole and not writable else f"has {size(free)} free" if whole else "is not there"
        )
        said = f"it {state}; segments go to mapped files in {temporary}, which is slower"
        yield Finding(
            HERE, "/dev/shm", WARNING, said, "in a container: --shm-size=8g, or as much as the rows and weights take"
        )
    else:
        said = f"neither it nor {temporary} can be written: there is no place for segments"
        yield Finding(HERE, "/dev/shm", FAILS, said, "mount a tmpfs at /dev/shm, or set TMPDIR")


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"{soft} open files" + ("" if hard == soft else f", {hard} at most")
    if soft < FEW_FILES:
        level = FAILS if soft < LEAST_FILES else WARNING
        yield Finding(HERE, "ulimit -n", level, f"{said}: each worker and each segment takes some", "ulimit -n 65536")
    else:
        yield Finding(HERE, "ulimit -n", FINE, said)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = "unlimited" if locked == resource.RLIM_INFINITY else f"{size(locked)} of locked memory"
    yield Finding(HERE, "ulimit -l", NOTE, f"{said}; the SDK locks none, engines with RDMA or pinned memory may")


def _loopback() -> Finding:
    try:
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding(
            HERE, "ports", FAILS, f"no port of 127.0.0.1 can be had: {error.strerror}", "see to the loopback device"
        )
    return Finding(HERE, "ports", FINE, "ports of 127.0.0.1 can be had")


def address(text: str) -> Finding:
    """Whether a run could be served there now. Raises ConfigError for what is no address."""
    matched = re.fullmatch(r"tcp://(\[[\w:.]+\]|[\w.*-]+):(\d+|\*)", text)
    port = 0 if matched is None or matched[2] == "*" else int(matched[2])
    if matched is None or port > 65535:
        raise ConfigError(f"{text!r} is no address: tcp://HOST:PORT is, such as tcp://0.0.0.0:7000")
    host = {"*": "0.0.0.0"}.get(matched[1], matched[1].strip("[]"))
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(target)
            trial.listen()
    except OSError as error:
        cure = (
            "give another port, or end who has it (ss -ltnp)" if error.errno == 98 else "give an address of this host"
        )
        return Finding(HERE, text, FAILS, f"it cannot be served: {error.strerror or error}", cure)
    alone = host.startswith("127.") or host in ("::1", "localhost")
    known = "this host alone reaches it" if alone else "other hosts reach it"
    return Finding(HERE, text, FINE, f"free; {known}; it is served with keys")


def keys(path: Path) -> Iterator[Finding]:
    """Of a run's directory, or of a file with a key."""
    from ..wire.keys import RunKey, ServerKeys

    files = [path / "server.key", path / "run.key"] if path.is_dir() else [path]
    there = [file for file in files if os.path.lexists(file)]
    if not there:
        yield Finding(str(path), "keys", NOTE, "there are none: a run has some when it is served over tcp")
    for file in there:
        kind: type[RunKey] | type[ServerKeys] = ServerKeys if file.name == "server.key" else RunKey
        try:
            kind.load(file)
        except AsyncFlowError as error:
            said, _, cure = str(error).partition("; ")
            yield Finding(str(path), file.name, FAILS, said, cure)
        else:
            yield Finding(str(path), file.name, FINE, "readable by its owner alone")
