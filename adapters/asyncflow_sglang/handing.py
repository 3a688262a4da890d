"""Handing: a version's bytes as a safetensors file in shared memory, where a server on this host reads them.

    with Handing() as handing:
        folder = handing.write(update)          # the server loads from there; then the next version is written over it

SGLang's calls that take tensors take pickles; this one takes a folder. The file is written in place, version after version,
so that its pages are there already.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow_sdk.errors import MemoryFull, WeightMismatch
from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_sdk.types import carrier, dtype_name
from asyncflow_sdk.weights.staging import Staging

from .checkpoint import METADATA, SAFETENSORS

_ALIGN = 64


class Handing:
    """``directory``: what the server sees, too; None: shared memory of this host. What is made in it goes with ``close``, and after a
    kill by the next one (shared memory only)."""

    def __init__(self, directory: str | None = None) -> None:
        self._staging = Staging.private("sglang") if directory is None else None
        if self._staging is not None:
            self.folder = self._staging.directory
        else:
            self.folder = Path(tempfile.mkdtemp(prefix="asyncflow-sglang-", dir=directory))
        self._file = self.folder / "model.safetensors"
        self._map: mmap.mmap | None = None

    def write(self, update: WeightUpdate) -> None:
        """Blocking; one at a time. Raises MemoryFull, WeightMismatch for tensors that are not what the update announced, and what
        the update raises: then the file is of no version."""
        header, places, size = _layout(update)
        memory = self._room(size)
        memory[: len(header)] = np.frombuffer(header, np.uint8)
        left = set(places)
        for name, array in update.arrays():
            given, wanted = (dtype_name(array.dtype), array.shape), update.tensors.get(name)
            if wanted is None or given != tuple(wanted):
                raise WeightMismatch(
                    f"version {update.version}: {name} came as {given[0]}{list(given[1])}, not as announced"
                )
            place = places[name]
            memory[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            left.discard(name)
        if left:
            raise WeightMismatch(f"version {update.version} did not bring {', '.join(sorted(left)[:10])}")

    def forget(self) -> None:
        """Somebody may still be reading: the next version gets other memory."""
        self._map = None
        self._file.unlink(missing_ok=True)

    def close(self) -> None:
        """Idempotent."""
        self._map = None
        self._file.unlink(missing_ok=True)
        if self._staging is not None:
            self._staging.close()
        else:
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def _room(self, size: int) -> np.ndarray[Any, Any]:
        if self._map is None or len(self._map) != size:
            self._map = None
            try:
                fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                try:
                    os.ftruncate(fd, size)
                    os.posix_fallocate(fd, 0, size)  # else what there is no room for is a SIGBUS
                    self._map = mmap.mmap(fd, size)
                finally:
                    os.close(fd)
            except OSError as error:
                self._file.unlink(missing_ok=True)
                raise MemoryFull(
                    f"no room for a version of {size} bytes in {self.folder}: {error.strerror}"
                ) from None
        return np.frombuffer(self._map, np.uint8)


def _layout(update: WeightUpdate) -> tuple[bytes, dict[str, int], int]:
    """The head of the file, where in it each tensor begins, and how long it is."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    # safetensors allows no holes: those of wide elements first, so that each is aligned
    for name in sorted(update.tensors, key=lambda name: -carrier(update.tensors[name].dtype).itemsize):
        dtype, shape = update.tensors[name]
        offsets[name], end = end, end + math.prod(shape) * carrier(dtype).itemsize
        header[name] = {"dtype": SAFETENSORS[dtype], "shape": shape, "data_offsets": (offsets[name], end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    front = struct.pack("<Q", len(text)) + text
    return front, {name: len(front) + offset for name, offset in offsets.items()}, len(front) + end
