"""The serving end: one thread owns the ROUTER sockets; requests come in order, answers go out whenever they are known.

A request repeated by (session, seq) is not carried out again: it gets the answer it had, or waits for it. Payload
beside an answer is not kept: it is made anew for who asks again, and not before what was sent of it is through. Large
requests and answers travel in fragments: see ``transfers``.
Garbage is counted and dropped; the server and its other sessions go on. A frame of more than FRAME_BYTES cuts
only the connection that it came over, before there is memory for it. A server that closes for good says goodbye to all it has heard from.
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
    FRAGMENT_BYTES,
    GOODBYE,
    MAX_BYTES,
    PROTOCOL,
    Fragment,
    Progress,
    ProgressQuery,
    ProtocolMismatch,
    Pull,
    RequestEnvelope,
    ResponseEnvelope,
    decode_request,
    encode,
)
from .keys import ServerKeys
from .processes import ProcessWatch, process_key
from .router_sockets import Route, RouterSockets
from .session_state import SessionState
from .transfers import SILENCE_S, Download, PayloadSink, Upload, Uploads

_GOODBYE = encode(ResponseEnvelope(PROTOCOL, GOODBYE, b""))
_UNREAD = 10_000
"""So many requests that came too late have their senders told."""
SWEEP_S = 5.0
"""How often transfers that were silent for long are looked for, while there are any."""
ALL_THERE = 1 << 62
"""More bytes than any request has."""
MAX_WAIT_S = 3600.0
"""The longest sleep between two rounds, whatever deadline comes next: a deadline may be infinite."""
# As plain integers: an operation on zmq's enumerations costs as much as receiving a message.
_AT_ONCE, _MORE_COMES = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
_log = logging.getLogger(__name__)


class RequestHandler(Protocol):
    """Carries out requests, always in one thread."""

    def request(self, session: str, ticket: int, body: bytes, payload: Any) -> None:
        """Carry out a request; ``Server.answer`` may be called now or later. ``payload``: what ``sink`` returned, filled
        unless it has an error; None if none came."""

    def dropped(self, session: str, seq: int, ticket: int, answer: bytes | None) -> None:
        """Nobody waits for a request any more, nor read its answer. ``answer``: what it was; None if there was
        none yet. ``ticket`` 0 and no answer: the request has not come yet."""


class Handler(RequestHandler, Protocol):
    """Called by a server, always from its one thread."""

    def sink(self, session: str, body: bytes, nbytes: int) -> PayloadSink:
        """Return where the payload of a request goes, which is still to come. Must not raise."""

    def make(self, answer: bytes) -> tuple[bytes, Sequence[Any]]:
        """An answer as it is sent, and frames to go beside it: contiguous buffers that are not changed for as long as
        they are referred to."""

    def gone(self, session: str, reason: str) -> None:
        """The process of a session ended."""

    def idle(self) -> float | None:
        """Called after every round; returns seconds until it wants to be called again, None for never."""

    def settle(self) -> bool:
        """Called before answers leave: what they rest on must be kept by now. False: not yet; they wait, and it is
        called again after the next round."""


class _Outgoing(NamedTuple):
    """An answer that leaves at the end of the round; ``starts``: of the fragments that were asked for, or none."""

    session: SessionState
    seq: int
    starts: tuple[int, ...] = ()
    recorded: bool = True


class Server:
    """Binds to ``addresses`` (inproc, ipc, tcp) and runs ``handler`` in a thread.

    A tcp address needs ``keys``, and serves clients that hold one; or ``insecure``: it serves everyone. ``bulk``: most of
    what it sends is payload.
    ``max_bytes``: the largest request taken, with its payload; the payload of all unfinished uploads together takes as
    much. ``garbage``: messages dropped because they were
    none; ``refused``: connections shut out by their key. ``hold``: answers leave together at the end of a round, so
    that the handler can settle what they rest on once for all of them. Raises ConfigError.
    """

    KEPT = ("_sessions", "_by_ticket", "_next_ticket")

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
    ) -> None:
        self._handler = handler
        self._hold = hold
        self._outbox: list[_Outgoing] = []
        self._uploads = Uploads(handler.sink, max_bytes)
        self._next_sweep = 0.0
        self._sessions: dict[str, SessionState] = {}
        self._by_ticket: dict[int, tuple[str, int]] = {}
        self._next_ticket = 1
        self._processes = ProcessWatch()
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._for_good: Callable[[], bool] = lambda: False
        self.garbage = 0
        self.max_bytes = max_bytes
        self._listening = RouterSockets(addresses, keys, insecure=insecure, bulk=bulk)
        self.addresses = self._listening.addresses
        self._waking = threading.Lock()
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = zmq.Poller()
        for socket in (*self._listening.routers, self._listening.zap):
            if socket is not None:
                self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wake_out, zmq.POLLIN)
        self._poller.register(self._processes.fileno(), zmq.POLLIN)
        self._admission = self._listening.admission
        self._poller.register(self._admission.fileno(), zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="asyncflow-server", daemon=True)

    @property
    def refused(self) -> int:
        return self._listening.refused

    @property
    def short(self) -> bool:
        """True if this process has hardly a file descriptor left, and should begin nothing new."""
        return self._admission.short

    def on_note(self, note: Callable[[str, str], None]) -> None:
        """Call ``note`` in the server's thread with a text and "info" or "warning" when peers are let in no more, or again;
        without it the text is logged. Before ``start``."""
        self._admission.note = note

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` in the server's thread, unless it has ended. From any thread."""
        self._calls.append(function)
        with self._waking, contextlib.suppress(BlockingIOError):
            if self._wake_in >= 0:  # it may have found the function already, and have stopped
                os.write(self._wake_in, b"\0")

    def stop(self, for_good: Callable[[], bool] = lambda: False) -> None:
        """Finish the round under way, close the socket, end the thread. From any other thread.

        ``for_good``: asked in the server's thread, after the last answer, whether no other will ever serve in its
        place. Then clients are told, and wait for nothing any more."""
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
        """Answer a request. In the server's thread; a ticket nobody waits for any more is ignored.

        ``make``: gives what is sent, instead of ``body``, each time: see ``Handler.make``. It is held until the answer
        arrived, or nobody waits for it; what it gives, until that is on its way.

        ``made``: what is sent is what the handler makes of it then.
        ``at_once``: it rests on nothing that has to be settled. ``recorded``: the request is; False: its answer leaves also
        when the round could not be settled.
        """
        session_id, seq = self._by_ticket.pop(ticket, ("", 0))
        session = self._sessions.get(session_id)
        if session is None:
            return
        session.tickets.pop(seq, None)
        session.answers[seq] = body
        if made:
            session.made.add(seq)
        if make is not None:
            session.makers[seq] = make
        if at_once:
            self._send(session, seq)
        else:
            self._outbox.append(_Outgoing(session, seq, recorded=recorded))

    def numbers(self, ticket: int) -> tuple[int, int]:
        """Of a request that is under way: its seq, and below which all of its session are over."""
        session_id, seq = self._by_ticket[ticket]
        return seq, self._sessions[session_id].done

    def replay(self, handler: RequestHandler, session_id: str, seq: int, done: int, ticket: int, body: bytes) -> None:
        """Replay a recorded request, which ``handler`` carries out. Call before ``start``."""
        session = self._sessions.setdefault(session_id, SessionState())
        session.raise_done(done)
        session.over(min(done, seq) - 1)
        following, self._next_ticket = self._next_ticket, ticket
        self._begin(handler, None, session_id, session, seq, body, None)
        self._next_ticket = max(following, self._next_ticket)  # one that had to wait came before others that did not

    def replay_drop(self, handler: RequestHandler, session_id: str, seq: int) -> None:
        """Replay a recorded request cancellation. Call before ``start``."""
        session = self._sessions.setdefault(session_id, SessionState())
        if seq in session.early:  # the request came since, changed nothing, and was taken back
            session.come(seq)
            handler.dropped(session_id, seq, 0, None)
        else:
            self._drop(handler, session_id, session, seq)

    def replayed(self) -> None:
        """Nothing of what was replayed is sent before it is asked for again."""
        self._outbox.clear()
        for session in self._sessions.values():
            session.routes = dict.fromkeys((*session.answers, *session.tickets))

    def watch(self, session: str, pid: int, key: str) -> None:
        """Call ``gone`` when the process of a session ends. Processes of other hosts cannot be watched."""
        if pid == os.getpid() and key in ("", process_key(pid)):
            return
        try:
            self._processes.add(session, pid, key)
        except ProcessLookupError:
            self.call(lambda: self._handler.gone(session, f"process {pid} ended"))

    def forget(self, session: str) -> None:
        """A session ended: what it may ask for again is dropped, and its process no longer watched for it."""
        known = self._sessions.pop(session, None)
        self._uploads.release(session)
        for ticket in known.tickets.values() if known else ():
            self._by_ticket.pop(ticket, None)
        self._processes.remove(session)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                timeout = self._idle()
                self._flush()
                waits = (timeout, self._sweep(), self._admission.wait_s, MAX_WAIT_S)
                wait_s = min(max(0.0, each) for each in waits if each is not None)
                ready = dict(self._poller.poll(int(wait_s * 1000) + 1))
                if self._processes.fileno() in ready:
                    self._bury()
                if self._admission.fileno() in ready or self._admission.wait_s is not None:
                    self._admission.tend()
                if self._wake_out in ready:
                    self._run_calls()
                if self._listening.zap in ready:
                    self._listening.judge()
                for router in self._listening.routers:
                    if router in ready:
                        self._receive(router)
            self._idle()
            self._flush()
            if self._for_good():
                self._say_goodbye()
        finally:
            self._close()

    def _say_goodbye(self) -> None:
        """Over each connection that anything came over, behind the answers that went there. What has not been read is not
        carried out, but who sent it is told, too."""
        routes = {route for session in self._sessions.values() for route in session.heard}
        for router in self._listening.routers:
            with contextlib.suppress(zmq.Again):
                for _ in range(_UNREAD):
                    routes.add((router, router.recv_multipart(_AT_ONCE, copy=False)[0].bytes))
        for route in routes:
            self._post(route, _GOODBYE)

    def _bury(self) -> None:
        for session in self._processes.ended():
            try:
                self._handler.gone(session, "its process ended")
            except Exception:  # one session's end must not be everybody's
                _log.exception("the server failed at the end of a session")

    def _close(self) -> None:
        self._processes.close()
        self._listening.close()
        with self._waking:
            for fd in (self._wake_out, self._wake_in):
                os.close(fd)
            self._wake_in = -1

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
            except Exception:  # one session's end must not be everybody's
                _log.exception("the server failed at a call of its own")

    def _receive(self, router: zmq.Socket[Any]) -> None:
        """All requests that have come, but not for ever: deaths and deadlines get their turn."""
        for _ in range(64):
            try:
                name = router.recv(_AT_ONCE)
            except zmq.Again:
                return
            frame, data, others = router.recv(copy=False), None, 0  # a router has at least one frame beside the name
            envelope = frame.bytes
            while frame.more:
                frame, others = router.recv(copy=False), others + 1
                data = frame if others == 1 else None
            try:
                if others > 1 or len(envelope) + (0 if data is None else len(data)) > self.max_bytes:
                    raise ProtocolError(f"a request of {others} frames or too many bytes")
                request = decode_request(envelope)
            except ProtocolMismatch as other:
                self.garbage += 1
                self._post((router, name), other.reply)
            except ProtocolError:
                self.garbage += 1
            else:
                try:
                    self._accept((router, name), request, data)
                except ProtocolError:
                    self.garbage += 1
                except Exception:  # one request must not be everybody's end
                    _log.exception("the server failed at a request")
                if not self._hold:
                    self._flush()
            if not int(router.getsockopt(_EVENTS)) & _READABLE:
                return

    def _accept(self, route: Route, request: RequestEnvelope, data: Any) -> None:
        session, seq, part = self._sessions.get(request.session), request.seq, request.part
        if session is None:
            if isinstance(part, Fragment) and part.start == 0 and data is not None:
                request = RequestEnvelope(
                    PROTOCOL, request.session, seq, 1, (), (), bytes(data)
                )  # the handler says what is wrong
            if isinstance(part, ProgressQuery):
                self._tell(route, seq, Progress(False, 0, part.upload, query=part.number))
            if not request.body:  # the last word of one that has ended
                return
            session, part = self._sessions.setdefault(request.session, SessionState()), None
        if route not in session.heard:
            session.hear(route)
        for dropped in request.dropped:
            self._drop(self._handler, request.session, session, dropped)
        for settled in request.settled:
            session.settle(settled)
        if request.done > session.done:
            session.raise_done(request.done)
        if part is None and not request.body:
            return
        if not session.has(seq):
            if seq in session.early and not request.body:
                return
            if isinstance(part, Fragment):
                self._add(route, request, part, data)
            elif isinstance(part, ProgressQuery):
                upload = self._uploads.find(request.session, seq)
                unknown = Progress(False, 0, part.upload, query=part.number)
                self._tell(route, seq, upload.progress(part.upload, part.number) if upload else unknown)
            elif part is None:
                sink = None if data is None else self._handler.sink(request.session, request.body, len(data))
                if sink is not None and sink.error is None:
                    sink.write(0, data)
                self._carry_out(route, request, sink)
            return
        if seq in session.routes:
            session.routes[seq] = route
        if isinstance(part, Pull):
            if seq in session.answers:
                self._outbox.append(_Outgoing(session, seq, part.starts))
            return
        asked, number = (0, 0) if part is None else (part.upload, getattr(part, "number", 0))
        download = session.downloads.get(seq)
        answer = download.sizes if download is not None else None
        if part is not None or answer is not None:
            self._tell(route, seq, Progress(True, asked, asked, ALL_THERE, query=number, answer=answer))
        if seq in session.answers and answer is None and not getattr(part, "answering", False):
            self._outbox.append(_Outgoing(session, seq))

    def _add(self, route: Route, request: RequestEnvelope, fragment: Fragment, data: Any) -> None:
        """A fragment of a request that is not whole yet."""
        upload = self._uploads.find(request.session, request.seq)
        if upload is None and not fragment.upload:
            if fragment.start:
                return  # the first was lost, and will come again
            upload = self._uploads.begin(request.session, request.seq, fragment.sizes)
        if upload is None or fragment.upload not in (0, upload.number):
            self._tell(route, request.seq, Progress(False, 0, fragment.upload))
            return
        upload.route = route
        self._uploads.add(upload, fragment, b"" if data is None else data)
        for ready in list(self._uploads.make_room()):
            if ready is not upload:
                self._go_on(ready)
        if self._uploads.find(upload.session, upload.seq) is upload:
            self._go_on(upload, request)

    def _go_on(self, upload: Upload, request: RequestEnvelope | None = None) -> None:
        """Carry its request out, if that is possible, or say how far it is. ``request``: the message that it comes from."""
        assert upload.route is not None
        if not upload.ready:
            asked = (
                request.part.upload if request is not None and isinstance(request.part, Fragment) else upload.number
            )
            self._tell(upload.route, upload.seq, upload.progress(asked))
            return
        self._uploads.remove(upload)
        done = 1 if request is None else request.done
        whole = RequestEnvelope(PROTOCOL, upload.session, upload.seq, done, (), (), upload.reassembly.body)
        self._carry_out(upload.route, whole, upload.sink)

    def _carry_out(self, route: Route, request: RequestEnvelope, sink: PayloadSink | None) -> None:
        """A request that has come for the first time, and is whole."""
        session, seq = self._sessions[request.session], request.seq
        session.over(min(request.done, seq) - 1)
        if self._begin(self._handler, route, request.session, session, seq, request.body, sink):
            self._drop(self._handler, request.session, session, seq)

    def _begin(
        self,
        handler: RequestHandler,
        route: Route | None,
        session_id: str,
        session: SessionState,
        seq: int,
        body: bytes,
        sink: PayloadSink | None,
    ) -> bool:
        """A request comes for the first time. Returns whether it was dropped before it came."""
        dropped = session.come(seq)
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        session.routes[seq], session.tickets[seq] = route, ticket
        self._by_ticket[ticket] = (session_id, seq)
        handler.request(session_id, ticket, body, sink)
        return dropped

    def _drop(self, handler: RequestHandler, session_id: str, session: SessionState, seq: int) -> None:
        if not session.has(seq):
            self._uploads.release(session_id, seq)
            if seq not in session.early:
                session.drop_early(seq)
                handler.dropped(session_id, seq, 0, None)
            return
        session.routes.pop(seq, None)
        ticket = session.tickets.pop(seq, None)
        answer = session.forget(seq)
        if ticket is not None:
            self._by_ticket.pop(ticket, None)
            handler.dropped(session_id, seq, ticket, None)
        elif answer is not None:
            handler.dropped(session_id, seq, 0, answer)

    def _flush(self) -> None:
        """Let answers leave, once what they rest on is kept."""
        try:
            settled = self._handler.settle()
        except Exception:
            _log.exception("the server failed to keep what its answers rest on")
            return
        if not self._outbox:
            return
        outbox, self._outbox = self._outbox, [each for each in self._outbox if each.recorded and not settled]
        for each in outbox:
            if (settled or not each.recorded) and each.seq in each.session.answers:
                self._send(each.session, each.seq, each.starts)

    def _send(self, session: SessionState, seq: int, starts: tuple[int, ...] = ()) -> None:
        """Send an answer, or fragments of it, where its request came from last; one that came to an earlier server is asked
        for again."""
        route, answer = session.routes[seq], session.answers[seq]
        if route is None:
            return
        download = session.downloads.get(seq)
        if download is None:
            body: bytes = answer
            payload: Sequence[Any] = ()
            if seq in session.made or seq in session.makers:
                try:
                    own = session.makers.get(seq)
                    body, payload = self._handler.make(answer) if own is None else own()
                except Exception:  # one answer that cannot be made must not be everybody's
                    _log.exception("the server failed to make an answer")
                    return
            if not payload and len(body) <= FRAGMENT_BYTES:
                self._post(route, encode(ResponseEnvelope(PROTOCOL, seq, body)))
                return
            download = session.downloads[seq] = Download(body, payload)
        with contextlib.suppress(ProtocolError):  # fragments that it has not: it is not what it was
            for start, body, fragment, data in download.messages(starts):
                envelope = encode(ResponseEnvelope(PROTOCOL, seq, body, fragment))
                download.sent(start, self._post(route, envelope, data))

    def _tell(self, route: Route, seq: int, progress: Progress) -> None:
        self._post(route, encode(ResponseEnvelope(PROTOCOL, seq, b"", progress)))

    def _sweep(self) -> float | None:
        """Release transfers that were silent for long, and let waiting ones go on; returns seconds until the next time."""
        for upload in list(self._uploads.make_room()):
            self._go_on(upload)
        sessions = [session for session in self._sessions.values() if session.downloads]
        if not sessions and not self._uploads:
            return None
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_S
            self._uploads.sweep(now)
            for session in sessions:
                session.release_downloads(now - SILENCE_S)
        return self._next_sweep - now

    def _post(self, route: Route, envelope: bytes, data: Any = None) -> zmq.MessageTracker | None:
        router, name = route
        with contextlib.suppress(zmq.ZMQError):  # its client is gone; the answer stays for a retry
            if data is not None and len(data):
                return router.send_multipart((name, envelope, data), _AT_ONCE, copy=False, track=True)
            router.send(name, _AT_ONCE | _MORE_COMES)
            router.send(envelope, _AT_ONCE)
        return None
