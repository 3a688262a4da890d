"""Version directories: their names, how they come to count, and how they go.

    path/version-00000012/model-00001-of-00002.safetensors ...      chunks, one a file
                          model.safetensors.index.json
                          manifest.msgpack                         written last: without it the directory does not count
    path/version-00000012-rank-1-of-4/...                           of one of several ranks
    path/.publisher-1                                               locked by that rank's publisher; says whose run it is

What goes is renamed first, so that nobody finds half of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from pathlib import Path

from ..errors import ConfigError
from ..memory.locks import try_lock

MANIFEST = "manifest.msgpack"
GONE = "removed-"
_NAME = re.compile(r"version-(\d{8,19})(?:-rank-(\d{1,9})-of-(\d{1,9}))?", re.ASCII)
_OURS = re.compile(
    r"(?:manifest\.msgpack|model\.safetensors\.index\.json|model-\d{5,}-of-\d{5,}\.safetensors)(?:\.tmp)?"
)


def directory_name(version: int, rank: int, world_size: int) -> str:
    return f"version-{version:08}" + (f"-rank-{rank}-of-{world_size}" if world_size > 1 else "")


def version_of(name: str) -> int:
    """Raises ValueError for what is no name of a version directory: it may come from anywhere."""
    return _version_and_rank(name)[0]


def _version_and_rank(name: str) -> tuple[int, int]:
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is no version directory")
    return int(found[1]), int(found[2] or 0)


class VersionDirectories:
    """Those of one rank, below ``path``. One publisher at a time: it holds a lock while it lives."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self.path, self._rank, self._world_size = path, rank, world_size
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / f".publisher-{rank}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(
                f"weights transport 'file' cannot write into {path}: {error.strerror}. Name a directory that the trainer"
                f' can write and every replica can read, for example path="/mnt/shared/my-run/weights"'
            ) from None
        _here.add(self)
        with contextlib.suppress(OSError):  # without locks there: the ledger lets one publish, too, in one run
            if not try_lock(self._lock, 0, 1, exclusive=True):
                self.close()
                raise ConfigError(
                    f"another publisher writes versions into {path}: it is alive. Give each run a path of its own"
                )

    def take(self, run: str, *, overwrite: bool) -> None:
        """From here on they are those of ``run``. Raises ConfigError where another run has left whole versions of this rank,
        unless ``overwrite``; nobody may remove them unasked."""
        mark = f"{run}\n".encode()
        try:
            if run and os.pread(self._lock, len(mark) + 1, 0) == mark:
                return
            left = sorted(each.name for each in os.scandir(self.path) if self._is_whole(each))
            if left and not overwrite:
                more = f" and {len(left) - 1} more" if len(left) > 1 else ""
                raise ConfigError(
                    f"{self.path} holds versions of another run: {left[-1]}{more}. Give another path, or overwrite=True, which"
                    " removes them"
                )
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, mark, 0)
            os.fsync(self._lock)
        except OSError as error:
            raise ConfigError(f"weights transport 'file' cannot work in {self.path}: {error.strerror}") from None

    def place(self, version: int) -> Path:
        return self.path / directory_name(version, self._rank, self._world_size)

    def remove(self, version: int) -> None:
        """It counts no more at once; its bytes go as far as they can."""
        self._remove(self.place(version))

    def remove_all_but(self, kept: set[int]) -> set[int]:
        """Whatever publishers of this rank left, except whole versions of ``kept``. Returns those of them that are there."""
        there = set()
        for found in self._found():
            version = version_of(found.name)
            if version in kept and (found / MANIFEST).is_file():
                there.add(version)
            else:
                self._remove(found)
        for half_gone in self.path.glob(f"{GONE}*"):
            if self._is_mine(half_gone.name.removeprefix(GONE)):
                _delete(half_gone)
        return there

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _found(self) -> list[Path]:
        return [Path(each.path) for each in os.scandir(self.path) if self._is_mine(each.name)]

    def _is_mine(self, name: str) -> bool:
        try:
            return name == directory_name(version_of(name), self._rank, self._world_size)
        except ValueError:
            return False

    def _is_whole(self, each: os.DirEntry[str]) -> bool:
        try:
            return _version_and_rank(each.name)[1] == self._rank and os.path.isfile(f"{each.path}/{MANIFEST}")
        except ValueError:
            return False

    def _remove(self, found: Path) -> None:
        gone = self.path / f"{GONE}{found.name}"
        if gone.exists():
            _delete(gone)
        with contextlib.suppress(FileNotFoundError):
            try:
                found.rename(gone)
            except (
                OSError
            ):  # in the way lies something that cannot be deleted: without its manifest it counts no more
                (found / MANIFEST).unlink(missing_ok=True)
                gone = found
            _delete(gone)


def _delete(directory: Path) -> None:
    """Only what a publisher wrote: what somebody else put there is theirs, and keeps the directory."""
    if directory.is_symlink() or not directory.is_dir():
        return
    for each in os.scandir(directory):
        if _OURS.fullmatch(each.name) and not each.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):
                os.unlink(each.path)
    with contextlib.suppress(OSError):
        directory.rmdir()


def _after_fork() -> None:
    """The lock is the parent's: a child that held it too would hold it when the parent is dead."""
    for each in list(_here):
        each.close()


_here: weakref.WeakSet[VersionDirectories] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)
