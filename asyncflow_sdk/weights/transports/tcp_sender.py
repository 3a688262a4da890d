"""TcpSender: versions staged in host memory, sent from there to replicas.

Nothing waits for replicas: memory being sent is pinned, and reused once it is free. Deltas are
encoded by threads of their own. Replicas on other hosts ask first from where to fetch: see
``RelayPlan``.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence

from ...errors import LeaseLost, ProtocolError
from ...interfaces.weights import Bytes, Host, WeightSender
from ...types import Manifest
from .bucket_server import BucketServer, HeldVersion
from .in_progress import GONE, InProgressVersion
from .relay_plan import RelayPlan
from .stream import StreamServer
from .tcp_messages import Join, JoinReply, ShareRequest, TcpAddress, encode
from .version_memory import SharedRoom, VersionMemory


class TcpSender(WeightSender):
    """Sends versions by a BucketServer, and streams whole buckets. ``listen``, ``insecure``,
    ``delta_bytes``: see BucketServer. ``fanout``: see RelayPlan; 0: no relays."""

    def __init__(self, host: Host, *, listen: str | None, insecure: bool, delta_bytes: int, fanout: int) -> None:
        self._host, self._fanout = host, fanout
        self._unannounced: int | None = None
        self._plan = RelayPlan(fanout)
        self._relays: dict[str, bytes] = {}  # by peer of the service
        self._lock = threading.Lock()
        self._in_progress = InProgressVersion()
        with contextlib.ExitStack() as undo:
            self._memory = VersionMemory.private(host.name)
            undo.callback(self._memory.close)
            self._buckets = BucketServer(
                host,
                listen=listen,
                insecure=insecure,
                delta_bytes=delta_bytes,
                on_call=self._join,
                on_gone=self._leave,
            )
            undo.callback(self._buckets.close)
            own = self._buckets.service.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
            self._stream = StreamServer(own if insecure else str(self._memory.directory / "stream"), self)
            undo.pop_all()

    def room(self, nbytes: int) -> SharedRoom:
        """See ``WeightSender.room``."""
        self._unannounced = None
        room = self._memory.room(nbytes)
        room.on_full = self._in_progress.add
        return room

    def prepare(self, sizes: Sequence[int]) -> Iterator[None]:
        """See ``WeightSender.prepare``."""
        return self._memory.prepare(sizes)

    def send(self, manifest: Manifest) -> bytes:
        """See ``WeightSender.send``."""
        number = manifest.version
        self._memory.seal(number)
        self._buckets.add(HeldVersion(manifest, self._memory.chunks(number)))
        self._unannounced = number
        self._in_progress.complete()
        attempt, host, buckets = self._in_progress.attempt, self._host, self._buckets
        return encode(
            TcpAddress(
                buckets.where,
                number,
                host.rank,
                self._stream.where,
                attempt,
                buckets.makes_deltas,
                host.identity,
                self._fanout,
            )
        )

    def abandon(self) -> None:
        """See ``WeightSender.abandon``."""
        self._in_progress.drop()
        self._forget_all_but([version for version in self._memory.versions if version != self._unannounced])
        self._memory.abandon()
        self._unannounced = None

    def keep(self, versions: Sequence[int]) -> None:
        """See ``WeightSender.keep``."""
        self._unannounced = None
        self._forget_all_but(versions)
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

    def _forget_all_but(self, versions: Sequence[int]) -> None:
        self._buckets.keep(versions)
        with self._lock:
            self._plan.keep(versions)

    # ---- the stream's StreamSource

    def stream_buckets(self, version: int, root: str, first: int, count: int) -> Sequence[Bytes]:
        """See ``StreamSource.stream_buckets``."""
        found = self._buckets.find(version, root)
        return [found.bytes_of(bucket) for bucket in found.span(first, count)]

    def stream_chunk(self, connection: socket.socket, attempt: int, number: int) -> tuple[int, Bytes | int]:
        """See ``StreamSource.stream_chunk``."""
        attempt, found = self._in_progress.wait(connection, attempt, number)
        if isinstance(found, int):
            return attempt, found
        try:
            return attempt, self._memory.view(found)
        except LeaseLost:  # its memory was reused
            return attempt, GONE

    # ---- in the service's thread

    def _join(self, peer: str, ticket: int, call: Join | ShareRequest) -> None:
        """Answer a receiver on another host: where it gets a version."""
        if not isinstance(call, Join):
            raise ProtocolError("a publisher shares no memory with other hosts")
        self._buckets.find(call.version, call.root)
        with self._lock:
            found = self._plan.join(call.version, call.host, call.relay, call.failed)
            self._relays[peer] = call.relay
        self._buckets.service.answer(ticket, encode(JoinReply(*found)))

    def _leave(self, peer: str) -> None:
        with self._lock:
            self._plan.leave(self._relays.pop(peer, b""))
