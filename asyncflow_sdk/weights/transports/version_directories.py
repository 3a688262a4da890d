"""The files of a version: their names, headers and byte ranges, and when they become visible and are removed.

    path/version-00000012/model-00001-of-00002.safetensors     one for each chunk; with several ranks: model-rank-1-...
                          model-tensor-5f0c….safetensors       a tensor in pieces: each rank writes its own
                          model.safetensors.index.json         once all ranks have written their parts
                          config.json, tokenizer.json, ...     of the model
                          manifest.msgpack                     written last, by each rank: without it its part is invalid
    path/.publisher-1                                          locked by the publisher of rank 1; holds the run's name

The whole tensors of a chunk share one file, without the zero padding between them: safetensors allows no holes. The
layout follows from one rank's manifest: readers know all headers in advance, and ranks write to one file without
coordination. Another rank may be writing to the directory of a version above every kept one: a rank removes only its
own files there. Manifests are removed first: readers never take half of a version for a whole one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import xxhash

from ...errors import ConfigError, WeightMismatch
from ...memory import make_private_directory
from ...memory.segment import try_lock
from ...types import Manifest, TensorInfo, carrier
from ...types.safetensors import METADATA, TensorEntry, dtype_metadata, encode_header, entry
from ..update import check_place

INDEX = "model.safetensors.index.json"
ALIGN = 64  # of a file's first tensor
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


class FileRun(NamedTuple):
    """Bytes ``start`` to ``stop`` of a chunk lie in ``file``, from byte ``place`` on."""

    chunk: int
    start: int
    stop: int
    file: str
    place: int


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file of ``nbytes``. ``runs``: its bytes behind the header. ``holds``: its tensors' names.
    ``tied``: further names of them. ``shared``: True for one tensor in pieces, written by several ranks."""

    name: str
    header: bytes
    nbytes: int
    runs: tuple[FileRun, ...]
    holds: tuple[str, ...]
    tied: dict[str, str]
    shared: bool = False


def tensor_files(manifest: Manifest, prefix: str = "") -> list[TensorFile]:
    """Return the files of a rank's part. ``prefix``: of its own files. Raises WeightMismatch for tensors outside
    their chunks, that overlap, or with the name of another."""
    chunks: list[list[TensorInfo]] = [[] for _ in manifest.chunks]
    pieces: dict[str, list[TensorInfo]] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for tensor in manifest.tensors:
        check_place(manifest.version, manifest.chunks, tensor)
        if (tensor.name, tensor.start) in seen:
            raise WeightMismatch(f"version {manifest.version}: tensor {tensor.name!r} is there twice")
        if tensor.name == METADATA:
            raise WeightMismatch(
                f"version {manifest.version}: tensor {tensor.name!r} cannot go into a file: safetensors has that name"
                " for what is no tensor; publish it by another name (rename=)"
            )
        seen.add((tensor.name, tensor.start))
        if chunks:  # else all tensors are empty
            chunks[tensor.chunk].append(tensor)
    files = []
    for number, tensors in enumerate(chunks, 1):
        name = f"model-{prefix}{number:05}-of-{len(chunks):05}.safetensors"
        files += _own_file(manifest.version, name, tensors, pieces)
    return files + [_shared_file(found) for found in pieces.values()]


def encode_index(version: int, root: str, files: Iterable[TensorFile]) -> bytes:
    """Return the index file of Hugging Face tools: the file of each tensor. Tied names are listed
    in its metadata only, as ``save_pretrained`` does."""
    each = {file.name: file for file in files}
    metadata = {
        "total_size": sum(file.nbytes - len(file.header) for file in each.values()),
        "version": version,
        "root": root,
        "tied": {alias: name for file in each.values() for alias, name in file.tied.items()},
    }
    where = {name: file.name for file in each.values() for name in file.holds}
    return json.dumps({"metadata": metadata, "weight_map": where}, indent=1).encode()


def _own_file(
    version: int, name: str, tensors: list[TensorInfo], pieces: dict[str, list[TensorInfo]]
) -> list[TensorFile]:
    """Return the file of a chunk's whole tensors, unless there are none. Add its pieces of others to ``pieces``."""
    header: dict[str, TensorEntry] = {}
    metadata = {"format": "pt"}
    own: list[tuple[TensorInfo, int]] = []  # with the place in the file's data
    tied: dict[str, str] = {}
    last: TensorInfo | None = None
    size = 0
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.nbytes and last is not None and tensor.offset < last.offset + last.nbytes:
            if (tensor.offset, tensor.nbytes) != (last.offset, last.nbytes):
                raise WeightMismatch(f"version {version}: tensors {tensor.name!r} and {last.name!r} overlap")
            tied[tensor.name] = last.name
            continue
        last = tensor if tensor.nbytes else last
        if tensor.whole:
            pieces.setdefault(tensor.name, []).append(tensor)
            continue
        header[tensor.name] = entry(tensor.dtype, tensor.shape, size)
        metadata |= dtype_metadata(tensor.name, tensor.dtype)
        own.append((tensor, size))
        size += tensor.nbytes
    if tensors and not header:
        return []
    if tied:
        metadata["tied"] = json.dumps(tied)
    front = encode_header(header, metadata, ALIGN)
    runs = [FileRun(t.chunk, t.offset, t.offset + t.nbytes, name, len(front) + at) for t, at in own if t.nbytes]
    tied = {alias: other for alias, other in tied.items() if other in header}
    return [TensorFile(name, front, len(front) + size, tuple(runs), tuple(header), tied)]


def _shared_file(pieces: list[TensorInfo]) -> TensorFile:
    """Return the file of a whole tensor, of which this rank has pieces: the same file for every rank."""
    tensor = pieces[0]
    metadata = {"format": "pt"} | dtype_metadata(tensor.name, tensor.dtype)
    size = math.prod(tensor.whole) * carrier(tensor.dtype).itemsize
    front = encode_header({tensor.name: entry(tensor.dtype, tensor.whole, 0)}, metadata, ALIGN)
    name = f"model-tensor-{xxhash.xxh3_64_hexdigest(tensor.name.encode())}.safetensors"
    runs = tuple(run for piece in pieces for run in _piece_runs(piece, name, len(front)))
    return TensorFile(name, front, len(front) + size, runs, (tensor.name,), {}, shared=True)


def _piece_runs(tensor: TensorInfo, file: str, first: int) -> Iterator[FileRun]:
    """Yield a piece as runs of bytes that are adjacent in the whole, too. ``first``: where the whole begins."""
    if not tensor.nbytes:
        return
    shape, whole, start = tensor.shape, tensor.whole, tensor.start
    cut = len(shape)  # from this dimension on the piece is whole
    while cut and shape[cut - 1] == whole[cut - 1]:
        cut -= 1
    outer = max(cut - 1, 0)
    itemsize = carrier(tensor.dtype).itemsize
    nbytes = math.prod(shape[outer:]) * itemsize
    strides = [math.prod(whole[n + 1 :]) * itemsize for n in range(len(whole))]
    first += sum(at * stride for at, stride in zip(start, strides, strict=True))
    for number, at in enumerate(itertools.product(*map(range, shape[:outer]))):
        begin = tensor.offset + number * nbytes
        place = first + sum(n * stride for n, stride in zip(at, strides, strict=False))
        yield FileRun(tensor.chunk, begin, begin + nbytes, file, place)


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
