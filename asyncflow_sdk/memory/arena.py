"""Arena: shared-memory segments with one writer. Blocks are allocated from free ranges of the segments. A range is
reused, without new page faults, after its block is freed and all readers have released their views.

    block = arena.allocate(nbytes); block.memory[HEADER_BYTES:] = ...          # writer
    view = mapper.view(block.segment, block.start, block.serial, block.nbytes)  # readers, any process
    arena.free([block.serial])                              # writer, when no reader may request it any more

While a reader has views of a block, it holds a shared lock on the block's first byte. To reuse a freed range, the
writer takes the exclusive lock, clears the serials of the blocks in it, and unlocks; while a reader holds a lock, the
range waits. A late reader finds no serial, and never another block's data.

The files may be deleted while the writer runs, by a cleaner of temporary directories or a restarted container. Each
allocation checks its segment's file; no block is allocated in a lost segment."""

from __future__ import annotations

import os
import secrets
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import AsyncFlowError, MemoryFull
from .segment import ALIGN, PAGE, Segment

SEGMENT_BYTES = 8 << 20
MAX_SEGMENTS = 64  # of one size: a larger arena grows by larger segments, to limit the number of files
MAX_WASTE = 16  # blocks above 1/16 of a segment get a segment of a multiple of their size
EPOCH = 4  # the high-water mark covers the time in which its bytes were allocated 4 times
FILL_BYTES = 1 << 20  # pages allocated at once in a range without pages
CHOICES = 8  # sufficient ranges compared by their missing pages


@dataclass
class Allocation:
    """A block, writable through ``memory`` (uint8) until announced. The arena writes its first 16 bytes."""

    segment: str
    start: int
    serial: int
    memory: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes of the block, header included."""
        return len(self.memory)

    def write(self, start: int, data: Any) -> None:
        """Write bytes at a position. ``data``: a contiguous buffer."""
        found = np.frombuffer(data, np.uint8)
        self.memory[start : start + len(found)] = found

    def change(self, serial: int, nbytes: int) -> None:
        """Set another serial, and keep the first bytes. For its arena."""
        self.serial, self.memory = serial, self.memory[:nbytes]


class GrowthNeeded(Exception):
    """Raised by ``Arena.allocate`` with ``grow`` False if the arena has to grow."""


class _Range(NamedTuple):
    """A block, or several adjacent freed blocks, beginning at ``heads``."""

    segment: Segment
    start: int
    stop: int
    heads: list[int]


class FreeRanges:
    """The free ranges of an arena's segments. Best fit: the smallest sufficient range was mostly freed just now, and
    is still in the cache; large ranges stay whole. Operations take O(log n) and a memmove of the sorted list."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int, int]] = []  # (size, segment number, start)
        self._stop_of: dict[tuple[int, int], int] = {}  # (segment, start) → stop
        self._start_of: dict[tuple[int, int], int] = {}  # (segment, stop) → start

    def add(self, segment: int, start: int, stop: int) -> None:
        """Add a range, and join it with adjacent ones."""
        before = self._start_of.pop((segment, start), None)
        if before is not None:
            self._drop(segment, before, start)
            start = before
        after = self._stop_of.get((segment, stop))
        if after is not None:
            del self._start_of[segment, after]
            self._drop(segment, stop, after)
            stop = after
        self._insert(segment, start, stop)

    def take(self, nbytes: int, cost: Callable[[int, int, int], int] | None = None) -> tuple[int, int] | None:
        """Remove ``nbytes`` and return their segment and start; None if no range is large enough. ``cost`` of a range
        (segment, start, stop): take the cheapest of the smallest CHOICES sufficient ranges."""
        at = bisect_left(self._by_size, (nbytes,))
        if at == len(self._by_size):
            return None
        if cost is not None:
            least = None
            for other in range(at, min(at + CHOICES, len(self._by_size))):
                _, segment, start = self._by_size[other]
                costs = cost(segment, start, start + nbytes)
                if least is None or costs < least:
                    least, at = costs, other
                    if not costs:
                        break
        size, segment, start = self._by_size.pop(at)
        del self._stop_of[segment, start]
        del self._start_of[segment, start + size]
        if size > nbytes:
            self._insert(segment, start + nbytes, start + size)
        return segment, start

    def remove(self, segment: int, size: int) -> bool:
        """Remove a segment of ``size`` bytes if all of it is free. Return True if it was."""
        if self._stop_of.get((segment, 0)) != size:
            return False
        del self._start_of[segment, size]
        self._drop(segment, 0, size)
        return True

    def forget(self, segment: int) -> None:
        """Remove every range of a segment. O(n)."""
        for size, start in [(size, start) for size, number, start in self._by_size if number == segment]:
            del self._start_of[segment, start + size]
            self._drop(segment, start, start + size)

    def largest_first(self) -> Iterator[tuple[int, int, int]]:
        """Yield (segment, start, stop) of each range."""
        return ((segment, start, start + size) for size, segment, start in reversed(self._by_size))

    def _insert(self, segment: int, start: int, stop: int) -> None:
        self._stop_of[segment, start] = stop
        self._start_of[segment, stop] = start
        insort(self._by_size, (stop - start, segment, start))

    def _drop(self, segment: int, start: int, stop: int) -> None:
        del self._stop_of[segment, start]
        del self._by_size[bisect_left(self._by_size, (stop - start, segment, start))]


