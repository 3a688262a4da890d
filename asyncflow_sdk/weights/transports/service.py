"""Service: calls between the ends of a transport, by an address of their own, past the run's server.

    service = Service(host, handler)                       # the publishing end; service.where goes with each version
    class Handler: def request(self, peer, ticket, body, frames): service.answer(ticket, b"...", frames=[array])
    client = ServiceClient(service.where)                  # the fetching end, on any host
    body, frames = client.call(b"...", 30.0, "bucket 7")

The service has keys, made for it alone: they are part of ``where``, which travels over the run's own connections and
is nobody else's to read.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from ...errors import AsyncFlowError, ConfigError, ProtocolError, ServerLost, WireError, error_from_name
from ...interfaces.weights import Bytes, Host
from ...wire import Client, MemorySink, RunKey, Server, generate_keys, process_key

MAX_CALL_BYTES = 1 << 20
FORGET_S = 3600.0
"""A peer that asked nothing for so long, and waits for nothing, counts as gone; it may come again."""
_log = logging.getLogger(__name__)


class ServiceHandler(Protocol):
    """What a service calls, always in its one thread: it must not block there. What it raises is the answer of a request."""

    def request(self, peer: str, ticket: int, body: bytes, frames: Sequence[Any]) -> None:
        """``Service.answer`` is called for ``ticket``, now or later, in any thread. ``peer``: who asks; the same for all
        calls of a ServiceClient."""

    def gone(self, peer: str) -> None:
        """It has closed, its process was seen to end, or it was silent for long."""


class ServiceAddress(msgspec.Struct, frozen=True, array_like=True):
    """How a service is reached. ``key`` None: it is insecure, and has no keys."""

    address: str
    key: RunKey | None
    pid: int
    pid_key: str


class PeerHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first word of a peer, by which its end is seen."""

    pid: int
    pid_key: str


class CallRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """``sizes``: of the frames, which follow each other in the payload."""

    body: bytes
    sizes: tuple[int, ...] = ()


class PeerBye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """The last one."""


class CallReply(msgspec.Struct, frozen=True, array_like=True):
    """An answer. ``error``: class name and message of what went wrong; "" if nothing did. ``sizes``: as in CallRequest."""

    body: bytes
    error: str = ""
    message: str = ""
    sizes: tuple[int, ...] = ()


class ServiceResult(NamedTuple):
    """``frames``: buffers, valid for as long as they are referred to."""

    body: bytes
    frames: Sequence[Any] = ()


_encode = msgspec.msgpack.Encoder().encode
_asked = msgspec.msgpack.Decoder(PeerHello | CallRequest | PeerBye)
_said = msgspec.msgpack.Decoder(CallReply)
_where = msgspec.msgpack.Decoder(ServiceAddress)
_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Service:
    """Answers calls in a thread of its own, from now until ``close``. ``where``: for those who call.

    ``listen``: an address instead of any port of ``host.address``. ``insecure``: no keys; every process that reaches the
    address may call. Raises ConfigError.
    """

    def __init__(
        self, host: Host, handler: ServiceHandler, *, listen: str | None = None, insecure: bool = False
    ) -> None:
        own = f"[{host.address}]" if ":" in host.address else host.address
        address = listen or f"tcp://{own}:0"
        keys, key = (None, None) if insecure else generate_keys()
        self._handler = handler
        self._seen: dict[str, float] = {}
        self._parked: dict[int, str] = {}
        self._look_s = 0.0
        self._server = Server([address], self, keys, MAX_CALL_BYTES, insecure=insecure, bulk=True)
        bound = self._server.addresses[0]
        if _everywhere(bound):
            bound = f"tcp://{own}:{bound.rpartition(':')[2]}"
        pid = os.getpid()
        self.address = bound
        self.where = _encode(ServiceAddress(bound, key, pid, process_key(pid)))
        self._server.start()

    def answer(self, ticket: int, body: bytes, frames: Sequence[Any] | Callable[[], Sequence[Any]] = ()) -> None:
        """From any thread. ``frames``: contiguous buffers, which must not change; they are held until they arrived. Or what
        gives them, in the service's thread each time the answer is sent: then they are held until they are on their way. A
        ticket nobody waits for any more is ignored."""

        def said() -> tuple[bytes, Sequence[Any]]:
            try:
                payload = frames() if callable(frames) else frames
            except AsyncFlowError as error:
                return _encode(_failure(error)), ()
            return _encode(CallReply(body, sizes=_sizes(payload))), payload

        self._say(ticket, CallReply(body), said if frames else None)

    def fail(self, ticket: int, error: AsyncFlowError) -> None:
        """Answer with an error, which the caller raises. From any thread."""
        self._say(ticket, _failure(error))

    def close(self) -> None:
        """Stop answering. Idempotent. From any thread but the service's."""
        self._server.stop()

    def _say(
        self, ticket: int, said: CallReply, make: Callable[[], tuple[bytes, Sequence[Any]]] | None = None
    ) -> None:
        def send() -> None:
            self._parked.pop(ticket, None)
            self._server.answer(ticket, _encode(said), make=make)

        self._server.call(send)

    # ---- called by the wire

    def sink(self, session: str, body: bytes, nbytes: int) -> MemorySink:
        return MemorySink(nbytes)  # of MAX_CALL_BYTES at most

    def request(self, session: str, ticket: int, body: bytes, payload: MemorySink | None) -> None:
        self._seen[session] = time.monotonic()
        self._parked[ticket] = session
        try:
            asked = _asked.decode(body)
            if isinstance(asked, CallRequest):
                self._handler.request(
                    session, ticket, asked.body, _split(None if payload is None else payload.memory, asked.sizes)
                )
            elif isinstance(asked, PeerHello):
                self._server.watch(session, asked.pid, asked.pid_key)
                self.answer(ticket, b"")
            else:
                self.answer(ticket, b"")
                self._server.call(lambda: self.gone(session, "it has closed"))
        except AsyncFlowError as error:
            self.fail(ticket, error)
        except _BAD as error:
            self.fail(ticket, ProtocolError(f"{self.address} cannot read this call: {error}"))
        except Exception as error:  # one call must not be everybody's end
            _log.exception("a weight service failed at a call")
            self.fail(ticket, ProtocolError(f"{self.address} failed at this call: {error!r}"))

    def dropped(self, session: str, seq: int, ticket: int, answer: bytes | None) -> None:
        self._parked.pop(ticket, None)

    def make(self, answer: bytes) -> tuple[bytes, Sequence[Any]]:
        return answer, ()  # one with frames has a function of its own that makes it

    def gone(self, session: str, reason: str) -> None:
        if self._seen.pop(session, None) is None:
            return
        for ticket in [ticket for ticket, peer in self._parked.items() if peer == session]:
            del self._parked[ticket]
        self._server.forget(session)
        self._handler.gone(session)

    def idle(self) -> float | None:
        now = time.monotonic()
        if self._seen and now >= self._look_s:
            self._look_s = now + FORGET_S
            waiting = set(self._parked.values())
            for session in [s for s, seen in self._seen.items() if now - seen > FORGET_S and s not in waiting]:
                self.gone(session, "it was silent for long")
        return self._look_s - now if self._seen else None

    def settle(self) -> bool:
        return True


