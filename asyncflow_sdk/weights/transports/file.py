"""Weights through files: version directories of safetensors on any file system that trainer and replicas both see.

    run.weight_publisher("file", path="/mnt/shared/run-1/weights")

The trainer is held for one copy into memory; files are written, and synced, behind it. A version outlives its publisher, and
is a Hugging Face model folder, however many ranks write it: whole tensors under their names, and the configuration and tokenizer
of the publisher's ``model``. Replicas find the directory by the path the publisher used, or, where it is
mounted elsewhere, by ``ASYNCFLOW_WEIGHTS_PATH``.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ...errors import (
    ConfigError,
    DeadlineExceeded,
    DigestMismatch,
    MemoryFull,
    ProtocolError,
    VersionGone,
    WeightError,
    WireError,
)
from ...interfaces import Fetched, Host, WeightReceiver, WeightSender, WeightTransport
from ...interfaces.weights import Room
from ...memory import BufferPool, sync_directory
from ...types import Manifest
from ...types.manifest import Bucket
from .file_layout import INDEX, ChunkFiles, TensorFile, chunk_files, encode_index
from .version_directories import VersionDirectories, copy_model_files, file_prefix, manifest_name, version_of
from .version_memory import VersionMemory

PATH = "ASYNCFLOW_WEIGHTS_PATH"
MOST_VIEWS = 1024  # IOV_MAX
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GONE = (errno.ENOENT, errno.ESTALE)
_LINK = (errno.ELOOP, errno.ENOTDIR)
_BAD = (msgspec.MsgspecError, ValueError, RecursionError)

Bytes = npt.NDArray[np.uint8]


class FileAddress(msgspec.Struct, frozen=True, array_like=True):
    path: str
    directory: str
    rank: int = 0
    world_size: int = 1


class FileTransport(WeightTransport):
    """Both ends, by the name ``file``. ``path``: a directory of this run alone; made if it is not there. ``overwrite``: versions
    of another run in it are removed; otherwise they raise ConfigError."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> None:
        self._path, self._overwrite = path, overwrite

    def check(self) -> None:
        if not self._path:
            raise ConfigError(
                "weights transport 'file' needs a path that trainer and replicas see, for example"
                ' weight_publisher("file", path="/mnt/shared/my-run/weights"), or in a workflow'
                ' Weights(transport="file", options={"path": "/mnt/shared/my-run/weights"})'
            )

    def sender(self, host: Host) -> FileSender:
        self.check()
        assert self._path is not None
        try:
            path = Path(self._path).expanduser().absolute()
        except RuntimeError as error:
            raise ConfigError(f"weights transport 'file' cannot write into {self._path}: {error}") from None
        return FileSender(path, host, overwrite=self._overwrite)

    def receiver(self, host: Host) -> FileReceiver:
        return FileReceiver()


