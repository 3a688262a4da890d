"""Journal: every input of a queue server in the order it was carried out, so that another server can carry them out again.

A file is a magic number and records; a record is its length (4 bytes), its number (8), a checksum over both and its
content (8), and the content. Numbers count up from 0, which is the file's head. What is torn, changed, missing or out
of order is therefore seen. Room is allocated ahead, so that a full disk is found before a request is carried
out and not after; what is allocated and not yet written is zero.

    journal.reserve(len(body))                  # raises MemoryFull: nothing was carried out
    ...                                         # carry it out
    journal.append(Asked(...), notes, told)
    journal.commit()                            # once for all requests of a round; then answers may leave
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

from ..errors import MemoryFull

FORMAT = 1
MAGIC = b"asyncfl-journal\n"
ROOM_BYTES = 4 << 20
"""Allocated ahead. Where no more can be allocated, the last of it is kept for what goes first."""
FOR_ENDS = ROOM_BYTES // 4
"""Kept for what is recorded beside requests: deaths, deadlines, notes."""
FOR_PROGRESS = ROOM_BYTES // 2
"""Kept, when new rows are put, for that and for work on the rows that are there."""
_FRAME = struct.Struct("<IQQ")


class Head(msgspec.Struct, frozen=True, array_like=True):
    """What a file belongs to. ``directory``: of the run's shared memory; ``rows``: of the segments of rows; ``boot``: of
    the host; ``now``: ledger seconds at its start."""

    format: int
    sdk: str
    run: str
    durability: str
    directory: str
    rows: str
    boot: str
    now: float


class Asked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """A request. ``now``, here and below: ledger seconds. ``ticket``: what the wire called it. ``body``: as it came."""

    now: float
    session: str
    seq: int
    done: int
    ticket: int
    body: bytes


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag="dropped"):
    """Nobody waits for a request any more."""

    now: float
    session: str
    seq: int


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """The process of a session ended. ``blame``: that counts against the rows it held."""

    now: float
    session: str
    reason: str
    blame: bool = True


class Ticked(msgspec.Struct, frozen=True, array_like=True, tag="ticked"):
    """Leases or parked requests came to their end."""

    now: float


class Served(msgspec.Struct, frozen=True, array_like=True, tag="served"):
    """Another server goes on with this file, for lack of room for a new one. ``lost``: rows (int64) whose payload it found
    gone; ``waiting``: tickets of the puts that waited and lost theirs; ``boot``: of the host; ``before``: of the host of the
    server before it."""

    now: float
    lost: bytes
    boot: str
    before: str
    waiting: tuple[int, ...] = ()


Record: TypeAlias = Asked | Dropped | Gone | Ticked | Served


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A record, what was learned outside while it was carried out, and a digest of the answers it made."""

    record: Record
    notes: tuple[bytes, ...]
    told: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode
_decode_head = msgspec.msgpack.Decoder(Head).decode


