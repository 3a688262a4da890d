"""Server: one thread owns the ROUTER sockets, executes requests in order, and sends each answer when it is known.

    server = Server(RouterSockets(["ipc:///run/x/queue"]), handler); server.start()     # handler: see Handler
    server.answer(ticket, body)                                   # from the server's thread, now or later
    server.stop()

RequestTable keeps sessions and answers, Uploads the large requests on their way. Invalid messages are counted and
dropped. Payload beside an answer is not stored: it is made again for each retry."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import zmq

from ..errors import AsyncFlowError, ProtocolError
from .envelope import (
    GOODBYE,
    MAX_BYTES,
    PIECE_BYTES,
    PROTOCOL,
    Offer,
    Part,
    Piece,
    ProtocolMismatch,
    Read,
    RequestEnvelope,
    ResponseEnvelope,
    decode_request,
    encode,
)
from .pieces import SILENCE_S, Download, PayloadSink, Upload, Uploads
from .processes import ProcessWatch, process_key
from .request_table import CHECK_BYTES, MAX_EARLY, Maker, RequestHandler, RequestTable, SessionState, WireRequest
from .router_sockets import Route, RouterSockets

_MAX_UNREAD = 10_000  # unread requests per socket whose senders get a goodbye
MAX_WAIT_S = 3600.0  # the longest sleep between two rounds: a deadline may be infinite
SWEEP_S = 5.0  # interval between searches for inactive transfers, while there are any
_ROUND_MESSAGES = 64
# Plain integers: an operation on zmq's enumerations costs as much as receiving a message.
_NOBLOCK, _SNDMORE, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.EVENTS), int(zmq.POLLIN)
_log = logging.getLogger(__name__)


class Handler(RequestHandler, Protocol):
    """Executes the requests of a running server. All calls come from the server's thread."""

    def sink(self, session: str, body: bytes, nbytes: int) -> PayloadSink:
        """Return a sink for the payload of a request, before it arrives. An AsyncFlowError becomes the payload."""
        raise ProtocolError("this server takes no payload")

    def make(self, answer: bytes) -> tuple[bytes, Sequence[Any]]:
        """Render a stored answer: return body and contiguous buffers, not to be changed while referred to."""
        return answer, ()

    def gone(self, session: str, reason: str) -> None:
        """The process of a session ended."""

    def idle(self) -> float | None:
        """Called after every round. Return the seconds until the next call is due, None for never."""

    def settle(self) -> bool:
        """Store the state behind the answers to be sent. Return False to hold them back until the next round."""
        return True


class _Outgoing(NamedTuple):
    """A queued answer. ``part``: the question for it, None for the first time."""

    request: WireRequest
    part: Part | None = None
    recorded: bool = True


