"""Arena: one writer's segments. Blocks are cut from the free ranges of its segments; a range is used again,
without new page faults, once its block was freed and no reader holds a view of it.

    block = arena.allocate(nbytes); block.memory[HEADER_BYTES:] = ...          # writer
    view = mapper.view(block.segment, block.start, block.serial, block.nbytes)  # readers, any process
    arena.free([block.serial])                              # the writer, when nobody may ask for it any more

A reader holds a shared lock on the first byte of a block while views of it live; the kernel drops it when the
reader dies. The writer takes the exclusive lock on a freed range, removes the serials of the blocks that lay in
it, and lets go: from then on the range is a hole. Without that lock it waits, however long that is, and costs
its own bytes. A reader that comes late finds no serial and not somebody else's data.

Somebody may remove the files while the writer lives: the tidying of a temporary directory, or a restarted host's
container. Each allocation looks whether the file of its segment is still there; no block is cut from a lost segment.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import AsyncFlowError, MemoryFull
from .free_ranges import FreeRanges
from .locks import try_lock, unlock
from .segment import ALIGN, PAGE, Segment, sync_directory

SEGMENT_BYTES = 8 << 20
MOST_SEGMENTS = 64  # of one size: an arena that holds more grows by larger ones, or files would run out
MOST_WASTE = 16  # a segment is made to measure for blocks that are larger than such a part of it
EPOCH = 4  # the high-water mark is that of the time in which its bytes were allocated this many times
FILL_BYTES = 1 << 20  # of a range whose pages were given back, how many to get again at once


@dataclass
class Allocation:
    """A block, writable through ``memory`` (uint8, (nbytes,)) until announced; the first 16 bytes are the arena's."""

    segment: str
    start: int
    serial: int
    memory: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return len(self.memory)


class GrowthNeeded(Exception):
    """Raised when more memory is needed than the arena holds, and it was not to grow."""


class _Range(NamedTuple):
    """A block, or several freed ones side by side."""

    segment: Segment
    start: int
    stop: int
    heads: list[int]


