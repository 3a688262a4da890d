"""Delta: the lossless difference between a bucket and the same bucket of an earlier version.

    code = encode(new, base, 2)      # None: the delta is no smaller than the bucket
    apply(code, base, out)           # out equals new; an invalid code writes nothing

A bucket is words of 1, 2, 4 or 8 bytes, subtracted as integers: two neighbouring floating-point
numbers differ by 1 at any exponent. A sparse code lists the changed words: the gaps between their
places, one byte each, with 255 for 255 unchanged words, and their differences. A dense code holds
the differences of all words. Differences are folded (0, -1, 1, -2, ...) and split into one plane
for each byte. Each plane is compressed on its own: planes of high bytes are mostly zeros.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from ...errors import ProtocolError

Bytes = npt.NDArray[np.uint8]
Words = np.ndarray[Any, np.dtype[Any]]

SPARSE = 0.4  # the largest share of changed words in a sparse code; above it dense codes are as small
WORTH = 0.9  # the largest useful code, as a share of its bucket
_HEAD = struct.Struct("<BBxxII")  # kind, width; bytes of the bucket, words in the code
_LENGTH = struct.Struct("<I")
_SPARSE, _DENSE = 1, 2
_WIDTHS = (1, 2, 4, 8)
_STEP = 255
_GROUP = 8  # bytes compared at once; the rest of a bucket, less than this, is sent unchanged
_PROBE = 32 << 10  # words of the sample that decides whether a dense code is made
_BLOCK = 64 << 10  # words subtracted at once: they stay in the cache
_MOST_WINDOW = 8 << 20  # memory for a frame beside its content; valid frames need 512 KB


class _Own(threading.local):
    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)


_own = _Own()  # neither is thread-safe


def encode(new: Bytes, base: Bytes, width: int) -> bytes | None:
    """Return the delta of ``new`` against ``base``; None if it is not clearly smaller than ``new``. Both contiguous,
    of the same size. ``width``: bytes of a word. Releases the GIL most of the time."""
    size = len(new) // _GROUP * _GROUP
    head, tail = (new[:size], base[:size]), new[size:].tobytes()
    differ = _differ(*head, _GROUP)
    if np.count_nonzero(differ) * _GROUP <= SPARSE * size or np.mean(_differ(*head, width)) <= SPARSE:
        places, folded = _listed(*head, np.flatnonzero(differ), width)
        kind, streams = _SPARSE, [_gaps(places), *_planes(folded)]
    else:
        if not _promising(*head, width):
            return None
        folded = _folded_all(*head, width)
        kind, streams = _DENSE, _planes(folded)
    parts = [_HEAD.pack(kind, width, len(new), len(folded))]
    for stream in map(_pack, streams):
        parts += [_LENGTH.pack(len(stream)), stream]
    code = b"".join((*parts, tail))
    return code if len(code) <= WORTH * len(new) else None


def apply(code: Any, base: Bytes, out: Bytes) -> None:
    """Write the bucket encoded against ``base`` to ``out``, of the same size. Both contiguous, without overlap.
    Raises ProtocolError for an invalid code, before ``out`` is written. Memory is limited to a few times the bucket
    for any code. A wrong base is not detected: compare digests."""
    rest = memoryview(code).cast("B")
    try:
        kind, width, nbytes, count = _HEAD.unpack_from(rest)
        if width not in _WIDTHS or kind not in (_SPARSE, _DENSE) or nbytes != len(base) or nbytes != len(out):
            raise ProtocolError(f"a delta of kind {kind} of {nbytes} bytes of width {width}, for {len(base)} bytes")
        size = nbytes // _GROUP * _GROUP
        words = size // width
        if count > words or (kind == _DENSE and count != words):
            raise ProtocolError(f"a delta of {count} of {words} words")
        rest = rest[_HEAD.size :]
        places = None
        if kind == _SPARSE:
            gaps, rest = _unpack(rest, count, count + words // _STEP + 1)
            places = _places(gaps, count, words)
        planes = []
        for _ in range(width):
            plane, rest = _unpack(rest, count, count)
            planes.append(plane)
        if len(rest) != nbytes - size:
            raise ProtocolError(f"a delta with {len(rest)} bytes left over; {nbytes - size} are expected")
    except struct.error as error:
        raise ProtocolError(f"a delta that ends too early: {error}") from None
    new = out[:size].view(f"u{width}")
    if places is not None:
        out[:size] = base[:size]
        new[places] += _unfolded(planes)
    else:
        old = base[:size].view(f"u{width}")
        for start in range(0, count, _BLOCK):
            part = slice(start, start + _BLOCK)
            np.add(old[part], _unfolded([plane[part] for plane in planes]), out=new[part])
    out[size:] = np.frombuffer(rest, np.uint8)


# ---- words


def _differ(new: Bytes, base: Bytes, width: int) -> npt.NDArray[np.bool_]:
    differ: npt.NDArray[np.bool_] = new.view(f"u{width}") != base.view(f"u{width}")
    return differ


def _listed(new: Bytes, base: Bytes, groups: Words, width: int) -> tuple[Words, Words]:
    """Return the places of the changed words, all in these groups, and their folded differences."""
    shift = (_GROUP // width).bit_length() - 1
    difference = new.view("u8")[groups].view(f"u{width}") - base.view("u8")[groups].view(f"u{width}")
    inside = np.flatnonzero(difference != 0)
    places = (groups[inside >> shift] << shift) | (inside & (1 << shift) - 1)
    return places, _folded(difference[inside])


def _gaps(places: Words) -> Bytes:
    """Return the number of unchanged words before each place, since the last one."""
    gaps = (np.diff(places, prepend=-1) - 1).astype(np.uint32)
    full = gaps // _STEP
    if not full.any():
        return gaps.astype(np.uint8)
    coded = np.full(len(gaps) + int(full.sum()), _STEP, np.uint8)
    coded[np.cumsum(full + 1, dtype=np.int64) - 1] = gaps - full * _STEP
    return coded


def _places(gaps: Bytes, count: int, words: int) -> Words:
    ends = np.flatnonzero(gaps != _STEP)
    if len(ends) != count or (len(gaps) and gaps[-1] == _STEP):
        raise ProtocolError(f"a delta that lists {len(ends)} places and {count} words")
    places: Words = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(count)
    if count and places[-1] >= words:
        raise ProtocolError(f"a delta of word {places[-1]} of {words}")
    return places


def _folded(difference: Words) -> Words:
    """Map small differences of either sign to small unsigned numbers."""
    width = difference.itemsize
    sign = difference.view(f"i{width}") >> (8 * width - 1)
    folded: Words = (difference << 1) ^ sign.view(f"u{width}")
    return folded


def _folded_all(new: Bytes, base: Bytes, width: int) -> Words:
    ours, theirs = new.view(f"u{width}"), base.view(f"u{width}")
    folded: Words = np.empty_like(ours)
    for start in range(0, len(ours), _BLOCK):
        part = slice(start, start + _BLOCK)
        folded[part] = _folded(ours[part] - theirs[part])
    return folded


def _unfolded(planes: list[Bytes]) -> Words:
    folded: Words = planes[0].astype(f"u{len(planes)}")
    for number, plane in enumerate(planes[1:], 1):
        folded |= plane.astype(folded.dtype) << 8 * number
    difference: Words = (folded >> 1) ^ (0 - (folded & 1))
    return difference


def _planes(words: Words) -> list[Bytes]:
    """Return the low bytes of all words, then the next bytes, and so on."""
    return [(words >> 8 * number).astype(np.uint8) for number in range(words.itemsize)]


def _promising(new: Bytes, base: Bytes, width: int) -> bool:
    """True if a sample from the middle compresses."""
    middle = len(new) // 2 // _GROUP * _GROUP
    part = slice(middle, middle + _PROBE * width)
    folded = _folded_all(new[part], base[part], width)
    return sum(len(_pack(plane)) for plane in _planes(folded)) <= WORTH * folded.nbytes + 100


# ---- streams


def _pack(stream: Bytes) -> bytes:
    packed: bytes = _own.compressor.compress(stream.data)
    return packed


def _unpack(data: memoryview, least: int, most: int) -> tuple[Bytes, memoryview]:
    """Return the next stream, of ``least`` to ``most`` bytes, and the data behind it."""
    (length,) = _LENGTH.unpack_from(data)
    packed, rest = data[_LENGTH.size : _LENGTH.size + length], data[_LENGTH.size + length :]
    if len(packed) != length:
        raise ProtocolError("a delta that ends too early")
    try:
        size = zstandard.frame_content_size(packed)  # checked before it is allocated
        raw = _own.decompressor.decompress(packed, allow_extra_data=False) if least <= size <= most else b""
    except zstandard.ZstdError as error:
        raise ProtocolError(f"a delta that cannot be read: {error}") from None
    if not least <= min(size, len(raw)) <= max(size, len(raw)) <= most:
        raise ProtocolError(f"a delta with a stream of {size} bytes; {least} to {most} are expected")
    return np.frombuffer(raw, np.uint8), rest


# ---- deltas for further replicas


DeltaKey: TypeAlias = tuple[str, str, int]
"""A bucket of a version against the same bucket of another: the roots of both, and its number."""


class DeltaCache:
    """Keeps the most recently used deltas, up to ``most_bytes``. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._made: OrderedDict[DeltaKey, Future[bytes | None]] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def get(self, pair: DeltaKey, make: Callable[[], bytes | None]) -> bytes | None:
        """Return the delta. The first caller makes it; others wait for its result."""
        with self._lock:
            found = self._made.get(pair)
            code = self._made[pair] = found or Future[bytes | None]()
            self._made.move_to_end(pair)
        if found is not None:
            return code.result()
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                self._made.pop(pair, None)
            code.set_exception(error)
            raise
        with self._lock:
            code.set_result(value)
            self.nbytes += _size(code)
            for old in list(self._made):
                if self.nbytes <= self._most_bytes:
                    break
                self._drop(old)
        return value

    def keep(self, roots: set[str]) -> None:
        """Drop deltas of all other versions."""
        with self._lock:
            for pair in [p for p in self._made if not roots.issuperset(p[:2])]:
                self._drop(pair)

    def _drop(self, pair: DeltaKey) -> None:
        code = self._made[pair]
        if code.done():  # one in progress is counted once it is made
            del self._made[pair]
            self.nbytes -= _size(code)


def _size(code: Future[bytes | None]) -> int:
    return len(code.result() or b"")
