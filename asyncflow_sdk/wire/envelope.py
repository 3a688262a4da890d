"""Framing: what every message carries around its body, and how bad ones are told apart.

A request is (protocol, session, seq, done, settled, dropped, body); a reply is (protocol, seq, body). ``session``
and ``seq`` make a retry recognisable. ``done``: everything below it is over; ``settled``: requests from there on
whose answers arrived; both let the server forget answers. ``dropped``: requests nobody waits for any more.
"""

from __future__ import annotations

import msgspec

from ..errors import ProtocolError

PROTOCOL = 1
MAX_BYTES = 64 << 20
"""The largest message a server takes; payload travels through segments, not through sockets."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    protocol: int
    session: str
    seq: int
    done: int
    settled: tuple[int, ...]
    dropped: tuple[int, ...]
    body: bytes


class Response(msgspec.Struct, frozen=True, array_like=True):
    protocol: int
    seq: int
    body: bytes


encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(Request)
_response = msgspec.msgpack.Decoder(Response)


def decode_request(frame: bytes) -> Request:
    """Raises ProtocolError for garbage and for other protocol versions."""
    try:
        request = _request.decode(frame)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a request: {error}") from None
    if request.protocol != PROTOCOL or not request.session or len(request.session) > 64:
        raise ProtocolError(f"a request of protocol {request.protocol}; this server speaks {PROTOCOL}")
    return request


def decode_response(frame: bytes) -> Response:
    """Raises ProtocolError for garbage and for other protocol versions."""
    try:
        response = _response.decode(frame)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a response: {error}") from None
    if response.protocol != PROTOCOL:
        raise ProtocolError(f"a response of protocol {response.protocol}; this client speaks {PROTOCOL}")
    return response