class Journal:
    """Writes one file. Not thread-safe. ``sync``: what is committed is on disk. Raises MemoryFull, OSError."""

    def __init__(self, path: Path, head: Head, sync: bool) -> None:
        self.path, self.head = path, head
        self.failure: OSError | None = None
        self._sync = sync
        self._number = 0
        self._buffer = bytearray()
        self._written = self._allocated = 0
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            self.reserve(0)
            self._buffer += MAGIC
            self._frame(_encode(head))
            self._write()
            os.fsync(self._fd)
        except BaseException:
            os.close(self._fd)
            path.unlink(missing_ok=True)
            raise

    @classmethod
    def reopened(cls, recorded: Recorded, cut: int, sync: bool) -> Journal:
        """Go on with a file that was read to its end; the ``cut`` bytes that were torn there are overwritten.
        Raises OSError."""
        assert recorded.head is not None
        journal = cls.__new__(cls)
        journal.path, journal.head, journal.failure, journal._sync = recorded.path, recorded.head, None, sync
        journal._number, journal._written, journal._buffer = recorded.records + 1, recorded.end, bytearray()
        journal._fd = os.open(recorded.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            journal._allocated = os.fstat(journal._fd).st_size
            os.pwrite(journal._fd, bytes(cut), recorded.end)
            os.fsync(journal._fd)
        except BaseException:
            os.close(journal._fd)
            raise
        return journal

    @property
    def nbytes(self) -> int:
        """Bytes recorded."""
        return self._written + len(self._buffer)

    def reserve(self, nbytes: int, keep: int = FOR_ENDS) -> None:
        """See to it that a request of ``nbytes`` can be recorded, and ``keep`` bytes besides. Raises MemoryFull."""
        if self.failure is not None:
            raise self._full(self.failure)
        lacks = self.nbytes + nbytes + keep - self._allocated
        if lacks > 0:
            try:
                os.posix_fallocate(self._fd, self._allocated, lacks + ROOM_BYTES)
            except OSError as error:
                raise self._full(error) from None
            self._allocated += lacks + ROOM_BYTES

    def append(self, record: Record, notes: tuple[bytes, ...] = (), told: int = 0) -> None:
        """Record an input that was carried out."""
        self._frame(_encode(Entry(record, notes, told)))

    def commit(self) -> bool:
        """Write what was appended. False when the disk refuses: nothing more can be reserved until it takes all of it."""
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
        """``keep_room``: what was allocated ahead stays so, for a server that may go on with this file. Idempotent."""
        if self._fd >= 0:
            with suppress(OSError):
                if not keep_room:
                    os.ftruncate(self._fd, self._written)
            os.close(self._fd)
            self._fd = -1

    def _frame(self, content: bytes) -> None:
        number, self._number = self._number, self._number + 1
        self._buffer += _FRAME.pack(len(content), number, _sum(content, number))
        self._buffer += content

    def _write(self) -> None:
        """All of it at its place, also what an earlier try may have written."""
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
            f"the journal {self.path} cannot take this request: {os.strerror(error.errno or 0)}. Nothing was stored;"
            " free space there and ask again"
        )


class Recorded:
    """Reads one file: ``head`` (None when it is torn), its ``entries``, and then what lay behind them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = 0
        self.boot = ""
        """Of the host of the server that wrote the last entry read."""
        self.end = 0
        """Bytes that were read: behind them lies nothing, or something that is no record."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size else b""
        self.head: Head | None = None
        if self._data[: len(MAGIC)] == MAGIC:
            self.end = len(MAGIC)
            with suppress(msgspec.MsgspecError):
                content = self._next(0)
                self.head = None if content is None else _decode_head(content)
                self.boot = "" if self.head is None else self.head.boot
                self.end += 0 if content is None else _FRAME.size + len(content)

    def entries(self) -> Iterator[Entry]:
        """All up to the end, or to what is damaged."""
        while self.head is not None and (content := self._next(self.records + 1)) is not None:
            try:
                entry = _decode(content)
            except msgspec.MsgspecError:
                return
            self.boot = entry.record.boot if isinstance(entry.record, Served) else self.boot
            self.records += 1
            self.end += _FRAME.size + len(content)
            yield entry

    @property
    def cut(self) -> int:
        """Bytes behind the last entry that are not zero to the end: torn or damaged. 0 after a clean end."""
        return len(self._data[self.end :].rstrip(b"\0"))

    def readable_behind(self) -> int:
        """Whole records behind ``end``: any means damage, none a torn end."""
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
        if isinstance(self._data, mmap.mmap):
            self._data.close()

    def _next(self, number: int) -> bytes | None:
        """The content of the record at ``end``; None unless it is whole and the one that has to come."""
        start = self.end + _FRAME.size
        if start > len(self._data):
            return None
        length, found, checksum = _FRAME.unpack_from(self._data, self.end)
        content = self._data[start : start + length]
        if found != number or len(content) != length or _sum(content, number) != checksum:
            return None
        return content


def _sum(content: bytes, number: int) -> int:
    return xxhash.xxh3_64_intdigest(content, number)
