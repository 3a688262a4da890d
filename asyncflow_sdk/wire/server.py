"""Server: one thread owns the ROUTER sockets, executes requests in order, and sends each answer
when it is known.

    server = Server(["ipc:///run/x/queue"], handler); server.start()     # handler: see Handler
    server.answer(ticket, body)                                          # from the server's thread, now or later
    server.stop()

RequestReceiver reads and executes requests, RequestTable keeps sessions and answers, AnswerSender
sends. A frame above FRAME_BYTES cuts its connection before any memory is allocated for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from .answer_sender import AnswerSender
from .envelope import GOODBYE, MAX_BYTES, PROTOCOL, ResponseEnvelope, encode
from .handler import Handler
from .keys import ServerKeys
from .processes import ProcessWatch, process_key
from .request_receiver import RequestReceiver
from .request_table import CHECK_BYTES, RequestTable
from .router_sockets import Asking, RouterSockets

_GOODBYE = encode(ResponseEnvelope(PROTOCOL, GOODBYE, b""))
_MAX_UNREAD = 10_000
"""Unread requests per socket whose senders get a goodbye."""
MAX_WAIT_S = 3600.0
"""The longest sleep between two rounds: a deadline may be infinite."""
_log = logging.getLogger(__name__)


class Server:
    """Binds to ``addresses`` (inproc, ipc, tcp) and runs ``handler`` in a thread. Raises
    ConfigError.

    A tcp address needs ``keys``, and serves clients with one of them; or ``insecure``: everyone.
    ``ask`` decides about clients with other keys: see RouterSockets.
    ``bulk``: most traffic is payload. ``max_bytes``: the largest request with its payload, and the
    limit for the payload of all unfinished uploads together. ``hold``: send answers at the end of a
    round, so the handler settles once for all of them.
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
        self._answers = AnswerSender(handler)
        self._receiver = RequestReceiver(handler, self.requests, self._answers, max_bytes, hold)
        self._processes = ProcessWatch()
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping, self._grown = False, 0
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
    def garbage(self) -> int:
        """Invalid messages dropped so far."""
        return self._receiver.garbage

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
        session, seq = self.requests.take(ticket)
        if session is None:
            return
        self._grown += session.answer(seq, body, made, make)
        if at_once:
            self._answers.send(session, seq)
        else:
            self._answers.queue(session, seq, recorded=recorded)

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
        self._receiver.uploads.release(session)
        self._processes.remove(session)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                timeout_s = self._idle()
                if self._grown + self.requests.grown >= CHECK_BYTES:
                    self._grown = 0
                    for session in self.requests.take_overfull():
                        self._end_session(session, "it was ended: it left too many answers unconfirmed")
                self._answers.flush()
                waits = (timeout_s, self._receiver.sweep(), self._limiter.wait_s, MAX_WAIT_S)
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
                        self._receiver.receive(router)
            self._idle()
            self._answers.flush()
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
            self._answers.post(route, _GOODBYE)

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
