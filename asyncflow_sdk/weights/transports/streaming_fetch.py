"""StreamingFetch: receives a publisher's next version while it is written, before it is announced.

    streaming = StreamingFetch(pool, address, manifest)            # after the fetch of a version
    partial = streaming.take(next_address, next_manifest, deadline)

Streamed bytes count only if their digest matches the manifest. Without digests, only if they belong
to the announced attempt, of which each byte is written once. Everything else is fetched as usual.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from ...errors import AsyncFlowError, ProtocolError
from ...interfaces.weights import Bytes
from ...memory import BufferPool
from ...types import Manifest
from ...types.manifest import Bucket
from .in_progress import ALL, GONE, NEXT_ATTEMPT
from .stream import PIECE, StreamClient
from .tcp_messages import TcpAddress

CONNECTIONS = 2
"""One connection leaves the link idle while its ends wait for each other."""
SPAN_BYTES = 8 << 20
CHUNK_STALL_S = 2.0
"""``take`` gives up if no bytes arrive for this long."""
MOST_ALIKE = 0.1
"""Share of changed bytes below which deltas are much smaller than the version."""
_SAMPLES = 8192
_log = logging.getLogger(__name__)


class RunningDigests:
    """Hashes arriving buckets in pieces. ``found``: digests of the complete ones."""

    def __init__(self, memory: memoryview, bucket_bytes: int) -> None:
        self._memory, self._bucket_bytes = memory, bucket_bytes
        self._state, self._hashed = xxhash.xxh3_128(), 0
        self.found: list[bytes] = []

    def add(self, got: int) -> None:
        """Hash the first ``got`` bytes, except an incomplete piece."""
        while self._hashed < got:
            bucket = min((len(self.found) + 1) * self._bucket_bytes, len(self._memory))
            stop = min(self._hashed + PIECE, bucket, got)
            if stop - self._hashed < PIECE and stop < bucket:
                return
            self._state.update(self._memory[self._hashed : stop])
            self._hashed = stop
            if stop == bucket:
                self.found.append(self._state.digest())
                self._state = xxhash.xxh3_128()


class PartialVersion:
    """The received part of a version. ``chunks``: all its memory. ``found``: digests of the buckets
    received, by chunk and index; b"" without digests."""

    def __init__(self, chunks: list[Bytes]) -> None:
        self.chunks = chunks
        self.found: dict[tuple[int, int], bytes] = {}

    def has(self, manifest: Manifest, bucket: Bucket) -> bool:
        """True if a bucket was received as published."""
        published = manifest.chunks[bucket.chunk].digests
        mine = self.found.get((bucket.chunk, bucket.index))
        return mine is not None and mine == (published[bucket.index] if published else b"")


class _Span(NamedTuple):
    """Whole buckets of a chunk, requested at once."""

    chunk: int
    start: int
    stop: int


class _Layout(NamedTuple):
    """Sizes of a version. The next one is only streamed into memory for equal sizes."""

    sizes: list[int]
    bucket_bytes: int
    digested: bool

    @classmethod
    def of(cls, manifest: Manifest) -> _Layout:
        """Return the sizes of a version."""
        return cls([chunk.nbytes for chunk in manifest.chunks], manifest.bucket_bytes, manifest.digested)

    def spans(self) -> Iterator[_Span]:
        """Yield the requests for the whole version."""
        step = max(SPAN_BYTES // self.bucket_bytes, 1) * self.bucket_bytes
        for number, nbytes in enumerate(self.sizes):
            for start in range(0, nbytes, step):
                yield _Span(number, start, min(start + step, nbytes))


class StreamingFetch:
    """Streams the version after the one of ``address`` and ``manifest``, in threads of its own,
    until ``take`` or ``stop``. Memory comes from ``pool``, and returns to it if the connection
    ends."""

    def __init__(self, pool: BufferPool, address: TcpAddress, manifest: Manifest) -> None:
        assert address.stream is not None
        self._pool, self._address, self._after = pool, address.stream, address.attempt
        self._clients = [StreamClient(address.stream) for _ in range(CONNECTIONS)]
        self._layout = _Layout.of(manifest)
        self._lock = threading.Lock()
        self._taken = False
        self._attempt = 0
        self._partial: PartialVersion | None = None
        self._received_at = 0.0
        self._complete = threading.Event()  # or it never will be
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="asyncflow-streaming", daemon=True).start()

    def take(self, address: TcpAddress, manifest: Manifest, deadline: float) -> PartialVersion | None:
        """Return the received part of this version, and stop. Waits while its bytes arrive. None if
        nothing was received, or another version."""
        with self._lock:
            self._taken, begun = True, self._partial is not None
            mine = (self._address, self._attempt, self._layout)
            wanted = mine == (address.stream, address.attempt, _Layout.of(manifest))
        began = time.monotonic()
        while begun and wanted and not self._complete.is_set():
            left = min(max(self._received_at, began) + CHUNK_STALL_S, deadline) - time.monotonic()
            if left <= 0:
                break
            self._complete.wait(left)
        self.stop()
        if not begun:
            return None
        self._ended.wait()
        partial, self._partial = self._partial, None
        if partial is not None and not wanted:
            self._pool.give_back(partial.chunks)
            partial = None
        return partial

    def stop(self) -> None:
        """End soon, together with a waiting ``take``."""
        self._taken = True
        for client in self._clients:
            client.interrupt()

    # ---- in its threads

    def _run(self) -> None:
        try:
            while self._stream_next():
                pass
        except AsyncFlowError as error:
            _log.debug("the next version is not streamed: %s", error)
        except Exception:
            _log.exception("the next version could not be streamed")
        finally:
            for client in self._clients:
                client.close()
            self._drop()
            self._complete.set()
            self._ended.set()

    def _stream_next(self) -> bool:
        """Stream the next version. Return True if it was given up, and another may follow."""
        client = self._clients[0]
        attempt, nbytes = client.next(self._after, NEXT_ATTEMPT, 0, 0)
        if attempt <= self._after or nbytes != self._layout.sizes[0]:
            raise ProtocolError(f"attempt {attempt} with {nbytes} bytes came after {self._after}")
        with self._lock:
            if self._taken:
                return False
            self._after = self._attempt = attempt
            self._partial = PartialVersion(self._pool.take(self._layout.sizes))
        todo, errors = deque(self._layout.spans()), list[Exception]()
        others = [
            threading.Thread(target=self._work, args=(each, todo, errors), name="asyncflow-streaming", daemon=True)
            for each in self._clients[1 : len(todo)]
        ]
        for each in others:
            each.start()
        self._work(client, todo, errors)
        for each in others:
            each.join()
        if errors:
            raise errors[0]
        attempt, state = client.next(self._attempt, len(self._layout.sizes), 0, 0)
        if (attempt, state) == (self._attempt, GONE):
            return self._drop()
        if (attempt, state) != (self._attempt, ALL):
            raise ProtocolError(f"{state} of attempt {attempt} came where it should end")
        self._complete.set()
        client.wait_for_end()
        return False

    def _work(self, client: StreamClient, todo: deque[_Span], errors: list[Exception]) -> None:
        """Receive spans until none are left."""
        try:
            while (span := _pop(todo)) is not None:
                answer = client.next(self._attempt, *span)
                if answer == (self._attempt, GONE):
                    return
                if answer != (self._attempt, self._layout.sizes[span.chunk]):
                    raise ProtocolError(f"attempt and bytes {answer} came for chunk {span.chunk} of {self._attempt}")
                self._fill(client, span)
        except Exception as error:
            errors.append(error)
            for each in self._clients:
                each.interrupt()

    def _fill(self, client: StreamClient, span: _Span) -> None:
        assert self._partial is not None
        partial, step = self._partial, self._layout.bucket_bytes
        view = memoryview(partial.chunks[span.chunk][span.start : span.stop])  # type: ignore[arg-type]
        digests = RunningDigests(view, step)

        def on_bytes(got: int) -> None:
            self._received_at = time.monotonic()
            if self._layout.digested:
                digests.add(got)

        client.fill(view, math.inf, on_bytes)
        for number, index in enumerate(range(span.start // step, -(-span.stop // step))):
            partial.found[span.chunk, index] = digests.found[number] if self._layout.digested else b""

    def _drop(self) -> bool:
        """Return the memory to the pool. False if ``take`` was called."""
        with self._lock:
            if self._taken:
                return False
            partial, self._partial, self._attempt = self._partial, None, 0
            if partial is not None:
                self._pool.give_back(partial.chunks)
            return True


def _pop(todo: deque[_Span]) -> _Span | None:
    try:
        return todo.popleft()
    except IndexError:  # another thread took the last
        return None


def alike(one: Sequence[Bytes], other: Sequence[Bytes]) -> bool:
    """True if few bytes differ between two versions with equal sizes, by a sample."""
    stride = max(sum(map(len, one)) // _SAMPLES, 1) | 1  # odd: it samples every byte of a word
    pairs = [(a[::stride], b[::stride]) for a, b in zip(one, other, strict=True)]
    differ = sum(int(np.count_nonzero(a != b)) for a, b in pairs)
    return differ < MOST_ALIKE * sum(len(a) for a, _ in pairs)