class Server:
    """Runs ``handler`` in a thread that owns ``sockets``.

    ``max_bytes``: the largest request with its payload, and the limit for all unfinished uploads together.
    ``garbage``: invalid messages dropped so far."""

    def __init__(self, sockets: RouterSockets, handler: Handler, max_bytes: int = MAX_BYTES) -> None:
        self.sockets, self._handler, self.max_bytes = sockets, handler, max_bytes
        self.limiter, self.addresses = sockets.limiter, sockets.addresses
        self.requests = RequestTable()
        self._answers: list[_Outgoing] = []  # to be sent after the handler has settled
        self._uploads, self._next_sweep_s = Uploads(max_bytes), 0.0
        self.garbage = 0
        self._processes = ProcessWatch()
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._for_good: Callable[[], bool] = lambda: False
        self._wake_lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for each in (*sockets.routers, sockets.zap, self._wake, self._processes.fd, sockets.limiter.fd):
            if each is not None:
                self._poller.register(each, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="asyncflow-server", daemon=True)

    def key_of(self, session: str) -> str:
        """Return the public key of a session's client; "" without keys."""
        state = self.requests.sessions.get(session)
        return state.keys[-1] if state and state.keys else ""

    def start(self) -> None:
        """Start the server's thread."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` in the server's thread, unless it has ended. Thread-safe."""
        self._calls.append(function)
        with self._wake_lock:
            if self._wake >= 0:  # the thread may have run the function already, and have stopped
                os.eventfd_write(self._wake, 1)

    def stop(self, for_good: Callable[[], bool] = lambda: False) -> None:
        """Finish the current round, close the sockets, and end the thread. Call from another thread. ``for_good``:
        called after the last answer; if it returns True, all clients get a goodbye, and wait for no other server."""
        if self._thread.is_alive():
            self._for_good = for_good
            self.call(self._stop)
            self._thread.join()
        elif self._thread.ident is None:
            self._close()

    def answer(
        self, ticket: int, body: bytes, made: bool = False, recorded: bool = True, make: Maker | None = None
    ) -> None:
        """Answer a request. Call in the server's thread. Ignores the ticket of a cancelled request.

        ``made``: each time, send the result of ``Handler.make(body)``. ``make``: each time, send the result of this
        function, held until the answer is confirmed or cancelled; its buffers are held until they are sent.
        ``recorded``: False for requests without a record: send even if settling failed."""
        if (request := self.requests.answer(ticket, body, made, make)) is not None:
            self._answers.append(_Outgoing(request, None, recorded))

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
                wait_s = MAX_WAIT_S
                for each in (timeout_s, self._sweep(), self.limiter.wait_s):
                    if each is not None and each < wait_s:
                        wait_s = each
                ready = dict(self._poller.poll(int(wait_s * 1000) + 1 if wait_s > 0 else 1))
                if self._processes.fd in ready:
                    for session in self._processes.ended():
                        self._end_session(session, "its process ended")
                if self.limiter.fd in ready or self.limiter.wait_s is not None:
                    self.limiter.update()
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    while self._calls:
                        self._guard("at a call of its own", self._calls.popleft())
                if self.sockets.zap in ready:
                    self.sockets.authenticate()
                for router in self.sockets.routers:
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
        for router in self.sockets.routers:
            with contextlib.suppress(zmq.Again):
                for _ in range(_MAX_UNREAD):
                    routes.add((router, router.recv_multipart(zmq.NOBLOCK, copy=False)[0].bytes))
        for route in routes:
            self._post(route, GOODBYE)

    def _guard(self, where: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the handler. Its errors must not end the server: return None."""
        try:
            return function(*arguments)
        except Exception:
            _log.exception("the server failed %s", where)
            return None

    def _end_session(self, session: str, reason: str) -> None:
        self._guard("at the end of a session", self._handler.gone, session, reason)

    def _idle(self) -> float | None:
        try:
            return self._handler.idle()
        except Exception:
            _log.exception("the server failed between requests")
            return 1.0

    def _close(self) -> None:
        self._processes.close()
        self.sockets.close()
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1

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
                    self._post((router, name), error.seq, str(error).encode())
            except Exception:  # must not end the server
                _log.exception("the server failed at a request")
            if not int(router.getsockopt(_EVENTS)) & _POLLIN:
                return

    def _sweep(self) -> float | None:
        """Release inactive transfers, continue waiting uploads. Return the seconds to the next call; None: never."""
        if not (self._uploads.by_session or self.requests.downloads):
            return None
        self._admit()
        now = time.monotonic()
        if now >= self._next_sweep_s:
            self._next_sweep_s = now + SWEEP_S
            self._uploads.sweep(now)
            self.requests.release_downloads(now - SILENCE_S)
        return self._next_sweep_s - now

    def _process(self, route: Route, message: RequestEnvelope, data: Any, frame: Any) -> None:
        name, seq, body, part = message.session, message.seq, message.body, message.part
        if seq < 1 and (body or part is not None):  # it would count as known, in a session unknown to the handler
            raise ProtocolError("a request below number 1")
        session = self.requests.sessions.get(name)
        if session is None:
            if isinstance(part, Piece) and part.start == 0 and data is not None:
                body, data = bytes(data), None  # of a body in pieces from an unknown session: the handler rejects it
            elif isinstance(part, Offer):
                self._post(route, seq, part=Read((0,), part.number))
            elif isinstance(part, Read):
                self._post(route, seq, part=Read(()))
            if not body:  # a confirmation from a session that has ended
                return
            if len(message.dropped) > MAX_EARLY:  # before there is a session
                raise ProtocolError("a first request with too many cancellations")
            part, key = None, _property(frame, "User-Id")
            session = self.requests.sessions.setdefault(name, SessionState(keys=(key,)))
        if route not in session.connections:
            session.add_connection(route, _property(frame, "User-Id"), _property(frame, "Peer-Address"))
        for dropped in message.dropped:
            self._uploads.release(name, dropped)
            self.requests.drop(self._handler, name, dropped)
        self.requests.confirm(session, message.settled, message.done)
        if part is None and not body:
            return
        if session.is_known(seq):  # in execution, or answered
            if (request := session.requests.get(seq)) is not None:
                request.reroute(route)
                if request.answer is not None and not isinstance(part, Piece):
                    self._answers.append(_Outgoing(request, part))
        elif part is None:
            sink = None if data is None else self._sink(name, body, len(data))
            if not isinstance(sink, AsyncFlowError | None):
                sink.write(0, data)
            self.requests.execute(self._handler, route, name, seq, message.done, body, sink)
        elif isinstance(part, Read):
            self._post(route, seq, part=Read(()))
        elif seq not in session.early:
            self._upload(route, message, part, data)

    def _sink(self, session: str, body: bytes, nbytes: int) -> PayloadSink | AsyncFlowError:
        try:
            return self._handler.sink(session, body, nbytes)
        except AsyncFlowError as error:
            return error

    # ---- uploads

    def _upload(self, route: Route, message: RequestEnvelope, part: Offer | Piece, data: Any) -> None:
        """Begin the upload of a large request, or add a piece, and ask for more or execute the request."""
        uploads, name, seq = self._uploads, message.session, message.seq
        offered = isinstance(part, Offer)
        upload = uploads.offer(name, seq, part.sizes) if offered else uploads.find(name, seq)
        if upload is None or upload.sizes != part.sizes:
            return  # of an upload since released
        upload.hear(route, part.number if isinstance(part, Offer) else None)
        body = None
        if isinstance(part, Piece):
            body = upload.add(part.start, b"" if data is None else data, self._sink)
        if body is None:
            self._ask(upload, again=offered)
        else:
            uploads.remove(upload)
            self.requests.execute(self._handler, route, name, seq, message.done, body, upload.sink)
        self._admit()

    def _admit(self) -> None:
        for upload in self._uploads.admit():
            self._ask(upload)

    def _ask(self, upload: Upload, again: bool = False) -> None:
        """Ask for pieces of an upload. ``again``: ask for lost ones, too."""
        if (read := upload.ask(again)) is not None:
            self._post(upload.route, upload.seq, part=read)

    # ---- answers

    def _flush(self) -> None:
        """Let the handler settle, then send the queued answers; if it fails, only those without a record."""
        try:
            settled = self._handler.settle()
        except Exception:
            _log.exception("the server failed to store the state behind its answers")
            settled = False
        if not self._answers:
            return
        queued = self._answers
        self._answers = [] if settled else [each for each in queued if each.recorded]
        for request, part, recorded in queued:
            if settled or not recorded:
                self._send(request, part)

    def _send(self, request: WireRequest, part: Part | None = None) -> None:
        """Send an answer, or pieces of it, over the connection of its request's last message; offer it if its first
        pieces were sent before. Do nothing if that message reached an earlier server: the client will repeat it."""
        route, seq, body = request.route, request.seq, request.answer
        if route is None or body is None:
            return
        download = self.requests.downloads.get(request)
        again = download is not None
        if download is None:
            payload: Sequence[Any] = ()
            if request.made or request.maker is not None:
                make = request.maker or functools.partial(self._handler.make, body)
                if (rendered := self._guard("to make an answer", make)) is None:
                    return
                body, payload = rendered
            if not payload and len(body) <= PIECE_BYTES:
                self._post(route, seq, body)
                return
            download = self.requests.downloads.setdefault(request, Download(body, payload))
        starts = part.starts if isinstance(part, Read) else ()
        if (again or isinstance(part, Read)) and not starts and download.large:
            self._post(route, seq, part=Offer(download.sizes, getattr(part, "number", 0)))
            return
        with contextlib.suppress(ProtocolError):  # the answer was made again, and has other pieces
            download.send(starts, functools.partial(self._post, route, seq))

    def _post(
        self, route: Route, seq: int, body: bytes = b"", part: Part | None = None, data: Any = None
    ) -> zmq.MessageTracker | None:
        """Send one message. Return a tracker if ``data`` is sent without a copy."""
        router, name = route
        envelope = encode(ResponseEnvelope(PROTOCOL, seq, body, part))
        try:
            if data is not None and len(data):
                return router.send_multipart((name, envelope, data), _NOBLOCK, copy=False, track=True)
            router.send(name, _NOBLOCK | _SNDMORE)
            router.send(envelope, _NOBLOCK)
        except zmq.ZMQError:  # the client has disconnected
            return None
        return None


def _property(frame: Any, name: str) -> str:
    """Return a property of a frame's connection: the client's public key is its User-Id. "" if it has none."""
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""
