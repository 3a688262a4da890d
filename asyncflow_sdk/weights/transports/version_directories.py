"""Version directories: their names, how they come to count, and how they go.

    path/version-00000012/model-00001-of-00002.safetensors ...         chunks, one a file; of one of several ranks with its number
                          model-tensor-5f0c….safetensors              a tensor of which each rank has a piece
                          model.safetensors.index.json                 when the parts of all ranks are there
                          config.json, tokenizer.json, ...             of the model
                          manifest.msgpack, or manifest-1-of-4.msgpack of a rank, written last: without it its part does not count
    path/.publisher-1                                                  locked by that rank's publisher; says whose run it is

A number that is above every kept one may be written by other ranks at this moment: of such a directory a rank removes its own
files only. What goes as a whole is renamed first, so that nobody finds half of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...memory import make_private_directory
from ...memory.locks import try_lock
from .file_layout import INDEX

MANIFEST = "manifest.msgpack"
GONE = "removed-"
MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "chat_template*",
)  # fmt: skip
"""What a Hugging Face folder holds beside weights."""
_NAME = re.compile(r"version-(\d{8,19})", re.ASCII)
_MANIFESTS = re.compile(r"manifest(?:-(\d{1,9})-of-\d{1,9})?\.msgpack", re.ASCII)
_OURS = re.compile(
    r"(?:manifest(?:-\d+-of-\d+)?\.msgpack|model\.safetensors\.index\.json(?:\.\d+)?"
    r"|model-(?:rank-\d+-)?\d{5,}-of-\d{5,}\.safetensors|model-tensor-[0-9a-f]{16}\.safetensors)(?:\.tmp)?"
)


def directory_name(version: int) -> str:
    return f"version-{version:08}"


def manifest_name(rank: int, world_size: int) -> str:
    return MANIFEST if world_size == 1 else f"manifest-{rank}-of-{world_size}.msgpack"


def file_prefix(rank: int, world_size: int) -> str:
    """Of the names of a rank's own files."""
    return "" if world_size == 1 else f"rank-{rank}-"


def copy_model_files(model: Path, place: Path) -> None:
    """Copy configuration and tokenizer from one model folder to another, onto the disk. Raises OSError."""
    for pattern in MODEL_FILES:
        for file in model.glob(pattern):
            if file.is_file():
                (place / file.name).write_bytes(file.read_bytes())


def version_of(name: str) -> int:
    """Raises ValueError for what is no name of a version directory: it may come from anywhere."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is no version directory")
    return int(found[1])


class VersionDirectories:
    """Those of one rank, below ``path``. One publisher at a time: it holds a lock while it lives."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self.path, self._rank, self._several = path, rank, world_size > 1
        self._manifest, self._prefix = manifest_name(rank, world_size), file_prefix(rank, world_size)
        try:
            make_private_directory(path)
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
        return self.path / directory_name(version)

    def remove(self, version: int) -> None:
        """This rank's part counts no more at once; its bytes go as far as they can. What other ranks have there stays."""
        self._remove(self.place(version), whole=not self._several)

    def remove_below(self, kept: Sequence[int]) -> None:
        """Of several ranks: directories that are not ``kept``, and whose numbers are used no more, as a whole."""
        if self._several:
            for found in self._found():
                if version_of(found.name) < max(kept, default=-1) and version_of(found.name) not in kept:
                    self._remove(found, whole=True)

    def remove_all_but(self, kept: set[int]) -> set[int]:
        """Whatever publishers of this rank left, except whole versions of ``kept``. Returns those of them that are there."""
        there = set()
        for found in self._found():
            version = version_of(found.name)
            if version in kept and (found / self._manifest).is_file():
                there.add(version)
            elif self._several or not _ranks_in(found) - {self._rank}:
                self._remove(found, whole=not self._several)
        self.remove_below(sorted(kept))
        for half_gone in self.path.glob(f"{GONE}*"):
            with contextlib.suppress(ValueError):
                version_of(half_gone.name.removeprefix(GONE))
                _delete(half_gone)
        return there

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _found(self) -> list[Path]:
        return [Path(each.path) for each in os.scandir(self.path) if _NAME.fullmatch(each.name)]

    def _is_whole(self, each: os.DirEntry[str]) -> bool:
        return _NAME.fullmatch(each.name) is not None and self._rank in _ranks_in(Path(each.path))

    def _remove(self, found: Path, *, whole: bool) -> None:
        if not whole:
            _delete_files(found, lambda name: name.startswith((self._manifest, f"model-{self._prefix}")))
            (found / INDEX).unlink(missing_ok=True)
            return
        gone = self.path / f"{GONE}{found.name}"
        if gone.exists():
            _delete(gone)
        with contextlib.suppress(FileNotFoundError):
            try:
                found.rename(gone)
            except (
                OSError
            ):  # in the way lies something that cannot be deleted: without its manifest it counts no more
                (found / self._manifest).unlink(missing_ok=True)
                gone = found
            _delete(gone)


def _ranks_in(found: Path) -> set[int]:
    """Those whose parts of a version count."""
    manifests = (_MANIFESTS.fullmatch(each.name) for each in found.glob("manifest*.msgpack"))
    return {int(each[1] or 0) for each in manifests if each is not None}


def _delete(directory: Path) -> None:
    """Only what a publisher wrote: what somebody else put there is theirs, and keeps the directory."""
    _delete_files(directory, lambda name: _OURS.fullmatch(name) or any(fnmatch(name, each) for each in MODEL_FILES))
    with contextlib.suppress(OSError):
        directory.rmdir()


def _delete_files(directory: Path, ours: Callable[[str], Any]) -> None:
    if directory.is_symlink() or not directory.is_dir():
        return
    with contextlib.suppress(FileNotFoundError):  # another rank was first
        for each in sorted(os.scandir(directory), key=lambda entry: not _MANIFESTS.fullmatch(entry.name)):
            if ours(each.name) and not each.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    os.unlink(each.path)


def _after_fork() -> None:
    """The lock is the parent's: a child that held it too would hold it when the parent is dead."""
    for each in list(_here):
        each.close()


_here: weakref.WeakSet[VersionDirectories] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)
