"""TransportHarness: a publisher and replicas of one transport in one process; it compares fetched
with published bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ..interfaces import Fetched, Host, WeightReceiver, WeightSender, WeightTransport
from ..memory import SharedDirectory
from ..types import Chunk, Manifest, TensorInfo, dtype_name, to_torch
from ..types.dtypes import from_torch, is_torch
from ..types.manifest import digest
from .kit.lab import EngineThread

ALIGN = 64
BUCKET = 1 << 16
LIMIT_S = 30.0
"""Seconds; a longer call counts as hanging."""

Bytes = npt.NDArray[np.uint8]
Array = np.ndarray[Any, Any]
T = TypeVar("T")


class Sent:
    """A published version: manifest, chunks, and its location."""

    def __init__(self, manifest: Manifest, chunks: Sequence[Bytes], where: bytes) -> None:
        self.manifest, self.chunks, self.where = manifest, chunks, where

    @property
    def version(self) -> int:
        """The number of the version."""
        return self.manifest.version

    def check(self, fetched: Fetched, what: str = "") -> None:
        """Compare every byte of fetched chunks. They must be contiguous, whole and writable."""
        said = f"version {self.version}{what}"
        assert isinstance(fetched, Fetched), f"fetch returned {fetched!r}, no Fetched"
        assert fetched.manifest == self.manifest, f"{said} was fetched with another manifest"
        found, sent = len(fetched.chunks), len(self.chunks)
        assert found == sent, f"{said} has {found} chunks, not {sent}"
        for n, (have, wanted) in enumerate(zip(fetched.chunks, self.chunks, strict=True)):
            plain, chunk = plain_bytes(have), f"{said}: chunk {n}"
            assert plain.dtype == np.uint8, f"{chunk} is {plain.dtype}, not uint8"
            assert plain.shape == wanted.shape, f"{chunk} has shape {plain.shape}, not {wanted.shape}"
            whole = have.is_contiguous() if is_torch(have) else plain.flags.c_contiguous
            assert whole, f"{chunk} is not contiguous"
            assert is_torch(have) or plain.flags.writeable, f"{chunk} cannot be written"
            if not np.array_equal(plain, wanted):
                at = int(np.flatnonzero(plain != wanted)[0])
                here = [
                    t.name for t in self.manifest.tensors if t.chunk == n and t.offset <= at < t.offset + t.nbytes
                ]
                holds = ", ".join(here) or "padding"
                raise AssertionError(f"{said}: byte {at} of chunk {n} ({holds}) is {plain[at]}, not {wanted[at]}")


class TransportHarness:
    """A publisher and its replicas on one host, each with a thread of its own. A context manager.

    ``run``: the run's name; by default a new one.
    """

    def __init__(
        self, sending: Callable[[], WeightTransport], fetching: Callable[[], WeightTransport], *, run: str = ""
    ) -> None:
        self._fetching = fetching
        self._memory = SharedDirectory()  # of one that was killed, the next one removes it
        self._run = run or self._memory.path.name
        self._threads = {name: EngineThread() for name in ("trainer", "delivery", "replica")}
        self._names = 0
        self.random = np.random.default_rng(0)
        self.receivers: list[WeightReceiver] = []
        try:
            self.transport = sending()
            self.sender = self.another_sender()
        except BaseException:
            self._memory.close()
            raise

    def another_sender(self) -> WeightSender:
        """Make one more sender by the publisher's transport."""
        self._names += 1
        sender = self.transport.sender(self._host())
        assert isinstance(sender, WeightSender), f"{self.transport!r} made {sender!r}, no WeightSender"
        return sender

    def receiver(self) -> WeightReceiver:
        """Make one more receiver, closed with the harness."""
        self._names += 1
        made = self._fetching().receiver(self._host())
        assert isinstance(made, WeightReceiver), f"{made!r} is no WeightReceiver"
        self.receivers.append(made)
        return made

    def _host(self) -> Host:
        return Host(directory=self._memory.path, name=f"{self._names}-0", run=self._run)

    def trainer(self, what: str, work: Callable[[], T]) -> T:
        """Run ``work`` in the trainer's thread. Raises its error, or AssertionError after LIMIT_S."""
        return self._in("trainer", what, work)

    def _in(self, thread: str, what: str, work: Callable[[], T]) -> T:
        return self._threads[thread].call(work, LIMIT_S, what)

    def fetch(
        self,
        receiver: WeightReceiver,
        sent: Sent,
        *,
        where: bytes | None = None,
        base: Fetched | None = None,
        timeout_s: float = LIMIT_S / 2,
    ) -> Fetched:
        """Fetch a version in the replica's thread. Raises the error of the transport."""
        place = sent.where if where is None else where
        work = partial(receiver.fetch, sent.manifest, place, base=base, timeout_s=timeout_s)
        return self._in("replica", f"fetch of version {sent.version}", work)

    def write(
        self,
        version: int,
        tensors: Mapping[str, Array],
        *,
        bucket: int = BUCKET,
        chunk: int = 4 * BUCKET,
        tied: Mapping[str, str] = {},
        digests: bool = True,
        spare: int = 0,
    ) -> tuple[Manifest, list[Any]]:
        """Fill the rooms of a version; return its manifest and their memory. ``spare``: bytes
        requested and trimmed."""
        infos, sizes = layout(tensors, chunk)
        own = {info.name: info for info in infos}
        infos += [msgspec.structs.replace(own[name], name=alias) for alias, name in tied.items()]
        memories = []
        for number, size in enumerate(sizes):
            room = self.trainer(f"room({size + spare})", partial(self.sender.room, size + spare))
            if spare:
                self.trainer(f"trim({size})", partial(room.trim, size))
            assert len(room.memory) == size, f"room({size}) has {len(room.memory)} bytes"
            plain = np.zeros(size, np.uint8)
            for info in infos:
                if info.chunk == number and info.name in tensors:
                    raw = np.frombuffer(tensors[info.name].tobytes(), np.uint8)
                    plain[info.offset : info.offset + info.nbytes] = raw
            put(room.memory, plain)
            memories.append(room.memory)
        found = [digests_of(plain_bytes(memory), bucket) if digests else () for memory in memories]
        chunks = tuple(map(Chunk, map(len, memories), found))
        return Manifest(version, tuple(infos), chunks, bucket), memories

    def send(self, manifest: Manifest) -> bytes:
        """Send a manifest in the delivery thread; return its location."""
        where = self._in("delivery", f"send of version {manifest.version}", lambda: self.sender.send(manifest))
        assert isinstance(where, bytes), f"send returned {where!r}, no bytes"
        return where

    def publish(self, version: int, tensors: Mapping[str, Array], **options: Any) -> Sent:
        """Write and send a version; return it with a copy of its chunks."""
        manifest, memories = self.write(version, tensors, **options)
        chunks = [plain_bytes(memory).copy() for memory in memories]
        return Sent(manifest, chunks, self.send(manifest))

    def keep(self, *versions: int) -> None:
        """Keep these versions only."""
        self.trainer(f"keep({versions})", lambda: self.sender.keep(versions))

    def __enter__(self) -> TransportHarness:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            for receiver in self.receivers:
                self._in("replica", "close of a receiver", receiver.close)
            self.trainer("close of the sender", self.sender.close)
        finally:
            for thread in self._threads.values():
                thread.close()
            self._memory.close()