class ServiceClient:
    """Calls the service that ``where`` leads to. Thread-safe; each thread that calls has a connection of its own.

    ``where`` comes from another process: raises ProtocolError for one that is none.
    """

    def __init__(self, where: bytes) -> None:
        try:
            found = _where.decode(where)
            if not found.address.startswith("tcp://"):
                raise ProtocolError(f"a service at {found.address[:200]!r}; a tcp address is expected")
            insecure = found.key is None
            self._client = Client(found.address, found.key, insecure=insecure, bulk=True)
        except (*_BAD, ConfigError) as error:
            raise ProtocolError(f"this does not say where a service is: {error}") from None
        self.address = found.address
        self._client.max_bytes = MAX_CALL_BYTES
        self._client.watch(found.pid, found.pid_key)
        self._lock = threading.Lock()
        self._known = False

    def call(
        self,
        body: bytes,
        timeout_s: float,
        what: str = "a call",
        frames: Sequence[Any] = (),
        since: int | None = None,
        most_bytes: int | None = None,
    ) -> ServiceResult:
        """CallRequest and wait. ``what`` is asked for, for messages. ``since``: what ``interrupts`` was when that began which the call
        belongs to: it raises if there was one since. ``most_bytes``: raise ProtocolError for a large answer of more.

        Raises what the handler answered with; ServerLost, naming address and ``what``, when no answer comes in time or
        the service's process is seen to end, and on ``close``; WireError on ``interrupt``; AccessDenied.
        """
        until = time.monotonic() + timeout_s
        with self._lock:
            if not self._known:
                self._ask(PeerHello(os.getpid(), process_key(os.getpid())), timeout_s, what, (), since, None)
                self._known = True
        return self._ask(CallRequest(body, _sizes(frames)), until - time.monotonic(), what, frames, since, most_bytes)

    @property
    def interrupts(self) -> int:
        """How often it was interrupted."""
        return self._client.interrupts

    def interrupt(self) -> None:
        """Calls under way in other threads raise WireError now; see also ``since``."""
        self._client.interrupt()

    def close(self) -> None:
        """Idempotent. Calls under way in other threads end with ServerLost."""
        if self._known and not self._client.closed:
            with contextlib.suppress(WireError):  # without waiting: a last word leaves, or is not needed
                self._client.send(_encode(PeerBye()))
        self._client.close()

    def _ask(
        self,
        word: PeerHello | CallRequest,
        timeout_s: float,
        what: str,
        frames: Sequence[Any],
        since: int | None,
        most_bytes: int | None,
    ) -> ServiceResult:
        try:
            reply = self._client.exchange(
                _encode(word), timeout_s, frames, grace_s=0.0, since=since, max_answer_bytes=most_bytes
            )
        except ServerLost as error:
            raise ServerLost(f"{what}: {error}") from None
        try:
            said = _said.decode(reply.body)
            parts = _split(reply.payload, said.sizes)
        except _BAD as error:
            raise ProtocolError(f"{what}: {self.address} gave an answer that cannot be read: {error}") from None
        if said.error:
            raise error_from_name(said.error, said.message)
        return ServiceResult(said.body, parts)


def _failure(error: AsyncFlowError) -> CallReply:
    return CallReply(b"", type(error).__name__, str(error)[:4000])


def _sizes(frames: Sequence[Any]) -> tuple[int, ...]:
    return tuple(memoryview(frame).nbytes for frame in frames)


def _split(payload: Bytes | None, sizes: tuple[int, ...]) -> list[memoryview]:
    """The frames of a payload. Raises ProtocolError unless they are all of it."""
    whole = memoryview(b"" if payload is None else payload)  # type: ignore[arg-type]
    ends = list(itertools.accumulate(sizes))
    if min(sizes, default=0) < 0 or (ends[-1] if ends else 0) != len(whole):
        raise ProtocolError(f"frames of {sum(sizes)} bytes were announced, and {len(whole)} bytes came")
    return [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _everywhere(address: str) -> bool:
    return address.partition("://")[2].rpartition(":")[0].strip("[]") in ("*", "0.0.0.0", "::")
