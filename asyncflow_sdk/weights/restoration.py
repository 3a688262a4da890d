"""Restoration: the version that a trainer must load after a rollback, before it may publish again.

pending = get_restoration(queue)                              # None: no rollback is pending
with pending.fetch() as update:
    engine.load_weights(update)
queue.send(cmd.ReportRestored(version=pending.version))        # versions may be published again
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
from .fetcher import decode_manifest
from .host import host_of, make_transport
from .update import Update

_names = itertools.count()


class Restoration:
    """``version``: the number to load. ``source``: the number under which its bytes were published.
    ``checkpoint``: the step of the checkpoint with its optimizer state; -1 without one."""

    def __init__(self, queue: QueueClient, reply: cmd.RestoreTarget) -> None:
        self.version, self.source, self.checkpoint = reply.version, reply.source, reply.checkpoint
        self._queue, self._reply = queue, reply

    @classmethod
    def decoded(cls, queue: QueueClient, packed: bytes) -> Restoration | None:
        """Decode the restoration packed by another rank; None if there is none."""
        reply = msgspec.msgpack.decode(packed, type=cmd.RestoreTarget)
        return None if reply.version < 0 else cls(queue, reply)

    @contextlib.contextmanager
    def fetch(self, timeout_s: float = FETCH_S) -> Iterator[WeightUpdate]:
        """Fetch and verify all ranks' parts of the version; the bytes are released after the block.
        This process does not count as a replica. ``timeout_s``: for all parts together. Raises
        WeightError if the bytes are no longer kept, and the errors of receivers."""
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


def fetch_version(queue: QueueClient, version: int) -> Restoration:
    """Return a kept version, to ``fetch`` it."""
    return Restoration(queue, queue.send(cmd.GetRestoreTarget(version=version)))


def pack_restoration(queue: QueueClient) -> bytes:
    """Return the ledger's restoration, encoded for the other ranks."""
    return msgspec.msgpack.encode(queue.send(cmd.GetRestoreTarget()))


def get_restoration(queue: QueueClient) -> Restoration | None:
    """Return the version that the trainer must load; None if no rollback is pending."""
    return Restoration.decoded(queue, pack_restoration(queue))
