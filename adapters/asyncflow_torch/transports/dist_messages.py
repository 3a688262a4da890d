"""What the ends of the transport ``dist`` say to each other, beside the broadcasts themselves."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from asyncflow_sdk.errors import ProtocolError
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.types.manifest import Bucket


class DistAddress(msgspec.Struct, frozen=True, array_like=True):
    """How receivers reach a publisher's rounds. ``insecure``: beyond loopback too. ``stall_s``:
    how long one member may hold up the others. ``rank``: of the publisher."""

    service: bytes
    backend: str
    insecure: bool
    stall_s: float
    name: str
    rank: int = 0


class JoinRound(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """A receiver asks for a version; answered with RoundStart. ``ask`` counts up. ``root``: of the manifest it has.
    ``wait_s``: how long it waits for the whole version, from now."""

    ask: int
    version: int
    root: str
    name: str
    wait_s: float


class LeaveRound(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """It wants no more what it asked for last, by ``ask`` or before."""

    ask: int


class PutKey(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """For the members of a group that is being made."""

    group: int
    key: str
    value: bytes


class GetKeys(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """Answered with a list of bytes once all of them are there."""

    group: int
    keys: tuple[str, ...]


class EndRound(msgspec.Struct, frozen=True, array_like=True, tag="over"):
    """A member is through with a round. ``error``: what broke it; answered, once it is known, with who did (a text)."""

    round: int
    error: str = ""


class RoundStart(msgspec.Struct, frozen=True, array_like=True):
    """A round begins: ``names`` of its members by rank, and the receiver's own rank. A ``group``
    it knows is used again."""

    round: int
    group: int
    rank: int
    names: tuple[str, ...]


GO_ON, UNWANTED, CLOSING = 0, 1, 2
"""What the publisher says before every batch of buckets."""
BATCH_BYTES = 64 << 20

encode = msgspec.msgpack.Encoder().encode
asked = msgspec.msgpack.Decoder(JoinRound | LeaveRound | PutKey | GetKeys | EndRound)
BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode_address(raw: bytes) -> DistAddress:
    """Raises ProtocolError for what no sender wrote."""
    try:
        where = msgspec.msgpack.decode(raw, type=DistAddress)
    except BAD as error:
        raise ProtocolError(f"this does not say where a dist publisher is: {error}") from None
    if not 0 < where.stall_s <= 3600:
        raise ProtocolError(f"a dist publisher that lets others wait {where.stall_s} s; up to an hour is expected")
    return where


def bucket_batches(manifest: Manifest) -> Iterator[list[Bucket]]:
    """All buckets of a manifest, in lists of about BATCH_BYTES."""
    many = max(1, BATCH_BYTES // manifest.bucket_bytes)
    batch: list[Bucket] = []
    for bucket in manifest.buckets():
        batch.append(bucket)
        if len(batch) == many:
            yield batch
            batch = []
    if batch:
        yield batch
