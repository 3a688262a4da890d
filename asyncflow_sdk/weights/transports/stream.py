"""Bulk: whole buckets over sockets of their own, from where they lie to where they belong, with no message between.

    bulk = StreamServer("/dev/shm/.../bulk", find, follow)       # find(version, root, first, count) -> the buckets' bytes
    channel = StreamClient(bulk.where); channel.read(version, root, first, views, until, landed)    # a thread's own
    attempt, nbytes = channel.next(attempt, number, start, stop); channel.fill(view, until, landed)

Half the work of messages, and no keys: over a socket file in a directory of the publisher's user, for replicas that see
it; over tcp for a service that is insecure. Who knows the token that travels with a version may read. What is wrong with
a request is told by the service, which is asked for the same then; here its connection just ends.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import ipaddress
import logging
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from ...errors import DeadlineExceeded, ServerLost, VersionGone, WireError
from ...interfaces.weights import Bytes

TOKEN_BYTES = 32
CONNECT_S = 3.0
SILENCE_S = 60.0
"""A peer that takes, or sends, nothing for so long is given up."""
MOST_CONNECTIONS = 512
SEND_BYTES = 4 << 20
"""What a peer must take within SILENCE_S."""
PIECE = 512 << 10
"""The most bytes taken at a time: they are hashed while they are in the cache."""
_ROOT_BYTES = 16
_REQUEST = struct.Struct("<q16sqq")
_ANSWER = struct.Struct("<q")
_FOLLOW = -1  # instead of a version
_SPAN = struct.Struct("<qq")  # in the place of a root
_NEXT = struct.Struct("<qq")
_log = logging.getLogger(__name__)


class StreamAddress(msgspec.Struct, frozen=True, array_like=True):
    """How it is reached. ``host``: an IP address; or the path of a socket file, and ``port`` 0."""

    host: str
    port: int
    token: bytes


class StreamServer:
    """Sends what ``find`` gives, a connection a thread, from now until ``close``. ``find`` raises VersionGone, or ProtocolError, for what
    is not there; its arrays are held while they are sent. ``follow(connection, attempt, number)``
    waits for a chunk of a version that is being written, and gives it with the number of its attempt; a negative number
    instead where there is none; it raises EOFError when the connection ends before."""

    def __init__(
        self,
        host: str,
        find: Callable[[int, str, int, int], Sequence[Bytes]],
        follow: Callable[[socket.socket, int, int], tuple[int, Bytes | int]],
    ) -> None:
        self._find, self._follow = find, follow
        self._token = secrets.token_bytes(TOKEN_BYTES)
        if _is_file(host):
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(host)
            self._listener.listen()
            self.where = StreamAddress(host, 0, self._token)
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family)
            self.where = StreamAddress(host, self._listener.getsockname()[1], self._token)
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="asyncflow-bulk", daemon=True).start()

    def close(self) -> None:
        """Idempotent. Connections end at once."""
        with self._lock:
            self._closed = True
            open_ones = list(self._connections)
        _end(self._listener)
        for each in open_ones:
            _end(each)

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    if self._closed:
                        return
                    _log.warning("a connection for weights was not taken: %s", error)
                    time.sleep(0.1)  # no descriptor left: others will end
                    continue
                with self._lock:
                    taken = not self._closed and len(self._connections) < MOST_CONNECTIONS
                    if taken:
                        self._connections.add(connection)
                if not taken:
                    connection.close()
                    continue
                threading.Thread(
                    target=self._serve, args=(connection,), name="asyncflow-bulk-out", daemon=True
                ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, EOFError):
                _set(connection)
                connection.settimeout(SILENCE_S)
                if not hmac.compare_digest(_exactly(connection, TOKEN_BYTES), self._token):
                    return
                while True:
                    connection.settimeout(None)  # a replica may ask for the next version after days
                    request = _exactly(connection, _REQUEST.size)
                    connection.settimeout(SILENCE_S)
                    self._answer(connection, *_REQUEST.unpack(request))
        except Exception:
            _log.exception("weights could not be sent")
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, connection: socket.socket, version: int, root: bytes, first: int, count: int) -> None:
        if version == _FOLLOW:
            start, stop = _SPAN.unpack(root)
            attempt, chunk = self._follow(connection, first, count)
            nbytes = chunk if isinstance(chunk, int) else chunk.nbytes
            connection.sendall(_NEXT.pack(attempt, nbytes))
            if not isinstance(chunk, int) and 0 <= start < stop <= nbytes:
                for at in range(start, stop, SEND_BYTES):
                    connection.sendall(memoryview(chunk[at : min(at + SEND_BYTES, stop)]))  # type: ignore[arg-type]
            return
        try:
            found = self._find(version, root.hex(), first, count)
        except (WireError, VersionGone):
            found = []
        connection.sendall(_ANSWER.pack(sum(each.nbytes for each in found) if found else -1))
        for each in found:
            connection.sendall(memoryview(each))  # type: ignore[arg-type]


class StreamClient:
    """A connection to a StreamServer. One thread reads; any may ``interrupt``."""

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
        until: float,
        landed: Callable[[int, int], None],
    ) -> bool:
        """Fill ``views``, which are as long as the buckets from number ``first`` on. ``landed`` is told which view has how many bytes,
        as they come. False when the server has not got them, or cannot be reached: its service says why. Raises
        ServerLost, DeadlineExceeded, WireError when interrupted; then the connection is given up."""
        if self._interrupted:
            raise WireError("it was interrupted")
        if not 0 <= version < 1 << 63 or (self._socket is None and not self._connect(until)):
            return False
        assert self._socket is not None
        try:
            if self._interrupted:
                raise WireError
            self._socket.settimeout(SILENCE_S)
            self._socket.sendall(_REQUEST.pack(version, bytes.fromhex(root), first, len(views)))
            self._wait(until)
            (nbytes,) = _ANSWER.unpack(_exactly(self._socket, _ANSWER.size))
            if nbytes < 0:
                return False
            if nbytes != sum(len(view) for view in views):
                raise ServerLost(f"{nbytes} bytes came for buckets of {sum(map(len, views))}")
            for number, view in enumerate(views):
                self._fill(view, until, functools.partial(landed, number))
        except BaseException as error:
            raise self._failed(error, until) from None
        return True

    def next(self, attempt: int, number: int, start: int, stop: int) -> tuple[int, int]:
        """Ask for bytes ``start`` to ``stop`` of a chunk, by number and attempt, and wait, for however long, until it is there.
        Returns the number of the attempt and the size of the chunk, of which those bytes come, for ``fill``; or a negative
        number, and none do. Raises as ``read`` does."""
        try:
            if self._socket is None and not self._connect(math.inf):
                raise ServerLost("it cannot be reached")
            assert self._socket is not None
            if self._interrupted:
                raise WireError
            self._socket.settimeout(SILENCE_S)
            self._socket.sendall(_REQUEST.pack(_FOLLOW, _SPAN.pack(start, stop), attempt, number))
            self._socket.settimeout(None)  # a version comes when a step of training is done
            return _NEXT.unpack(_exactly(self._socket, _NEXT.size))
        except BaseException as error:
            raise self._failed(error, math.inf) from None

    def fill(self, view: memoryview, until: float, landed: Callable[[int], None]) -> None:
        """Get the bytes asked for. ``landed`` is told how many are there. Raises as ``read`` does."""
        try:
            self._fill(view, until, landed)
        except BaseException as error:
            raise self._failed(error, until) from None

    def _fill(self, view: memoryview, until: float, landed: Callable[[int], None]) -> None:
        assert self._socket is not None
        got = 0
        while got < len(view):
            self._wait(until)
            read = self._socket.recv_into(view[got : got + PIECE])
            if not read:
                raise EOFError
            got += read
            landed(got)

    def _failed(self, error: BaseException, until: float) -> BaseException:
        """What is raised instead, once the connection is given up."""
        self.close()
        if self._interrupted:
            return WireError("it was interrupted")
        if isinstance(error, TimeoutError) and time.monotonic() >= until:
            return DeadlineExceeded("no time is left")
        if isinstance(error, (OSError, EOFError)) and not isinstance(error, WireError):
            return ServerLost(f"its connection for buckets ended: {error or 'it was closed'}")
        return error

    def wait(self) -> None:
        """Until the other end closes. Raises ServerLost then, and WireError when interrupted."""
        try:
            assert self._socket is not None
            self._socket.settimeout(None)
            _exactly(self._socket, 1)
            raise ServerLost("it sent what nobody asked for")
        except BaseException as error:
            raise self._failed(error, math.inf) from None

    def interrupt(self) -> None:
        """A read under way, and every later one, raises WireError."""
        self._interrupted = True
        connection = self._socket
        if connection is not None:
            _end(connection)  # whoever reads closes it

    def close(self) -> None:
        """The next read connects anew. Idempotent. By the thread that reads."""
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def _connect(self, until: float) -> bool:
        place = self._where
        try:
            left = max(min(CONNECT_S, until - time.monotonic()), 0.001)
            connection = _open(place, left)
        except (OSError, ValueError, OverflowError):  # nothing is there, or no such place can be
            return False
        self._socket = connection
        with contextlib.suppress(OSError):
            _set(connection)
            connection.sendall(place.token)
        return True

    def _wait(self, until: float) -> None:
        """The next read may take so long."""
        assert self._socket is not None
        self._socket.settimeout(max(min(SILENCE_S, until - time.monotonic()), 0.001))


def _is_file(host: str) -> bool:
    return host.startswith("/")


def _open(place: StreamAddress, timeout_s: float) -> socket.socket:
    """Raises OSError, ValueError, OverflowError."""
    if not _is_file(place.host):
        ipaddress.ip_address(place.host)  # names are not looked up: that has no deadline
        return socket.create_connection((place.host, place.port), timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(place.host)
    except BaseException:
        connection.close()
        raise
    return connection


def _set(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    """Raises EOFError when the other end closes before."""
    data = b""
    while len(data) < nbytes:
        more = connection.recv(nbytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _end(connection: socket.socket) -> None:
    """Whoever reads or writes there stops."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
