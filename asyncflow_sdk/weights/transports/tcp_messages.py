"""Messages of the tcp transport: requests for buckets, and their answers."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ...errors import ProtocolError
from ...types import Manifest

RAW, DELTA = 0, 1
ANSWER_BYTES = 8 << 20
"""Limit of an answer. It has fewer buckets than requested if they are larger, but at least one."""
MOST_BUCKETS = 256
"""Limit of a request."""


class TcpAddress(msgspec.Struct, frozen=True, array_like=True):
    """Address of a version. ``service``: encoded ServiceAddress. ``version``: its number when
    published. ``rank``: of the publisher. ``host``: identity of the publisher's host, whose processes map
    the chunks at ``places`` of ``directory``, encoded as by ShmSender."""

    service: bytes
    version: int
    rank: int = 0
    host: str = ""
    directory: str = ""
    places: bytes = b""


class Get(msgspec.Struct, frozen=True, array_like=True):
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
    """RAW or DELTA for each bucket sent. Each bucket is a frame."""

    kinds: bytes


encode = msgspec.msgpack.Encoder().encode
_T = TypeVar("_T", bound=msgspec.Struct)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Decode a message. Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
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
