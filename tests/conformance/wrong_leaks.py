"""Rollout engines that keep what they should give back: at their end, or more and more with every version."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from own_engine import NumpyRollout, Weights

# ---- when they are closed


class LeavesAThread(NumpyRollout):
    END = threading.Event()

    def __init__(self, model: str) -> None:
        super().__init__(model)
        threading.Thread(target=self.END.wait, args=(30,), name="never-joined").start()


class LeavesAProcess(NumpyRollout):
    STARTED: list[subprocess.Popen[bytes]] = []  # noqa: RUF012

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.STARTED.append(subprocess.Popen(["sleep", "30"]))


class LeavesAServer(NumpyRollout):
    """It detaches itself, as servers do, so that it is nobody's child any more."""

    PIDS: list[int] = []  # noqa: RUF012

    def __init__(self, model: str) -> None:
        super().__init__(model)
        detached = ["setsid", "sh", "-c", "sleep 31 > /dev/null 2>&1 & echo $!"]
        self.PIDS.append(int(subprocess.run(detached, check=True, capture_output=True).stdout))


class LeavesASegment(NumpyRollout):
    MADE: list[Path] = []  # noqa: RUF012

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.MADE.append(path := segment())
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)


class LeavesDescriptors(NumpyRollout):
    def __init__(self, model: str) -> None:
        super().__init__(model)
        OPEN.append(os.open("/dev/zero", os.O_RDONLY))


class LeavesADaemonThread(NumpyRollout):
    """It keeps no process alive, and stays as long as one lives."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        threading.Thread(target=LeavesAThread.END.wait, args=(30,), daemon=True).start()


class MadeOnce(NumpyRollout):
    """Right: a process can have one only, and it keeps a descriptor of its own, which is not more and more."""

    made = False

    def __init__(self, model: str) -> None:
        if MadeOnce.made:
            raise RuntimeError("the process group is initialised already")
        MadeOnce.made = True
        super().__init__(model)
        OPEN.append(os.open("/dev/zero", os.O_RDONLY))


OPEN: list[int] = []
"""Descriptors for tests to close."""


def segment() -> Path:
    """A new file in shared memory, of 64 KB."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="wrong-engine-", delete=False) as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 16)
    return Path(file.name)


# ---- with every version


class Leaks(NumpyRollout):
    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._old: list[Any] = []

    def _take(self, new: Weights, version: int) -> None:
        self._old.append(self._weights)
        super()._take(new, version)


class LeaksSegments(NumpyRollout):
    """One an update, which nobody has open any more."""

    def _take(self, new: Weights, version: int) -> None:
        super()._take(new, version)
        LeavesASegment.MADE.append(segment())


class LeaksSharedMaps(NumpyRollout):
    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._maps: list[mmap.mmap] = []

    def _take(self, new: Weights, version: int) -> None:
        super()._take(new, version)
        self._maps.append(mmap.mmap(-1, 1 << 16))


class LeaksDescriptors(NumpyRollout):
    def _take(self, new: Weights, version: int) -> None:
        super()._take(new, version)
        OPEN.append(os.open("/dev/zero", os.O_RDONLY))


class LeaksThreads(NumpyRollout):
    def _take(self, new: Weights, version: int) -> None:
        super()._take(new, version)
        threading.Thread(target=LeavesAThread.END.wait, args=(30,), daemon=True).start()


class LeaksInItsWorker(NumpyRollout):
    """The memory is that of a process of its own."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        code = "import sys; kept = [(bytearray(b'x' * (1 << 16)), print(flush=True)) for _ in sys.stdin]"
        self._worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _take(self, new: Weights, version: int) -> None:
        super()._take(new, version)
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.write(b"update\n")
        self._worker.stdin.flush()
        self._worker.stdout.readline()  # it has it

    async def close(self) -> None:
        await super().close()
        self._worker.communicate()
