"""Transport ``file``: version directories of safetensors on a file system of trainer and replicas.

    run.weight_publisher("file", path="/mnt/shared/run-1/weights")

The trainer waits for one copy into memory; a background thread writes and syncs the files. Versions
outlive their publisher. Each is a Hugging Face model folder, whatever the number of ranks: whole
tensors, and the configuration and tokenizer of the publisher's ``model``. Replicas use the
publisher's path, or ``ASYNCFLOW_WEIGHTS_PATH`` where it is mounted elsewhere.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

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
from ...interfaces.weights import Bytes, Room
from ...memory import BufferPool, sync_directory
from ...types import Manifest
from ...types.manifest import Bucket
from .shm import VersionMemory
from .version_directories import (
    INDEX,
    RankFiles,
    TensorFile,
    VersionDirectories,
    copy_model_files,
    encode_index,
    tensor_files,
    version_of,
)

PATH = "ASYNCFLOW_WEIGHTS_PATH"
PIECE_BYTES = 1 << 20  # read and verified at a time
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GONE = (errno.ENOENT, errno.ESTALE)
_LINK = (errno.ELOOP, errno.ENOTDIR)
_BAD = (msgspec.MsgspecError, ValueError, RecursionError)


class FileAddress(msgspec.Struct, frozen=True, array_like=True):
    """The directory of a version below ``path``, and the publishing rank."""

    path: str
    directory: str
    rank: int = 0
    world_size: int = 1


class FileTransport(WeightTransport):
    """Both ends, by the name ``file``. ``path``: a directory for this run only, created if missing.
    ``overwrite``: remove versions of another run in it; otherwise they raise ConfigError."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> None:
        self._path, self._overwrite = path, overwrite

    def check(self) -> None:
        """Raise ConfigError without a path."""
        if not self._path:
            raise ConfigError(
                "weights transport 'file' needs a path that trainer and replicas see, for example"
                ' weight_publisher("file", path="/mnt/shared/my-run/weights"), or in a workflow'
                ' Weights(transport="file", options={"path": "/mnt/shared/my-run/weights"})'
            )

    def sender(self, host: Host) -> FileSender:
        """See ``WeightTransport.sender``."""
        self.check()
        assert self._path is not None
        try:
            path = Path(self._path).expanduser().absolute()
        except RuntimeError as error:
            raise ConfigError(f"weights transport 'file' cannot write into {self._path}: {error}") from None
        return FileSender(path, host, overwrite=self._overwrite)

    def receiver(self, host: Host) -> FileReceiver:
        """See ``WeightTransport.receiver``."""
        return FileReceiver()


class FileSender(WeightSender):
    """Stages a version in memory; ``send`` writes it to its directory."""

    outlives = True

    def __init__(self, path: Path, host: Host, *, overwrite: bool = False) -> None:
        self._model = Path(host.model) if host.model and not host.rank else None
        self._files = RankFiles(host.rank, host.world_size)
        self._directories = VersionDirectories(path, self._files)
        try:
            self._directories.take(host.run, overwrite=overwrite)
            name = f"f{host.name}-"
            self._memory = VersionMemory(host.directory, name) if host.directory else VersionMemory.private(name)
        except BaseException:
            self._directories.close()
            raise
        self._written: set[int] = set()
        self._unannounced: int | None = None

    def adopt(self, kept: Sequence[tuple[Manifest, bytes]]) -> None:
        """See ``WeightSender.adopt``."""
        self._written = self._directories.remove_all_but({manifest.version for manifest, _ in kept})

    def room(self, nbytes: int) -> Room:
        """See ``WeightSender.room``."""
        self._unannounced = None
        return self._memory.room(nbytes)

    def send(self, manifest: Manifest) -> bytes:
        """See ``WeightSender.send``."""
        version = manifest.version
        self._memory.seal(version)
        directory = self._directories.place(version)
        try:
            self._directories.remove(version)
            self._write(directory, manifest, self._memory.chunks(version))
        except BaseException as error:
            self._directories.remove(version)
            if not isinstance(error, OSError):
                raise
            if error.errno in _FULL:
                raise MemoryFull(
                    f"version {version}: no room for its {manifest.nbytes} bytes in {directory}: {error.strerror}."
                    " Free space there, or keep fewer versions"
                ) from None
            raise OSError(error.errno, f"version {version}: {error.strerror}", str(directory)) from None
        finally:
            self._memory.keep([])
        self._written.add(version)
        self._unannounced = version
        return msgspec.msgpack.encode(FileAddress(str(directory.parent), directory.name, *self._files))

    def abandon(self) -> None:
        """See ``WeightSender.abandon``."""
        self._memory.abandon()
        if self._unannounced is not None:
            self.keep([version for version in self._written if version != self._unannounced])

    def keep(self, versions: Sequence[int]) -> None:
        """See ``WeightSender.keep``."""
        self._unannounced = None
        for version in self._written.difference(versions):
            self._directories.remove(version)
        self._written.intersection_update(versions)
        self._directories.remove_below(versions)

    @property
    def nbytes(self) -> int:
        """Host memory held for weights."""
        return self._memory.nbytes

    def close(self) -> None:
        """See ``WeightSender.close``."""
        self._memory.close()
        self._directories.close()

    def _write(self, directory: Path, manifest: Manifest, chunks: Sequence[Bytes]) -> None:
        """Write this rank's part. The last rank writes the index, too."""
        directory.mkdir(exist_ok=True)  # other ranks and people may have files there
        if directory.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "it is a symbolic link; nothing is written through it")
        if self._model is not None:
            copy_model_files(self._model, directory)
        for file in tensor_files(manifest, self._files.prefix):
            # a shared file may exist already: it keeps other ranks' bytes
            with _synced(directory / file.name, 0 if file.shared else os.O_EXCL) as fd:
                _write(fd, file.header, 0)
                for run in file.runs:
                    _write(fd, chunks[run.chunk][run.start : run.stop], run.place)
                os.ftruncate(fd, file.nbytes)  # last: a half-written file is short
        _write_atomically(directory, self._files.manifest, msgspec.msgpack.encode(manifest))
        self._write_index(directory, manifest)
        sync_directory(directory.parent)

    def _write_index(self, directory: Path, manifest: Manifest) -> None:
        """Write the index if all ranks' parts are written. Several ranks write the same bytes."""
        files: list[TensorFile] = []
        roots = []
        for rank in range(self._files.world_size):
            names = self._files._replace(rank=rank)
            part = manifest
            if names != self._files:
                try:
                    part = msgspec.msgpack.decode((directory / names.manifest).read_bytes(), type=Manifest)
                except (FileNotFoundError, *_BAD):
                    return
            files += tensor_files(part, names.prefix)
            roots.append(part.root)
        index = encode_index(manifest.version, " ".join(roots), files)
        _write_atomically(directory, INDEX, index, f".{self._files.rank}")


