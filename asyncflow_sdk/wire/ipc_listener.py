"""IpcListener: the socket file of a server. libzmq ends the process if it accepts an ipc peer
without a free descriptor (``ipc_listener.cpp``), so peers wait at a socket unknown to libzmq.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
from collections import Counter
from typing import Any

import zmq

from ..errors import ConfigError

IPC_BACKLOG = 64
"""Peers that may wait at an ipc address: one ``admit`` admits at most one more."""
_MAX_PATH_BYTES = 107


class IpcListener:
    """The socket file ``path``, for the thread of ``router``. ``ready`` reports each new
    peer once. ``socket``: None while its directory is gone. Raises ConfigError."""

    def __init__(self, router: zmq.Socket[Any], path: str, ready: select.epoll) -> None:
        if path[0] in "@*" or len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise ConfigError(f"cannot listen on ipc://{path}: a path of at most {_MAX_PATH_BYTES} bytes is expected")
        self._router, self._path, self._ready = router, path, ready
        self._inode = 0
        self._admitted: dict[str, Counter[int]] = {}  # endpoint of a socket passed to libzmq → its events
        try:
            self.socket: socket.socket | None = self._listen()
        except OSError as error:
            raise ConfigError(f"cannot listen on ipc://{path}: {os.strerror(error.errno or 0)}") from None

    def admit(self) -> socket.socket:
        """Pass the socket with its waiting peers to libzmq, and put a new one in its place.
        Return a duplicate: it has no waiting peers once libzmq has accepted them. Raises OSError or
        ZMQError if that fails for now."""
        assert self.socket is not None
        admitted, accepting = self.socket, self.socket.dup()
        try:
            try:
                self.socket = self._listen()
            except FileNotFoundError:  # the directory is gone: no more peers can connect before ``renew``
                self.socket = None
            self._ready.unregister(admitted)
            self._router.setsockopt(zmq.USE_FD, descriptor := admitted.detach())
            try:
                self._router.bind(f"ipc://{self._path}")
            except zmq.ZMQError:  # the waiting peers are disconnected, and try again
                os.close(descriptor)
                raise
            finally:
                self._router.setsockopt(zmq.USE_FD, -1)
        except BaseException:
            accepting.close()
            raise
        self._admitted[self._router.get_string(zmq.LAST_ENDPOINT)] = Counter()
        return accepting

    def renew(self) -> None:
        """Listen at a new socket file in place of a removed one. Raises OSError."""
        removed, self.socket = self.socket, self._listen()
        if removed is not None:
            removed.close()

    def refuse(self) -> None:
        """Disconnect the waiting peers; they try again until their deadline. Raises OSError."""
        assert self.socket is not None
        with contextlib.suppress(BlockingIOError):
            for _ in range(IPC_BACKLOG):
                self.socket.accept()[0].close()

    def count(self, events: list[tuple[int, int, str]], unbind: bool) -> None:
        """Count joined and left peers. ``unbind``: no peer waits for libzmq. Then close sockets passed
        to it once all their peers have left: it closes the connections accepted at a socket together with it."""
        for event, _, endpoint in events:
            if endpoint in self._admitted:
                self._admitted[endpoint][event] += 1
        for endpoint, seen in list(self._admitted.items()):
            if unbind and 0 < seen[zmq.EVENT_ACCEPTED] <= seen[zmq.EVENT_DISCONNECTED]:
                del self._admitted[endpoint]
                self._router.unbind(endpoint)

    def close(self) -> None:
        """Remove the socket file, unless another server has replaced it. Idempotent."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None
            with contextlib.suppress(OSError):
                if os.stat(self._path).st_ino == self._inode:
                    os.unlink(self._path)

    def _listen(self) -> socket.socket:
        """Replace the socket file by a new listening socket, atomically."""
        new = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder, name = os.path.split(self._path)
        made = f"{name}.{secrets.token_hex(3)}"
        at = os.open(folder or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            new.bind(f"/proc/self/fd/{at}/{made}")  # short, however long the path is
            new.listen(IPC_BACKLOG)
            new.setblocking(False)
            self._ready.register(new, select.EPOLLIN | select.EPOLLET)
            self._inode = os.stat(made, dir_fd=at).st_ino
            os.rename(made, name, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            new.close()
            with contextlib.suppress(OSError):
                os.unlink(made, dir_fd=at)
            raise
        finally:
            os.close(at)
        return new
