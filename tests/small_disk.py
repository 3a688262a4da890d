"""A disk of a few megabytes, to be filled: a tmpfs where one may be mounted. What files take of a disk."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab") as file:
            while (room := os.statvfs(self.path)).f_bavail:
                with contextlib.suppress(OSError):  # others took some of it meanwhile
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, room.f_bavail * room.f_frsize)

    def free(self) -> None:
        self._ballast.unlink()


def on_disk(directory: Path, files: str = "w*") -> int:
    """Return the bytes allocated to files; one that is removed meanwhile takes none."""
    total = 0
    for path in directory.glob(files):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512 if path.is_file() else 0
    return total


@contextlib.contextmanager
def small_disk(path: Path, mebibytes: int, inodes: int = 0) -> Iterator[SmallDisk]:
    """Skips the test where nothing may be mounted. ``inodes``: at most so many, or 0."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,nr_inodes={inodes}", "asyncflow-test", str(path)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("no small disk can be mounted here: there is no mount")
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=60)
