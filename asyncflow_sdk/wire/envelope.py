"""Framing: what every message carries around its body, and how bad ones are told apart.

A request is (protocol, session, seq, done, settled, dropped, body); a reply is (protocol, seq, body). ``session``
and ``seq`` make a retry recognisable. ``done``: everything below it is over; ``settled``: requests from there on
whose answers arrived; both let the server forget answers. ``dropped``: requests nobody waits for any more.
Further frames after this one carry payload, bytes as they are.

A reply to request 0, which nobody asked for, is a goodbye: the server has closed for good, and nobody will ever answer
in its place.

In every protocol, past and to come, a request begins with (protocol, session, seq), and a reply is (protocol, seq,
body). A server answers a request of another protocol in its own, with a text for a body: so a client that finds
another number than its own in a reply knows that the body says why.
"""

from __future__ import annotations

import msgspec

from ..errors import ProtocolError

PROTOCOL = 2
MAX_BYTES = 1 << 30
"""The largest message a server takes, unless it is told another: envelope and payload."""
MAX_FRAMES = 4096
GOODBYE = 0
"""The request that a goodbye is a reply to."""


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


class _Start(msgspec.Struct, frozen=True, array_like=True):
    """How requests of every protocol begin."""

    protocol: int
    session: str
    seq: int


encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(Request)
_response = msgspec.msgpack.Decoder(Response)
_start = msgspec.msgpack.Decoder(_Start)


class OtherProtocol(ProtocolError):
    """A request of another protocol. ``reply`` tells its sender so, in a form it can read whatever it speaks."""

    def __init__(self, protocol: int, seq: int) -> None:
        text = f"this server speaks protocol {PROTOCOL}, you {protocol}; install the same asyncflow-sdk on both sides"
        super().__init__(text)
        self.reply = encode(Response(PROTOCOL, seq, text.encode()))


def decode_request(frame: bytes) -> Request:
    """Raises ProtocolError for garbage, and its kind OtherProtocol for other protocol versions."""
    try:
        request = _request.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        _check_protocol(frame)
        raise ProtocolError(f"not a request: {error}") from None
    if request.protocol != PROTOCOL:
        raise OtherProtocol(request.protocol, request.seq)
    if not request.session or len(request.session) > 64:
        raise ProtocolError(f"a session name of {len(request.session)} characters; 1 to 64 are expected")
    return request


def _check_protocol(frame: bytes) -> None:
    """Raises OtherProtocol for what begins like a request of another version."""
    try:
        start = _start.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return
    if start.protocol != PROTOCOL:
        raise OtherProtocol(start.protocol, start.seq)


def decode_response(frame: bytes) -> Response:
    """Raises ProtocolError for garbage and for other protocol versions."""
    try:
        response = _response.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a response: {error}") from None
    if response.protocol != PROTOCOL:
        said = response.body[:1000].decode(errors="replace")
        raise ProtocolError(f"a response of protocol {response.protocol}; this client speaks {PROTOCOL}. {said}")
    return response
