"""What processes with a small /dev/shm of their own do."""

import ctypes
import logging
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from children import say

import asyncflow_sdk as af
from asyncflow_sdk.errors import AsyncFlowError

_NEW_MOUNTS = 0x00020000
SHM = Path("/dev/shm")


def _mount(megabytes: int) -> bool:
    """Give this process a /dev/shm of its own. Says why not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS):
        say(f"cannot unshare: {os.strerror(ctypes.get_errno())}")
        return False
    for arguments in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(SHM)]):
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
        if done.returncode:
            say(f"cannot mount: {done.stderr}")
            return False
    return True


def _take(path: Path, megabytes: int) -> None:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, megabytes << 20)


def serve_in_a_container(temporary: str, megabytes: int, left: int) -> None:
    """Put and get much through a run of this process. ``left``: MB that a killed run left."""
    if not _mount(megabytes):
        return
    tempfile.tempdir = temporary
    dead = SHM / f"asyncflow-{os.getuid()}-1-0"
    dead.mkdir()
    (dead / "owner").touch()
    _take(dead / "s1-1", left)
    equal = 0
    with af.serve() as run:
        run.queue.declare("read", needs=["x"])
        for number in range(40):
            values = np.full((4, 1 << 20), number, np.uint8)
            run.queue.put({"x": values})
            with run.queue.get("read", 4) as batch:
                equal += int(np.array_equal(batch.array("x"), values))
                batch.ack()
        base = str(run.queue._port.connection.directory.parent)
    say({"equal": equal, "base": base, "shm": os.listdir(SHM)})


def fill_up() -> None:
    """Fill shared memory up while a queue works."""
    if not _mount(300):
        return
    logging.disable()
    outcome: dict[str, Any] = {"errors": []}
    with af.serve(capacity_bytes=8 << 30) as run:
        queue = run.queue
        queue.declare("work", needs=["x"], gives=["y"])
        queue.declare("end", needs=["y"])
        queue.put({"x": np.repeat(np.arange(5.0), 100_000).reshape(5, 100_000)})
        batch = queue.get("work", 5)
        free = os.statvfs(SHM)
        _take(SHM / "else", (free.f_bavail * free.f_frsize >> 20) - 1)
        for rows in (20, 300, 6250):  # 16 MB, 240 MB, 5 GB
            try:
                queue.put({"x": np.zeros((rows, 100_000))})
            except AsyncFlowError as error:
                outcome["errors"].append(f"{type(error).__name__}: {error}")
        outcome["read"] = batch.array("x")[:, 50_000].tolist()
        batch.complete({"y": np.arange(5.0)})
        with queue.get("end", 5) as ended:
            outcome["completed"] = ended.array("y").tolist()
            ended.ack()
        (SHM / "else").unlink()
        outcome["after"] = queue.put({"x": np.zeros((100, 100_000))}).count
        outcome["balanced"] = queue.audit().balanced
    say(outcome)
