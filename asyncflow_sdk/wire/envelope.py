"""Envelopes: the first frame of every message. A second frame may carry payload as plain bytes.

A request envelope is (protocol, session, seq, done, settled, dropped, body, part), a response
envelope (protocol, seq, body, part). A server recognises a retry by ``session`` and ``seq``.
``done``: all requests below it are over; ``settled``: answered requests from there on; both let the
server forget answers. ``dropped``: cancelled requests.

A message above FRAGMENT_BYTES is sent as fragments, one per message, described by ``part`` instead
of ``body``: see ``fragments``, ``exchange`` (the client's side) and ``transfers`` (the server's).

A response to request 0 is a goodbye: the server has closed, and no other server will take its
place.

In every version of the protocol, a request begins with (protocol, session, seq), and a response
with (protocol, seq, body). A server answers a request of another version in its own, with an error
text as body. A client that receives another version can therefore show the text.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..errors import ProtocolError

PROTOCOL = 3
MAX_BYTES = 1 << 30
"""The default of the largest request: body and payload, in any number of fragments."""
FRAGMENT_BYTES = 1 << 20
FRAME_BYTES = 2 << 20
"""The largest frame a socket accepts: a fragment, or an envelope around one. ZeroMQ cuts a
connection that announces a larger one before it allocates memory for it."""
WINDOW_BYTES = 8 << 20
"""The most bytes of one message in flight: sent and not acknowledged."""
GOODBYE = 0
"""The request number of a goodbye."""


class Fragment(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The payload frame holds the bytes from ``start`` of a message. ``sizes``: bytes of its body
    and payload. ``upload``: the server's number of the upload; 0 if not known yet, and in answers.
    """

    upload: int
    start: int
    sizes: tuple[int, int]


class Pull(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Request the fragments of an answer that begin at ``starts``."""

    starts: tuple[int, ...]


class ProgressQuery(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """After a silence, query how much of a request the server has. ``number``: counts the queries
    of the request. ``answering``: True if answer fragments have arrived; a Progress suffices as
    reply."""

    upload: int
    number: int
    answering: bool


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """How much of a request the server has. ``known``: False if nothing: it restarted, or released
    the upload.

    ``upload``: the server's number for it. ``message_upload``: the number in the message that this
    answers. ``low``: all bytes before it have arrived, and the fragments that begin at ``beyond``.
    ``limit``: fragments that begin before it may be sent. ``query``: the number of the
    ProgressQuery that this answers, else 0. ``answer``: sizes of the answer if it was sent in
    fragments; fragments that have not arrived before this message are lost.
    """

    known: bool
    upload: int
    message_upload: int
    low: int = 0
    beyond: tuple[int, ...] = ()
    limit: int = 0
    query: int = 0
    answer: tuple[int, int] | None = None


RequestPart: TypeAlias = Fragment | Pull | ProgressQuery
ResponsePart: TypeAlias = Fragment | Progress


class RequestEnvelope(msgspec.Struct, frozen=True, array_like=True):
    protocol: int
    session: str
    seq: int
    done: int
    settled: tuple[int, ...]
    dropped: tuple[int, ...]
    body: bytes
    part: RequestPart | None = None


class ResponseEnvelope(msgspec.Struct, frozen=True, array_like=True):
    protocol: int
    seq: int
    body: bytes
    part: ResponsePart | None = None


class _RequestStart(msgspec.Struct, frozen=True, array_like=True):
    """The fields that a request of every version begins with."""

    protocol: int
    session: str
    seq: int


encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(RequestEnvelope)
_response = msgspec.msgpack.Decoder(ResponseEnvelope)
_request_start = msgspec.msgpack.Decoder(_RequestStart)
_DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class ProtocolMismatch(ProtocolError):
    """Internal: a request of another protocol version. ``reply``: readable in every version."""

    def __init__(self, protocol: int, seq: int) -> None:
        text = f"this server speaks protocol {PROTOCOL}, you {protocol}; install the same asyncflow-sdk on both sides"
        super().__init__(text)
        self.reply = encode(ResponseEnvelope(PROTOCOL, seq, text.encode()))


def decode_request(frame: bytes) -> RequestEnvelope:
    """Raises ProtocolError for an invalid frame, its subclass ProtocolMismatch for another version."""
    try:
        request = _request.decode(frame)
    except _DECODE_ERRORS as error:
        try:
            start = _request_start.decode(frame)
        except _DECODE_ERRORS:
            start = None
        if start is not None and start.protocol != PROTOCOL:
            raise ProtocolMismatch(start.protocol, start.seq) from None
        raise ProtocolError(f"not a request: {error}") from None
    if request.protocol != PROTOCOL:
        raise ProtocolMismatch(request.protocol, request.seq)
    if not request.session or len(request.session) > 64:
        raise ProtocolError(f"a session name of {len(request.session)} characters; 1 to 64 are expected")
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
