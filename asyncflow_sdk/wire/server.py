"""Server: one thread owns the ROUTER sockets, executes requests in order, and sends each answer
when it is known.

    server = Server(["ipc:///run/x/queue"], handler); server.start()     # handler: see Handler
    server.answer(ticket, body)                                          # from the server's thread, now or later
    server.stop()

RequestTable keeps sessions and answers, Uploads the large requests on their way. Invalid messages are
counted and dropped. A frame above FRAME_BYTES cuts its connection before any memory is allocated for it.
Payload beside an answer is not stored: it is made again for each retry.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import zmq

from ..errors import ProtocolError
from .envelope import (
    GOODBYE,
    MAX_BYTES,
    PIECE_BYTES,
    PROTOCOL,
    Ask,
    Offer,
    Piece,
    ProtocolMismatch,
    Read,
    RequestEnvelope,
    RequestPart,
    ResponseEnvelope,
    ResponsePart,
    decode_request,
    encode,
)
from .keys import ServerKeys
from .processes import ProcessWatch, process_key
from .request_table import CHECK_BYTES, RequestHandler, RequestTable, SessionState
from .router_sockets import Asking, Route, RouterSockets
from .uploads import SILENCE_S, PayloadSink, Upload, Uploads

_GOODBYE = encode(ResponseEnvelope(PROTOCOL, GOODBYE, b""))
_MAX_UNREAD = 10_000
"""Unread requests per socket whose senders get a goodbye."""
MAX_WAIT_S = 3600.0
"""The longest sleep between two rounds: a deadline may be infinite."""
SWEEP_S = 5.0
"""Interval between searches for inactive transfers, while there are any."""
_ROUND_MESSAGES = 64
# Plain integers: an operation on zmq's enumerations costs as much as receiving a message.
_NOBLOCK, _SNDMORE, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.EVENTS), int(zmq.POLLIN)
_log = logging.getLogger(__name__)


class Handler(RequestHandler, Protocol):
    """Executes the requests of a running server. All calls come from the server's thread."""

    def sink(self, session: str, body: bytes, nbytes: int) -> PayloadSink:
        """Return a sink for the payload of a request, before the payload arrives. Must not raise."""

    def make(self, answer: bytes) -> tuple[bytes, Sequence[Any]]:
        """Render a stored answer for sending: return the body, and contiguous buffers to send
        beside it. The buffers must not change while anything refers to them."""

    def gone(self, session: str, reason: str) -> None:
        """The process of a session ended."""

    def idle(self) -> float | None:
        """Called after every round. Return the seconds until the next call is due, None for never."""

    def settle(self) -> bool:
        """Called before answers are sent: store everything that they depend on. Return False to
        hold the answers back until the next round."""


class _Outgoing(NamedTuple):
    """A queued answer. ``part``: the message that asked for it, None for the first time."""

    session: SessionState
    seq: int
    part: RequestPart | None = None
    recorded: bool = True


