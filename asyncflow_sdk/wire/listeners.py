"""The listening sockets of a server. They can stop accepting connections without any call of
libzmq.

libzmq accepts connections in its own threads until no descriptor is left. Then accept on an ipc
socket aborts the process (``ipc_listener.cpp``), and unbinding to prevent it would cut the
connected peers.

libzmq binds a TcpListener once. A socket filter pauses it by dropping incoming packets; peers
retransmit, and connect once the filter is removed. An IpcListener keeps its listening socket away
from libzmq. To admit the waiting peers, it puts a new socket in its place and passes the old one,
with the limited number of peers in its queue, to libzmq.
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
"""Peers that may wait at an ipc address: one ``admit`` admits at most one more than this."""
_MAX_PATH_BYTES = 107
"""The kernel's limit for the path of a socket."""
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes of each packet


class TcpListener:
    """A listening tcp socket of libzmq, given by its descriptor. Thread-safe.

    ``unauthenticated``: connected peers with an unfinished handshake: descriptor → time (seconds,
    monotonic); the owner's thread updates it. ``can_pause``: False where socket filters are
    forbidden.
    """

    _all: ClassVar[weakref.WeakSet[TcpListener]] = weakref.WeakSet()
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _pauses: ClassVar[int] = 0

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._paused = self._filtered = False
        self.can_pause = True
        self.unauthenticated: dict[int, float] = {}
        with TcpListener._lock:
            TcpListener._all.add(self)
            self._apply()

    def set_paused(self, paused: bool) -> None:
        """Pause or resume accepting connections. ``pause_all`` prevails."""
        with TcpListener._lock:
            self._paused = paused
            self._apply()

    def close(self) -> None:
        """Close the duplicate of the socket; libzmq closes its own. Idempotent."""
        with TcpListener._lock:
            TcpListener._all.discard(self)
            self._socket.close()

    @classmethod
    def pause_all(cls) -> None:
        """Pause all listeners of the process, so that its number of descriptors does not change,
        until as many calls of ``resume_all``."""
        cls._pause_all(1)

    @classmethod
    def resume_all(cls) -> None:
        """Undo one ``pause_all``."""
        cls._pause_all(-1)

    @classmethod
    def none_waiting(cls) -> bool:
        """True if libzmq has accepted all peers of the process. Stays true during ``pause_all``."""
        with cls._lock:
            return not any(_has_waiting(listener._socket) for listener in cls._all if listener.can_pause)

    @classmethod
    def _pause_all(cls, change: int) -> None:
        with cls._lock:
            TcpListener._pauses += change
            for listener in cls._all:
                listener._apply()

    def _apply(self) -> None:
        wanted = self._paused or TcpListener._pauses > 0
        if wanted == self._filtered or not self.can_pause:
            return
        try:
            if wanted:
                program = struct.pack("HxxxxxxP", 1, ctypes.addressof(_DROP_ALL))
                self._socket.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
            else:
                self._socket.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
            self._filtered = wanted
        except OSError:  # a sandbox without filters
            self.can_pause = False


class IpcListener:
    """The socket file ``path``. Owned by the thread of ``router``. Raises ConfigError."""

    def __init__(self, router: zmq.Socket[Any], path: str) -> None:
        if path[0] in "@*" or len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise ConfigError(f"cannot listen on ipc://{path}: a path of at most {_MAX_PATH_BYTES} bytes is expected")
        self._router, self._path = router, path
        self._numbers = itertools.count()
        self._queue: socket.socket | None = None
        self._inode = 0
        self._admitted: dict[str, list[int]] = {}  # endpoint of a socket passed to libzmq → peers connected, and left
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
        """True until libzmq has accepted all admitted peers."""
        if self._queue is not None and not _has_waiting(self._queue):
            self._queue.close()
            self._queue = None
        return self._queue is not None

    @property
    def descriptor(self) -> int:
        """Descriptor of the socket; changed by ``admit`` and ``renew``, -1 while its directory is gone."""
        return -1 if self._socket is None else self._socket.fileno()

    def admit(self) -> None:
        """Let libzmq accept the waiting peers. Raises OSError or ZMQError if that fails for now."""
        assert self._socket is not None
        admitted, queue = self._socket, self._socket.dup()
        try:
            self._socket = self._listen()
        except OSError as error:
            if error.errno != errno.ENOENT:
                queue.close()
                raise
            self._socket = None  # the directory is gone: no more peers can connect before ``renew``
        self._router.setsockopt(zmq.USE_FD, descriptor := admitted.detach())
        try:
            self._router.bind(f"ipc://{self._path}")
        except zmq.ZMQError:  # the waiting peers are disconnected, and try again
            os.close(descriptor)
            queue.close()
            raise
        finally:
            self._router.setsockopt(zmq.USE_FD, -1)
        self._queue = queue
        self._admitted[self._router.get_string(zmq.LAST_ENDPOINT)] = [0, 0]

    def renew(self) -> None:
        """Listen at a new socket file in place of a removed one. Raises OSError."""
        removed, self._socket = self._socket, self._listen()
        if removed is not None:
            removed.close()

    def refuse(self) -> None:
        """Disconnect the waiting peers; they try again until their deadline. Raises OSError."""
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            for _ in range(IPC_BACKLOG):
                self._socket.accept()[0].close()

    def count(self, endpoint: str, left: bool) -> None:
        """Record a peer accepted at an endpoint of libzmq, or one that ``left`` it."""
        if endpoint in self._admitted:
            self._admitted[endpoint][left] += 1

    def close_unused(self) -> None:
        """Close sockets passed to libzmq once all their peers have left. libzmq closes a listening
        socket together with the connections accepted there, so a socket in use stays open."""
        if self.admitting:
            return
        for endpoint in [each for each, (joined, left) in self._admitted.items() if joined and left >= joined]:
            del self._admitted[endpoint]
            self._router.unbind(endpoint)

    def close(self) -> None:
        """Remove the socket file, unless another server has replaced it. Idempotent."""
        for each in (self._socket, self._queue):
            if each is not None:
                each.close()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                if os.stat(self._path).st_ino == self._inode:
                    os.unlink(self._path)
        self._socket = self._queue = None

    def _listen(self) -> socket.socket:
        """Replace the socket file by a new listening socket, atomically."""
        new = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder, name = os.path.split(self._path)
        number = f"{name}.{next(self._numbers) % 1_000_000}"
        at = os.open(folder or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(number, dir_fd=at)  # left by a killed server
            new.bind(f"/proc/self/fd/{at}/{number}")  # short, however long the path is
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
