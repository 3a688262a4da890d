"""Messages between the ends of the transport ``dist``, beside the broadcasts."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from asyncflow_sdk.errors import ProtocolError
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.types.manifest import Bucket


class DistAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address of a publisher's rounds. ``insecure``: allowed beyond loopback. ``stall_s``:
    limit of a member's delay. ``rank``: of the publisher."""

    service: bytes
    backend: str
    insecure: bool
    stall_s: float
    name: str
    rank: int = 0


class JoinRound(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """Request of a receiver for a version; the answer is RoundStart. ``ask``: its request number,
    counted up. ``root``: of its manifest. ``wait_s``: from now, for the whole version."""

    ask: int
    version: int
    root: str
    name: str
    wait_s: float


class LeaveRound(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """Cancel the receiver's requests up to number ``ask``."""

    ask: int


class PutKey(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Set a key of the store, for the members of a group that is being made."""

    group: int
    key: str
    value: bytes


class GetKeys(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """Request keys of the store. The answer, a list of bytes, comes when all of them are set."""

    group: int
    keys: tuple[str, ...]


class EndRound(msgspec.Struct, frozen=True, array_like=True, tag="over"):
    """A member has ended its round. ``error``: the fault it saw. The answer to an error is the name
    of the faulty member, once it is known."""

    round: int
    error: str = ""


class RoundStart(msgspec.Struct, frozen=True, array_like=True):
    """A round begins. ``names``: of its members by rank; then the receiver's own rank. A receiver
    that knows ``group`` uses it again."""

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
    """Decode a sender's address. Raises ProtocolError for invalid bytes."""
    try:
        where = msgspec.msgpack.decode(raw, type=DistAddress)
    except BAD as error:
        raise ProtocolError(f"this does not say where a dist publisher is: {error}") from None
    if not 0 < where.stall_s <= 3600:
        raise ProtocolError(f"a dist publisher that lets others wait {where.stall_s} s; up to an hour is expected")
    return where


def bucket_batches(manifest: Manifest) -> Iterator[list[Bucket]]:
    """Return all buckets of a manifest, in lists of about BATCH_BYTES."""
    many = max(1, BATCH_BYTES // manifest.bucket_bytes)
    batch: list[Bucket] = []
    for bucket in manifest.buckets():
        batch.append(bucket)
        if len(batch) == many:
            yield batch
            batch = []
    if batch:
        yield batch
