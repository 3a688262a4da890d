"""Control groups: bound the memory and the tasks of a program together. Version 2, and version 1 where it
still has these controllers."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "pids")
_REMOVAL_TRIES = 1000
ENTER = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit; shift; done; shift; exec "$@"'
"""A script of sh: enter the cgroups of these files, then run the command after ``--``."""


def parents() -> list[Path]:
    """Return the cgroups where this process may make others and enter them: one, or one a controller
    in version 1. Return none if there are no such cgroups."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {name: path[1:] for _, names, path in lines for name in names.split(",")}
    if own.keys() >= set(_CONTROLLERS):
        found = [_ROOT / name / own[name] for name in _CONTROLLERS]
        return found if all(map(_may_enter, found)) else []
    place = _ROOT / own.get("", "")
    above = [place, *place.parents[: len(place.parts) - len(_ROOT.parts)]]
    return next(([each] for each in above if _may_enter(each) and _controls(each) >= set(_CONTROLLERS)), [])


@contextlib.contextmanager
def bounded(parents: Sequence[Path], memory_bytes: int, tasks: int) -> Iterator[list[str]]:
    """Make a cgroup below each parent. Yield the files to write "0" to for entering. Then end the
    processes left, and remove the cgroups."""
    limits = {
        "memory.max": memory_bytes, "memory.swap.max": 0, "pids.max": tasks,
        "memory.limit_in_bytes": memory_bytes, "memory.memsw.limit_in_bytes": memory_bytes,
    }  # fmt: skip
    made: list[Path] = []
    try:
        for parent in parents:
            made.append(parent / f"asyncflow-{secrets.token_hex(8)}")
            made[-1].mkdir()
            for name, most in limits.items():
                if (made[-1] / name).exists():
                    (made[-1] / name).write_text(f"{most}")
        yield [str(each / "cgroup.procs") for each in made]
    finally:
        for each in made:
            _remove(each)


def _may_enter(cgroup: Path) -> bool:
    return os.access(cgroup, os.W_OK) and os.access(cgroup / "cgroup.procs", os.W_OK)


def _controls(cgroup: Path) -> set[str]:
    """Return the controllers of the cgroups below one."""
    return set((cgroup / "cgroup.subtree_control").read_text().split())


def _remove(cgroup: Path) -> None:
    """Remove a cgroup once its processes have ended."""
    tries = 0
    while cgroup.exists():
        for pid in (cgroup / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            cgroup.rmdir()
        except OSError:  # a killed process has not ended
            tries += 1
            if tries == _REMOVAL_TRIES:
                raise
            time.sleep(0.01)
