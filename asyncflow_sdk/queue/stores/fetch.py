"""Fetches: columns of rows in memory that a client does not see, sent by the process that sees it.

    columns = fetcher.fetch({home: [FetchPart(slices, schema)]})      # client: all homes in parallel
    reply, frames = read_parts(reader, request.parts)                 # storage unit, or server

Each part becomes one block. A digest of its bytes is checked by the client. A unit that restarts has
another address and key, and the same contents: ``HomeFetcher`` looks it up again between two attempts.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ...errors import (
    AccessDenied,
    AsyncFlowError,
    DigestMismatch,
    LeaseLost,
    ProtocolError,
    StoreUnavailable,
    WireError,
)
from ...interfaces.store import StorageHome
from ...types import Column, ColumnSpec
from ...types.batch import concat, take
from ...types.blocks import BlockSlices
from ...wire import RunKey, ServiceAddress, ServiceClient
from .blocks import MOST_BYTES, RUN, Ints, kind_of, to_image
from .homes import SERVER_MEMORY, HomeId, KnownHomes, session_of
from .reader import ColumnReader, from_image

MAX_REQUEST_BYTES = 16 << 20
"""Of one request to a unit, on both sides."""
FETCH_S = 30.0
"""Longest wait for one home. A transfer in progress goes on."""
ATTEMPT_S = 2.0
"""The first wait for an answer to begin, before the home's address is looked up again. Then doubled."""
LAST_S = 1.0
"""The shortest attempt, also at the end."""
PAUSE_S = 0.2
THREADS = 2
"""Requests to one home at a time. Others of the same client wait for them."""
MOST_PARTS = 4096
MOST_FIELDS = 1 << 16
MOST_ROWS = 1 << 22
"""Rows of one part."""
MOST_COPIED_BYTES = 4 << 30
"""Bytes copied for one request. Contiguous rows are not copied."""
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions raised by decoding an invalid message."""


class FetchPart(msgspec.Struct, frozen=True, array_like=True):
    """The rows of one ``BlockSlices``, and the types of its columns."""

    slices: BlockSlices
    schema: dict[str, ColumnSpec]


class FetchRequest(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Request for columns, all in one home."""

    parts: tuple[FetchPart, ...]


class NeededRequest(msgspec.Struct, frozen=True, array_like=True, tag="needed"):
    """Request for the segments of a home that are needed."""

    home: int
    epoch: int


class Needed(msgspec.Struct, frozen=True, array_like=True, tag="segments"):
    """``segments`` have payload of rows; further ones of the open ``sessions`` may get some."""

    segments: tuple[str, ...]
    sessions: tuple[int, ...]


class SentBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block of the answer. ``digest``: XXH3 (64 bits) of its bytes."""

    rows: int
    nbytes: int
    digest: int


class FetchReply(msgspec.Struct, frozen=True, array_like=True, tag="fetched"):
    """The blocks beside the answer, one for each part of the request."""

    blocks: tuple[SentBlock, ...]


encode = msgspec.msgpack.Encoder().encode
_decode_reply = msgspec.msgpack.Decoder(FetchReply).decode


def check_parts(parts: Sequence[FetchPart]) -> None:
    """Raises ProtocolError unless all arrays of the slices agree: a client may have made them.
    Positions inside blocks are checked when they are read."""
    if not 0 < len(parts) <= MOST_PARTS:
        raise ProtocolError(f"{len(parts)} parts; 1 to {MOST_PARTS} are expected")
    for slices, schema in ((part.slices, part.schema) for part in parts):
        columns = len(slices.columns)
        blocks, runs, fields = len(slices.blocks) // 48, len(slices.entries) // 4, len(slices.fields) // 4
        lengths = len(slices.blocks) % 48 | len(slices.entries) % 4 | len(slices.fields) % 4
        if (
            lengths
            or not columns == len(set(slices.columns))
            or not columns
            or not slices.segments
            or min(map(session_of, slices.segments)) < 0
            or set(slices.columns) != set(schema)
            or not 0 < blocks <= runs <= MOST_ROWS
            or len(slices.counts) != len(slices.entries)
            or fields not in (columns, columns * blocks)
        ):
            raise ProtocolError("a location has no valid segments, or parts of sizes that do not agree")
        number, start, _, rows, nbytes, of_block = np.frombuffer(slices.blocks, np.int64).reshape(-1, 6).T
        counts, field = np.frombuffer(slices.counts, np.int32), np.frombuffer(slices.fields, np.int32)
        if (
            set(number.tolist()) != set(range(len(slices.segments)))
            or min(start.min(), rows.min(), nbytes.min()) < 0
            or max(start.max(), nbytes.max()) > MOST_BYTES
            or not 1 <= of_block.min() <= of_block.max() <= runs
            or of_block.sum() != runs
            or counts.min() < 1
            or counts.sum(dtype=np.int64) > MOST_ROWS
            or field.min() < 0
            or field.max() >= MOST_FIELDS
        ):
            raise ProtocolError("a location is invalid")


def read_parts(reader: ColumnReader, parts: Sequence[FetchPart]) -> tuple[FetchReply, list[Any]]:
    """Return the reply for checked parts, and the buffers of its blocks. Raises LeaseLost,
    SchemaError, and ProtocolError for more than MOST_COPIED_BYTES."""
    blocks, frames = [], list[Any]()
    left = MOST_COPIED_BYTES
    for part in parts:
        names = part.slices.columns
        schema = {name: part.schema[name] for name in names}
        fixed = sum(kind.width for kind in (kind_of(*each) for each in schema.items()) if not kind.ragged)
        rows = int(np.frombuffer(part.slices.counts, np.int32).sum(dtype=np.int64))
        copied = len(part.slices.counts) > RUN.size
        left -= fixed * rows if copied else 0
        if left < 0:
            raise ProtocolError(f"more than {MOST_COPIED_BYTES} bytes are requested at once; lease fewer rows")
        columns = reader.read(part.slices, schema, left)
        image = to_image({name: columns[name] for name in names})
        left -= image.nbytes - fixed * rows if copied else 0
        digest = xxhash.xxh3_64()
        for piece in image.parts:
            digest.update(memoryview(piece))  # type: ignore[arg-type]
        blocks.append(SentBlock(image.rows, image.nbytes, digest.intdigest()))
        frames += image.parts
    return FetchReply(tuple(blocks)), frames


def unpack_parts(
    reply: FetchReply, payload: npt.NDArray[np.uint8], parts: Sequence[FetchPart]
) -> list[dict[str, Column]]:
    """Return the columns of each part. Raises DigestMismatch, SchemaError, ProtocolError."""
    if len(reply.blocks) != len(parts) or sum(each.nbytes for each in reply.blocks) != len(payload):
        raise ProtocolError(f"{len(parts)} blocks were requested; {len(reply.blocks)} in {len(payload)} bytes came")
    payload.setflags(write=False)
    out, end = list[dict[str, Column]](), 0
    for part, block in zip(parts, reply.blocks, strict=True):
        memory, end = payload[end : end + block.nbytes], end + max(block.nbytes, 0)
        rows = int(np.frombuffer(part.slices.counts, np.int32).sum(dtype=np.int64))
        if block.rows != rows or len(memory) != block.nbytes:
            raise ProtocolError(f"{rows} rows were requested, and {block.rows} in {len(memory)} bytes came")
        if xxhash.xxh3_64_intdigest(memoryview(memory)) != block.digest:  # type: ignore[arg-type]
            raise DigestMismatch(f"the columns {', '.join(part.slices.columns)} were damaged on their way")
        out.append(from_image(memory, block.rows, {name: part.schema[name] for name in part.slices.columns}))
    return out


class SlicesOfHome(NamedTuple):
    """Part of a ``BlockSlices`` in one home. ``rows``: positions of its rows in the batch."""

    slices: BlockSlices
    rows: Ints


def split(slices: BlockSlices, key: Callable[[str], Any]) -> dict[Any, SlicesOfHome]:
    """Split slices by ``key`` of their segments, in the order of the segments."""
    keys = [key(segment) for segment in slices.segments]
    counts = np.frombuffer(slices.counts, np.int32)
    if len(set(keys)) == 1:
        return {keys[0]: SlicesOfHome(slices, np.arange(counts.sum(dtype=np.int64)))}
    blocks = np.frombuffer(slices.blocks, np.int64).reshape(-1, 6)
    entries = np.frombuffer(slices.entries, np.int32)
    fields = np.frombuffer(slices.fields, np.int32).reshape(-1, len(slices.columns))
    out = {}
    for home in dict.fromkeys(keys):
        numbers = [number for number, each in enumerate(keys) if each == home]
        of_block = np.isin(blocks[:, 0], numbers)
        of_run = of_block.repeat(blocks[:, 5])
        mine = blocks[of_block]
        mine[:, 0] = np.searchsorted(numbers, mine[:, 0])
        part = BlockSlices(
            slices.columns, (fields[of_block] if len(fields) > 1 else fields).tobytes(),
            tuple(slices.segments[number] for number in numbers), mine.tobytes(),
            entries[of_run].tobytes(), counts[of_run].tobytes(),
        )  # fmt: skip
        out[home] = SlicesOfHome(part, np.flatnonzero(of_run.repeat(counts)))
    return out


def merge(pieces: Sequence[tuple[Ints, Column]]) -> Column:
    """Return one column from pieces of it, each with the positions of its rows. Raises SchemaError."""
    if len(pieces) == 1:
        return pieces[0][1]
    places, columns = [rows for rows, _ in pieces], [column for _, column in pieces]
    if (first := columns[0]).offsets is None:  # each value is copied once
        values = np.empty((sum(map(len, places)), *first.values.shape[1:]), first.values.dtype)
        for rows, column in pieces:
            values[rows] = column.values
        merged = Column(first.spec, values, None)
    else:
        merged = take(concat(columns), np.argsort(np.concatenate(places)))
    merged.values.setflags(write=False)
    return merged


def open_unit(home: StorageHome, key: RunKey | None) -> ServiceClient:
    """Return a connection to the unit of a home. ``key``: this client's own. Raises AccessDenied without a
    key that is needed."""
    if home.key and key is None:
        raise AccessDenied(f"home {home.home} ({home.name}) needs the run's key, and this client has none")
    return ServiceClient(ServiceAddress(home.address, home.key or None, 0, ""), key, max_call_bytes=MAX_REQUEST_BYTES)


def _unit_of(home: StorageHome) -> tuple[str, str]:
    return home.address, home.key


class HomeFetcher:
    """``key``: the run's key. ``server``: sends a request for columns in home 0; see
    ``StoreContext.fetch``. Thread-safe."""

    def __init__(
        self,
        homes: KnownHomes,
        key: RunKey | None,
        server: Callable[[FetchRequest, float], tuple[FetchReply, Any]] | None,
        *,
        timeout_s: float = FETCH_S,
    ) -> None:
        self._homes, self._key, self._server, self._timeout_s = homes, key, server, timeout_s
        self._clients: dict[int, tuple[StorageHome, ServiceClient]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._threads: dict[HomeId, ThreadPoolExecutor] = {}

    def fetch(self, wanted: Mapping[HomeId, Sequence[FetchPart]]) -> dict[HomeId, list[dict[str, Column]]]:
        """Return the columns of each part, all homes in parallel. Raises the first home's error:
        StoreUnavailable, LeaseLost, SchemaError, ProtocolError, AccessDenied."""
        if len(wanted) == 1:  # in this thread: handing over costs more than a small transfer
            ((where, parts),) = wanted.items()
            return {where: self._fetch(where, parts)}
        with self._lock:
            self._check_open()
            waiting: dict[HomeId, Future[list[dict[str, Column]]]] = {}
            for where, parts in wanted.items():  # threads for each: a lost host must not delay others
                if where not in self._threads:
                    self._threads[where] = ThreadPoolExecutor(THREADS, f"asyncflow-home-{where.home}")
                waiting[where] = self._threads[where].submit(self._fetch, where, parts)
        return {where: future.result() for where, future in waiting.items()}  # each ends at its own deadline

    def close(self) -> None:
        """End all fetches and connections. Idempotent."""
        with self._lock:
            self._closed = True
            pools, self._threads = list(self._threads.values()), {}
            clients, self._clients = list(self._clients.values()), {}
        for _, client in clients:
            client.close()
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, where: HomeId, parts: Sequence[FetchPart]) -> list[dict[str, Column]]:
        request, timeout_s = FetchRequest(tuple(parts)), self._timeout_s
        began, damaged, attempt_s = time.monotonic(), 0, ATTEMPT_S
        while True:
            left = timeout_s - (time.monotonic() - began)
            try:
                reply, payload = self._ask(where, request, min(max(left, LAST_S), attempt_s))
                return unpack_parts(reply, payload, parts)
            except DigestMismatch as error:
                damaged += 1
                reason: AsyncFlowError = error
                if damaged > 1:
                    raise StoreUnavailable(f"{self._named(where)}: {error}, twice") from None
            except (ProtocolError, AccessDenied) as error:
                if not self._moved(where):
                    raise
                reason = error
            except WireError as error:
                reason = error
            waited = time.monotonic() - began
            self._check_open()
            moved = self._moved(where)
            if waited >= timeout_s and not moved:
                raise StoreUnavailable(
                    f"{self._named(where)} could not be reached from this host in {waited:.1f} s: {reason}. The rows are"
                    " not lost; is its storage unit running, and does the network reach it?"
                )
            attempt_s = ATTEMPT_S if moved else 2 * attempt_s
            if not moved:
                time.sleep(PAUSE_S)

    def _ask(self, where: HomeId, request: FetchRequest, timeout_s: float) -> tuple[FetchReply, Any]:
        if where == SERVER_MEMORY:
            if self._server is None:
                raise ProtocolError("rows are in memory of the server that this client neither sees nor may request")
            return self._server(request, timeout_s)
        answer = self._client(where).call(encode(request), timeout_s, f"rows in {self._named(where)}")
        try:
            return _decode_reply(answer.body), answer.payload
        except DECODE_ERRORS as error:
            raise ProtocolError(f"an answer with columns cannot be read: {error}") from None

    def _client(self, where: HomeId) -> ServiceClient:
        """Return the connection to a home's unit. Raises LeaseLost for a lost epoch and after
        ``close``, WireError if it has no unit now, AccessDenied."""
        home = self._homes.in_epoch(where)
        if home is None:
            raise WireError(f"home {where.home} is unknown to this run's server")
        if not home.address:
            raise WireError("it has no storage unit now")
        with self._lock:
            self._check_open()
            known = self._clients.get(where.home)
            if known is None or _unit_of(known[0]) != _unit_of(home):
                if known is not None:
                    known[1].close()
                known = self._clients[where.home] = home, open_unit(home, self._key)
            return known[1]

    def _check_open(self) -> None:
        if self._closed:
            raise LeaseLost("the connection that reads these rows is closed")

    def _moved(self, where: HomeId) -> bool:
        """Look a home up again. True if its unit has another address or key now."""
        if where == SERVER_MEMORY:
            return False
        before = self._homes.find(where)
        with contextlib.suppress(WireError):  # the server may be away, too
            self._homes.refresh(after_s=PAUSE_S / 2)
        now = self._homes.find(where)
        return (before and _unit_of(before)) != (now and _unit_of(now))

    def _named(self, where: HomeId) -> str:
        home = None
        with contextlib.suppress(WireError):
            home = self._homes.find(where)
        if where == SERVER_MEMORY:
            return "the memory of the queue server"
        return f"home {where.home}" if home is None else f"home {where.home} ({home.name}) at {home.address}"