class Server:
    """Binds to ``addresses`` (inproc, ipc, tcp) and runs ``handler`` in a thread. Raises
    ConfigError.

    A tcp address needs ``keys``, and serves clients with one of them; or ``insecure``: everyone.
    ``ask`` decides about clients with other keys: see RouterSockets.
    ``bulk``: most traffic is payload. ``max_bytes``: the largest request with its payload, and the
    limit for all unfinished uploads together. ``hold``: send answers at the end of a
    round, so the handler settles once for all of them. ``garbage``: invalid messages dropped so far.
    """

    def __init__(
        self,
        addresses: list[str],
        handler: Handler,
        keys: ServerKeys | None = None,
        max_bytes: int = MAX_BYTES,
        hold: bool = False,
        *,
        insecure: bool = False,
        bulk: bool = False,
        ask: Asking | None = None,
    ) -> None:
        self._handler, self.max_bytes = handler, max_bytes
        self.requests = RequestTable()
        self._hold = hold
        self._answers: list[_Outgoing] = []  # to be sent after the handler has settled
        self._uploads, self._next_sweep_s = Uploads(max_bytes), 0.0
        self.garbage = 0
        self._processes = ProcessWatch()
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._for_good: Callable[[], bool] = lambda: False
        self._sockets = RouterSockets(addresses, keys, insecure=insecure, bulk=bulk, ask=ask)
        self._limiter = self._sockets.limiter
        self.addresses = self._sockets.addresses
        self._wake_lock = threading.Lock()
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = zmq.Poller()
        for socket in (*self._sockets.routers, self._sockets.zap):
            if socket is not None:
                self._poller.register(socket, zmq.POLLIN)
        for fd in (self._wake_out, self._processes.fileno(), self._limiter.fileno()):
            self._poller.register(fd, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="asyncflow-server", daemon=True)

    @property
    def refused(self) -> int:
        """Connections refused because of their key so far."""
        return self._sockets.refused

    @property
    def short(self) -> bool:
        """True if this process has hardly a free file descriptor, and should begin nothing new."""
        return self._limiter.short

    def replace_keys(self, keys: ServerKeys) -> None:
        """Accept new connections by these keys only. In the server's thread."""
        self._sockets.replace_keys(keys)

    def renew_ipc(self) -> None:
        """Replace removed socket files. In the server's thread. Raises OSError."""
        self._limiter.renew_ipc()

    def key_of(self, session: str) -> str:
        """Return the public key of a session's client; "" without keys."""
        state = self.requests.sessions.get(session)
        return state.keys[-1] if state and state.keys else ""

    def bind(self, session: str, *keys: str) -> None:
        """Accept messages by these keys in a session; see ``SessionState.accept``."""
        self.requests.sessions[session].accept(keys)

    def on_note(self, note: Callable[[str, str], None]) -> None:
        """Call ``note`` with a text and "info" or "warning" when connections are paused or resumed,
        instead of logging the text. In the server's thread. Call before ``start``."""
        self._limiter.on_note(note)

    def start(self) -> None:
        """Start the server's thread."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` in the server's thread, unless it has ended. Thread-safe."""
        self._calls.append(function)
        with self._wake_lock, contextlib.suppress(BlockingIOError):
            if self._wake_in >= 0:  # the thread may have run the function already, and have stopped
                os.write(self._wake_in, b"\0")

    def stop(self, for_good: Callable[[], bool] = lambda: False) -> None:
        """Finish the current round, close the sockets, and end the thread. Call from another
        thread.

        ``for_good``: called in the server's thread after the last answer. If it returns True, all
        clients get a goodbye, so none waits for another server at these addresses."""
        if self._thread.is_alive():
            self._for_good = for_good
            self.call(self._stop)
            self._thread.join()
        elif self._thread.ident is None:
            self._close()

    def answer(
        self,
        ticket: int,
        body: bytes,
        made: bool = False,
        at_once: bool = False,
        recorded: bool = True,
        make: Callable[[], tuple[bytes, Sequence[Any]]] | None = None,
    ) -> None:
        """Answer a request. Call in the server's thread. Ignores the ticket of a cancelled request.

        ``made``: each time, send the result of ``Handler.make(body)``. ``make``: each time, send
        the result of this function, held until the answer is confirmed or cancelled; its buffers
        are held until they are sent. ``at_once``: send now, because the answer needs no settling.
        ``recorded``: False for requests without a record: send even if settling failed."""
        session, seq = self.requests.answer(ticket, body, made, make)
        if session is None:
            return
        if at_once:
            self._send(session, seq)
        else:
            self._answers.append(_Outgoing(session, seq, None, recorded))

    def finish_replay(self) -> None:
        """Call after a replay, before ``start``: only clients that ask again get its answers."""
        self._answers.clear()
        self.requests.finish_replay()

    def watch(self, session: str, pid: int, key: str) -> None:
        """Call ``Handler.gone`` when a session's process ends. Ignores processes of other hosts."""
        if pid == os.getpid() and key in ("", process_key(pid)):
            return
        try:
            self._processes.add(session, pid, key)
        except ProcessLookupError:
            self.call(lambda: self._handler.gone(session, f"process {pid} ended"))

    def forget(self, session: str) -> None:
        """Release everything kept for an ended session, and stop watching its process."""
        self.requests.forget(session)
        self._uploads.release(session)
        self._processes.remove(session)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                timeout_s = self._idle()
                if self.requests.grown >= CHECK_BYTES:
                    for session in self.requests.take_overfull():
                        self._end_session(session, "it was ended: it left too many answers unconfirmed")
                self._flush()
                waits = (timeout_s, self._sweep(), self._limiter.wait_s, MAX_WAIT_S)
                known = [each for each in waits if each is not None]
                wait_s = max(0.0, min(known))
                ready = dict(self._poller.poll(int(wait_s * 1000) + 1))
                if self._processes.fileno() in ready:
                    for session in self._processes.ended():
                        self._end_session(session, "its process ended")
                if self._limiter.fileno() in ready or self._limiter.wait_s is not None:
                    self._limiter.update()
                if self._wake_out in ready:
                    self._run_calls()
                if self._sockets.zap in ready:
                    self._sockets.authenticate()
                for router in self._sockets.routers:
                    if router in ready:
                        self._receive(router)
            self._idle()
            self._flush()
            if self._for_good():
                self._send_goodbyes()
        finally:
            self._close()

    def _send_goodbyes(self) -> None:
        """Send a goodbye over known connections and to the senders of unread requests."""
        routes = {route for session in self.requests.sessions.values() for route in session.connections}
        for router in self._sockets.routers:
            with contextlib.suppress(zmq.Again):
                for _ in range(_MAX_UNREAD):
                    routes.add((router, router.recv_multipart(zmq.NOBLOCK, copy=False)[0].bytes))
        for route in routes:
            self._post(route, _GOODBYE)

    def _end_session(self, session: str, reason: str) -> None:
        try:
            self._handler.gone(session, reason)
        except Exception:  # must not end the server
            _log.exception("the server failed at the end of a session")

    def _idle(self) -> float | None:
        try:
            return self._handler.idle()
        except Exception:
            _log.exception("the server failed between requests")
            return 1.0

    def _run_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_out, 4096)
        while self._calls:
            try:
                self._calls.popleft()()
            except Exception:  # must not end the server
                _log.exception("the server failed at a call of its own")

    def _close(self) -> None:
        self._processes.close()
        self._sockets.close()
        with self._wake_lock:
            for fd in (self._wake_out, self._wake_in):
                os.close(fd)
            self._wake_in = -1

    # ---- requests

    def _receive(self, router: zmq.Socket[Any]) -> None:
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
                if others > 1 or len(envelope) + (0 if data is None else len(data)) > self.max_bytes:
                    raise ProtocolError("a request of too many frames or bytes")
                self._process((router, name), decode_request(envelope), data, first)
            except ProtocolError as error:
                self.garbage += 1
                if isinstance(error, ProtocolMismatch):
                    self._post((router, name), error.reply)
            except Exception:  # must not end the server
                _log.exception("the server failed at a request")
            if not self._hold:
                self._flush()
            if not int(router.getsockopt(_EVENTS)) & _POLLIN:
                return

    def _sweep(self) -> float | None:
        """Release inactive transfers and continue waiting uploads. Return the seconds until the
        next call is due, None without transfers."""
        self._admit()
        sessions = [session for session in self.requests.sessions.values() if session.downloads]
        if not sessions and not self._uploads:
            return None
        now = time.monotonic()
        if now >= self._next_sweep_s:
            self._next_sweep_s = now + SWEEP_S
            self._uploads.sweep(now)
            for session in sessions:
                session.release_downloads(now - SILENCE_S)
        return self._next_sweep_s - now

    def _process(self, route: Route, request: RequestEnvelope, data: Any, frame: Any) -> None:
        session, seq, part = self.requests.sessions.get(request.session), request.seq, request.part
        if session is None:
            if isinstance(part, Piece) and part.start == 0 and data is not None:
                # a body in pieces from an unknown session: the handler rejects it
                request, data = RequestEnvelope(PROTOCOL, request.session, seq, 1, (), (), bytes(data)), None
            if isinstance(part, Ask | Offer):
                self._send_part(route, seq, Read((0,), part.number) if isinstance(part, Offer) else Read(()))
            if not request.body:  # a confirmation from a session that has ended
                return
            session = self.requests.open(request.session, _property(frame, "User-Id"))
            part = None
        if route not in session.connections:
            session.add_connection(route, _property(frame, "User-Id"), _property(frame, "Peer-Address"))
        for dropped in request.dropped:
            if not session.is_known(dropped):
                self._uploads.release(request.session, dropped)
            self.requests.drop(self._handler, request.session, dropped)
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
            self._send_part(route, seq, Read(()))
        elif part is None:
            sink = None if data is None else self._handler.sink(request.session, request.body, len(data))
            if sink is not None and sink.error is None:
                sink.write(0, data)
            name, handler = request.session, self._handler
            if self.requests.begin(handler, route, name, seq, request.done, request.body, sink):
                self.requests.drop(handler, name, seq)

    def _repeat(self, route: Route, session: SessionState, seq: int, part: RequestPart | None) -> None:
        """Process another message about a request in execution, or already answered."""
        session.reroute(seq, route)
        if seq in session.answers and not isinstance(part, Piece):
            self._answers.append(_Outgoing(session, seq, part))

    # ---- uploads

    def _upload(self, route: Route, request: RequestEnvelope, part: Offer | Piece, data: Any) -> None:
        """Begin the upload of a large request, or add a piece, and ask for more or execute the request."""
        offered = isinstance(part, Offer)
        uploads, name, seq = self._uploads, request.session, request.seq
        upload = uploads.offer(name, seq, part.sizes) if offered else uploads.find(name, seq)
        if upload is None or upload.sizes != part.sizes:
            return  # of an upload since released
        upload.hear(route, part.number if isinstance(part, Offer) else None)
        if isinstance(part, Piece) and upload.add(part.start, b"" if data is None else data, self._handler.sink):
            uploads.remove(upload)
            assert upload.incoming is not None
            body = upload.incoming.body.tobytes()
            if self.requests.begin(self._handler, route, name, seq, request.done, body, upload.sink):
                self.requests.drop(self._handler, name, seq)
        else:
            self._ask(upload, again=offered)
        self._admit()

    def _admit(self) -> None:
        for upload in self._uploads.admit():
            self._ask(upload)

    def _ask(self, upload: Upload, again: bool = False) -> None:
        """Ask for pieces of an upload. ``again``: ask for lost ones, too."""
        if (read := upload.ask(again)) is not None:
            self._send_part(upload.route, upload.seq, read)

    # ---- answers

    def _flush(self) -> None:
        """Let the handler settle, then send the queued answers. If it could not, send only those of
        requests without a record."""
        try:
            settled = self._handler.settle()
        except Exception:
            _log.exception("the server failed to store the state that its answers depend on")
            return
        if not self._answers:
            return
        queued, self._answers = self._answers, [each for each in self._answers if each.recorded and not settled]
        for each in queued:
            if (settled or not each.recorded) and each.seq in each.session.answers:
                self._send(each.session, each.seq, each.part)

    def _send(self, session: SessionState, seq: int, part: RequestPart | None = None) -> None:
        """Send an answer, or pieces of it, over the connection of its request's last message; offer it
        if its first pieces were sent before. Do nothing if that message reached an earlier server: the
        client will repeat it."""
        route, answer = session.routes[seq], session.answers[seq]
        if route is None:
            return
        download = session.downloads.get(seq)
        again = download is not None
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
                self._post(route, encode(ResponseEnvelope(PROTOCOL, seq, body)))
                return
            download = session.download(seq, body, payload)
        if (again or isinstance(part, Ask)) and not isinstance(part, Read) and download.sizes is not None:
            self._send_part(route, seq, Offer(download.sizes, getattr(part, "number", 0)))
            return
        starts = part.starts if isinstance(part, Read) else ()
        with contextlib.suppress(ProtocolError):  # the answer was made again, and has other pieces
            for start, body, piece, data in download.messages(starts):
                envelope = encode(ResponseEnvelope(PROTOCOL, seq, body, piece))
                download.mark_sent(start, len(body) + len(data), self._post(route, envelope, data))

    def _send_part(self, route: Route, seq: int, part: ResponsePart) -> None:
        """Send a message about the pieces of a request or an answer."""
        self._post(route, encode(ResponseEnvelope(PROTOCOL, seq, b"", part)))

    def _post(self, route: Route, envelope: bytes, data: Any = None) -> zmq.MessageTracker | None:
        """Send one message. Return a tracker if ``data`` is sent without a copy."""
        router, name = route
        with contextlib.suppress(zmq.ZMQError):  # the client has disconnected
            if data is not None and len(data):
                return router.send_multipart((name, envelope, data), _NOBLOCK, copy=False, track=True)
            router.send(name, _NOBLOCK | _SNDMORE)
            router.send(envelope, _NOBLOCK)
        return None


def _property(frame: Any, name: str) -> str:
    """Return a property of a frame's connection: the client's public key is its User-Id. "" if it has none."""
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""
