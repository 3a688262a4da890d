"""TcpSender: versions staged in host memory, sent from there to replicas.

Nothing waits for replicas: memory being sent is pinned, and reused once it is free. Deltas are
encoded by threads of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from ...interfaces.weights import Bytes, Host, WeightSender
from ...types import Manifest
from .bucket_server import BucketServer, HeldVersion
from .stream import StreamServer
from .tcp_messages import TcpAddress, encode
from .version_memory import SharedRoom, VersionMemory


class TcpSender(WeightSender):
    """Sends versions by a BucketServer, and streams whole buckets. ``listen``, ``insecure``,
    ``delta_bytes``: see BucketServer."""

    def __init__(self, host: Host, *, listen: str | None, insecure: bool, delta_bytes: int) -> None:
        self._host = host
        self._unannounced: int | None = None
        with contextlib.ExitStack() as undo:
            self._memory = VersionMemory.private(host.name)
            undo.callback(self._memory.close)
            self._buckets = BucketServer(host, listen=listen, insecure=insecure, delta_bytes=delta_bytes)
            undo.callback(self._buckets.close)
            own = self._buckets.service.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
            self._stream = StreamServer(own if insecure else str(self._memory.directory / "stream"), self)
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
        self._memory.seal(number)
        self._buckets.add(HeldVersion(manifest, self._memory.chunks(number)))
        self._unannounced = number
        host, buckets, stream = self._host, self._buckets, self._stream.where
        return encode(TcpAddress(buckets.where, number, host.rank, stream, buckets.makes_deltas, host.identity))

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
        self._stream.close()
        self._memory.close()

    # ---- the stream's StreamSource

    def stream_buckets(self, version: int, root: str, first: int, count: int) -> Sequence[Bytes]:
        """See ``StreamSource.stream_buckets``."""
        found = self._buckets.find(version, root)
        return [found.bytes_of(bucket) for bucket in found.span(first, count)]
