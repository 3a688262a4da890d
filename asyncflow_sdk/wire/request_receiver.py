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
    Fragment,
    Progress,
    ProgressQuery,
    ProtocolMismatch,
    Pull,
    RequestEnvelope,
    RequestPart,
    decode_request,
)
from .handler import Handler
from .request_table import RequestTable
from .router_sockets import Route
from .session_state import SessionState
from .transfers import SILENCE_S, PayloadSink, Upload, Uploads

SWEEP_S = 5.0
"""Interval between searches for inactive transfers, while there are any."""
NO_LIMIT = 1 << 62
"""Larger than any request: the client may send all of it."""
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
        self.uploads = Uploads(handler.sink, max_bytes)
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
        self._continue_admitted()
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
            if isinstance(part, Fragment) and part.start == 0 and data is not None:
                # a body in fragments from an unknown session: the handler rejects it
                request = RequestEnvelope(PROTOCOL, request.session, seq, 1, (), (), bytes(data))
            if isinstance(part, ProgressQuery):
                self._answers.send_progress(route, seq, Progress(False, 0, part.upload, query=part.number))
            if not request.body:  # a confirmation from a session that has ended
                return
            session = self._requests.sessions[request.session] = SessionState(keys=(_property(frame, "User-Id"),))
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
        elif isinstance(part, Fragment):
            self._add_fragment(route, request, part, data)
        elif isinstance(part, ProgressQuery):
            upload = self.uploads.find(request.session, seq)
            unknown = Progress(False, 0, part.upload, query=part.number)
            progress = unknown if upload is None else upload.progress(part.upload, part.number)
            self._answers.send_progress(route, seq, progress)
        elif part is None:
            sink = None if data is None else self._handler.sink(request.session, request.body, len(data))
            if sink is not None and sink.error is None:
                sink.write(0, data)
            self._execute(route, request.session, seq, request.done, request.body, sink)

    def _repeat(self, route: Route, session: SessionState, seq: int, part: RequestPart | None) -> None:
        """Process another message about a request in execution, or already answered."""
        if seq in session.routes:
            session.routes[seq] = route
        if isinstance(part, Pull):
            if seq in session.answers:
                self._answers.queue(session, seq, part.starts)
            return
        upload, query = (0, 0) if part is None else (part.upload, getattr(part, "number", 0))
        download = session.downloads.get(seq)
        sizes = download.sizes if download is not None else None
        if part is not None or sizes is not None:
            progress = Progress(True, upload, upload, NO_LIMIT, query=query, answer=sizes)
            self._answers.send_progress(route, seq, progress)
        if seq in session.answers and sizes is None and not getattr(part, "answering", False):
            self._answers.queue(session, seq)

    def _execute(self, route: Route, name: str, seq: int, done: int, body: bytes, sink: PayloadSink | None) -> None:
        """Execute a complete request on its first arrival."""
        if self._requests.begin(self._handler, route, name, seq, done, body, sink):
            self._requests.drop(self._handler, name, seq)

    # ---- uploads

    def _add_fragment(self, route: Route, request: RequestEnvelope, fragment: Fragment, data: Any) -> None:
        """Add a fragment to the upload of an incomplete request."""
        upload = self.uploads.find(request.session, request.seq)
        if upload is None and not fragment.upload:
            if fragment.start:
                return  # the first fragment was lost, and will be sent again
            upload = self.uploads.begin(request.session, request.seq, fragment.sizes)
        if upload is None or fragment.upload not in (0, upload.number):
            self._answers.send_progress(route, request.seq, Progress(False, 0, fragment.upload))
            return
        upload.route = route
        self.uploads.add(upload, fragment, b"" if data is None else data)
        self._continue_admitted(upload)
        if self.uploads.find(upload.session, upload.seq) is upload:
            self._continue(upload, fragment.upload, request.done)

    def _continue_admitted(self, current: Upload | None = None) -> None:
        """Admit the payload of waiting uploads, and continue all of these except ``current``."""
        for upload in list(self.uploads.admit()):
            if upload is not current:
                self._continue(upload, upload.number, 1)

    def _continue(self, upload: Upload, message_upload: int, done: int) -> None:
        """Execute the request of an upload if it is ready, else send its progress."""
        assert upload.route is not None
        if not upload.ready:
            self._answers.send_progress(upload.route, upload.seq, upload.progress(message_upload))
            return
        self.uploads.remove(upload)
        self._execute(upload.route, upload.session, upload.seq, done, upload.reassembly.body, upload.sink)


def _property(frame: Any, name: str) -> str:
    """Return a property of a frame's connection: the client's public key is its User-Id. "" if it has none."""
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""
