"""Byte-range locks of open files, owned by an open file description. The kernel releases them when it is closed.

A reader locks the first byte of each block that it has views of. ``COPYING`` is a byte beyond the end of every file.
A reader locks it to copy from a segment without a view, and the writer to return pages of free ranges to the system:
reading such a page would allocate it again, and kill the reader if no memory is left.
"""

from __future__ import annotations

import errno
import fcntl
import struct

COPYING = 1 << 62
_pack = struct.Struct("hhqqi4x").pack


def try_lock(fd: int, start: int, stop: int, *, exclusive: bool) -> bool:
    """Lock a byte range without waiting. Return False if another owner's lock conflicts."""
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack(kind, 0, start, stop - start, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int, start: int, stop: int) -> None:
    """Unlock bytes ``start`` to ``stop``."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack(fcntl.F_UNLCK, 0, start, stop - start, 0))
