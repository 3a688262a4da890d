"""Resources of an engine on its host: memory, shared memory, descriptors, threads, processes; and their release."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from ..._guard import adopt_orphans, descendants, living_below
from ...memory.directory import PREFIX
from .check import CheckFailed, expect

SHM = "/dev/shm/"
_ANONYMOUS = "/dev/zero (deleted)"  # a shared map without a name
CYCLES = ROUNDS = 3
_SETTLE_S = 1.0
GONE_S = 10.0
"""Seconds for threads, processes and segments to disappear after ``close``."""
_BYTES = {"memory": "", "segments": " of shared memory", "gpu": " of GPU memory"}
_COUNTED = {"descriptors": "descriptors open", "threads": "threads running", "processes": "processes running"}
Segment = tuple[str, int]
"""A file of shared memory, by path and inode."""
Starters = dict[threading.Thread, str]


@dataclass(frozen=True)
class Held:
    """Resources of this process and its descendants.

    Bytes: ``memory`` (anonymous and resident), ``segments`` (mapped shared memory), ``gpu``; the
    others are counts. ``abandoned``: bytes of files of shared memory without a process.
    """

    memory: int
    segments: int
    gpu: int
    descriptors: int
    threads: int
    processes: int
    abandoned: Mapping[Segment, int]

    @classmethod
    def now(cls) -> Held:
        """Measure."""
        gc.collect()
        with contextlib.suppress(AttributeError, OSError):  # not glibc; else a leak would first fill what it has free
            ctypes.CDLL(None).malloc_trim(0)
        pids = [os.getpid(), *descendants(os.getpid())]
        descriptors, threads = (sum(len(_ls(pid, folder)) for pid in pids) for folder in ("fd", "task"))
        memory, segments = sum(map(_resident, pids)), sum(_segments(pids).values())
        return cls(memory, segments, _gpu_bytes(pids), descriptors, threads, len(living_below()), _abandoned())

    def beyond(self, before: Held, *, nbytes: int, count: int) -> dict[str, int]:
        """Return the increase of each resource above ``nbytes`` bytes, or above ``count``."""
        grown = {name: getattr(self, name) - getattr(before, name) for name in (*_BYTES, *_COUNTED)}
        # Hazard: other programs remove files that they abandoned, which would hide those of the engine.
        grown["segments"] += sum(size for key, size in self.abandoned.items() if key not in before.abandoned)
        return {name: by for name, by in grown.items() if by > (nbytes if name in _BYTES else count)}


class Growth:
    """Resources growing in every round. Growth in some rounds is normal for an allocator and for other processes.

    while growth.goes_on():
        use(engine, count)
    growth.check("updates", count, nbytes)
    """

    def __init__(self, *, nbytes: int, count: int) -> None:
        self.nbytes, self.count = nbytes, count
        self._before: list[Held] = []
        self._grown: dict[str, int] | None = None

    def goes_on(self) -> bool:
        """Measure. Return True before the first round, and after each if a resource has grown in all of them."""
        if self._before:
            grown = Held.now().beyond(self._before[-1], nbytes=self.nbytes, count=self.count)
            self._grown = {name: by for name, by in grown.items() if self._grown is None or name in self._grown}
        if self._grown == {} or len(self._before) == ROUNDS:
            return False
        self._before.append(Held.now())
        return True

    def check(self, what: str, count: int, nbytes: int) -> None:
        """Raise CheckFailed for growth in all rounds of ``count`` times ``what``, with a model of ``nbytes``."""
        parts = [
            f"took {by >> 20} MB{_BYTES[name]} that did not come back: {by / count / nbytes:.1f} times the model each"
            if name in _BYTES
            else f"left {by} {_COUNTED[name]}"
            for name, by in (self._grown or {}).items()
        ]
        expect(not parts, f"{count} {what} of a model of {nbytes >> 10} KB {', and '.join(parts)}")


def check_given_back(start: Callable[[], object], close: Callable[[], object], *, limit_s: float) -> None:
    """Make and use an engine by ``start``, close it by ``close``, and find its remains.

    Non-daemon threads, processes (orphans, too) and segments count after the first time. Descriptors and other
    threads may be made once and stay, or be replaced by the next engine's: they count only if each engine adds some,
    and they outlive the next one. Late release, by a thread or the collector, has `GONE_S` after the last one. An
    engine limited to one per process is not tested for these.
    """
    until, wait_s = time.monotonic() + limit_s / 2, min(GONE_S, limit_s)
    with _adopting(), _starters() as starters:
        pids = [os.getpid(), *descendants(os.getpid())]
        before, threads, processes = set(_segments(pids)), set(threading.enumerate()), set(living_below())
        opened = _open()
        start()
        segments = _segments([os.getpid(), *descendants(os.getpid())])
        close()
        files = {key for key in segments if key[0].startswith(SHM)} - before
        _check_left(files, threads, processes, wait_s, starters)
        kept = new = _kept(_open() - opened, _SETTLE_S)
        for settle_s in (_SETTLE_S,) * (CYCLES - 2) + (wait_s,):
            if not new or time.monotonic() > until:
                return
            former, opened = new, _open()
            try:
                start()
            except Exception:
                return
            close()
            if not (kept := _kept(former, settle_s)):
                return
            new = _open() - opened
    counts = collections.Counter(kind for kind, *_ in kept)
    said = ", ".join(f"{count} {_COUNTED[kind]}" for kind, count in sorted(counts.items()))
    names = sorted({name for kind, _, name in kept if kind == "descriptors"})
    running = sorted(_thread_of(number, starters) for kind, number, _ in kept if kind == "threads")
    for kind, each in (("open", names), ("running", running)):
        said += f"; {kind} are {', '.join(each[-8:])}" if each else ""
    raise CheckFailed(f"each engine that was made and closed left {said}")


@contextlib.contextmanager
def _starters() -> Iterator[Starters]:
    """Describe each thread started meanwhile: name, target, and the place of its start past the standard library."""
    found: Starters = {}
    start = threading.Thread.start

    def _noted(thread: threading.Thread) -> None:
        frame, target = sys._getframe(1), getattr(thread, "_target", None) or thread.run
        while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in sys.stdlib_module_names:
            frame = frame.f_back
        runs = f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', repr(target))}"
        starter = f"{frame.f_globals.get('__name__')} ({frame.f_code.co_filename}:{frame.f_lineno})"
        found[thread] = f"{thread.name!r} (runs {runs}; started by {starter})"
        start(thread)

    with mock.patch.object(threading.Thread, "start", _noted):
        yield found


def _thread_of(number: str, starters: Starters) -> str:
    """Describe a thread by its number in the system. One of a library in C has a name only."""
    for thread, said in starters.items():
        if thread.is_alive() and str(thread.native_id) == number:
            return said
    with contextlib.suppress(OSError):
        return repr(Path(f"/proc/self/task/{number}/comm").read_text().strip())
    return number


def _check_left(
    segments: set[Segment], threads: set[threading.Thread], processes: set[int], wait_s: float, starters: Starters
) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        alive = [t for t in threading.enumerate() if t not in threads and not t.daemon and t.is_alive()]
        running = {pid: command for pid, command in living_below().items() if pid not in processes}
        kept = sorted(path for path, inode in segments if _inode(path) == inode)
        if not (alive or running or kept) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    said = ", ".join(starters.get(thread, thread.name) for thread in alive)
    expect(not alive, f"threads are still alive after close(), and keep the process from ending: {said}")
    said = ", ".join(f"{pid} ({command})" for pid, command in sorted(running.items()))
    expect(not running, f"processes are still alive after close(): {said}")
    expect(not kept, f"segments of shared memory are still there after close(): {', '.join(kept)}")


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    before = adopt_orphans(True)
    mine = set(descendants(os.getpid()))
    try:
        yield
    finally:
        adopt_orphans(before)
        for pid in set(descendants(os.getpid())) - mine - set(living_below()):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # nobody else waits for one that was adopted


def _open() -> set[tuple[str, str, str]]:
    """Return the open descriptors and running threads of this process: kind, number and target."""
    gc.collect()
    found = {("threads", task, "") for task in _ls(os.getpid(), "task")}
    for fd in _ls(os.getpid(), "fd"):
        with contextlib.suppress(OSError):
            found.add(("descriptors", fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


def _kept(found: set[tuple[str, str, str]], wait_s: float) -> set[tuple[str, str, str]]:
    until = time.monotonic() + wait_s
    while (kept := found & _open()) and time.monotonic() < until:
        time.sleep(0.05)
    return kept


def _segments(pids: list[int]) -> dict[Segment, int]:
    found: dict[Segment, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            found |= _mapped(pid)
    return found


def _abandoned() -> dict[Segment, int]:
    """Return this user's files in /dev/shm without a process: left by these processes, or by others
    that died. Directories of runs are left out: the next server removes those of dead ones."""
    files: dict[Segment, int] = {}
    for folder, folders, names in os.walk(SHM):
        folders[:] = [name for name in folders if not name.startswith(PREFIX)]
        for name in names:
            with contextlib.suppress(OSError):
                stat = os.stat(path := os.path.join(folder, name))
                if stat.st_uid == os.getuid():
                    files[path, stat.st_ino] = stat.st_blocks << 9
    if files:
        for key in _segments([int(name) for name in os.listdir("/proc") if name.isdecimal()]):
            files.pop(key, None)
    return files


def _mapped(pid: int) -> dict[Segment, int]:
    sizes: dict[Segment, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        parts = line.split(None, 5)
        if len(parts) == 6 and parts[5].startswith((SHM, "/memfd:", _ANONYMOUS)):
            start, end = (int(each, 16) for each in parts[0].split("-"))
            key = (parts[5], int(parts[4]))
            sizes[key] = max(sizes.get(key, 0), int(parts[2], 16) + end - start)
    for fd in _ls(pid, "fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/{pid}/fd/{fd}")
            if path.startswith((SHM, "/memfd:")):
                stat = os.stat(f"/proc/{pid}/fd/{fd}")
                sizes[path, stat.st_ino] = stat.st_blocks << 9
    return sizes


def _inode(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(path).st_ino
    return None


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon:")), 0)
    return 0


def _ls(pid: int, folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/{folder}")
    return []


def _gpu_bytes(pids: list[int]) -> int:
    """Return torch's memory here, and the driver's figure for descendants if it knows their ids."""
    torch, local = sys.modules.get("torch"), 0
    if torch is not None and torch.cuda.is_initialized():
        local = sum(torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count()))
    if len(pids) == 1 or (tool := shutil.which("nvidia-smi")) is None:
        return local
    asked = [tool, "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        rows = subprocess.run(asked, capture_output=True, text=True, timeout=20.0, check=True).stdout.splitlines()
        used = {int(pid): int(mib) << 20 for pid, mib in (row.split(",") for row in rows if row)}
        local += sum(used.get(pid, 0) for pid in pids[1:])
    return local