def layout(tensors: Mapping[str, Array], chunk: int) -> tuple[list[TensorInfo], list[int]]:
    """Return tensor locations as a publisher assigns them, and the size of each chunk."""
    infos: list[TensorInfo] = []
    sizes = [0]
    for name, array in tensors.items():
        room = -(-array.nbytes // ALIGN) * ALIGN
        if sizes[-1] and sizes[-1] + room > chunk:
            sizes.append(0)
        infos.append(TensorInfo(name, dtype_name(array.dtype), array.shape, len(sizes) - 1, sizes[-1]))
        sizes[-1] += room
    return infos, sizes


def plain_bytes(memory: Any) -> Bytes:
    """Return memory as a numpy array, copied only from a device."""
    return from_torch(memory) if is_torch(memory) else np.asarray(memory)


def put(memory: Any, plain: Bytes) -> None:
    """Copy bytes into memory of the host or of a device."""
    if is_torch(memory):
        memory.copy_(to_torch(plain))
    else:
        memory[:] = plain


def digests_of(plain: Bytes, bucket: int) -> tuple[bytes, ...]:
    """Return the digest of each bucket."""
    view = memoryview(plain)  # type: ignore[arg-type]
    return tuple(digest(view[start : start + bucket]) for start in range(0, len(plain), bucket))
