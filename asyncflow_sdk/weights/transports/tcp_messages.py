"""What the ends of the tcp transport say to each other: requests for buckets, and what is sent for each."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ...errors import ProtocolError
from ...types import Manifest
from .stream import StreamAddress

RAW, DELTA = 0, 1
ANSWER_BYTES = 8 << 20
"""An answer that gets larger has fewer buckets than were asked for, but at least one."""
MOST_BUCKETS = 256
"""In a request."""


class TcpAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a version is: at a service, by the number it was published under. ``rank``: of the publisher. ``bulk``: where whole
    buckets are sent without messages, too. ``attempt``: which of those to write a version came to
    this one. ``deltas``: whether any are made."""

    service: bytes
    version: int
    rank: int = 0
    bulk: StreamAddress | None = None
    attempt: int = 0
    deltas: bool = True


class Get(msgspec.Struct, frozen=True, array_like=True):
    """``count`` buckets of a version from number ``first`` of all. ``base``: a version that is held already, by number and root,
    which a delta may be made against; -1 for none. Roots tell versions with the same number apart."""

    version: int
    root: str
    first: int
    count: int
    base: int = -1
    base_root: str = ""


class GetReply(msgspec.Struct, frozen=True, array_like=True):
    """A byte for each bucket that is sent: RAW or DELTA. Each has a frame."""

    kinds: bytes


encode = msgspec.msgpack.Encoder().encode
_T = TypeVar("_T", TcpAddress, Get, GetReply)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the tcp transport of weights cannot read this: {error}") from None


def fits(manifest: Manifest, base: Manifest) -> bool:
    """Whether buckets of one can be told as differences from the same buckets of the other, and verified."""
    return (
        manifest.digested
        and base.digested
        and manifest.bucket_bytes == base.bucket_bytes
        and [chunk.nbytes for chunk in manifest.chunks] == [chunk.nbytes for chunk in base.chunks]
        and manifest.tensors == base.tensors
    )