class Arena:
    """The segments written by one session. Thread-safe; unusable in a child made by fork(), which would write to its
    parent's memory. Files are named ``prefix`` and a number, never reused. It holds at most the recent maximum of
    live bytes plus one segment, and returns free memory above that to the system, whole segments first.
    Example: blocks of 1000 and 64 bytes lie at 0 and 1024 (multiples of 64). The first is freed: 500 bytes go to 0,
    if no reader has a view of it; else the range waits for the reader."""

    def __init__(self, directory: Path, prefix: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory, self._prefix, self._segment_bytes = directory, prefix, segment_bytes
        self._unknown = segment_bytes // 4
        self._segments: dict[int, Segment] = {}
        self._blocks: dict[int, _Range] = {}  # by serial
        self._ranges = FreeRanges()
        self._lacking = False  # True if free ranges may have missing pages
        self._waiting: deque[_Range] = deque()  # freed, but locked by readers
        self._made = 0
        self._serial = secrets.randbits(30) + 1 << 32  # unique among arenas, and unlikely in payload
        self._live = self._known = 0
        self._peak = self._peak_before = self._turnover = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all present pages."""
        return sum(segment.held for segment in self._segments.values())

    @property
    def blocks(self) -> int:
        """Blocks not freed yet."""
        return len(self._blocks)

    def allocate(self, nbytes: int, *, grow: bool = True) -> Allocation:
        """Return a block of ``nbytes``, its header of 16 bytes included, at a multiple of 64. Raises MemoryFull.
        ``grow`` False: raise GrowthNeeded instead of using new memory or exceeding the live bytes known so far, for
        the caller to free blocks first; not if there are no blocks."""
        if os.getpid() != self._pid:
            raise AsyncFlowError(
                "shared memory cannot be written in a child made by fork(); connect again in the child"
            )
        size = _up(nbytes, ALIGN)
        with self._lock:
            if self._waiting:
                self._retry_oldest()
            if not grow and self._blocks and self._live + size > self._known:
                self._known = self._live + size + self._unknown  # not at every step of a growth
                raise GrowthNeeded
            segment, start = self._take(size, grow or not self._blocks)
            self._serial += 1
            self._blocks[self._serial] = _Range(segment, start, start + size, [start])
            self._count(size)
            segment.write_header(start, self._serial)
            return Allocation(segment.name, start, self._serial, segment.bytes[start : start + nbytes])

    def is_lost(self, block: Allocation) -> bool:
        """True if the block's file is gone: readers cannot find it. Its ``memory`` stays valid."""
        with self._lock:
            held = self._blocks.get(block.serial)
            return not (self._directory / block.segment).exists() if held is None else held.segment.gone

    def trim(self, block: Allocation, nbytes: int) -> None:
        """Shorten a block, not announced yet, to ``nbytes``, and free the rest."""
        with self._lock:
            segment, start, stop, heads = self._blocks[block.serial]
            end = start + _up(nbytes, ALIGN)
            if end < stop:
                self._blocks[block.serial] = _Range(segment, start, end, heads)
                if not segment.lost:
                    self._ranges.add(segment.number, end, stop)
                if self._peak == self._live:
                    self._peak -= stop - end  # never filled
                self._live -= stop - end
        block.change(block.serial, nbytes)

    def renew(self, block: Allocation) -> bool:
        """Give a block another serial, with the same bytes. Return False without change while a reader holds it."""
        with self._lock:
            segment, start, stop, heads = self._blocks[block.serial]
            if not segment.clear_headers(heads, stop):
                return False
            self._serial += 1
            self._blocks[self._serial] = self._blocks.pop(block.serial)
            segment.write_header(start, self._serial)
            block.change(self._serial, block.nbytes)
        return True

    def free(self, serials: Iterable[int]) -> None:
        """Free blocks not requested any more. Existing views stay valid. Ignores unknown serials."""
        with self._lock:
            freed = [block for serial in serials if (block := self._blocks.pop(serial, None)) is not None]
            for each in _joined(freed) if len(freed) > 1 else freed:
                self._release(each)
            for segment in {each.segment for each in freed if each.segment.lost}:
                self._close_unused(segment)

    def shrink(self) -> None:
        """Return free memory to the system, and forget the maximum of live bytes."""
        with self._lock:
            self._retry_all()
            self._peak = self._peak_before = self._live
            self._shrink_to(self._limit())

    def sync(self, block: Allocation) -> None:
        """Write a block to its disk, if any. Raises MemoryFull, and frees the block."""
        try:
            with self._lock:
                segment = self._blocks[block.serial].segment
                fd = os.dup(segment.fd)
            try:
                os.fdatasync(fd)
                segment.keep_name(self._directory)
            finally:
                os.close(fd)
        except OSError as error:
            self.free([block.serial])
            raise MemoryFull(f"{segment.path} cannot be synced: {os.strerror(error.errno or 0)}") from None

    def close(self, *, unlink: bool) -> None:
        """Stop writing. ``unlink``: remove the files; else the directory's owner does."""
        with self._lock:
            for segment in self._segments.values():
                segment.close(unlink=unlink)
            self._segments.clear()
            self._blocks.clear()
            self._waiting.clear()
            self._ranges = FreeRanges()
            self._live = 0

    # ---- free ranges

    def _release(self, freed: _Range) -> None:
        """Reuse a freed range, or the unlocked blocks in it; the others wait."""
        if self._reclaim(freed):
            return
        for start, stop in zip(freed.heads, [*freed.heads[1:], freed.stop], strict=True):
            single = _Range(freed.segment, start, stop, [start])
            if len(freed.heads) == 1 or not self._reclaim(single):
                self._waiting.append(single)

    def _close_unused(self, segment: Segment) -> None:
        if all(block.segment is not segment for block in self._blocks.values()):
            self._segments.pop(segment.number, None)
            segment.close()

    def _reclaim(self, freed: _Range) -> bool:
        """Make a freed range free again; return False if a reader holds it."""
        segment, start, stop, heads = freed
        if not segment.lost:  # a lost segment is never written again, so its readers may continue
            if not segment.clear_headers(heads, stop):
                return False
            self._ranges.add(segment.number, start, stop)
        self._live -= stop - start
        return True

    def _retry_oldest(self) -> None:
        """Reclaim waiting ranges, the oldest first, up to the first one held."""
        for _ in range(len(self._waiting)):
            if not self._reclaim(self._waiting[0]):
                self._waiting.rotate(-1)
                return
            self._waiting.popleft()

    def _retry_all(self) -> None:
        self._waiting = deque(each for each in self._waiting if not self._reclaim(each))

    def _take(self, nbytes: int, grow: bool) -> tuple[Segment, int]:
        """Return a free range with present pages, in an existing file."""
        while True:
            segment, start = self._cut(nbytes, grow)
            if not segment.gone:
                return segment, start
            segment.lose()  # it is unmapped with its last block
            self._ranges.forget(segment.number)
            self._retry_all()
            self._close_unused(segment)

    def _cut(self, nbytes: int, grow: bool) -> tuple[Segment, int]:
        found = self._find(nbytes)
        if found is None and self._waiting:
            self._retry_all()
            found = self._find(nbytes)
        if found is None:
            if not grow:
                raise GrowthNeeded
            self._grow(nbytes)
            found = self._find(nbytes)
            assert found is not None
        segment, start = self._segments[found[0]], found[1]
        if segment.missing and segment.lacks(start, start + nbytes):
            try:
                if not grow:
                    raise GrowthNeeded
                self._fill(segment, start, start + nbytes)
            except BaseException:
                self._ranges.add(segment.number, start, start + nbytes)
                raise
        return segment, start

    def _find(self, nbytes: int) -> tuple[int, int] | None:
        return self._ranges.take(nbytes, self._lacks if self._lacking else None)

    # ---- pages

    def _grow(self, nbytes: int) -> None:
        """Add a segment. Only pages within the limit are allocated at once."""
        usual = max(self._segment_bytes, self.nbytes // MAX_SEGMENTS)
        size = _up(max(usual // nbytes, 1) * nbytes if nbytes * MAX_WASTE > usual else usual, PAGE)
        least = _up(nbytes, PAGE)
        self._shrink_to(self._limit(nbytes) - least)
        self._made += 1
        path = self._directory / f"{self._prefix}{self._made}"
        try:
            filled = max(least, min(size, self._limit(nbytes) - self.nbytes) // PAGE * PAGE)
            segment = Segment(path, self._made, size, filled)
        except MemoryFull:
            self._retry_all()
            self._shrink_to(0)
            segment = Segment(path, self._made, size, least)
        self._segments[segment.number] = segment
        self._ranges.add(segment.number, 0, size)
        self._lacking |= segment.missing > 0

    def _fill(self, segment: Segment, start: int, stop: int) -> None:
        """Allocate the missing pages of a range."""
        more = min(max(stop, start + FILL_BYTES), segment.size)  # not page by page
        limit = self._limit(stop - start)
        self._shrink_to(limit - segment.lacks(start, more))
        if self.nbytes + segment.lacks(start, more) <= limit:
            stop = more
        try:
            segment.fill(start, stop)
        except MemoryFull:
            self._retry_all()
            self._shrink_to(0)
            segment.fill(start, stop)

    def _lacks(self, segment: int, start: int, stop: int) -> int:
        return self._segments[segment].lacks(start, stop)

    def _shrink_to(self, limit: int) -> None:
        """Return free memory above ``limit`` bytes: unused segments, then pages of free ranges."""
        excess = self.nbytes - limit
        if excess <= 0:
            return
        self._lacking = True
        for segment in sorted(self._segments.values(), key=lambda s: s.held, reverse=True):
            if self._ranges.remove(segment.number, segment.size):
                del self._segments[segment.number]
                excess -= segment.held
                segment.close(unlink=True)
                if excess <= 0:
                    return
        for number, start, stop in self._ranges.largest_first():
            excess -= self._segments[number].punch(start, stop, excess)
            if excess <= 0:
                return

    def _limit(self, more: int = 0) -> int:
        """Return the bytes to hold at most, given a new block of ``more`` bytes: the maximum of
        live bytes plus a segment, less a margin for freed blocks not reported yet."""
        most = max(self._peak, self._peak_before, self._live + more)
        return max(most + self._segment_bytes - self._unknown, self._segment_bytes)

    def _count(self, size: int) -> None:
        self._live += size
        self._peak = max(self._peak, self._live)
        self._turnover += size
        if self._turnover > EPOCH * max(self._peak, self._segment_bytes):
            self._peak_before, self._peak, self._turnover = self._peak, self._live, 0
            self._known = min(self._known, self._peak_before)
            self._shrink_to(self._limit())


def _up(nbytes: int, unit: int) -> int:
    """Return the next multiple of ``unit``, at least one."""
    return max(-(-nbytes // unit), 1) * unit


def _joined(freed: list[_Range]) -> list[_Range]:
    """Join adjacent ranges: one lock serves them."""
    freed.sort(key=lambda each: (each.segment.number, each.start))
    joined = [freed[0]]
    for each in freed[1:]:
        last = joined[-1]
        if each.segment is last.segment and each.start == last.stop:
            joined[-1] = _Range(last.segment, last.start, each.stop, last.heads + each.heads)
        else:
            joined.append(each)
    return joined