class FileSender(WeightSender):
    """Stages a version in memory; ``send`` writes it into a directory of its own."""

    outlives = True

    def __init__(self, path: Path, host: Host, *, overwrite: bool = False) -> None:
        self._model = Path(host.model) if host.model and not host.rank else None
        self._rank, self._world_size = host.rank, host.world_size
        self._directories = VersionDirectories(path, host.rank, host.world_size)
        try:
            self._directories.take(host.run, overwrite=overwrite)
            if host.directory is None:
                self._staging = VersionMemory.private(f"f{host.name}-")
            else:
                self._staging = VersionMemory(host.directory, f"f{host.name}-")
        except BaseException:
            self._directories.close()
            raise
        self._there: set[int] = set()
        self._unannounced: int | None = None

    def adopt(self, kept: Sequence[tuple[Manifest, bytes]]) -> None:
        self._there = self._directories.remove_all_but({manifest.version for manifest, _ in kept})

    def room(self, nbytes: int) -> Room:
        self._unannounced = None
        return self._staging.room(nbytes)

    def send(self, manifest: Manifest) -> bytes:
        version = manifest.version
        self._staging.seal(version)
        place = self._directories.place(version)
        try:
            self._directories.remove(version)
            self._write(place, manifest, self._staging.chunks(version))
        except OSError as error:
            self._directories.remove(version)
            if error.errno in _FULL:
                raise MemoryFull(
                    f"version {version}: no room for its {manifest.nbytes} bytes in {place}: {error.strerror}. Free space"
                    " there, or keep fewer versions"
                ) from None
            raise OSError(error.errno, f"version {version}: {error.strerror}", str(place)) from None
        except BaseException:
            self._directories.remove(version)
            raise
        finally:
            self._staging.keep([])
        self._there.add(version)
        self._unannounced = version
        return msgspec.msgpack.encode(FileAddress(str(place.parent), place.name, self._rank, self._world_size))

    def abandon(self) -> None:
        self._staging.abandon()
        if self._unannounced is not None:
            self.keep([version for version in self._there if version != self._unannounced])

    def keep(self, versions: Sequence[int]) -> None:
        self._unannounced = None
        for version in self._there.difference(versions):
            self._directories.remove(version)
        self._there.intersection_update(versions)
        self._directories.remove_below(versions)

    @property
    def nbytes(self) -> int:
        return self._staging.nbytes

    def close(self) -> None:
        self._staging.close()
        self._directories.close()

    def _write(self, place: Path, manifest: Manifest, chunks: Sequence[Bytes]) -> None:
        """This rank's part; with the last of them the index. Whatever ranks write into one file is as each would write it alone."""
        place.mkdir(exist_ok=self._world_size > 1)
        if self._model is not None:
            copy_model_files(self._model, place)
        for layout, chunk in zip(self._layouts(manifest), chunks, strict=True):
            for n, gap in enumerate(layout.gaps(chunk)):
                if gap.any():
                    raise WeightError(
                        f"version {manifest.version}: bytes between tensors of {layout.files[0].name} are not zero ({n})"
                    )
            for file in layout.files:
                with _opened_to_write(place / file.name, file) as fd:
                    _write_all(fd, [file.header], 0)
                    for at, views in layout.bytes_of(file, chunk):
                        _write_all(fd, views, at)
        name = manifest_name(self._rank, self._world_size)
        _write_whole(place, name, msgspec.msgpack.encode(manifest))
        self._write_index(place, manifest)
        sync_directory(place.parent)

    def _layouts(self, manifest: Manifest, rank: int | None = None) -> list[ChunkFiles]:
        return chunk_files(manifest, file_prefix(self._rank if rank is None else rank, self._world_size))

    def _write_index(self, place: Path, manifest: Manifest) -> None:
        """When all ranks have written their parts. Who sees that last writes it; if several do, they write the same."""
        manifests = [manifest]
        for rank in range(self._world_size):
            if rank == self._rank:
                continue
            try:
                found = (place / manifest_name(rank, self._world_size)).read_bytes()
                manifests.insert(rank, msgspec.msgpack.decode(found, type=Manifest))
            except (FileNotFoundError, *_BAD):
                return
        files = [
            file for r, each in enumerate(manifests) for layout in self._layouts(each, r) for file in layout.files
        ]
        root = " ".join(each.root for each in manifests)
        _write_whole(place, INDEX, encode_index(manifest.version, root, files), f".{self._rank}")


def _write_whole(place: Path, name: str, content: bytes, mark: str = "") -> None:
    """A file that is there as a whole or not at all, also when the host dies."""
    part = place / f"{name}{mark}.tmp"
    part.unlink(missing_ok=True)
    with _created(part) as fd:
        _write_all(fd, [content], 0)
    sync_directory(place)
    os.rename(part, place / name)
    sync_directory(place)


