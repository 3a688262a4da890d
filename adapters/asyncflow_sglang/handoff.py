"""SafetensorsHandoff: a version's bytes as a safetensors file in shared memory, read by SGLang on this host.

    handoff = SafetensorsHandoff()
    handoff.write(update)                   # then SGLang loads handoff.folder; the next version overwrites the file

SGLang's calls with tensors take pickles; its call with a folder does not. The file is written in place, so its pages
stay allocated.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow_http.model_folder import announced_arrays
from asyncflow_sdk.errors import MemoryFull
from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_sdk.types.safetensors import plan
from asyncflow_sdk.weights.transports import VersionMemory

_ALIGN = 64


class SafetensorsHandoff:
    """``directory``: visible to SGLang; None: shared memory of this host. ``close`` removes the
    files; after a kill the next handoff does (shared memory only)."""

    def __init__(self, directory: str | None = None) -> None:
        self._staging = VersionMemory.private("sglang") if directory is None else None
        if self._staging is not None:
            self.folder = self._staging.directory
        else:
            self.folder = Path(tempfile.mkdtemp(prefix="asyncflow-sglang-", dir=directory))
        self._file = self.folder / "model.safetensors"
        self._map: mmap.mmap | None = None

    def write(self, update: WeightUpdate) -> None:
        """Write a version. Blocking; one call at a time. Raises MemoryFull, WeightMismatch for
        tensors unlike the announced ones, and errors of the update; the file is then incomplete."""
        layout = plan({name: (kind.dtype, kind.shape) for name, kind in update.tensors.items()}, align=_ALIGN)
        memory = self._memory(layout.nbytes)
        memory[: len(layout.header)] = np.frombuffer(layout.header, np.uint8)
        for name, array in announced_arrays(update, layout.offsets):
            place = layout.offsets[name]
            memory[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def forget(self) -> None:
        """Give the next version other memory: SGLang may still read this one."""
        self._map = None
        self._file.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the files. Idempotent."""
        self.forget()
        if self._staging is not None:
            self._staging.close()
        else:
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def _memory(self, size: int) -> np.ndarray[Any, Any]:
        if self._map is None or len(self._map) != size:
            self._map = None
            try:
                fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                try:
                    os.ftruncate(fd, size)
                    os.posix_fallocate(fd, 0, size)  # otherwise a full memory raises SIGBUS on write
                    self._map = mmap.mmap(fd, size)
                finally:
                    os.close(fd)
            except OSError as error:
                self._file.unlink(missing_ok=True)
                raise MemoryFull(
                    f"no room for a version of {size} bytes in {self.folder}: {error.strerror}"
                ) from None
        return np.frombuffer(self._map, np.uint8)
