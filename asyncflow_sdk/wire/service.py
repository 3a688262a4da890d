"""Service: calls to a process at an address of its own, with payload in the answers.

    service = Service(host, handler)                       # one end; service.where travels to the other
    class Handler: def request(self, peer, ticket, body): service.answer(ticket, b"...", frames=[array])
    client = ServiceClient(service.where)                  # the other end, on any host
    result = client.call(b"...", 30.0, "bucket 7")

Each service has its own keys. ``where`` has the public one, and travels over the run's connections only. Members of
a run prove themselves by their own keys: the service asks the run's server for each new connection if its key is a
member's, and again during use. Without a ``member``, ``where`` has the key for all clients."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import AccessDenied, AsyncFlowError, ConfigError, ProtocolError, ServerLost, WireError, error_from_name
from .client import Client
from .keys import RunKey, generate_keys
from .processes import process_key
from .router_sockets import RouterSockets
from .server import Handler, Server
from .sockets import EVERY_HOST, host_and_port

MAX_CALL_BYTES = 1 << 20
ASK_THREADS = 2
MAX_ASKED = 256  # open questions about keys of connections. Other connections are not answered, and try again
RECHECK_S = 5.0  # a service in use asks about the keys of its peers again after this time: they may be revoked
FORGET_S = 3600.0  # a peer without calls for this long is forgotten. It may call again
_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_log = logging.getLogger(__name__)

Frames: TypeAlias = Sequence[Any]


class Member(NamedTuple):
    """A member of a run, for other members. ``key``: its key pair. ``known``: returns the members' keys among some
    public keys; asks the run's server, blocking; raises AsyncFlowError."""

    key: RunKey
    known: Callable[[Collection[str]], Collection[str]]


class ServiceHandler(Protocol):
    """Called in the service's one thread. Must not block. The caller gets its errors."""

    def request(self, peer: str, ticket: int, body: bytes) -> None:
        """Handle a call of ``peer``, a ServiceClient: ``Service.answer`` or ``fail``, now or later, in any thread."""

    def gone(self, peer: str) -> None:
        """Handle the end of a peer: closed, process ended, or silent for FORGET_S."""


class ServiceAddress(msgspec.Struct, frozen=True, array_like=True):
    """The place of a service. ``key``: its public key, or the key for all clients; None for an insecure service."""

    address: str
    key: RunKey | str | None
    pid: int
    pid_key: str


class PeerCall(msgspec.Struct, frozen=True, array_like=True):
    """A call. With ``process``, pid and key, it is none: it introduces the peer. Without ``body``, the peer ends."""

    body: bytes | None
    process: tuple[int, str] | None = None


class CallReply(msgspec.Struct, frozen=True, array_like=True):
    """An answer. ``error`` and ``message``: class name and text of an error; "" without one."""

    body: bytes
    error: str = ""
    message: str = ""


class ServiceResult(NamedTuple):
    """The answer of a call. ``payload``: uint8, all frames one after another."""

    body: bytes
    payload: npt.NDArray[np.uint8]


_encode = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(PeerCall).decode
_decode_reply = msgspec.msgpack.Decoder(CallReply).decode
_decode_address = msgspec.msgpack.Decoder(ServiceAddress).decode


