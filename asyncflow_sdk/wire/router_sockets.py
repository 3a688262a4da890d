"""RouterSockets: the ROUTER sockets of a server. One serves socket files without keys; the other, in a context of its own,
tcp connections that prove with CurveZMQ that they hold a key that is let in.

A context of its own, because what a context does about keys (ZAP) it does for every socket in it, the sockets of
clients of the same process included.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import zmq
from zmq.utils import z85

from ..errors import ConfigError
from .connection_limiter import ConnectionLimiter
from .envelope import FRAME_BYTES
from .keys import ServerKeys
from .sockets import BULK_THREADS, GIVE_UP_MS, context_of, set_tcp, transport_of

Route: TypeAlias = "tuple[zmq.Socket[Any], bytes]"
"""A connection: the socket that has it, and the name it has there."""
UNREAD_MESSAGES = 64
"""Of one connection; a client that sends more waits until the server has read some."""


class RouterSockets:
    """Binds to ``addresses``; ``keys`` are for all of them that are tcp. The server's thread owns it from then on.
    ``insecure``: tcp without keys; every process that reaches the address may read and change what is served."""

    def __init__(
        self,
        addresses: list[str],
        keys: ServerKeys | None,
        *,
        insecure: bool = False,
        bulk: bool = False,
    ) -> None:
        self._keys, self._insecure, self._bulk = keys, insecure, bulk
        self._own: zmq.Context[Any] | None = None
        self.zap: zmq.Socket[Any] | None = None
        self.routers: list[zmq.Socket[Any]] = []
        self.addresses: list[str] = []
        self.refused = 0
        self.admission = ConnectionLimiter()
        self._plain: zmq.Socket[Any] | None = None
        self._keyed: zmq.Socket[Any] | None = None
        try:
            # options hold for what is bound after them: those of tcp are set last
            bound = {each: self._bind(each) for each in sorted(addresses, key=lambda a: transport_of(a) == "tcp")}
        except BaseException:
            self.close()
            raise
        self.addresses = [bound[each] for each in addresses]

    def judge(self) -> None:
        """Answer those that ask to be let in."""
        assert self.zap is not None
        assert self._keys is not None
        while True:
            try:
                asked = self.zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            known = len(asked) == 7 and asked[5] == b"CURVE" and z85.encode(asked[6]).decode() in self._keys.clients
            self.refused += not known
            verdict = (b"200", b"OK") if known else (b"400", b"this key is not let in")
            self.zap.send_multipart([b"1.0", asked[1] if len(asked) > 1 else b"", *verdict, b"", b""], zmq.NOBLOCK)

    def close(self) -> None:
        self.admission.close()
        for socket in self.routers:
            socket.close()
        if self.zap is not None:
            self.zap.close(linger=0)
        if self._own is not None:
            self._own.term()

    def _bind(self, address: str) -> str:
        transport = transport_of(address)
        tcp = transport == "tcp"
        if tcp and self._keys is None and not self._insecure:
            raise ConfigError(
                f"{address} is served with keys only: other users, and perhaps other hosts, reach it. Serve a run"
                ' directory, af.serve("runs/x", address=...), which makes them; or give key=, the path of a server.key; or,'
                " where everyone who reaches it may read and change the run, insecure=True"
            )
        if tcp and self._keys is not None:
            router = self._keyed = self._keyed or self._with_keys(self._keys)
        else:
            router = self._plain = self._plain or self._router(context_of(self._bulk))
        if transport == "ipc":
            self.admission.add_ipc(router, address.partition("://")[2])
            return address
        if tcp:
            set_tcp(router)
            router.ipv6 = "[" in address
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from None
        if not tcp:
            return address
        bound = router.get_string(zmq.LAST_ENDPOINT)
        self.admission.add_tcp(bound)
        return bound

    def _with_keys(self, keys: ServerKeys) -> zmq.Socket[Any]:
        self._own = zmq.Context(io_threads=BULK_THREADS if self._bulk else 1)
        self.zap = self._own.socket(zmq.REP)
        self.zap.bind("inproc://zeromq.zap.01")
        router = self._router(self._own)
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = keys.public.encode(), keys.secret.encode()
        router.zap_domain = b"asyncflow"
        return router

    def _router(self, context: zmq.Context[Any]) -> zmq.Socket[Any]:
        router: zmq.Socket[Any] = context.socket(zmq.ROUTER)
        self.routers.append(router)
        router.linger = 200  # milliseconds: last answers leave
        router.maxmsgsize = FRAME_BYTES
        router.sndhwm = 0  # bounded by one request a client thread, and by windows of fragments; not by drops
        router.rcvhwm = UNREAD_MESSAGES
        router.setsockopt(zmq.HANDSHAKE_IVL, GIVE_UP_MS)
        self.admission.monitor(router)
        return router
