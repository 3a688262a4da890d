"""Journal: the inputs of a queue server in order of execution, so that a later server can replay
them.

A file is a magic number and records. A record is its length (4 bytes), its number (8), an xxh3
checksum of number and content (8), and the content. Record 0 is the head. Torn, changed, missing or
reordered records are therefore detected. Space is allocated ahead and zero until written, so a full
disk is detected before a request is executed.

    journal.reserve(len(body))                  # raises MemoryFull: nothing was executed
    ...                                         # execute the request
    journal.append(RequestRecord(...), results, digest)
    journal.commit()                            # once for all requests of a round; then answers may be sent
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import xxhash

from .._version import __version__
from ..errors import ConfigError, MemoryFull

FORMAT = 1
MAGIC = b"asyncfl-journal\n"
DISK_RETRY_S = 0.5
"""Seconds between two tries to write to a full disk."""
ROOM_BYTES = 4 << 20
"""Allocated ahead. On a full disk, parts of it are reserved as follows."""
FOR_ENDS = ROOM_BYTES // 4
"""Reserved for dead sessions, deadlines, cancellations, and commands of ``recovery.KEPT``."""
FOR_PROGRESS = ROOM_BYTES // 2
"""Reserved against puts: for ``FOR_ENDS`` and for work on existing rows."""
_FRAME = struct.Struct("<IQQ")


class JournalHead(msgspec.Struct, frozen=True, array_like=True):
    """The run that a file belongs to. ``directory``: of the run's shared memory. ``rows``: of the
    row segments. ``boot``: of the host. ``now``: ledger seconds at the file's start."""

    format: int
    sdk: str
    run: str
    durability: str
    directory: str
    rows: str
    boot: str
    now: float