class Service(Handler):
    """Answers calls in its own thread, from now until ``close``. ``where``: the encoded address.

    ``host``: the IP address of this host for others. ``listen``: an address; default: a free port of this host.
    ``member``: this process in its run, to admit other members; None: ``where`` has the key. ``insecure``: no keys,
    so every process with access to the address may call. ``max_call_bytes``: size of the largest call. ``public``:
    its public key; "" without keys. Raises ConfigError."""

    def __init__(
        self,
        host: str,
        handler: ServiceHandler,
        *,
        listen: str | None = None,
        member: Member | None = None,
        insecure: bool = False,
        max_call_bytes: int = MAX_CALL_BYTES,
    ) -> None:
        own = f"[{host}]" if ":" in host else host
        keys, key = (None, None) if insecure else generate_keys()
        self.public = "" if keys is None else keys.public
        self._known = None if insecure or member is None else member.known
        if keys is not None and self._known is not None:
            keys = msgspec.structs.replace(keys, clients=())
        self._asking, self._slots = ThreadPoolExecutor(ASK_THREADS, "asyncflow-ask"), threading.Semaphore(MAX_ASKED)
        self._members: set[str] = set()
        self._handler = handler
        self._last_calls: dict[str, float] = {}
        self._next_recheck_s = self._next_check_s = 0.0
        ask = None if self._known is None else self._admit
        addresses = [listen or f"tcp://{own}:0"]
        sockets = RouterSockets(addresses, keys, insecure=insecure, bulk=True, ask=ask)
        self._server = Server(sockets, self, max_call_bytes)
        self.address = self._server.addresses[0]
        name, port = host_and_port(self.address)
        if name in EVERY_HOST:
            self.address = f"tcp://{own}:{port}"
        pid, shown = os.getpid(), key if self._known is None else self.public
        self.where = _encode(ServiceAddress(self.address, shown, pid, process_key(pid)))
        self._server.start()

    def answer(self, ticket: int, body: bytes, frames: Frames | Callable[[], Frames] = ()) -> None:
        """Answer a call, from any thread. No effect if its peer no longer waits.

        ``frames``: contiguous buffers. They must not change, and are held until they arrive. A function instead is
        called in the service's thread whenever the answer is sent; its buffers are held until they are sent, and
        its AsyncFlowError is the answer."""

        def render() -> tuple[bytes, Frames]:
            try:
                return _encode(CallReply(body)), frames() if callable(frames) else frames
            except AsyncFlowError as error:
                return _encode(_failure(error)), ()

        self._send(ticket, CallReply(body), render if frames else None)

    def fail(self, ticket: int, error: AsyncFlowError) -> None:
        """Answer with an error, raised by the caller. From any thread."""
        self._send(ticket, _failure(error))

    def close(self) -> None:
        """Stop answering. Idempotent. From any thread except the service's."""
        self._server.stop()
        self._asking.shutdown(wait=False, cancel_futures=True)

    def _admit(self, key: str, verdict: Callable[[bool], None]) -> None:
        """Ask if the key of a new connection is a member's. Without an answer the peer tries again."""
        if self._slots.acquire(blocking=False):
            self._ask({key}, verdict).add_done_callback(lambda future: self._slots.release())

    def _ask(self, keys: set[str], verdict: Callable[[bool], None] = lambda known: None) -> Future[None]:
        """Ask the run's server for the members' keys among ``keys``. ``verdict``: called with True if all are."""

        def decide(known: set[str]) -> None:
            self._members = (self._members - keys) | known
            verdict(known == keys)

        def ask() -> None:
            assert self._known is not None
            with contextlib.suppress(AsyncFlowError):
                known = set(self._known(keys)) & keys
                self._server.call(lambda: decide(known))

        return self._asking.submit(ask)

    def _check_member(self, session: str) -> None:
        """Raise AccessDenied if the key of a peer was revoked. At most RECHECK_S old."""
        now = time.monotonic()
        if now >= self._next_recheck_s:
            self._next_recheck_s = now + RECHECK_S
            self._ask(self._members)
        if self._server.key_of(session) not in self._members:
            raise AccessDenied(f"{self.address} does not accept this key any more: its client was evicted, or ended")

    def _send(self, ticket: int, reply: CallReply, make: Callable[[], tuple[bytes, Frames]] | None = None) -> None:
        self._server.call(lambda: self._server.answer(ticket, _encode(reply), make=make))

    # ---- the wire's Handler

    def request(self, session: str, ticket: int, body: bytes, payload: Any) -> None:
        """See ``Handler.request``."""
        new = session not in self._last_calls
        self._last_calls[session] = time.monotonic()
        try:
            if new:
                self._server.requests.check_room(session)
            if self._known is not None:
                self._check_member(session)
            if payload is not None:
                raise payload
            call = _decode_call(body)
            if call.process is not None:
                self._server.watch(session, *call.process)
                self.answer(ticket, b"")
            elif call.body is not None:
                self._handler.request(session, ticket, call.body)
            else:
                self.answer(ticket, b"")
                self._server.call(lambda: self.gone(session, "it has closed"))
        except AsyncFlowError as error:
            self.fail(ticket, error)
            if new:
                self._server.call(lambda: self.gone(session, "its first call was refused"))
        except _BAD as error:
            self.fail(ticket, ProtocolError(f"{self.address} cannot read this call: {error}"))
        except Exception as error:  # one failed call must not end the service
            _log.exception("a service failed at a call")
            self.fail(ticket, ProtocolError(f"{self.address} failed at this call: {error!r}"))

    def gone(self, session: str, reason: str) -> None:
        """See ``Handler.gone``."""
        if self._last_calls.pop(session, None) is None:
            return
        self._server.forget(session)
        self._handler.gone(session)

    def idle(self) -> float | None:
        """See ``Handler.idle``. Forgets silent peers."""
        now = time.monotonic()
        if self._last_calls and now >= self._next_check_s:
            self._next_check_s = now + FORGET_S
            for session, state in list(self._server.requests.sessions.items()):
                silent_s = now - self._last_calls.get(session, now)
                if silent_s > FORGET_S and all(each.answer is not None for each in state.requests.values()):
                    self.gone(session, "it was silent for long")
        return self._next_check_s - now if self._last_calls else None


