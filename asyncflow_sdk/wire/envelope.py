"""Framing: what every message carries around its body, and how bad ones are told apart.

A request is (protocol, session, seq, done, settled, dropped, body, part); a reply is (protocol, seq, body, part). ``session``
and ``seq`` make a retry recognisable. ``done``: everything below it is over; ``settled``: requests from there on
whose answers arrived; both let the server forget answers. ``dropped``: requests nobody waits for any more.
One more frame may carry payload, bytes as they are.

A message of more than FRAGMENT_BYTES travels as fragments, each in a message of its own; ``part`` then stands in the
place of ``body``. See ``fragments``, ``exchange`` (the client's side) and ``transfers`` (the server's).

A reply to request 0, which nobody asked for, is a goodbye: the server has closed for good, and nobody will ever answer
in its place.

In every protocol, past and to come, a request begins with (protocol, session, seq), and a reply with (protocol, seq,
body). A server answers a request of another protocol in its own, with a text for a body: so a client that finds
another number than its own in a reply knows that the body says why.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..errors import ProtocolError

PROTOCOL = 3
MAX_BYTES = 1 << 30
"""The largest call a server takes, unless it is told another: body and payload, in however many fragments."""
FRAGMENT_BYTES = 1 << 20
FRAME_BYTES = 2 << 20
"""The largest frame a socket takes: a fragment, or an envelope around one. ZeroMQ cuts a connection that announces a
larger one before it allocates memory for it."""
WINDOW_BYTES = 8 << 20
"""Bytes of one message that may be under way: sent, and not acknowledged."""
GOODBYE = 0
"""The request that a goodbye is a reply to."""


class Fragment(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The bytes in the frame beside it, which begin at ``start`` of a message of body and payload (``sizes``).
    ``upload``: the server's number for the upload; 0: not known yet. In answers it is 0."""

    upload: int
    start: int
    sizes: tuple[int, int]


class Pull(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Ask for the fragments of an answer that begin at ``starts``."""

    starts: tuple[int, ...]


class ProgressQuery(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Ask after a silence what the server knows of a request. ``number``: counts the queries of the request.
    ``answering``: True if fragments of the answer have arrived, so that a small message is enough."""

    upload: int
    number: int
    answering: bool


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """What a server has of a request. ``known``: False if it has nothing: it came back, or gave the upload up.

    ``upload``: the server's number for it; ``asked``: the number in the message that this answers. All bytes before
    ``low`` are there, and the fragments that begin at ``beyond``. Fragments that begin before ``limit`` may be sent.
    ``query``: the number of the ProgressQuery that this answers, else 0. ``answer``: sizes of the answer, if it was sent
    in fragments; those that have not arrived before this message are lost.
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


class _Start(msgspec.Struct, frozen=True, array_like=True):
    """How requests of every protocol begin."""

    protocol: int
    session: str
    seq: int


encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(RequestEnvelope)
_response = msgspec.msgpack.Decoder(ResponseEnvelope)
_start = msgspec.msgpack.Decoder(_Start)


class ProtocolMismatch(ProtocolError):
    """A request of another protocol. ``reply`` tells its sender so, in a form it can read whatever it speaks."""

    def __init__(self, protocol: int, seq: int) -> None:
        text = f"this server speaks protocol {PROTOCOL}, you {protocol}; install the same asyncflow-sdk on both sides"
        super().__init__(text)
        self.reply = encode(ResponseEnvelope(PROTOCOL, seq, text.encode()))


def decode_request(frame: bytes) -> RequestEnvelope:
    """Raises ProtocolError for garbage, and its kind ProtocolMismatch for other protocol versions."""
    try:
        request = _request.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        _check_protocol(frame)
        raise ProtocolError(f"not a request: {error}") from None
    if request.protocol != PROTOCOL:
        raise ProtocolMismatch(request.protocol, request.seq)
    if not request.session or len(request.session) > 64:
        raise ProtocolError(f"a session name of {len(request.session)} characters; 1 to 64 are expected")
    return request


def _check_protocol(frame: bytes) -> None:
    """Raises ProtocolMismatch for what begins like a request of another version."""
    try:
        start = _start.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return
    if start.protocol != PROTOCOL:
        raise ProtocolMismatch(start.protocol, start.seq)


def decode_response(frame: bytes) -> ResponseEnvelope:
    """Raises ProtocolError for garbage and for other protocol versions."""
    try:
        response = _response.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a response: {error}") from None
    if response.protocol != PROTOCOL:
        said = response.body[:1000].decode(errors="replace")
        raise ProtocolError(f"a response of protocol {response.protocol}; this client speaks {PROTOCOL}. {said}")
    return response
