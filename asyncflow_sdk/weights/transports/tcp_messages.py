"""Messages of the tcp transport: requests for buckets, and their answers."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from ...errors import ProtocolError
from ...types import Manifest
from .stream import StreamAddress
from .version_memory import ChunkPlace

RAW, DELTA = 0, 1
ANSWER_BYTES = 8 << 20
"""Limit of an answer. It has fewer buckets than requested if they are larger, but at least one."""
MOST_BUCKETS = 256
"""Limit of a request."""


class TcpAddress(msgspec.Struct, frozen=True, array_like=True):
    """Address of a version. ``service``: encoded ServiceAddress. ``version``: its number when
    published. ``rank``: of the publisher. ``stream``: None if whole buckets are sent by the service
    only. ``attempt``: number of the attempt to write it. ``deltas``: False if the publisher makes
    none. ``host``: identity of the publisher's host. ``fanout``: hosts that fetch from one host; 0:
    all fetch from the publisher."""

    service: bytes
    version: int
    rank: int = 0
    stream: StreamAddress | None = None
    attempt: int = 0
    deltas: bool = True
    host: str = ""
    fanout: int = 0


class Get(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """Request for ``count`` buckets from number ``first`` on. ``base`` and ``base_root``: a version
    that the replica holds, for deltas; -1 without one. Roots distinguish versions with the same
    number."""

    version: int
    root: str
    first: int
    count: int
    base: int = -1
    base_root: str = ""


class GetReply(msgspec.Struct, frozen=True, array_like=True):
    """RAW or DELTA for each bucket sent. Each bucket is a frame. A relay without the first bucket
    sends none after a while: it waits for the bucket, too."""

    kinds: bytes


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """Ask the publisher where this host gets a version. ``relay``: address of the asking relay.
    ``failed``: address of a source to be replaced."""

    version: int
    root: str
    host: Annotated[str, msgspec.Meta(max_length=200)]
    relay: Annotated[bytes, msgspec.Meta(max_length=2000)]
    failed: bytes = b""


class JoinReply(msgspec.Struct, frozen=True, array_like=True):
    """``source``: address of a relay with the version, maybe still arriving; b"": the publisher.
    ``shared``: True if the relay is on the asking host, and shares the version's memory."""

    source: bytes
    shared: bool


class ShareRequest(msgspec.Struct, frozen=True, array_like=True, tag="share"):
    """Ask the relay of the own host for the memory of a version."""

    version: int
    root: str


class ShareReply(msgspec.Struct, frozen=True, array_like=True):
    """The place of a complete version. Without places it is incomplete: ``received`` buckets."""

    directory: str = ""
    places: tuple[ChunkPlace, ...] = ()
    received: int = 0


encode = msgspec.msgpack.Encoder().encode
_T = TypeVar("_T", bound=msgspec.Struct)
_V = TypeVar("_V")
_calls: msgspec.msgpack.Decoder[Get | Join | ShareRequest] = msgspec.msgpack.Decoder(Get | Join | ShareRequest)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Decode a message. Raises ProtocolError."""
    return _decode(msgspec.msgpack.Decoder(kind), body)


def decode_call(body: bytes) -> Get | Join | ShareRequest:
    """Decode a call of a publisher or relay. Raises ProtocolError."""
    return _decode(_calls, body)


def _decode(decoder: msgspec.msgpack.Decoder[_V], body: bytes) -> _V:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the tcp transport of weights cannot read this: {error}") from None


def fits(manifest: Manifest, base: Manifest) -> bool:
    """True if deltas between two versions are possible and can be verified."""
    return (
        manifest.digested
        and base.digested
        and manifest.bucket_bytes == base.bucket_bytes
        and [chunk.nbytes for chunk in manifest.chunks] == [chunk.nbytes for chunk in base.chunks]
        and manifest.tensors == base.tensors
    )
