"""Little shared memory: files instead, with one warning; and when it fills up, a put fails and nothing else."""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Child, say

import asyncflow_sdk as af

SHM = Path("/dev/shm")


def within(megabytes: int) -> list[str]:
    """What gives a process a /dev/shm of its own."""
    script = f'mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]


def hear(child: Child) -> Any:
    """What it says, if it may mount."""
    try:
        return child.hear()
    except AssertionError as error:
        if "unshare" in str(error) or "mount" in str(error):
            pytest.skip(f"a small /dev/shm needs root: {error}")
        raise


def take(path: Path, megabytes: int) -> None:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, megabytes << 20)


def serve_beside_what_a_killed_run_left(temporary: str, megabytes: int) -> None:
    """Put and get much through a run of this process."""
    tempfile.tempdir = temporary
    dead = SHM / f"asyncflow-{os.getuid()}-1-0"
    dead.mkdir()
    (dead / "owner").touch()
    take(dead / "s1-1", megabytes)
    equal = 0
    with af.serve() as run:
        run.queue.declare("read", needs=["x"])
        for number in range(10):
            values = np.full((4, 4 << 20), number, np.uint8)
            run.queue.put({"x": values})
            with run.queue.get("read", 4) as batch:
                equal += int(np.array_equal(batch.array("x"), values))
                batch.ack()
        base = Path(run.addresses[1].removeprefix("ipc://")).parent.parent
    say({"equal": equal, "base": str(base), "shm": os.listdir(SHM)})


def test_a_container_with_little_shared_memory_works_on_files_and_warns_once(tmp_path: Path) -> None:
    # given 64 MB of /dev/shm, of which most is taken by what a killed run left
    with Child(serve_beside_what_a_killed_run_left, str(tmp_path), 30, within=within(64)) as child:
        # when more goes through the queue than there is shared memory, then
        assert hear(child) == {"equal": 10, "base": str(tmp_path), "shm": []}
        assert child.wait() == 0
        warning = "/dev/shm has only 64 MB free; segments go to files in"
        assert child.errors().count(warning) == 1
        assert "--shm-size" in child.errors()
    # and nothing is left, of the killed run neither
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_does_not_make_shared_memory_small(tmp_path: Path) -> None:
    with Child(serve_beside_what_a_killed_run_left, str(tmp_path), 300, within=within(400)) as child:
        assert hear(child) == {"equal": 10, "base": "/dev/shm", "shm": []}
        assert child.errors() == ""


def fill_up() -> None:
    """Fill shared memory up while a queue works."""
    errors = []
    with af.serve(capacity_bytes=8 << 30) as run:
        queue = run.queue
        queue.declare("work", needs=["x"], gives=["y"])
        queue.declare("end", needs=["y"])
        queue.put({"x": np.repeat(np.arange(5.0), 100_000).reshape(5, 100_000)})
        batch = queue.get("work", 5)
        free = os.statvfs(SHM)
        take(SHM / "else", (free.f_bavail * free.f_frsize >> 20) - 1)
        for columns in (np.zeros((20, 100_000)), np.broadcast_to(np.uint8(1), (1, 5 << 30))):  # 16 MB, 5 GB
            try:
                queue.put({"x" if columns.ndim == 2 and columns.dtype == float else "z": columns})
            except af.AsyncFlowError as error:
                errors.append(f"{type(error).__name__}: {error}")
        read = batch.array("x")[:, 50_000].tolist()
        batch.complete({"y": np.arange(5.0)})
        with queue.get("end", 5) as ended:
            completed = ended.array("y").tolist()
            ended.ack()
        (SHM / "else").unlink()
        after = queue.put({"x": np.zeros((100, 100_000))}).count
        say({"errors": errors, "read": read, "completed": completed, "after": after, "live": queue.audit().live})


def test_shared_memory_that_fills_up_fails_puts_and_nothing_else() -> None:
    # given a queue on 300 MB of shared memory, with rows leased and rows ready
    with Child(fill_up, within=within(300)) as child:
        outcome = hear(child)
    # then while others fill it up, puts say what to do, also one of 5 GB
    assert len(outcome["errors"]) == 2
    for error in outcome["errors"]:
        assert error.startswith("MemoryFull: no room for ")
        assert "--shm-size" in error
    # and rows under way are read, completed with new columns
    assert outcome["read"] == outcome["completed"] == [float(n) for n in range(5)]
    # and puts go on when there is room again
    assert (outcome["after"], outcome["live"]) == (100, 100)
