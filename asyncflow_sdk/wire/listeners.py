"""Doors: the listening sockets of a server, opened and shut without a word to libzmq.

libzmq accepts in threads of its own, as fast as peers connect, until no descriptor is left: then accept on an ipc
socket ends the process (``ipc_listener.cpp``), and unbinding to prevent it would cut the peers that are connected.

A TcpListener is bound by libzmq once. It is shut by a filter that drops what arrives at the listening socket; peers
repeat their first packet, and get in once the door is open again.
An IpcListener keeps its listening socket to itself. When peers wait there, it puts a new socket in its place and gives
the old one, with the few peers that wait in its queue, to libzmq: each admission is of a bounded number.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import select
import socket
import struct
import threading
import weakref
from typing import Any, ClassVar

import zmq

from ..errors import ConfigError

IPC_BACKLOG = 64
"""Peers that may wait at an ipc door: at most one more than this is admitted at once."""
_PATH_BYTES = 107
"""The longest path of a socket that the kernel takes."""
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes of each packet


class TcpListener:
    """A listening tcp socket of libzmq, given by its descriptor. ``hold_all`` shuts the doors of the whole process, so
    that the number of its descriptors stands still. Thread-safe.

    ``unproven``: peers that connected and have not finished their handshake: descriptor → time (seconds, monotonic). Its
    owner's thread keeps it.
    """

    _all: ClassVar[weakref.WeakSet[TcpListener]] = weakref.WeakSet()
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _holds: ClassVar[int] = 0

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._shut = self._filtered = False
        self.can_shut = True
        self.unproven: dict[int, float] = {}
        with TcpListener._lock:
            TcpListener._all.add(self)
            self._apply()

    def shut(self) -> None:
        with TcpListener._lock:
            self._shut = True
            self._apply()

    def open(self) -> None:
        with TcpListener._lock:
            self._shut = False
            self._apply()

    def close(self) -> None:
        """Close this door's view of the socket; libzmq closes its own. Idempotent."""
        with TcpListener._lock:
            TcpListener._all.discard(self)
            self._socket.close()

    @classmethod
    def hold_all(cls) -> None:
        """Shut every door of the process until ``release_all``. Holds are counted."""
        with cls._lock:
            TcpListener._holds += 1
            for door in cls._all:
                door._apply()

    @classmethod
    def release_all(cls) -> None:
        with cls._lock:
            TcpListener._holds -= 1
            for door in cls._all:
                door._apply()

    @classmethod
    def quiet(cls) -> bool:
        """True if no peer waits at a door of the process for libzmq to accept it. While ``hold_all`` holds, it stays so."""
        with cls._lock:
            return not any(_has_waiting(door._socket) for door in cls._all if door.can_shut)

    def _apply(self) -> None:
        wanted = self._shut or TcpListener._holds > 0
        if wanted == self._filtered or not self.can_shut:
            return
        try:
            if wanted:
                program = struct.pack("HxxxxxxP", 1, ctypes.addressof(_DROP_ALL))
                self._socket.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
            else:
                self._socket.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
            self._filtered = wanted
        except OSError:  # a sandbox without filters
            self.can_shut = False


class IpcListener:
    """The socket file ``path``. Not thread-safe: the thread of ``router`` owns it. Raises ConfigError."""

    def __init__(self, router: zmq.Socket[Any], path: str) -> None:
        if path[0] in "@*" or len(os.fsencode(path)) > _PATH_BYTES:
            raise ConfigError(f"cannot listen on ipc://{path}: a path of at most {_PATH_BYTES} bytes is expected")
        self._router, self._path = router, path
        self._numbers = itertools.count()
        self._queue: socket.socket | None = None
        self._inode = 0
        self._given: dict[
            str, list[int]
        ] = {}  # endpoint of a socket that libzmq has → peers that came, and that left
        try:
            self._socket: socket.socket | None = self._listen()
        except OSError as error:
            raise ConfigError(f"cannot listen on ipc://{path}: {os.strerror(error.errno or 0)}") from None

    @property
    def waiting(self) -> bool:
        """True if peers wait to be admitted."""
        return self._socket is not None and _has_waiting(self._socket)

    @property
    def admitting(self) -> bool:
        """True while libzmq has not accepted all that were admitted."""
        if self._queue is not None and not _has_waiting(self._queue):
            self._queue.close()
            self._queue = None
        return self._queue is not None

    @property
    def descriptor(self) -> int:
        """Of the socket at which peers wait; another after each admission. -1: there is none any more."""
        return -1 if self._socket is None else self._socket.fileno()

    def admit(self) -> None:
        """Let libzmq accept the waiting peers. Raises OSError or ZMQError when it cannot be done now."""
        assert self._socket is not None
        admitted, queue = self._socket, self._socket.dup()
        try:
            self._socket = self._listen()
        except OSError as error:
            if error.errno != errno.ENOENT:
                queue.close()
                raise
            self._socket = None  # the folder is gone, and nobody else can come
        self._router.setsockopt(zmq.USE_FD, descriptor := admitted.detach())
        try:
            self._router.bind(f"ipc://{self._path}")
        except zmq.ZMQError:  # those who wait there are disconnected, and try again
            os.close(descriptor)
            queue.close()
            raise
        finally:
            self._router.setsockopt(zmq.USE_FD, -1)
        self._queue = queue
        self._given[self._router.get_string(zmq.LAST_ENDPOINT)] = [0, 0]

    def refuse(self) -> None:
        """Disconnect the waiting peers; they try again until their deadline. Raises OSError."""
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            for _ in range(IPC_BACKLOG):
                self._socket.accept()[0].close()

    def accepted(self, endpoint: str) -> None:
        """A peer was accepted at a socket that libzmq has."""
        if endpoint in self._given:
            self._given[endpoint][0] += 1

    def disconnected(self, endpoint: str) -> None:
        """It left."""
        if endpoint in self._given:
            self._given[endpoint][1] += 1

    def tidy(self) -> None:
        """Close listening sockets whose peers have all left: nobody can find them any more. While others use them they stay,
        since libzmq closes what was accepted at a socket together with it."""
        if self.admitting:
            return
        for endpoint in [each for each, (came, left) in self._given.items() if came and left >= came]:
            del self._given[endpoint]
            self._router.unbind(endpoint)

    def close(self) -> None:
        """Remove the socket file, unless it is another server's by now. Idempotent."""
        for each in (self._socket, self._queue):
            if each is not None:
                each.close()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                if os.stat(self._path).st_ino == self._inode:
                    os.unlink(self._path)
        self._socket = self._queue = None

    def _listen(self) -> socket.socket:
        """A new socket in the place of the last. Peers that connect meanwhile find the one or the other."""
        new = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder, name = os.path.split(self._path)
        number = f"{name}.{next(self._numbers) % 1_000_000}"
        at = os.open(folder or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(number, dir_fd=at)  # left by a server that was killed
            new.bind(f"/proc/self/fd/{at}/{number}")  # short, however long the path of the folder is
            new.listen(IPC_BACKLOG)
            new.setblocking(False)
            self._inode = os.stat(number, dir_fd=at).st_ino
            os.rename(number, name, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            new.close()
            with contextlib.suppress(OSError):
                os.unlink(number, dir_fd=at)
            raise
        finally:
            os.close(at)
        return new


def _has_waiting(listening: socket.socket) -> bool:
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    return bool(poll.poll(0))
