"""RequestReceiver: reads messages from ROUTER sockets, assembles uploads, and executes complete
requests.

Invalid messages are counted and dropped; the server and its other sessions continue.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import zmq

from ..errors import ProtocolError
from .answer_sender import AnswerSender
from .envelope import (
    PROTOCOL,
    Ask,
    Offer,
    Piece,
    ProtocolMismatch,
    Read,
    RequestEnvelope,
    RequestPart,
    decode_request,
)
from .handler import Handler
from .request_table import RequestTable
from .router_sockets import Route
from .session_state import SessionState
from .uploads import SILENCE_S, Upload, Uploads

SWEEP_S = 5.0
"""Interval between searches for inactive transfers, while there are any."""
_ROUND_MESSAGES = 64
# Plain integers: an operation on zmq's enumerations costs as much as receiving a message.
_NOBLOCK, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)
_log = logging.getLogger(__name__)


class RequestReceiver:
    """Not thread-safe: the server's thread owns it. ``garbage``: invalid messages dropped.
    ``hold``: leave flushing answers to the caller, instead of flushing after each request."""

    def __init__(
        self, handler: Handler, requests: RequestTable, answers: AnswerSender, max_bytes: int, hold: bool
    ) -> None:
        self._handler, self._requests, self._answers = handler, requests, answers
        self._max_bytes, self._hold = max_bytes, hold
        self.uploads = Uploads(max_bytes)
        self._next_sweep_s = 0.0
        self.garbage = 0

    def receive(self, router: zmq.Socket[Any]) -> None:
        """Read and process the waiting messages, but at most 64: exits and deadlines come next."""
        for _ in range(_ROUND_MESSAGES):
            try:
                name = router.recv(_NOBLOCK)
            except zmq.Again:
                return
            first = frame = router.recv(copy=False)  # at least one frame follows the name
            data, others = None, 0
            envelope = frame.bytes
            while frame.more:
                frame, others = router.recv(copy=False), others + 1
                data = frame if others == 1 else None
            try:
                if others > 1 or len(envelope) + (0 if data is None else len(data)) > self._max_bytes:
                    raise ProtocolError("a request of too many frames or bytes")
                self._process((router, name), decode_request(envelope), data, first)
            except ProtocolError as error:
                self.garbage += 1
                if isinstance(error, ProtocolMismatch):
                    self._answers.post((router, name), error.reply)
            except Exception:  # must not end the server
                _log.exception("the server failed at a request")
            if not self._hold:
                self._answers.flush()
            if not int(router.getsockopt(_EVENTS)) & _POLLIN:
                return

    def sweep(self) -> float | None:
        """Release inactive transfers and continue waiting uploads. Return the seconds until the
        next call is due, None without transfers."""
        self._admit()
        sessions = [session for session in self._requests.sessions.values() if session.downloads]
        if not sessions and not self.uploads:
            return None
        now = time.monotonic()
        if now >= self._next_sweep_s:
            self._next_sweep_s = now + SWEEP_S
            self.uploads.sweep(now)
            for session in sessions:
                session.release_downloads(now - SILENCE_S)
        return self._next_sweep_s - now

    def _process(self, route: Route, request: RequestEnvelope, data: Any, frame: Any) -> None:
        session, seq, part = self._requests.sessions.get(request.session), request.seq, request.part
        if session is None:
            if isinstance(part, Piece) and part.start == 0 and data is not None:
                # a body in pieces from an unknown session: the handler rejects it
                request = RequestEnvelope(PROTOCOL, request.session, seq, 1, (), (), bytes(data))
            if isinstance(part, Ask | Offer):
                self._answers.send_part(route, seq, Read((0,), part.number) if isinstance(part, Offer) else Read(()))
            if not request.body:  # a confirmation from a session that has ended
                return
            session = self._requests.open(request.session, _property(frame, "User-Id"))
            part = None
        if route not in session.connections:
            session.add_connection(route, _property(frame, "User-Id"), _property(frame, "Peer-Address"))
        for dropped in request.dropped:
            if not session.is_known(dropped):
                self.uploads.release(request.session, dropped)
            self._requests.drop(self._handler, request.session, dropped)
        for confirmed in request.settled:
            session.confirm(confirmed)
        if request.done > session.done:
            session.advance_done(request.done)
        if part is None and not request.body:
            return
        if session.is_known(seq):
            self._repeat(route, session, seq, part)
        elif seq in session.early and not request.body:
            return
        elif isinstance(part, Offer | Piece):
            self._upload(route, request, part, data)
        elif isinstance(part, Ask):
            self._answers.send_part(route, seq, Read(()))
        elif part is None:
            sink = None if data is None else self._handler.sink(request.session, request.body, len(data))
            if sink is not None and sink.error is None:
                sink.write(0, data)
            name, handler = request.session, self._handler
            if self._requests.begin(handler, route, name, seq, request.done, request.body, sink):
                self._requests.drop(handler, name, seq)

    def _repeat(self, route: Route, session: SessionState, seq: int, part: RequestPart | None) -> None:
        """Process another message about a request in execution, or already answered."""
        session.reroute(seq, route)
        if seq not in session.answers or isinstance(part, Piece):
            return
        download = session.downloads.get(seq)
        if isinstance(part, Read):
            self._answers.queue(session, seq, part.starts)
        elif download is None or download.sizes is None:
            self._answers.queue(session, seq)
        else:
            self._answers.send_part(route, seq, Offer(download.sizes, getattr(part, "number", 0)))

    # ---- uploads

    def _upload(self, route: Route, request: RequestEnvelope, part: Offer | Piece, data: Any) -> None:
        """Begin the upload of a large request, or add a piece, and ask for more or execute the request."""
        offered = isinstance(part, Offer)
        uploads, name, seq = self.uploads, request.session, request.seq
        upload = uploads.offer(name, seq, part.sizes) if offered else uploads.find(name, seq)
        if upload is None or upload.sizes != part.sizes:
            return  # of an upload since released
        upload.hear(route, part.number if isinstance(part, Offer) else None)
        if isinstance(part, Piece) and upload.add(part.start, b"" if data is None else data, self._handler.sink):
            uploads.remove(upload)
            assert upload.incoming is not None
            body = upload.incoming.body.tobytes()
            if self._requests.begin(self._handler, route, name, seq, request.done, body, upload.sink):
                self._requests.drop(self._handler, name, seq)
        else:
            self._ask(upload, again=offered)
        self._admit()

    def _admit(self) -> None:
        for upload in self.uploads.admit():
            self._ask(upload)

    def _ask(self, upload: Upload, again: bool = False) -> None:
        """Ask for pieces of an upload. ``again``: for lost ones, too."""
        if (read := upload.ask(again)) is not None:
            self._answers.send_part(upload.route, upload.seq, read)


def _property(frame: Any, name: str) -> str:
    """Return a property of a frame's connection: the client's public key is its User-Id. "" if it has none."""
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""
