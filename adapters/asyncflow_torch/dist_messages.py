"""Messages of the transport ``dist`` beside its broadcasts."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from asyncflow_sdk.errors import ProtocolError
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.types.manifest import Bucket


class RoundsAddress(msgspec.Struct, frozen=True, array_like=True):
    """Address of a publisher's rounds. ``insecure``: also beyond loopback. ``stall_s``: maximum
    time that one member may delay the others. ``rank``: of the publisher."""

    service: bytes
    backend: str
    insecure: bool
    stall_s: float
    name: str
    rank: int = 0


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """Request for a version; answered with Start. ``ask`` increases. ``root``: of the known
    manifest."""

    ask: int
    version: int
    root: str
    name: str


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """Withdrawal of the requests up to ``ask``."""

    ask: int


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Value for the members of a group that is being made."""

    group: int
    key: str
    value: bytes


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """Request for values; answered with a list of bytes once all are stored."""

    group: int
    keys: tuple[str, ...]


class Over(msgspec.Struct, frozen=True, array_like=True, tag="over"):
    """End of a member's round. ``error``: its failure, answered with the cause as text."""

    round: int
    error: str = ""


class Start(msgspec.Struct, frozen=True, array_like=True):
    """Begin of a round: ``names`` of its members by rank, and the receiver's rank. A known
    ``group`` is used again."""

    round: int
    group: int
    rank: int
    names: tuple[str, ...]


GO_ON, UNWANTED, CLOSING = 0, 1, 2
"""State broadcast by the publisher before each run of buckets."""
RUN_BYTES = 64 << 20

encode = msgspec.msgpack.Encoder().encode
asked = msgspec.msgpack.Decoder(Join | Leave | Put | Look | Over)
BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def where_of(raw: bytes) -> RoundsAddress:
    """Decode an address. Raises ProtocolError."""
    try:
        where = msgspec.msgpack.decode(raw, type=RoundsAddress)
    except BAD as error:
        raise ProtocolError(f"this is no address of a dist publisher: {error}") from None
    if not 0 < where.stall_s <= 3600:
        raise ProtocolError(f"a dist publisher that lets others wait {where.stall_s} s; up to an hour is expected")
    return where


def bucket_runs(manifest: Manifest) -> Iterator[list[Bucket]]:
    """Yield all buckets of a manifest in lists of about RUN_BYTES."""
    many = max(1, RUN_BYTES // manifest.bucket_bytes)
    run: list[Bucket] = []
    for bucket in manifest.buckets():
        run.append(bucket)
        if len(run) == many:
            yield run
            run = []
    if run:
        yield run
