"""TcpSender: versions staged in shared memory, mapped by replicas of this host, sent from there to others.

Nothing waits for replicas: memory being sent is pinned, and reused once it is free. Deltas are
encoded by threads of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from ...interfaces.weights import Host, WeightSender
from ...types import Manifest
from .bucket_server import BucketServer, HeldVersion
from .tcp_messages import TcpAddress, encode
from .version_memory import SharedRoom, VersionMemory


class TcpSender(WeightSender):
    """Sends versions by a BucketServer. ``listen``, ``insecure``, ``delta_bytes``: see there."""

    def __init__(self, host: Host, *, listen: str | None, insecure: bool, delta_bytes: int) -> None:
        self._host = host
        self._unannounced: int | None = None
        with contextlib.ExitStack() as undo:
            self._memory = VersionMemory.private(host.name)
            undo.callback(self._memory.close)
            self._buckets = BucketServer(host, listen=listen, insecure=insecure, delta_bytes=delta_bytes)
            undo.callback(self._buckets.close)
            undo.pop_all()

    def room(self, nbytes: int) -> SharedRoom:
        """See ``WeightSender.room``."""
        self._unannounced = None
        return self._memory.room(nbytes)

    def prepare(self, sizes: Sequence[int]) -> Iterator[None]:
        """See ``WeightSender.prepare``."""
        return self._memory.prepare(sizes)

    def send(self, manifest: Manifest) -> bytes:
        """See ``WeightSender.send``."""
        number = manifest.version
        places = encode(self._memory.seal(number))
        self._buckets.add(HeldVersion(manifest, self._memory.chunks(number)))
        self._unannounced = number
        host, directory = self._host, str(self._memory.directory)
        return encode(TcpAddress(self._buckets.where, number, host.rank, host.identity, directory, places))

    def abandon(self) -> None:
        """See ``WeightSender.abandon``."""
        self._buckets.keep([version for version in self._memory.versions if version != self._unannounced])
        self._memory.abandon()
        self._unannounced = None

    def keep(self, versions: Sequence[int]) -> None:
        """See ``WeightSender.keep``."""
        self._unannounced = None
        self._buckets.keep(versions)
        self._memory.keep(versions)

    @property
    def nbytes(self) -> int:
        """Host memory held for weights and deltas."""
        return self._memory.nbytes + self._buckets.nbytes

    def close(self) -> None:
        """See ``WeightSender.close``."""
        self._buckets.close()
        self._memory.close()
