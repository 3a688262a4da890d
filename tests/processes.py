"""Processes as /proc shows them: their commands, their children, and whether they run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from waiting import until


def state(pid: int) -> str:
    """A letter: "T" of one that stands still, "X" of one that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return "X"


def alive(pid: int) -> bool:
    """True if a process runs; a zombie does not."""
    return state(pid) not in "ZX"


def title(pid: int) -> str:
    """The command of a process; "" of one that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def below(pid: int) -> set[int]:
    """All processes below one, but for the helper that Python keeps as long as it runs."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found |= {child} | below(child)
    return {each for each in found if "resource_tracker" not in title(each)}


def with_mark(mark: str, file: str = "environ") -> dict[int, str]:
    """Processes that have it in their environment (or "cmdline"), wherever they hang, and their commands."""
    found = {}
    for path in Path("/proc").glob(f"[0-9]*/{file}"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found[int(path.parent.name)] = title(int(path.parent.name))
    return found


def wait_gone(pids: Iterable[int]) -> None:
    """Until all have ended; one that was not waited for counts as ended."""
    until(lambda: not any(title(pid) for pid in pids), f"the end of {list(pids)}")
