"""Restoration: the version that a trainer has to load after a rollback, before it may publish again.

asked = restoration(queue)                                # None: no rollback is pending
with asked.fetch() as update:
    engine.load_weights(update)
restored(queue, asked.version, "fresh")                   # from now on versions may be published
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

import msgspec

from ..errors import WeightError
from ..interfaces import WeightUpdate
from ..ledger import commands as cmd
from ..queue import QueueClient
from ..types.defaults import FETCH_S
from .choices import make_transport
from .fetcher import decode_manifest
from .host import host_of
from .update import Update

_names = itertools.count()


class Restoration:
    """``version``: the number to load. ``source``: the number that its bytes were published under. ``checkpoint``: the step of the
    checkpoint with its optimizer state; -1 without one."""

    def __init__(self, queue: QueueClient, reply: cmd.RestoreTarget) -> None:
        self.version, self.source, self.checkpoint = reply.version, reply.source, reply.checkpoint
        self._queue, self._reply = queue, reply

    @classmethod
    def decoded(cls, queue: QueueClient, packed: bytes) -> Restoration | None:
        """The restoration that another rank has packed; None if it found none."""
        reply = msgspec.msgpack.decode(packed, type=cmd.RestoreTarget)
        return None if reply.version < 0 else cls(queue, reply)

    @contextlib.contextmanager
    def fetch(self, timeout_s: float = FETCH_S) -> Iterator[WeightUpdate]:
        """Fetch and verify the version's bytes, all ranks' parts; they are released when the block ends.

        This process is no replica for it. ``timeout_s``: for all parts together. Raises WeightError if the bytes cannot be fetched
        any more, and what receivers raise."""
        if not self._reply.parts:
            raise WeightError(
                f"version {self.version} cannot be restored: {self._reply.why or 'it is not kept any more'}"
            )
        connection, until = self._queue.connection, time.monotonic() + timeout_s
        with contextlib.ExitStack() as ending:
            fetched = []
            for rank, part in enumerate(self._reply.parts):
                manifest = decode_manifest(self.version, rank, part)
                host = host_of(connection, f"{connection.session}-restored-{next(_names)}")
                receiver = make_transport(part.transport).receiver(host)
                ending.callback(receiver.close)
                left_s = max(until - time.monotonic(), 0.0)
                fetched.append(receiver.fetch(manifest, part.where, timeout_s=left_s))
                ending.callback(fetched[-1].release)
            update = Update(self.version, fetched)
            ending.callback(update.release)
            yield update


def packed_restoration(queue: QueueClient) -> bytes:
    """Ask the ledger, and pack its answer for other ranks."""
    return msgspec.msgpack.encode(queue.send(cmd.GetRestoreTarget()))


def restoration(queue: QueueClient) -> Restoration | None:
    """The version that the trainer has to load; None if no rollback is pending."""
    return Restoration.decoded(queue, packed_restoration(queue))


def restored(queue: QueueClient, version: int, optimizer: str = "") -> None:
    """The trainer has loaded ``version``. Raises ConfigError if another version is current."""
    queue.send(cmd.ReportRestored(version=version, optimizer=optimizer))
