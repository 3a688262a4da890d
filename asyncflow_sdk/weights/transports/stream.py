"""Streams: whole buckets over sockets of their own, received into their final memory without
messages.

    server = StreamServer("/dev/shm/.../stream", source)        # in the publisher; source: a StreamSource
    client = StreamClient(server.where)                         # one for each thread
    client.read(version, root, first, views, deadline, on_bytes)

A stream costs half as much as messages, and has no keys: it is a socket file in a directory of the
publisher's user, or tcp for an insecure service. The token that travels with a version gives
access. Errors of a request are not sent: the receiver asks the service next, which raises them.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import ipaddress
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ...errors import DeadlineExceeded, ServerLost, VersionGone, WireError
from ...interfaces.weights import Bytes

TOKEN_BYTES = 32
CONNECT_S = 3.0
SILENCE_S = 60.0
"""Longest wait for a peer that neither sends nor receives."""
MOST_CONNECTIONS = 512
PIECE = 512 << 10
"""Largest number of bytes received at once: they are hashed while they are in the cache."""
_REQUEST = struct.Struct("<q16sqq")  # version, root, first, count
_ANSWER = struct.Struct("<q")  # bytes; -1: not available
_log = logging.getLogger(__name__)


class StreamAddress(msgspec.Struct, frozen=True, array_like=True):
    """``host``: an IP address, or the path of a socket file with ``port`` 0."""

    host: str
    port: int
    token: bytes


class StreamSource(Protocol):
    """Provides the bytes of a StreamServer. Thread-safe. Arrays are held while they are sent."""

    def stream_buckets(self, version: int, root: str, first: int, count: int) -> Sequence[Bytes]:
        """Return buckets of a version. Raises VersionGone, ProtocolError."""


class StreamServer:
    """Serves ``source`` until ``close``, with a thread for each connection."""

    def __init__(self, host: str, source: StreamSource) -> None:
        self._source = source
        self._token = secrets.token_bytes(TOKEN_BYTES)
        port = 0
        if _is_file(host):
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(host)
            self._listener.listen()
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family)
            port = self._listener.getsockname()[1]
        self.where = StreamAddress(host, port, self._token)
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="asyncflow-stream", daemon=True).start()

    def close(self) -> None:
        """End all connections at once. Idempotent."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        for each in (self._listener, *connections):
            _shut_down(each)

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    if self._closed:
                        return
                    _log.warning("a connection for weights was not accepted: %s", error)
                    time.sleep(0.1)  # out of descriptors, until other connections end
                    continue
                with self._lock:
                    accepted = not self._closed and len(self._connections) < MOST_CONNECTIONS
                    if accepted:
                        self._connections.add(connection)
                if accepted:
                    serve = functools.partial(self._serve, connection)
                    threading.Thread(target=serve, name="asyncflow-stream-out", daemon=True).start()
                else:
                    connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, EOFError):
                _set_options(connection)
                connection.settimeout(SILENCE_S)
                if not hmac.compare_digest(_receive(connection, TOKEN_BYTES), self._token):
                    return
                while True:
                    connection.settimeout(None)  # the next version may come after days
                    request = _receive(connection, _REQUEST.size)
                    connection.settimeout(SILENCE_S)
                    self._answer(connection, *_REQUEST.unpack(request))
        except Exception:
            _log.exception("weights could not be sent")
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, connection: socket.socket, version: int, root: bytes, first: int, count: int) -> None:
        try:
            found = self._source.stream_buckets(version, root.hex(), first, count)
        except (WireError, VersionGone):
            found = []
        connection.sendall(_ANSWER.pack(sum(each.nbytes for each in found) if found else -1))
        for each in found:
            connection.sendall(memoryview(each))  # type: ignore[arg-type]


class StreamClient:
    """A connection to a StreamServer, for one thread. ``interrupt`` is thread-safe.

    An error closes the connection: ServerLost, DeadlineExceeded, and WireError after ``interrupt``.
    """

    def __init__(self, where: StreamAddress) -> None:
        self._where = where
        self._socket: socket.socket | None = None
        self._interrupted = False

    def read(
        self,
        version: int,
        root: str,
        first: int,
        views: Sequence[memoryview],
        deadline: float,
        on_bytes: Callable[[int, int], None],
    ) -> bool:
        """Receive the buckets from number ``first`` on into ``views``. ``on_bytes`` gets the number
        of a view and of its bytes received. Return False if the server cannot be reached or does
        not have them."""
        if self._interrupted:
            raise WireError("it was interrupted")
        if not 0 <= version < 1 << 63 or (self._socket is None and not self._connect(deadline)):
            return False
        try:
            assert self._socket is not None
            if self._interrupted:
                raise WireError
            self._socket.settimeout(SILENCE_S)
            self._socket.sendall(_REQUEST.pack(version, bytes.fromhex(root), first, len(views)))
            self._set_timeout(deadline)
            (nbytes,) = _ANSWER.unpack(_receive(self._socket, _ANSWER.size))
            if nbytes < 0:
                return False
            if nbytes != sum(len(view) for view in views):
                raise ServerLost(f"{nbytes} bytes came for buckets of {sum(map(len, views))}")
            for number, view in enumerate(views):
                got = 0
                while got < len(view):
                    self._set_timeout(deadline)
                    read = self._socket.recv_into(view[got : got + PIECE])
                    if not read:
                        raise EOFError
                    got += read
                    on_bytes(number, got)
        except BaseException as error:
            raise self._failed(error, deadline) from None
        return True

    def interrupt(self) -> None:
        """Make the call in progress and every later one raise WireError."""
        self._interrupted = True
        connection = self._socket
        if connection is not None:
            _shut_down(connection)  # the reading thread closes it

    def close(self) -> None:
        """Close the connection, from the reading thread. The next read opens another.
        Idempotent."""
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def _connect(self, deadline: float) -> bool:
        try:
            self._socket = _open(self._where, max(min(CONNECT_S, deadline - time.monotonic()), 0.001))
        except (OSError, ValueError, OverflowError):  # no server, or no valid address
            return False
        with contextlib.suppress(OSError):
            _set_options(self._socket)
            self._socket.sendall(self._where.token)
        return True

    def _set_timeout(self, deadline: float) -> None:
        assert self._socket is not None
        self._socket.settimeout(max(min(SILENCE_S, deadline - time.monotonic()), 0.001))

    def _failed(self, error: BaseException, deadline: float) -> BaseException:
        """Close the connection. Return the error to raise."""
        self.close()
        if self._interrupted:
            return WireError("it was interrupted")
        if isinstance(error, TimeoutError) and time.monotonic() >= deadline:
            return DeadlineExceeded("no time is left")
        if isinstance(error, (OSError, EOFError)) and not isinstance(error, WireError):
            return ServerLost(f"its connection for buckets ended: {error or 'it was closed'}")
        return error


def _is_file(host: str) -> bool:
    return host.startswith("/")


def _open(address: StreamAddress, timeout_s: float) -> socket.socket:
    """Raises OSError, ValueError, OverflowError."""
    if not _is_file(address.host):
        ipaddress.ip_address(address.host)  # a name lookup would have no deadline
        return socket.create_connection((address.host, address.port), timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address.host)
    except BaseException:
        connection.close()
        raise
    return connection


def _set_options(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    """Return exactly ``nbytes``. Raises EOFError."""
    data = b""
    while len(data) < nbytes:
        more = connection.recv(nbytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _shut_down(connection: socket.socket) -> None:
    """Wake the threads that use a connection."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
