"""Envelopes: the first frame of every message. A second frame may carry payload as plain bytes.

A request envelope is (protocol, session, seq, done, settled, dropped, body, part), a response envelope (protocol,
seq, body, part). A server recognises a retry by ``session`` and ``seq``. ``done``: all requests below it are over;
``settled``: answered requests from there on; both let the server forget answers. ``dropped``: cancelled requests.

A message above PIECE_BYTES is sent in ``pieces``, one per message, described by ``part`` instead of ``body``.

A response to request 0 is a goodbye: the server has closed, and no other server will take its place.

In every version of the protocol, a request begins with (protocol, session, seq), and a response with (protocol,
seq, body). A server answers a request of another version in its own, with an error text as body for the user."""

from __future__ import annotations

import contextlib
from typing import Annotated, TypeAlias

import msgspec

from ..errors import ProtocolError

PROTOCOL = 5
MAX_BYTES = 1 << 30  # the default of the largest request: body and payload, in any number of pieces
PIECE_BYTES = 1 << 20
FRAME_BYTES = 2 << 20
"""The largest frame a socket accepts: a piece, or an envelope around one. ZeroMQ cuts a connection at the
announcement of a larger one, before it allocates memory for it."""
GOODBYE = 0  # the request number of a goodbye


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A large message, to be asked for: its bytes of body and payload. ``number``: the client's questions so far;
    in an answer, the number of the question."""

    sizes: tuple[int, int]
    number: int = 0


class Piece(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The payload frame holds the bytes from ``start`` of a message of ``sizes``."""

    start: int
    sizes: tuple[int, int]


class Read(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Ask for the pieces at ``starts``. ``number``: number of the newest Offer; pieces sent before it are lost.
    Without ``starts``, from a client: question ``number`` for an Offer; from a server: the request is unknown."""

    starts: Annotated[tuple[int, ...], msgspec.Meta(max_length=16)]  # eight under way, and as many lost
    number: int = 0


Part: TypeAlias = Offer | Piece | Read


class RequestEnvelope(msgspec.Struct, frozen=True, array_like=True):
    protocol: int
    session: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    seq: int
    done: int
    settled: tuple[int, ...]
    dropped: tuple[int, ...]
    body: bytes
    part: Part | None = None


class ResponseEnvelope(msgspec.Struct, frozen=True, array_like=True):
    protocol: int
    seq: int
    body: bytes
    part: Part | None = None


class _RequestStart(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of a request, in every version."""

    protocol: int
    session: str
    seq: int


encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(RequestEnvelope)
_response = msgspec.msgpack.Decoder(ResponseEnvelope)
_request_start = msgspec.msgpack.Decoder(_RequestStart)
_DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class ProtocolMismatch(ProtocolError):
    """Internal: request ``seq`` is of another protocol version. Its text is the body of the reply."""

    def __init__(self, protocol: int, seq: int) -> None:
        super().__init__(
            f"this server speaks protocol {PROTOCOL}, you {protocol}; install the same asyncflow-sdk on both sides"
        )
        self.seq = seq


def decode_request(frame: bytes) -> RequestEnvelope:
    """Raises ProtocolError for an invalid frame, its subclass ProtocolMismatch for another version."""
    try:
        request = _request.decode(frame)
    except _DECODE_ERRORS as error:
        with contextlib.suppress(*_DECODE_ERRORS):
            if (start := _request_start.decode(frame)).protocol != PROTOCOL:
                raise ProtocolMismatch(start.protocol, start.seq) from None
        raise ProtocolError(f"not a request: {error}") from None
    if request.protocol != PROTOCOL:
        raise ProtocolMismatch(request.protocol, request.seq)
    return request


def decode_response(frame: bytes) -> ResponseEnvelope:
    """Raises ProtocolError for an invalid frame, and for another protocol version."""
    try:
        response = _response.decode(frame)
    except _DECODE_ERRORS as error:
        raise ProtocolError(f"not a response: {error}") from None
    if response.protocol != PROTOCOL:
        text = response.body[:1000].decode(errors="replace")
        raise ProtocolError(f"a response of protocol {response.protocol}; this client speaks {PROTOCOL}. {text}")
    return response
