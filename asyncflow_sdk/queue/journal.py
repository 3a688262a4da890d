"""Journal: the inputs of a queue server in order of execution. A later server replays them.

A file is a magic number and records. A record is a mark (8 random bytes, the same in all records of a file), length,
number, the byte where its commit began (8 bytes each), an xxh3 checksum of all this, and the content. Record 0 is the
head. The disk writes the pages of a commit in any order, so an invalid record is torn unless a later commit is behind
it: that one began when the record was whole, so this is damage. Space is allocated ahead and zero until written, so a
full disk is detected before a request is executed.

    journal.reserve(len(body), cmd.AddRows)     # raises MemoryFull: nothing was executed
    ...                                         # execute the request
    journal.append(RequestRecord(...), results, digest)
    journal.commit()                            # once for all requests of a round; then answers may be sent
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import xxhash

from .._version import __version__
from ..errors import ConfigError, MemoryFull
from ..ledger import commands as cmd
from ..wire import boot_id

FORMAT = 4  # a commit that changes commands, records or attributes of the state raises it
MAGIC = b"asyncfl-journal\n"
DISK_RETRY_S = 0.5
"""Seconds between two tries to write to a full disk."""
ROOM_BYTES = 4 << 20
"""Allocated ahead. On a full disk, parts of it are reserved as follows."""
FOR_ENDS = ROOM_BYTES // 4
"""Reserved for dead sessions, deadlines, cancellations, and commands of ``KEPT``."""
FOR_PROGRESS = ROOM_BYTES // 2
"""Reserved against puts: for ``FOR_ENDS`` and for work on existing rows."""
KEPT: dict[type, int] = {
    cmd.AddRows: FOR_PROGRESS, cmd.Renew: FOR_ENDS // 2, cmd.GiveBack: FOR_ENDS // 2, cmd.Dismiss: FOR_ENDS // 4,
    cmd.CloseSession: 0,
}  # fmt: skip
"""Bytes of a full journal that a command leaves to others; FOR_ENDS by default. Holders keep their rows, and leave."""
RESTORE = "Nothing was changed: restore the file from a copy, or move the directory away to start a new run"
_FRAME = struct.Struct("<8sQQQ")
_MARK = slice(len(MAGIC), len(MAGIC) + 8)


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

    @property
    def unsynced(self) -> bool:
        """True if the host was started again, and files of the run were never synced: they may be incomplete."""
        return self.durability == "process" and self.boot != boot_id()


def decode_head(content: bytes, path: Path) -> JournalHead:
    """Return the head of a journal or snapshot ``path``. Raises ConfigError naming the writer if
    this version of the SDK cannot read the file or may replay it differently."""
    try:
        format, sdk = (*msgspec.msgpack.decode(content, type=list), None, None)[:2]  # in heads of every format
        if (format, sdk) != (FORMAT, __version__):
            raise ConfigError(
                f"{path} has journal format {format} of asyncflow-sdk {sdk}; {__version__} has format {FORMAT}, and may"
                f" replay it differently: continue or replay it with {sdk}, or choose another directory"
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


Record: TypeAlias = RequestRecord | DropRecord | SessionEndRecord | TickRecord


class JournalEntry(msgspec.Struct, frozen=True, array_like=True):
    """A record, the nondeterministic results used in its execution, and a digest of its answers."""

    record: Record
    results: tuple[bytes, ...]
    digest: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JournalEntry).decode
_decode_head = msgspec.msgpack.Decoder(JournalHead).decode


class Journal:
    """Begins the file ``path``, also where a killed server has begun one. ``sync``: commit to the disk. ``failure``:
    the error of a disk refusing the records of the last commit. Not thread-safe. Raises MemoryFull, OSError."""

    def __init__(self, path: Path, head: JournalHead, sync: bool) -> None:
        self.path = path
        self.failure: OSError | None = None
        self._sync, self._number, self._written, self._allocated = sync, 0, 0, 0
        self._mark, self._buffer = secrets.token_bytes(8), bytearray(MAGIC)
        self._fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            self.reserve(0, type(None))
            self._frame(_encode(head))
            self._write()
            os.fsync(self._fd)
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes recorded."""
        return self._written + len(self._buffer)

    def reserve(self, nbytes: int, command: type) -> None:
        """Reserve room for a request of ``nbytes``, and what its kind leaves to others. Raises MemoryFull."""
        if self.failure is not None:
            raise self._full(self.failure)
        lacks = self.nbytes + nbytes + KEPT.get(command, FOR_ENDS) - self._allocated
        if lacks > 0:
            try:
                os.posix_fallocate(self._fd, self._allocated, lacks + ROOM_BYTES)
            except OSError as error:
                raise self._full(error) from error
            self._allocated += lacks + ROOM_BYTES

    def append(self, record: Record, results: tuple[bytes, ...] = (), digest: int = 0) -> None:
        """Record an executed input."""
        self._frame(_encode(JournalEntry(record, results, digest)))

    def commit(self, note: Callable[[str, str], None]) -> bool:
        """Write the records. Return False if the disk refuses; ``reserve`` fails meanwhile. ``note``: called when
        this changes, with a text and its level."""
        failed, self.failure = self.failure, None
        try:
            self._write()
        except OSError as error:
            self.failure = error
            if failed is None:
                note(f"{self.path} cannot be written: {error}; answers wait", "error")
            return False
        if failed is not None:
            note(f"{self.path} can be written again", "info")
        return True

    def close(self) -> None:
        """Close the file, and free the space allocated ahead. Idempotent."""
        if self._fd >= 0:
            with suppress(OSError):
                os.ftruncate(self._fd, self._written)
            with suppress(OSError):  # all that counts was committed before
                os.close(self._fd)
            self._fd = -1

    def _frame(self, content: bytes) -> None:
        self._buffer += framed(self._mark, self._number, content, self._written)
        self._number += 1

    def _write(self) -> None:
        """Write the buffer at its place, again from its start after a failed try."""
        if not self._buffer:
            return
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
    """Reads a copy of the journal ``path`` of ``run``. ``records``: the number of entries read. ``torn_bytes``: bytes
    after the last entry, without trailing zeros; 0 after a clean end. ``incomplete``: True if a later commit is among
    them, on a host started again that never synced. Raises ConfigError for another format, version or run."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.records, self.torn_bytes, self.incomplete = path, 0, 0, False
        self._data = path.read_bytes()
        first = record_at(self._data, len(MAGIC))
        if first is None or not self._data.startswith(MAGIC):
            raise ConfigError(f"{path} has no valid head, or one of another version: {RESTORE}")
        head = decode_head(first.content, path)
        if head.run != run:
            raise ConfigError(f"{path} belongs to run {head.run}, and the snapshot beside it to run {run}: {RESTORE}")
        self._end, self._synced = first.end, not head.unsynced

    def entries(self) -> Iterator[JournalEntry]:
        """Yield the entries. Raises ConfigError at damage."""
        while (record := self._next()) is not None:
            self.records, self._end = record.number, record.end
            yield _decode(record.content)
        self.torn_bytes = len(self._data[self._end :].rstrip(b"\0"))

    def _next(self) -> _Framed | None:
        for _ in range(2):
            record = record_at(self._data, self._end)
            if record is not None and record.number == self.records + 1:
                return record
            if not self._has_later_commit():
                return None
            self._data = self.path.read_bytes()  # a live server has written the record meanwhile, or it is damaged
        self.incomplete = True
        if not self._synced:
            return None
        raise ConfigError(
            f"{self.path} is damaged: record {self.records + 1}, at byte {self._end}, is invalid, and valid records"
            f" follow it. {RESTORE}"
        )

    def _has_later_commit(self) -> bool:
        """Return True if a valid record of a commit that began behind the next record's place is there."""
        at, mark = self._end - 1, self._data[_MARK]
        while (at := self._data.find(mark, at + 1)) >= 0:
            record = record_at(self._data, at)
            if record is not None and record.began > self._end:
                return True
        return False


class _Framed(NamedTuple):
    """A valid record, and its end in the file."""

    number: int
    began: int
    content: bytes
    end: int


def framed(mark: bytes, number: int, content: bytes, began: int = 0) -> bytes:
    """Return a record."""
    frame = _FRAME.pack(mark, len(content), number, began)
    return frame + _checksum(frame, content) + content


def record_at(data: bytes, at: int) -> _Framed | None:
    """Return the record at a place; None if it is invalid."""
    start = at + _FRAME.size + 8
    frame, checksum = data[at : start - 8], data[start - 8 : start]
    if start > len(data) or frame[:8] != data[_MARK]:
        return None
    _, length, number, began = _FRAME.unpack(frame)
    content = data[start : start + length]
    if len(content) != length or _checksum(frame, content) != checksum:
        return None
    return _Framed(number, began, content, start + length)


def _checksum(frame: bytes, content: bytes) -> bytes:
    return xxhash.xxh3_64_digest(content, xxhash.xxh3_64_intdigest(frame))