def _write_atomically(directory: Path, name: str, content: bytes, mark: str = "") -> None:
    """Write a file that is complete or missing, even if the host dies."""
    part = directory / f"{name}{mark}.tmp"
    part.unlink(missing_ok=True)
    with _synced(part, os.O_EXCL) as fd:
        _write(fd, content, 0)
    sync_directory(directory)
    os.rename(part, directory / name)
    sync_directory(directory)


@contextmanager
def _synced(path: Path, flags: int) -> Iterator[int]:
    """Open a file to write. It is on its disk when the block ends."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o666)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(fd: int, data: bytes | Bytes, at: int) -> None:
    view = memoryview(data)  # type: ignore[arg-type]
    while view:
        done = os.pwritev(fd, [view], at)
        at, view = at + done, view[done:]


class FileReceiver(WeightReceiver):
    """Reads versions into its own memory and verifies every byte, headers included."""

    def __init__(self) -> None:
        self.interrupted = False
        self._pool = BufferPool("fetched weights, of which a replica holds two versions")

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        """See ``WeightReceiver.fetch``."""
        self.interrupted = False
        reader = _VersionReader(self, manifest, *_find(manifest, where), timeout_s)
        return Fetched(manifest, reader.read(self._pool), moved=manifest.nbytes)

    def interrupt(self) -> None:
        """See ``WeightReceiver.interrupt``."""
        self.interrupted = True

    def close(self) -> None:
        """See ``WeightReceiver.close``."""
        self.interrupted = True
        self._pool.close()


def _find(manifest: Manifest, where: bytes) -> tuple[Path, RankFiles]:
    """Return the directory of a version, and the names of the publishing rank's files. ``where``
    comes from another process: it is limited to a directory of this version."""
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
    if not os.path.isdir(path):  # raises for no name, however long
        raise WeightError(
            f"version {manifest.version}: {path}, where its publisher wrote it, is not on this host; mount it, or"
            f" set {PATH} to where it is mounted here"
        )
    return path / place.directory, RankFiles(place.rank, place.world_size)


class _VersionReader:
    def __init__(
        self, receiver: FileReceiver, manifest: Manifest, path: Path, files: RankFiles, timeout_s: float
    ) -> None:
        self._receiver, self._manifest, self._path = receiver, manifest, path
        self._deadline, self._timeout_s = time.monotonic() + timeout_s, timeout_s
        published = msgspec.msgpack.encode(manifest)
        own = TensorFile(files.manifest, published, len(published), (), (), {})
        self._files = [own, *tensor_files(manifest, files.prefix)]  # the manifest's file first
        self._version = f"version {manifest.version}"

    def read(self, pool: BufferPool) -> list[Bytes]:
        """Return the verified chunks, in memory of ``pool``."""
        with self._opened(self._path, None, os.O_DIRECTORY) as directory:
            for file in self._files:  # before memory is allocated
                with self._opened(file.name, directory) as fd:
                    self._check_front(fd, file)
            chunks = pool.take([chunk.nbytes for chunk in self._manifest.chunks])
            try:
                self._read_chunks(directory, chunks)
            except BaseException:
                pool.give_back(chunks)  # frames of the error's traceback still refer to them
                raise
            return chunks

    def _check_front(self, fd: int, file: TensorFile) -> None:
        """Compare kind, size and header of a file with those of the published one."""
        found, header = os.fstat(fd), np.empty(len(file.header), np.uint8)
        about = f"{self._version}: {self._path / file.name}"
        if not stat.S_ISREG(found.st_mode):
            raise DigestMismatch(f"{about} is no regular file")
        if found.st_size != file.nbytes:
            raise DigestMismatch(
                f"{about} has {found.st_size} bytes, not the {file.nbytes} that were published{self._tensors(file.name)}"
            )
        self._read(fd, file.name, header, 0)
        if header.tobytes() != file.header:
            raise DigestMismatch(f"{about} has another header than the published one{self._tensors(file.name)}")

    def _read_chunks(self, directory: int, chunks: Sequence[Bytes]) -> None:
        """Read all chunks in order, and verify each bucket soon after its last byte."""
        buckets = deque(self._manifest.buckets())
        ends = [0] * len(chunks)
        runs = sorted(run for file in self._files for run in file.runs)
        for run in runs:
            chunks[run.chunk][ends[run.chunk] : run.start] = 0  # padding is in no file
            ends[run.chunk] = run.stop
        for chunk, end in zip(chunks, ends, strict=True):
            chunk[end:] = 0
        for name, group in itertools.groupby(runs, key=lambda run: run.file):
            with self._opened(name, directory) as fd:
                for run in group:
                    for low in range(run.start, run.stop, PIECE_BYTES):
                        high = min(low + PIECE_BYTES, run.stop)
                        self._read(fd, name, chunks[run.chunk][low:high], run.place + low - run.start)
                        while buckets and (buckets[0].chunk, buckets[0].stop) <= (run.chunk, high):
                            self._verify(buckets.popleft(), chunks)
        for bucket in buckets:
            self._verify(bucket, chunks)

    def _verify(self, bucket: Bucket, chunks: Sequence[Bytes]) -> None:
        data = chunks[bucket.chunk][bucket.start : bucket.stop]
        try:
            self._manifest.check(bucket, memoryview(data))  # type: ignore[arg-type]
        except DigestMismatch as error:
            runs = (run for file in self._files for run in file.runs)
            name = next((r.file for r in runs if r.chunk == bucket.chunk and r.stop > bucket.start), "")
            raise DigestMismatch(f"{error}, in {self._path / name}") from None

    def _read(self, fd: int, name: str, view: Bytes, at: int) -> None:
        while len(view):
            if self._receiver.interrupted:
                raise VersionGone(f"{self._version} is wanted no more")
            if time.monotonic() > self._deadline:
                raise DeadlineExceeded(f"{self._version}: {self._path} was not read within {self._timeout_s:g} s")
            try:
                done = os.preadv(fd, [view], at)  # type: ignore[list-item]
            except OSError as error:
                raise self._failed(self._path / name, error) from None
            if not done:
                raise DigestMismatch(f"{self._version}: {self._path / name} ends at byte {at}{self._tensors(name)}")
            at, view = at + done, view[done:]

    @contextmanager
    def _opened(self, name: str | Path, directory: int | None, flags: int = 0) -> Iterator[int]:
        """Open a file to read, without following links or waiting for pipes."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, dir_fd=directory)
        except OSError as error:
            raise self._failed(self._path / name, error) from None
        try:
            yield fd
        finally:
            os.close(fd)

    def _failed(self, path: Path, error: OSError) -> Exception:
        if error.errno in _GONE and not os.path.exists(self._path / self._files[0].name):
            return VersionGone(f"{self._version} is no longer kept in {self._path}; take the newest")
        if error.errno in _GONE:
            return DigestMismatch(f"{self._version}: {path} is missing{self._tensors(path.name)}")
        if error.errno in _LINK:
            return DigestMismatch(
                f"{self._version}: {path} is a symbolic link, or no directory; nothing is read through it"
            )
        return WireError(f"{self._version}: {path} cannot be read: {error.strerror}")

    def _tensors(self, name: str) -> str:
        """Return the tensors of a file, for an error message."""
        held = next((file.holds for file in self._files if file.name == name), ())
        return f"; it holds {', '.join(held[:5])}{' and more' if len(held) > 5 else ''}" if held else ""
