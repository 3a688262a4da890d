"""Messages between a writer and the storage unit that keeps a replica of its block.

A block is sent in chunks, one request for each; the unit answers each with the replica's place.
"""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from ...errors import DigestMismatch, ProtocolError
from ...types.blocks import BlockPlace
from .blocks import MOST_BYTES

CHUNK_BYTES = 1 << 20
"""Larger chunks are not faster, and take more of the unit's memory."""
_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class ReplicaChunk(msgspec.Struct, frozen=True, array_like=True, tag="replica"):
    """Bytes of a block from ``start`` on, sent beside the request, with the digest (XXH3, 64 bits) of
    these bytes. ``home``, ``epoch``: of the unit. ``session``: of the writer. ``nbytes``: of the whole
    block. ``serial``: of the replica, as answered to its first chunk; 0 in that one. ``synced``: the
    replica has to be on disk before the last answer. ``freed``: serials (int64) of this session's
    replicas to free first."""

    home: int
    epoch: int
    session: int
    nbytes: int
    start: int
    digest: int
    serial: int = 0
    synced: bool = False
    freed: bytes = b""


class KeptReplica(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """The answer to a chunk."""

    place: BlockPlace


encode = msgspec.msgpack.Encoder().encode
_decode_reply = msgspec.msgpack.Decoder(KeptReplica).decode


def decode_kept(body: bytes) -> BlockPlace:
    """Raises ProtocolError."""
    try:
        return _decode_reply(body).place
    except _BAD as error:
        raise ProtocolError(f"an answer about a replica cannot be read: {error}") from None


def digest_of_chunk(data: Any) -> int:
    """Return the digest of a contiguous buffer."""
    return xxhash.xxh3_64_intdigest(memoryview(data))


def check_chunk(chunk: ReplicaChunk, data: Any) -> None:
    """Raises DigestMismatch for damaged bytes, ProtocolError for an invalid position."""
    nbytes = memoryview(data).nbytes
    continues = chunk.start > 0 and chunk.serial > 0
    begins = chunk.start == chunk.serial == 0
    if not (continues or begins) or not 0 < nbytes <= chunk.nbytes - chunk.start or chunk.nbytes > MOST_BYTES:
        raise ProtocolError(f"a block of {chunk.nbytes} bytes has no chunk of {nbytes} bytes at {chunk.start}")
    if digest_of_chunk(data) != chunk.digest:
        raise DigestMismatch(f"bytes {chunk.start} to {chunk.start + nbytes} of a block were damaged on their way")
