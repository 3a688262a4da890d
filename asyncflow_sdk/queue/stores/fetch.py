"""Fetches: columns of rows in memory that a client does not see, sent by the process that sees it.

    request = encode(FetchRequest((FetchPart(slices, schema),)))          # client
    reply, frames = read_parts(reader, request.parts)                     # storage unit, or server
    columns = unpack_parts(decode_reply(body), payload, request.parts)    # client

Each part becomes one block. A digest of its bytes is checked by the client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ...errors import DigestMismatch, ProtocolError, SchemaError
from ...types import Column, ColumnSpec
from ...types.blocks import BlockSlices
from .blocks import MOST_BYTES, RUN, Ints, kind_of, to_image
from .homes import is_row_segment
from .reader import ColumnReader, from_image

MOST_PARTS = 4096
MOST_FIELDS = 1 << 16
MOST_ROWS = 1 << 22
"""Rows of one part."""
MOST_COPIED_BYTES = 4 << 30
"""Bytes copied for one request. Contiguous rows are not copied."""
_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


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


def decode_reply(body: bytes) -> FetchReply:
    """Raises ProtocolError."""
    try:
        return _decode_reply(body)
    except _BAD as error:
        raise ProtocolError(f"an answer with columns cannot be read: {error}") from None


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
            or not all(map(is_row_segment, slices.segments))
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


class SlicesOfHome(msgspec.Struct, frozen=True):
    """The part of a ``BlockSlices`` in one home. ``rows``: positions of its rows in the batch."""

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
            slices.columns,
            (fields[of_block] if len(fields) > 1 else fields).tobytes(),
            tuple(slices.segments[number] for number in numbers),
            mine.tobytes(),
            entries[of_run].tobytes(),
            counts[of_run].tobytes(),
        )
        out[home] = SlicesOfHome(part, np.flatnonzero(of_run.repeat(counts)))
    return out


def merge(pieces: Sequence[tuple[Ints, Column]], name: str) -> Column:
    """Return one column from pieces of it, each with the positions of its rows."""
    if len(pieces) == 1:
        return pieces[0][1]
    spec = pieces[0][1].spec
    rows = sum(len(at) for at, _ in pieces)
    if spec.kind == "fixed":
        values = np.empty((rows, *pieces[0][1].values.shape[1:]), pieces[0][1].values.dtype)
        for at, column in pieces:
            values[at] = column.values
        return Column(spec, _read_only(values), None)
    lengths = np.zeros(rows, np.int64)
    for at, column in pieces:
        assert column.offsets is not None
        lengths[at] = np.diff(column.offsets)
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    first = pieces[0][1].values
    values = np.empty((int(offsets[-1]), *first.shape[1:]), first.dtype)
    for at, column in pieces:
        assert column.offsets is not None
        if int(column.offsets[-1]) > len(column.values) or int(column.offsets[0]):
            raise SchemaError(f"column {name!r} has offsets beyond its values")
        index = np.repeat(offsets[at] - column.offsets[:-1], lengths[at]) + np.arange(int(column.offsets[-1]))
        values[index] = column.values[: int(column.offsets[-1])]
    return Column(spec, _read_only(values), offsets)


def _read_only(values: Any) -> Any:
    values.setflags(write=False)
    return values