@contextmanager
def _opened_to_write(path: Path, file: TensorFile) -> Iterator[int]:
    """A file of this rank's own is new. One that ranks share may be there; it is of its size afterwards, and nothing of it is lost."""
    if not file.shared:
        with _created(path) as fd:
            yield fd
        return
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        os.ftruncate(fd, file.nbytes)
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _created(path: Path) -> Iterator[int]:
    """A new file, on its disk when the block ends."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, pieces: Sequence[bytes | Bytes], at: int) -> None:
    views = [memoryview(piece) for piece in pieces]  # type: ignore[arg-type]
    while views:
        done = os.pwritev(fd, views[:MOST_VIEWS], at)
        at += done
        views = _rest(views, done)


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left after so many bytes."""
    for n, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[n + 1 :]]
        done -= len(view)
    return []


class FileReceiver(WeightReceiver):
    """Reads versions into memory of its own, and verifies every byte: of headers too, which follow from the manifest."""

    def __init__(self) -> None:
        self._interrupted = False
        self._pool = BufferPool("fetched weights, of which a replica holds two versions")

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        self._interrupted = False
        reading = _VersionReader(self, manifest, *_find(manifest, where), time.monotonic() + timeout_s, timeout_s)
        return Fetched(manifest, reading.chunks(self._pool), moved=manifest.nbytes)

    def interrupt(self) -> None:
        self._interrupted = True

    @property
    def interrupted(self) -> bool:
        return self._interrupted

    def close(self) -> None:
        self._interrupted = True
        self._pool.close()


def _find(manifest: Manifest, where: bytes) -> tuple[Path, str, str]:
    """The directory of a version, and of the rank that wrote this part the manifest's name and its files' prefix. ``where`` comes from another process: it can name nothing but one, and only this one."""
    try:
        place = msgspec.msgpack.decode(where, type=FileAddress)
        if version_of(place.directory) != manifest.version or not os.path.isabs(place.path) or "\0" in place.path:
            raise ValueError(f"it names {place.directory!r} in {place.path!r}")
        if not 0 <= place.rank < place.world_size:
            raise ValueError(f"it is of rank {place.rank} of {place.world_size}")
    except _BAD as error:
        raise ProtocolError(
            f"version {manifest.version}: what its publisher says of its place cannot be read: {error}"
        ) from None
    path = Path(os.path.expanduser(os.environ.get(PATH, "")) or place.path)
    if not os.path.isdir(path):  # of no name does it raise, however long
        raise WeightError(
            f"version {manifest.version}: {path}, where its publisher wrote it, is not on this host; mount it, or set {PATH}"
            " to where it is mounted here"
        )
    of = place.rank, place.world_size
    return path / place.directory, manifest_name(*of), file_prefix(*of)