class _Writer(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of a head in every format."""

    format: int
    sdk: str


def decode_head(content: bytes, path: Path) -> JournalHead:
    """Return the head of a journal or snapshot ``path``. Raises ConfigError naming the writer if
    this version of the SDK cannot read the file or may replay it differently."""
    try:
        writer = _decode_writer(content)
        if writer.format != FORMAT:
            raise ConfigError(
                f"{path} has journal format {writer.format}, and asyncflow-sdk {__version__} reads format {FORMAT}:"
                f" continue or replay it with {writer.sdk}, or choose another directory"
            )
        if writer.sdk != __version__:
            raise ConfigError(
                f"{path} was written by asyncflow-sdk {writer.sdk}; {__version__} may replay it differently:"
                f" continue or replay it with {writer.sdk}, or choose another directory"
            )
        return _decode_head(content)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} has no head of a journal: {error}; choose another directory") from None


class RequestRecord(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """A request. ``now``: ledger seconds. ``ticket``: its wire number. ``body``: the encoded call."""

    now: float
    session: str
    seq: int
    done: int
    ticket: int
    body: bytes


class DropRecord(msgspec.Struct, frozen=True, array_like=True, tag="dropped"):
    """A cancelled request."""

    now: float
    session: str
    seq: int


class SessionEndRecord(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """The process of a session ended. ``blame``: its rows count an attempt."""

    now: float
    session: str
    reason: str
    blame: bool = True


class TickRecord(msgspec.Struct, frozen=True, array_like=True, tag="ticked"):
    """Leases or waiting requests expired."""

    now: float


class RestartRecord(msgspec.Struct, frozen=True, array_like=True, tag="served"):
    """A restarted server continues this file, because a new one did not fit on the disk.

    ``lost``: rows (int64) with lost payload. ``waiting``: tickets of waiting puts with lost
    payload. ``boot``: of the host. ``before``: of the earlier server's host.
    """

    now: float
    lost: bytes
    boot: str
    before: str
    waiting: tuple[int, ...] = ()


Record: TypeAlias = RequestRecord | DropRecord | SessionEndRecord | TickRecord | RestartRecord


class JournalEntry(msgspec.Struct, frozen=True, array_like=True):
    """A record, the nondeterministic results used in its execution, and a digest of its answers."""

    record: Record
    results: tuple[bytes, ...]
    digest: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JournalEntry).decode
_decode_head = msgspec.msgpack.Decoder(JournalHead).decode
_decode_writer = msgspec.msgpack.Decoder(_Writer).decode


class Journal:
    """Writes one file. ``fd``: open for writing. ``sync``: commit to the disk. ``number``: the number of the next
    frame. ``written``: bytes in the file. Not thread-safe."""

    def __init__(self, path: Path, head: JournalHead, fd: int, sync: bool, number: int = 0, written: int = 0) -> None:
        self.path, self.head = path, head
        self.failure: OSError | None = None
        self._fd, self._sync, self._number, self._written = fd, sync, number, written
        self._buffer = bytearray()
        self._allocated = os.fstat(fd).st_size

    @classmethod
    def new(cls, path: Path, head: JournalHead, sync: bool) -> Journal:
        """Begin a file. Raises MemoryFull, OSError."""
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            return cls(path, head, fd, sync)._begin()
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise

    @classmethod
    def reopened(cls, recorded: JournalReader, cut: int, sync: bool) -> Journal:
        """Continue a file read to its end; overwrite its ``torn_bytes``. Raises OSError."""
        assert recorded.head is not None
        fd = os.open(recorded.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, bytes(cut), recorded.end)
            os.fsync(fd)
            return cls(recorded.path, recorded.head, fd, sync, recorded.records + 1, recorded.end)
        except BaseException:
            os.close(fd)
            raise

    @property
    def nbytes(self) -> int:
        """Bytes recorded."""
        return self._written + len(self._buffer)

    def reserve(self, nbytes: int, keep: int = FOR_ENDS) -> None:
        """Reserve room for a request of ``nbytes``, and ``keep`` bytes more. Raises MemoryFull."""
        if self.failure is not None:
            raise self._full(self.failure)
        lacks = self.nbytes + nbytes + keep - self._allocated
        if lacks > 0:
            try:
                os.posix_fallocate(self._fd, self._allocated, lacks + ROOM_BYTES)
            except OSError as error:
                raise self._full(error) from None
            self._allocated += lacks + ROOM_BYTES

    def append(self, record: Record, results: tuple[bytes, ...] = (), digest: int = 0) -> None:
        """Record an executed input."""
        self._frame(_encode(JournalEntry(record, results, digest)))

    def commit(self) -> bool:
        """Write the records. Return False if the disk refuses; ``reserve`` fails meanwhile."""
        if not self._buffer:
            return True
        try:
            self._write()
        except OSError as error:
            self.failure = error
            return False
        self.failure = None
        return True

    def close(self, *, keep_room: bool = False) -> None:
        """Close the file. ``keep_room``: keep the space allocated ahead, for a server that
        continues the file. Idempotent."""
        if self._fd >= 0:
            with suppress(OSError):
                if not keep_room:
                    os.ftruncate(self._fd, self._written)
            os.close(self._fd)
            self._fd = -1

    def _begin(self) -> Journal:
        """Write the head."""
        self.reserve(0)
        self._buffer += MAGIC
        self._frame(_encode(self.head))
        self._write()
        os.fsync(self._fd)
        return self

    def _frame(self, content: bytes) -> None:
        number, self._number = self._number, self._number + 1
        self._buffer += _FRAME.pack(len(content), number, _sum(content, number))
        self._buffer += content

    def _write(self) -> None:
        """Write the buffer at its place, again from its start after a failed try."""
        done = 0
        with memoryview(self._buffer) as view:
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], self._written + done)
        if self._sync:
            os.fdatasync(self._fd)
        self._written += done
        self._buffer = bytearray()

    def _full(self, error: OSError) -> MemoryFull:
        return MemoryFull(
            f"the journal {self.path} has no room for this request: {os.strerror(error.errno or 0)}. Nothing was"
            " stored; free space there (old runs, checkpoints), and try again"
        )


class JournalReader:
    """Reads the journal ``path`` of ``run``: ``head`` (None if it is torn), ``entries``, and the
    bytes after them. Raises ConfigError for a journal of another format, version or run."""

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.records = 0
        self.boot = ""
        """Boot of the host of the server that wrote the last entry read."""
        self.end = 0
        """Bytes read. After them there is nothing, or no valid record."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size else b""
        self.head: JournalHead | None = None
        if self._data[: len(MAGIC)] == MAGIC:
            self.end = len(MAGIC)
            if (content := self._next(0)) is not None:
                try:
                    self.head = _head_of(run, content, path)
                except ConfigError:
                    self.close()
                    raise
                self.boot = self.head.boot
                self.end += _FRAME.size + len(content)

    def entries(self) -> Iterator[JournalEntry]:
        """Yield entries up to the end or the first damage."""
        while self.head is not None and (content := self._next(self.records + 1)) is not None:
            try:
                entry = _decode(content)
            except msgspec.MsgspecError:
                return
            self.boot = entry.record.boot if isinstance(entry.record, RestartRecord) else self.boot
            self.records += 1
            self.end += _FRAME.size + len(content)
            yield entry

    @property
    def torn_bytes(self) -> int:
        """Bytes after the last entry, without trailing zeros: torn or damaged. 0 after a clean end."""
        return len(self._data[self.end :].rstrip(b"\0"))

    def count_records_behind(self) -> int:
        """Return the number of valid records after ``end``. More than 0 means damage, 0 a torn end."""
        data, at, found, least = self._data, self.end, 0, self.records
        while at + _FRAME.size <= len(data):
            window = np.frombuffer(data[at + 4 : at + 12 + (1 << 20)], np.uint8)
            if len(window) < 8:
                break
            numbers = np.lib.stride_tricks.sliding_window_view(window, 8).copy().view("<u8").ravel()
            likely = np.flatnonzero((numbers > least) & (numbers < least + len(data) // _FRAME.size))
            after = at + len(numbers)
            for place in (likely + at).tolist():
                length, number, checksum = _FRAME.unpack_from(data, place)
                start = place + _FRAME.size
                if start + length <= len(data) and _sum(data[start : start + length], number) == checksum:
                    found, least, after = found + 1, number, start + length
                    break
            at = after
        return found

    def close(self) -> None:
        """Unmap the file."""
        if isinstance(self._data, mmap.mmap):
            self._data.close()

    def _next(self, number: int) -> bytes | None:
        """Return the content of the record at ``end``; None if it is invalid or has another number."""
        start = self.end + _FRAME.size
        if start > len(self._data):
            return None
        length, found, checksum = _FRAME.unpack_from(self._data, self.end)
        content = self._data[start : start + length]
        if found != number or len(content) != length or _sum(content, number) != checksum:
            return None
        return content


def _head_of(run: str, content: bytes, path: Path) -> JournalHead:
    head = decode_head(content, path)
    if head.run != run:
        raise ConfigError(
            f"{path} belongs to run {head.run}, and the snapshot beside it to run {run}: put its own journal there,"
            " or choose another directory"
        )
    return head


def _sum(content: bytes, number: int) -> int:
    return xxhash.xxh3_64_intdigest(content, number)
