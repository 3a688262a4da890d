"""RouterSockets: the ROUTER sockets of a server. One serves ipc and inproc without keys; the other, in a ZeroMQ
context of its own, serves tcp clients with an accepted key, proven by CurveZMQ.

A ZAP handler decides for every socket of its context, also for clients in the same process: hence two contexts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import zmq
from zmq.utils import z85

from ..errors import ConfigError
from .connection_limiter import ConnectionLimiter
from .envelope import FRAME_BYTES
from .keys import ServerKeys
from .sockets import BULK_THREADS, GIVE_UP_MS, context_of, set_options, set_tcp, transport_of

Route: TypeAlias = "tuple[zmq.Socket[Any], bytes]"  # a connection: its socket, and its name there
Asking: TypeAlias = Callable[[str, Callable[[bool], None]], None]
UNREAD_ANSWERS = 1000  # unread answers per connection; its client asks for the others again
UNREAD_MESSAGES = 64  # unread messages per connection; its client waits until the server has read some


class RouterSockets:
    """Binds to ``addresses`` (inproc, ipc, tcp), for the server's thread. Raises ConfigError.

    A tcp address needs ``keys``, and serves clients with one of them; or ``insecure``: every process that reaches it
    may read and change the data. ``bulk``: most traffic is payload. ``ask`` is called with the key of another client
    and a function for the verdict, to be called in the server's thread; without one the connection fails later."""

    def __init__(
        self,
        addresses: list[str],
        keys: ServerKeys | None = None,
        *,
        insecure: bool = False,
        bulk: bool = False,
        ask: Asking | None = None,
    ) -> None:
        self.keys, self._insecure, self._bulk, self._ask = keys, insecure, bulk, ask
        self._keyed_context: zmq.Context[Any] | None = None
        self.zap: zmq.Socket[Any] | None = None
        self.routers: list[zmq.Socket[Any]] = []
        self.limiter = ConnectionLimiter()
        self._plain: zmq.Socket[Any] | None = None
        self._keyed: zmq.Socket[Any] | None = None
        try:
            # options apply to later binds: those of tcp are set last
            bound = {each: self._bind(each) for each in sorted(addresses, key=lambda a: transport_of(a) == "tcp")}
        except BaseException:
            self.close()
            raise
        self.addresses = [bound[each] for each in addresses]

    def authenticate(self) -> None:
        """Answer the waiting ZAP requests: accept the clients with a known key."""
        assert self.zap is not None
        assert self.keys is not None
        while self.zap.poll(0):
            name, _, *request = self.zap.recv_multipart()
            curve = len(request) == 7 and request[5] == b"CURVE"
            key = z85.encode(request[6]).decode() if curve else ""
            envelope = [name, b"", b"1.0", request[1] if len(request) > 1 else b""]
            verdict = functools.partial(self._answer_zap, envelope, key)
            if key in self.keys.clients or not key or self._ask is None:
                verdict(key in self.keys.clients)
            else:
                self._ask(key, verdict)

    def _answer_zap(self, envelope: list[bytes], key: str, known: bool) -> None:
        assert self.zap is not None
        verdict = (b"200", b"OK", key.encode()) if known else (b"400", b"this key is not accepted", b"")
        if not self.zap.closed:
            with contextlib.suppress(zmq.ZMQError):  # the peer may have gone
                self.zap.send_multipart([*envelope, *verdict, b""], zmq.NOBLOCK)

    def replace_keys(self, keys: ServerKeys) -> None:
        """Accept new connections by these keys only."""
        self.keys = keys

    def close(self) -> None:
        """Close all sockets, and the context of the keyed one."""
        self.limiter.close()
        for socket in self.routers:
            socket.close()
        if self.zap is not None:
            self.zap.close(linger=0)
        if self._keyed_context is not None:
            self._keyed_context.term()

    def _bind(self, address: str) -> str:
        transport = transport_of(address)
        tcp = transport == "tcp"
        if tcp and self.keys is None and not self._insecure:
            raise ConfigError(
                f"{address} is served with keys only: other users, and perhaps other hosts, reach it. Serve a run"
                ' directory, af.serve("runs/x", address=...), which makes them; or pass key=, the path of a server.key;'
                " or, if everyone who reaches the address may read and change the run, insecure=True"
            )
        if tcp and self.keys is not None:
            router = self._keyed = self._keyed or self._keyed_router(self.keys)
        else:
            router = self._plain = self._plain or self._router(context_of(self._bulk))
        if transport == "ipc":
            self.limiter.add_ipc(router, address.partition("://")[2])
            return address
        if tcp:
            set_tcp(router, address)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from None
        if tcp:
            address = router.get_string(zmq.LAST_ENDPOINT)
            self.limiter.add_tcp(address)
        return address

    def _keyed_router(self, keys: ServerKeys) -> zmq.Socket[Any]:
        self._keyed_context = zmq.Context(io_threads=BULK_THREADS if self._bulk else 1)
        self.zap = self._keyed_context.socket(zmq.ROUTER)
        self.zap.bind("inproc://zeromq.zap.01")
        router = self._router(self._keyed_context)
        own = {zmq.CURVE_PUBLICKEY: keys.public.encode(), zmq.CURVE_SECRETKEY: keys.secret.encode()}
        set_options(router, own | {zmq.ZAP_DOMAIN: b"asyncflow", zmq.CURVE_SERVER: 1})
        return router

    def _router(self, context: zmq.Context[Any]) -> zmq.Socket[Any]:
        router: zmq.Socket[Any] = context.socket(zmq.ROUTER)
        self.routers.append(router)
        final = {zmq.LINGER: 200}  # milliseconds, for the last answers
        unread = {zmq.SNDHWM: UNREAD_ANSWERS, zmq.RCVHWM: UNREAD_MESSAGES}
        set_options(router, final | unread | {zmq.MAXMSGSIZE: FRAME_BYTES, zmq.HANDSHAKE_IVL: GIVE_UP_MS})
        self.limiter.monitor(router)
        return router
