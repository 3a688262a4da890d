"""AnswerSender: sends answers over the connections of their requests, the large ones in pieces.

Payload beside an answer is not stored: it is made again for each retry, once the frames sent before
have left.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import zmq

from ..errors import ProtocolError
from .envelope import PIECE_BYTES, PROTOCOL, ResponseEnvelope, ResponsePart, encode
from .handler import Handler
from .router_sockets import Route
from .session_state import SessionState

# Plain integers: an operation on zmq's enumerations costs as much as receiving a message.
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_log = logging.getLogger(__name__)


class _Outgoing(NamedTuple):
    """A queued answer. ``starts``: requested pieces; empty for the first ones."""

    session: SessionState
    seq: int
    starts: tuple[int, ...] = ()
    recorded: bool = True


class AnswerSender:
    """Owned by the server's thread. A failed send is ignored: the client retries."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._queued: list[_Outgoing] = []

    def queue(self, session: SessionState, seq: int, starts: tuple[int, ...] = (), recorded: bool = True) -> None:
        """Send an answer with the next ``flush``. ``recorded``: see ``Server.answer``."""
        self._queued.append(_Outgoing(session, seq, starts, recorded))

    def clear(self) -> None:
        """Send none of the queued answers. Their requests can be repeated."""
        self._queued.clear()

    def flush(self) -> None:
        """Let the handler settle, then send the queued answers. If it could not, send only those of
        requests without a record."""
        try:
            settled = self._handler.settle()
        except Exception:
            _log.exception("the server failed to store the state that its answers depend on")
            return
        if not self._queued:
            return
        queued, self._queued = self._queued, [each for each in self._queued if each.recorded and not settled]
        for each in queued:
            if (settled or not each.recorded) and each.seq in each.session.answers:
                self.send(each.session, each.seq, each.starts)

    def send(self, session: SessionState, seq: int, starts: tuple[int, ...] = ()) -> None:
        """Send an answer, or pieces of it, over the connection of its request's last message. Do
        nothing if that reached an earlier server: the client will repeat it."""
        route, answer = session.routes[seq], session.answers[seq]
        if route is None:
            return
        download = session.downloads.get(seq)
        if download is None:
            body: bytes = answer
            payload: Sequence[Any] = ()
            if seq in session.made or seq in session.makers:
                try:
                    make = session.makers.get(seq)
                    body, payload = self._handler.make(answer) if make is None else make()
                except Exception:  # must not end the server
                    _log.exception("the server failed to make an answer")
                    return
            if not payload and len(body) <= PIECE_BYTES:
                self.post(route, encode(ResponseEnvelope(PROTOCOL, seq, body)))
                return
            download = session.download(seq, body, payload)
        with contextlib.suppress(ProtocolError):  # the answer was made again, and has other pieces
            for start, body, piece, data in download.messages(starts):
                envelope = encode(ResponseEnvelope(PROTOCOL, seq, body, piece))
                download.mark_sent(start, len(body) + len(data), self.post(route, envelope, data))

    def send_part(self, route: Route, seq: int, part: ResponsePart) -> None:
        """Send a message about the pieces of a request or an answer."""
        self.post(route, encode(ResponseEnvelope(PROTOCOL, seq, b"", part)))

    def post(self, route: Route, envelope: bytes, data: Any = None) -> zmq.MessageTracker | None:
        """Send one message. Return a tracker if ``data`` is sent without a copy."""
        router, name = route
        with contextlib.suppress(zmq.ZMQError):  # the client has disconnected
            if data is not None and len(data):
                return router.send_multipart((name, envelope, data), _NOBLOCK, copy=False, track=True)
            router.send(name, _NOBLOCK | _SNDMORE)
            router.send(envelope, _NOBLOCK)
        return None