class Arena:
    """The segments one session writes. Thread-safe. Files are named ``prefix`` and a number, never reused.
    Refuses to work in a child after a bare fork, which would write into what its parent writes.

    What it holds stays within the most bytes that were alive together lately, and one segment: what is idle beyond
    that goes back to the system, whole segments first.
    """

    def __init__(self, directory: Path, prefix: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory, self._prefix, self._segment_bytes = directory, prefix, segment_bytes
        self._unknown = segment_bytes // 4
        self._segments: dict[int, Segment] = {}
        self._blocks: dict[int, _Range] = {}  # by serial
        self._free = FreeRanges()
        self._lacking = False  # whether pages were ever given back, or never taken
        self._waiting: deque[_Range] = deque()  # freed, but readers still look
        self._made = 0
        self._serial = secrets.randbits(30) + 1 << 32  # no two arenas share one, nor does payload look like one
        self._live = self._known = 0
        self._peak = self._peak_before = self._turnover = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes held: those of all segments whose pages are there."""
        return sum(segment.held for segment in self._segments.values())

    @property
    def blocks(self) -> int:
        """Blocks that were not freed yet."""
        return len(self._blocks)

    def allocate(self, nbytes: int, *, grow: bool = True) -> Allocation:
        """Room for a block of ``nbytes`` (its 16 bytes of header among them), at a multiple of 64.

        ``grow`` False: only where a block lay before, and not more than lived before, if blocks are there that may
        have been freed meanwhile. Raises MemoryFull, and GrowthNeeded.
        """
        if os.getpid() != self._pid:
            raise AsyncFlowError(
                "shared memory cannot be written in a child made by fork(); connect again in the child"
            )
        size = max(-(-nbytes // ALIGN), 1) * ALIGN
        with self._lock:
            if self._waiting:
                self._look_again()
            if not grow and self._blocks and self._live + size > self._known:
                self._known = self._live + size + self._unknown  # not at every step on the way up
                raise GrowthNeeded
            segment, start = self._take(size, grow or not self._blocks)
            self._serial += 1
            self._blocks[self._serial] = _Range(segment, start, start + size, [start])
            self._count(size)
            segment.head(start, self._serial)
            return Allocation(segment.name, start, self._serial, segment.bytes[start : start + nbytes])

    def lost(self, block: Allocation) -> bool:
        """True if the file that a block was cut from is gone, so that no reader finds it. Its ``memory`` stays as it is."""
        with self._lock:
            held = self._blocks.get(block.serial)
            return not (self._directory / block.segment).exists() if held is None else held.segment.gone

    def trim(self, block: Allocation, nbytes: int) -> None:
        """Only the first ``nbytes`` of a block are used: its ``memory`` ends there, and what lies behind is free again. For a block
        that was not announced yet."""
        size = max(-(-nbytes // ALIGN), 1) * ALIGN
        with self._lock:
            segment, start, stop, heads = self._blocks[block.serial]
            if start + size < stop:
                self._blocks[block.serial] = _Range(segment, start, start + size, heads)
                if not segment.lost:
                    self._free.add(segment.number, start + size, stop)
                if self._peak == self._live:
                    self._peak -= stop - start - size  # it was never filled
                self._live -= stop - start - size
        block.memory = block.memory[:nbytes]

    def renew(self, block: Allocation) -> bool:
        """Begin a block anew in its place, under another serial, so that the old one is gone; its bytes are as they were. Returns
        False, and nothing is changed, while a reader holds it."""
        with self._lock:
            segment, start, stop, heads = self._blocks[block.serial]
            if not try_lock(segment.fd, start, stop, exclusive=True):
                return False
            segment.behead(heads)
            unlock(segment.fd, start, stop)
            self._serial += 1
            self._blocks[self._serial] = self._blocks.pop(block.serial)
            segment.head(start, self._serial)
        block.serial = self._serial
        return True

    def free(self, serials: Iterable[int]) -> None:
        """Blocks are no longer needed by anyone who could still ask for them. Views of them stay valid. A serial
        that is not there, or not any more, is passed over."""
        with self._lock:
            freed = [block for serial in serials if (block := self._blocks.pop(serial, None)) is not None]
            for each in _side_by_side(freed) if len(freed) > 1 else freed:
                self._release(each)
            for segment in {each.segment for each in freed if each.segment.lost}:
                self._close_unused(segment)

    def settle(self) -> None:
        """Give back what is free now, as if no more bytes had ever lived together than do."""
        with self._lock:
            self._look_at_all()
            self._peak = self._peak_before = self._live
            self._shrink(self._limit())

    def sync(self, block: Allocation) -> None:
        """Return when the block is on the disk, if its directory is on one. Raises MemoryFull: then the block is free."""
        with self._lock:
            segment = self._blocks[block.serial].segment
            fd = os.dup(segment.fd)
        try:
            os.fdatasync(fd)
            if not segment.named:
                sync_directory(self._directory)
                segment.named = True
        except OSError as error:
            self.free([block.serial])
            raise MemoryFull(f"{segment.path} cannot be synced: {os.strerror(error.errno or 0)}") from None
        finally:
            os.close(fd)

    def close(self, *, unlink: bool) -> None:
        """Stop writing. ``unlink``: remove the files too; else whoever owns the directory does."""
        with self._lock:
            for segment in self._segments.values():
                segment.unlink() if unlink else segment.close()
            self._segments.clear()
            self._blocks.clear()
            self._waiting.clear()
            self._free = FreeRanges()
            self._live = 0

    # ---- free ranges

    def _release(self, freed: _Range) -> None:
        """Make holes of what nobody looks at; the rest waits."""
        if self._open(freed):
            return
        for start, stop in zip(freed.heads, [*freed.heads[1:], freed.stop], strict=True):
            single = _Range(freed.segment, start, stop, [start])
            if len(freed.heads) == 1 or not self._open(single):
                self._waiting.append(single)

    def _lose(self, segment: Segment) -> None:
        """Cut no further block from a segment whose file is gone. Its mapping goes with its last block."""
        segment.lost = True
        self._free.forget(segment.number)
        self._look_at_all()
        self._close_unused(segment)

    def _close_unused(self, segment: Segment) -> None:
        if all(block.segment is not segment for block in self._blocks.values()):
            self._segments.pop(segment.number, None)
            segment.close()

    def _open(self, freed: _Range) -> bool:
        segment, start, stop, heads = freed
        if segment.lost:  # nobody writes there again, so whoever reads it may go on
            self._live -= stop - start
            return True
        if not try_lock(segment.fd, start, stop, exclusive=True):
            return False
        segment.behead(heads)
        unlock(segment.fd, start, stop)
        self._free.add(segment.number, start, stop)
        self._live -= stop - start
        return True

    def _look_again(self) -> None:
        """At the range that waits longest, and at the next ones for as long as they have become free."""
        for _ in range(len(self._waiting)):
            if not self._open(self._waiting[0]):
                self._waiting.rotate(-1)
                return
            self._waiting.popleft()

    def _look_at_all(self) -> None:
        self._waiting = deque(each for each in self._waiting if not self._open(each))

    def _take(self, nbytes: int, grow: bool) -> tuple[Segment, int]:
        """A range of that size whose pages are there, in a file that is."""
        while True:
            segment, start = self._cut(nbytes, grow)
            if not segment.gone:
                return segment, start
            self._lose(segment)

    def _cut(self, nbytes: int, grow: bool) -> tuple[Segment, int]:
        found = self._free.take(nbytes, self._lacks if self._lacking else None)
        if found is None and self._waiting:
            self._look_at_all()
            found = self._free.take(nbytes, self._lacks if self._lacking else None)
        if found is None:
            if not grow:
                raise GrowthNeeded
            self._grow(nbytes)
            found = self._free.take(nbytes, self._lacks if self._lacking else None)
            assert found is not None
        segment, start = self._segments[found[0]], found[1]
        if segment.missing:
            try:
                if not grow and segment.lacks(start, start + nbytes):
                    raise GrowthNeeded
                self._fill(segment, start, start + nbytes)
            except BaseException:
                self._free.add(segment.number, start, start + nbytes)
                raise
        return segment, start

    # ---- pages

    def _grow(self, nbytes: int) -> None:
        """Another segment, since no hole is large enough. Only as much of it as may be held has its pages at once."""
        usual = max(self._segment_bytes, self.nbytes // MOST_SEGMENTS)
        size = _pages(max(usual // nbytes, 1) * nbytes if nbytes * MOST_WASTE > usual else usual)
        least = _pages(nbytes)
        self._shrink(self._limit(nbytes) - least)
        self._made += 1
        path = self._directory / f"{self._prefix}{self._made}"
        try:
            segment = Segment(
                path, self._made, size, max(least, min(size, self._limit(nbytes) - self.nbytes) // PAGE * PAGE)
            )
        except MemoryFull:
            self._look_at_all()
            self._shrink(0)
            segment = Segment(path, self._made, size, least)
        self._segments[segment.number] = segment
        self._free.add(segment.number, 0, size)
        self._lacking |= segment.missing > 0

    def _fill(self, segment: Segment, start: int, stop: int) -> None:
        if not segment.lacks(start, stop):
            return
        more = min(max(stop, start + FILL_BYTES), segment.size)  # not page by page
        limit = self._limit(stop - start)
        self._shrink(limit - segment.lacks(start, more))
        if self.nbytes + segment.lacks(start, more) <= limit:
            stop = more
        try:
            segment.fill(start, stop)
        except MemoryFull:
            self._look_at_all()
            self._shrink(0)
            segment.fill(start, stop)

    def _lacks(self, segment: int, start: int, stop: int) -> int:
        return self._segments[segment].lacks(start, stop)

    def _shrink(self, limit: int) -> None:
        """Give free memory back until no more than ``limit`` bytes are held: idle segments, then pages of holes."""
        excess = self.nbytes - limit
        if excess <= 0:
            return
        self._lacking = True
        for segment in sorted(self._segments.values(), key=lambda s: s.held, reverse=True):
            if self._free.remove(segment.number, segment.size):
                del self._segments[segment.number]
                excess -= segment.held
                segment.unlink()
                if excess <= 0:
                    return
        for number, start, stop in self._free.largest_first():
            segment = self._segments[number]
            before = segment.held
            segment.punch(start, stop, excess)
            excess -= before - segment.held
            if excess <= 0:
                return

    def _limit(self, more: int = 0) -> int:
        """Bytes that may be held, with a block of ``more`` about to live: with what may have ended without being known
        here, a segment above the most that lived."""
        most = max(self._peak, self._peak_before, self._live + more)
        return max(most + self._segment_bytes - self._unknown, self._segment_bytes)

    def _count(self, size: int) -> None:
        self._live += size
        self._peak = max(self._peak, self._live)
        self._turnover += size
        if self._turnover > EPOCH * max(self._peak, self._segment_bytes):
            self._peak_before, self._peak, self._turnover = self._peak, self._live, 0
            self._known = min(self._known, self._peak_before)
            self._shrink(self._limit())


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _side_by_side(freed: list[_Range]) -> list[_Range]:
    """The same ranges, neighbours joined: one lock for all."""
    freed.sort(key=lambda each: (each.segment.number, each.start))
    joined = [freed[0]]
    for each in freed[1:]:
        last = joined[-1]
        if each.segment is last.segment and each.start == last.stop:
            joined[-1] = _Range(last.segment, last.start, each.stop, last.heads + each.heads)
        else:
            joined.append(each)
    return joined