class ServiceClient(Client):
    """Calls the service at ``where``. Thread-safe; each calling thread has its own connection. ``max_call_bytes``:
    as the service's. ``own``: key of this member.

    ``where`` comes from another process: raises ProtocolError for an invalid one."""

    def __init__(
        self, where: bytes | ServiceAddress, own: RunKey | None = None, *, max_call_bytes: int = MAX_CALL_BYTES
    ) -> None:
        try:
            found = where if isinstance(where, ServiceAddress) else _decode_address(where)
            key = found.key
            if isinstance(key, str):
                if own is None:
                    raise ProtocolError("members of its run only, and this process is none")
                key = msgspec.structs.replace(own, server=key)
            if not found.address.startswith("tcp://"):
                raise ProtocolError(f"a service at {found.address[:200]!r}; a tcp address is expected")
            super().__init__(found.address, key, insecure=key is None, bulk=True)
        except (*_BAD, ConfigError) as error:
            raise ProtocolError(f"the address of a service cannot be read: {error}") from None
        self.limit(max_call_bytes)
        self._patient = isinstance(found.key, str)  # the service may have no answer yet from the run's server
        self.watch(found.pid, found.pid_key)
        self._called_s = -math.inf

    def call(
        self, body: bytes, timeout_s: float, what: str = "a call", since: int | None = None, limit: int | None = None
    ) -> ServiceResult:
        """Send a call and wait for its answer. ``what``: the requested object, for errors. ``since``: a former
        value of ``interrupts``; the call raises if it has changed. ``limit``: the most bytes of the answer.

        Raises the handler's error; ServerLost after ``timeout_s``, when the service's process ends, and on
        ``close``; WireError on ``interrupt``; ProtocolError for a broken or large answer; AccessDenied."""
        until = time.monotonic() + timeout_s
        if time.monotonic() - self._called_s > FORGET_S / 2:  # the service may not know this client
            self.greet(timeout_s, what, since)  # several threads may: none waits for the greeting of another
        self._called_s = time.monotonic()
        return self._exchange(PeerCall(body), until - time.monotonic(), what, since, limit)

    def greet(self, timeout_s: float, what: str, since: int | None = None) -> None:
        """Introduce this client, and wait for the answer. Arguments and errors as of ``call``."""
        self._exchange(PeerCall(None, (os.getpid(), process_key(os.getpid()))), timeout_s, what, since, None)

    def close(self) -> None:
        """Close the connections. Calls in other threads raise ServerLost. Idempotent."""
        if self._called_s > 0 and not self.closed:
            with contextlib.suppress(WireError):  # best effort: the service also watches the process
                self.exchange(_encode(PeerCall(None)), 0.0, grace_s=0.0)
        super().close()

    def _exchange(
        self, message: PeerCall, timeout_s: float, what: str, since: int | None, limit: int | None
    ) -> ServiceResult:
        try:
            reply = self.exchange(_encode(message), timeout_s, grace_s=0.0, since=since, max_answer_bytes=limit)
        except ServerLost as error:
            raise ServerLost(f"{what}: {error}") from None
        try:
            answer = _decode_reply(reply.body)
        except _BAD as error:
            raise ProtocolError(f"{what}: {self.address} gave an answer that cannot be read: {error}") from None
        if answer.error:
            raise error_from_name(answer.error, answer.message)
        return ServiceResult(answer.body, np.empty(0, np.uint8) if reply.payload is None else reply.payload)


def _failure(error: AsyncFlowError) -> CallReply:
    return CallReply(b"", type(error).__name__, str(error)[:4000])
