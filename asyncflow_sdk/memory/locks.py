"""Byte-range locks of open files: held by the descriptor that took them, dropped by the kernel with its last owner.

Readers lock the first byte of each block they hold a view of. ``COPYING``, a byte that no file has, is locked by who
copies out of a segment without holding a view, and by its writer while it gives pages of free ranges back: a
read of a page that is gone would allocate it again, and kill the reader where there is no room.
"""

from __future__ import annotations

import errno
import fcntl
import struct

COPYING = 1 << 62
_pack = struct.Struct("hhqqi4x").pack


def try_lock(fd: int, start: int, stop: int, *, exclusive: bool) -> bool:
    """Lock bytes ``start`` to ``stop`` of a file without waiting. Returns whether nobody else was in the way."""
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack(kind, 0, start, stop - start, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int, start: int, stop: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack(fcntl.F_UNLCK, 0, start, stop - start, 0))
