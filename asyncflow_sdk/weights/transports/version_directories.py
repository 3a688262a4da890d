"""VersionDirectories: names of version directories, and when they become visible and are removed.

    path/version-00000012/model-00001-of-00002.safetensors     one for each chunk; with several ranks: model-rank-1-...
                          model-tensor-5f0c….safetensors       a tensor in pieces: each rank writes its own
                          model.safetensors.index.json         once all ranks have written their parts
                          config.json, tokenizer.json, ...     of the model
                          manifest.msgpack                     written last, by each rank: without it its part is invalid
    path/.publisher-1                                          locked by the publisher of rank 1; holds the run's name

Another rank may be writing to the directory of a version above every kept one: a rank removes only
its own files there. A whole directory is renamed first: readers never find half of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ConfigError
from ...memory import make_private_directory
from ...memory.segment import try_lock
from .file_layout import INDEX

MANIFEST = "manifest.msgpack"
REMOVED = "removed-"
MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "chat_template*",
)  # fmt: skip
"""Files of a Hugging Face folder beside the weights."""
_NAME = re.compile(r"version-(\d{8,19})", re.ASCII)
_MANIFESTS = re.compile(r"manifest(?:-(\d{1,9})-of-\d{1,9})?\.msgpack", re.ASCII)
_OWN_FILES = re.compile(
    r"(?:manifest(?:-\d+-of-\d+)?\.msgpack|model\.safetensors\.index\.json(?:\.\d+)?"
    r"|model-(?:rank-\d+-)?\d{5,}-of-\d{5,}\.safetensors|model-tensor-[0-9a-f]{16}\.safetensors)(?:\.tmp)?"
)


class RankFiles(NamedTuple):
    """Names of one rank's files in a version directory."""

    rank: int
    world_size: int

    @property
    def manifest(self) -> str:
        """Name of the manifest."""
        return MANIFEST if self.world_size == 1 else f"manifest-{self.rank}-of-{self.world_size}.msgpack"

    @property
    def prefix(self) -> str:
        """Prefix of the rank's own tensor files."""
        return "" if self.world_size == 1 else f"rank-{self.rank}-"


def copy_model_files(model: Path, place: Path) -> None:
    """Copy configuration and tokenizer to another folder. Raises OSError."""
    for pattern in MODEL_FILES:
        for file in model.glob(pattern):
            if file.is_file():
                (place / file.name).write_bytes(file.read_bytes())


def version_of(name: str) -> int:
    """Return the version of a directory's name. Raises ValueError for any other name."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is no version directory")
    return int(found[1])


class VersionDirectories:
    """The directories of one rank's versions below ``path``. Locked: one publisher at a time."""

    def __init__(self, path: Path, files: RankFiles) -> None:
        self.path, self._files, self._several = path, files, files.world_size > 1
        try:
            make_private_directory(path)
            self._lock = os.open(path / f".publisher-{files.rank}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(
                f"weights transport 'file' cannot write into {path}: {error.strerror}. Name a directory that the"
                " trainer"
                f' can write and every replica can read, for example path="/mnt/shared/my-run/weights"'
            ) from None
        _open_directories.add(self)
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: the ledger still permits one publisher in a run
            if not try_lock(self._lock, 0, 1, exclusive=True):
                self.close()
                raise ConfigError(
                    f"another publisher writes versions into {path}: it is alive. Give each run a path of its own"
                )

    def take(self, run: str, *, overwrite: bool) -> None:
        """Mark the directories as those of ``run``. Raises ConfigError for complete versions of
        another run, unless ``overwrite``."""
        mark = f"{run}\n".encode()
        try:
            if run and os.pread(self._lock, len(mark) + 1, 0) == mark:
                return
            left = sorted(each.name for each in os.scandir(self.path) if self._is_whole(each))
            if left and not overwrite:
                more = f" and {len(left) - 1} more" if len(left) > 1 else ""
                raise ConfigError(
                    f"{self.path} holds versions of another run: {left[-1]}{more}. Give another path, or"
                    " overwrite=True, which removes them"
                )
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, mark, 0)
            os.fsync(self._lock)
        except OSError as error:
            raise ConfigError(f"weights transport 'file' cannot work in {self.path}: {error.strerror}") from None

    def place(self, version: int) -> Path:
        """Return the directory of a version."""
        return self.path / f"version-{version:08}"

    def remove(self, version: int) -> None:
        """Remove this rank's part of a version as far as possible. It is invalid at once. Other ranks' files stay."""
        self._remove(self.place(version), whole=not self._several)

    def remove_below(self, kept: Sequence[int]) -> None:
        """With several ranks: remove whole directories of versions below the newest kept one."""
        if self._several:
            for found in self._list():
                if version_of(found.name) < max(kept, default=-1) and version_of(found.name) not in kept:
                    self._remove(found, whole=True)

    def remove_all_but(self, kept: set[int]) -> set[int]:
        """Remove all files of this rank's publishers except complete versions of ``kept``. Return
        the versions found."""
        present = set()
        for found in self._list():
            version = version_of(found.name)
            if version in kept and (found / self._files.manifest).is_file():
                present.add(version)
            elif self._several or not _published_ranks(found) - {self._files.rank}:
                self._remove(found, whole=not self._several)
        self.remove_below(sorted(kept))
        for half_removed in self.path.glob(f"{REMOVED}*"):
            with contextlib.suppress(ValueError):
                version_of(half_removed.name.removeprefix(REMOVED))
                _delete(half_removed)
        return present

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _list(self) -> list[Path]:
        return [Path(each.path) for each in os.scandir(self.path) if _NAME.fullmatch(each.name)]

    def _is_whole(self, each: os.DirEntry[str]) -> bool:
        return _NAME.fullmatch(each.name) is not None and self._files.rank in _published_ranks(Path(each.path))

    def _remove(self, found: Path, *, whole: bool) -> None:
        if not whole:
            _delete_files(found, lambda name: name.startswith((self._files.manifest, f"model-{self._files.prefix}")))
            (found / INDEX).unlink(missing_ok=True)
            return
        gone = self.path / f"{REMOVED}{found.name}"
        if gone.exists():
            _delete(gone)
        with contextlib.suppress(FileNotFoundError):
            try:
                found.rename(gone)
            except OSError:  # the other name is taken; without its manifest the version is invalid
                (found / self._files.manifest).unlink(missing_ok=True)
                gone = found
            _delete(gone)


def _published_ranks(found: Path) -> set[int]:
    """Return the ranks with a valid part of a version."""
    manifests = (_MANIFESTS.fullmatch(each.name) for each in found.glob("manifest*.msgpack"))
    return {int(each[1] or 0) for each in manifests if each is not None}


def _delete(directory: Path) -> None:
    """Delete the files that a publisher wrote. Other files stay, and keep the directory."""
    _delete_files(
        directory, lambda name: _OWN_FILES.fullmatch(name) or any(fnmatch(name, each) for each in MODEL_FILES)
    )
    with contextlib.suppress(OSError):
        directory.rmdir()


def _delete_files(directory: Path, ours: Callable[[str], Any]) -> None:
    if directory.is_symlink() or not directory.is_dir():
        return
    with contextlib.suppress(FileNotFoundError):  # another rank removed it first
        for each in sorted(os.scandir(directory), key=lambda entry: not _MANIFESTS.fullmatch(entry.name)):
            if ours(each.name) and not each.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    os.unlink(each.path)


def _after_fork() -> None:
    """Close the locks in a forked child: otherwise they would survive the parent."""
    for each in list(_open_directories):
        each.close()


_open_directories: weakref.WeakSet[VersionDirectories] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)