class _VersionReader:
    """One version being read."""

    def __init__(
        self, receiver: FileReceiver, manifest: Manifest, place: Path, name: str, prefix: str, deadline: float,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self._receiver, self._manifest, self._place, self._name = receiver, manifest, place, name
        self._layouts = chunk_files(manifest, prefix)
        self._deadline, self._timeout_s = deadline, timeout_s
        self._version = f"version {manifest.version}"

    def chunks(self, pool: BufferPool) -> list[Bytes]:
        with self._opened(self._place, None, os.O_DIRECTORY) as directory:
            self._check_manifest(directory)
            for layout in self._layouts:  # before memory is taken for any
                for file in layout.files:
                    self._check_size(directory, file.name, file.nbytes)
            buckets: list[list[Bucket]] = [[] for _ in self._layouts]
            for bucket in self._manifest.buckets():
                buckets[bucket.chunk].append(bucket)
            chunks = pool.take([chunk.nbytes for chunk in self._manifest.chunks])
            try:
                for chunk, layout, inside in zip(chunks, self._layouts, buckets, strict=True):
                    self._read_chunk(directory, chunk, layout, inside)
            except BaseException:
                pool.give_back(chunks)  # though frames of the error's traceback refer to them
                raise
            return chunks

    def _check_manifest(self, directory: int) -> None:
        wanted = msgspec.msgpack.encode(self._manifest)
        self._check_size(directory, self._name, len(wanted))
        with self._opened(self._name, directory) as fd:
            found = os.pread(fd, len(wanted) + 1, 0)
        if found != wanted:
            raise DigestMismatch(
                f"{self._version}: {self._place / self._name} is not the manifest that was published"
            )

    def _check_size(self, directory: int, name: str, wanted: int) -> None:
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            raise self._failed(self._place / name, error) from None
        if not stat.S_ISREG(found.st_mode):
            raise DigestMismatch(f"{self._version}: {self._place / name} is no regular file, but a link or the like")
        if found.st_size != wanted:
            raise DigestMismatch(
                f"{self._version}: {self._place / name} has {found.st_size} bytes, not the {wanted} that were published"
                f"{self._tensors(name)}"
            )

    def _read_chunk(self, directory: int, chunk: Bytes, layout: ChunkFiles, buckets: Sequence[Bucket]) -> None:
        for file in layout.files:
            with self._opened(file.name, directory) as fd:
                header = bytearray(len(file.header))
                self._read(fd, file.name, [header], 0)
                if header != file.header:
                    raise DigestMismatch(
                        f"{self._version}: the header of {self._place / file.name} is not that which was published"
                        f"{self._tensors(file.name)}"
                    )
        for gap in layout.gaps(chunk):
            gap[:] = 0
        for bucket in buckets:
            self._check_time()
            name = ""
            for file, at, views in layout.pieces(chunk, bucket.start, bucket.stop):
                name = file.name
                with self._opened(name, directory) as fd:
                    self._read(fd, name, views, at)
            try:
                self._manifest.check(bucket, memoryview(chunk[bucket.start : bucket.stop]))  # type: ignore[arg-type]
            except DigestMismatch as error:
                raise DigestMismatch(f"{error}, in {self._place / name}") from None

    def _read(self, fd: int, name: str, pieces: Sequence[bytearray | Bytes], at: int) -> None:
        views = [memoryview(piece) for piece in pieces]  # type: ignore[arg-type]
        while views:
            try:
                done = os.preadv(fd, views[:MOST_VIEWS], at)
            except OSError as error:
                raise self._failed(self._place / name, error) from None
            if not done:
                raise DigestMismatch(f"{self._version}: {self._place / name} ends at byte {at}{self._tensors(name)}")
            at += done
            views = _rest(views, done)

    def _check_time(self) -> None:
        if self._receiver.interrupted:
            raise VersionGone(f"{self._version} is wanted no more")
        if time.monotonic() > self._deadline:
            raise DeadlineExceeded(f"{self._version}: {self._place} was not read within {self._timeout_s:g} s")

    @contextmanager
    def _opened(self, name: str | Path, directory: int | None, flags: int = 0) -> Iterator[int]:
        """Nothing is followed, and nothing waits: what lies there may be a link or a pipe."""
        path = self._place / name
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, dir_fd=directory)
        except OSError as error:
            raise self._failed(path, error) from None
        try:
            yield fd
        finally:
            os.close(fd)

    def _failed(self, path: Path, error: OSError) -> Exception:
        if error.errno in _GONE and not os.path.exists(self._place / self._name):
            return VersionGone(f"{self._version} is no longer kept in {self._place}; take the newest")
        if error.errno in _GONE:
            return DigestMismatch(f"{self._version}: {path} is missing{self._tensors(path.name)}")
        if error.errno in _LINK:
            return DigestMismatch(
                f"{self._version}: {path} is a symbolic link, or no directory; nothing is read through it"
            )
        return WireError(f"{self._version}: {path} cannot be read: {error.strerror}")

    def _tensors(self, name: str) -> str:
        """What a file should hold, for people."""
        files = (file for layout in self._layouts for file in layout.files)
        held = next((file.holds for file in files if file.name == name), ())
        return f"; it holds {', '.join(held[:5])}{' and more' if len(held) > 5 else ''}" if held else ""
