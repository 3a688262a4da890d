"""VersionDirectories: names of version directories, and when they become visible and are removed.

    path/version-00000012/model-00001-of-00002.safetensors     one for each chunk; with several ranks: model-rank-1-...
                          model-tensor-5f0c….safetensors       a tensor in pieces: each rank writes its own
                          model.safetensors.index.json         once all ranks have written their parts
                          config.json, tokenizer.json, ...     of the model
                          manifest.msgpack                     written last, by each rank: without it its part is invalid
    path/.publisher-1                                          locked by the publisher of rank 1; holds the run's name

Another rank may be writing to the directory of a version above every kept one: a rank removes only its own files
there. Manifests are removed first: readers never take half of a version for a whole one.
"""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from ...errors import ConfigError
from ...memory import make_private_directory
from ...memory.segment import try_lock
from .file_layout import INDEX

MANIFEST = "manifest.msgpack"
MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "chat_template*",
)  # fmt: skip
"""Files of a Hugging Face folder beside the weights."""
_NAME = re.compile(r"version-(\d{8,19})", re.ASCII)
_MANIFESTS = re.compile(r"manifest(?:-(\d{1,9})-of-\d{1,9})?\.msgpack", re.ASCII)
_OWN_FILES = (
    "manifest*.msgpack*", f"{INDEX}*", "model-*-of-*.safetensors", "model-tensor-*.safetensors", *MODEL_FILES
)  # fmt: skip
"""Files of a publisher in the directory of a version."""


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
                f"weights transport 'file' cannot write into {path}: {error.strerror}. Name a directory that the trainer"
                ' can write and every replica can read, for example path="/mnt/shared/my-run/weights"'
            ) from None
        _open_directories.add(self)
        with contextlib.suppress(OSError):  # no locks there: the ledger still permits one publisher in a run
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
            found = self._list().values()
            left = sorted(each.name for each in found if self._files.rank in _published_ranks(each))
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
            for version, found in self._list().items():
                if version < max(kept, default=-1) and version not in kept:
                    self._remove(found, whole=True)

    def remove_all_but(self, kept: set[int]) -> set[int]:
        """Remove all files of this rank's publishers except complete versions of ``kept``. Return
        the versions found."""
        present = set()
        for version, found in self._list().items():
            if version in kept and (found / self._files.manifest).is_file():
                present.add(version)
            elif self._several or not _published_ranks(found) - {self._files.rank}:
                self._remove(found, whole=not self._several)
        self.remove_below(sorted(kept))
        return present

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _list(self) -> dict[int, Path]:
        """Return the directories of versions."""
        return {int(found[1]): each for each in self.path.iterdir() if (found := _NAME.fullmatch(each.name))}

    def _remove(self, place: Path, *, whole: bool) -> None:
        """Remove this rank's files, or all that publishers wrote. Other files stay, and keep the directory."""
        patterns = _OWN_FILES if whole else (f"{self._files.manifest}*", f"model-{self._files.prefix}*", INDEX)
        if place.is_symlink() or not place.is_dir():
            return
        with contextlib.suppress(FileNotFoundError):  # another rank removed it first
            for each in sorted(place.iterdir(), key=lambda file: not _MANIFESTS.fullmatch(file.name)):
                if any(fnmatch(each.name, pattern) for pattern in patterns):
                    with contextlib.suppress(OSError):
                        each.unlink()
        if whole:
            with contextlib.suppress(OSError):
                place.rmdir()


def _published_ranks(found: Path) -> set[int]:
    """Return the ranks with a valid part of a version."""
    manifests = (_MANIFESTS.fullmatch(each.name) for each in found.glob("manifest*.msgpack"))
    return {int(each[1] or 0) for each in manifests if each is not None}


def _after_fork() -> None:
    """Close the locks in a forked child: otherwise they would survive the parent."""
    for each in list(_open_directories):
        each.close()


_open_directories: weakref.WeakSet[VersionDirectories] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)
