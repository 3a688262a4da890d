"""Moving weights: WeightUpdate, what an engine is given; WeightTransport, how its bytes get there.

A transport moves chunks of bytes and knows nothing of tensors; what is current, and who may swap when, is the ledger's to say.

    sender.room(nbytes) ... sender.send(manifest) -> where          # trainer: chunks are filled, then made available
    receiver.fetch(manifest, where) -> Fetched                      # replica: the same bytes, verified
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..types import Manifest

Bytes = npt.NDArray[np.uint8]


class TensorType(NamedTuple):
    """Of a whole tensor: the name of its dtype as torch says it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


class FilePlace(NamedTuple):
    """Bytes ``offset`` from the start of a file that other processes of this host can map."""

    path: str
    offset: int


class WeightUpdate(abc.ABC):
    """A verified version, ready to be loaded: its bytes equal its manifests' digests.

    Iterating gives (name, torch tensor); ``arrays()`` gives (name, numpy array) where torch is not
    wanted. Both give whole tensors in the order of ``tensors``. They are valid until the update is released; copy what is
    kept. They may be written into without harm to anyone else. ``root``: one digest of everything.
    """

    version: int
    tensors: Mapping[str, TensorType]
    root: str

    @abc.abstractmethod
    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """(name, array); bfloat16 and the like by ml_dtypes."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """(name, torch tensor)."""

    def place(self, name: str) -> FilePlace | None:
        """Where a whole tensor lies in C order, for engines that compute in other processes; valid until the update is released.
        None where it lies in this process alone. Nobody writes there."""
        return None

    @abc.abstractmethod
    def release(self) -> None:
        """Give the bytes back. Idempotent."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What a transport may know of the end it works for.

    ``directory``: the run's shared memory; None where it is not in sight (another host, or container). ``name``:
    of this end, nobody else's in the run, fit for a file name. ``run``: of the run, no other's; one that comes back has the same;
    "" where nobody says. ``address``: an IP address by which other members of the
    run reach this host; a loopback one when they all are on it. Of a publishing end, ``rank`` of ``world_size``: which part of
    each version is its; a publisher that takes its place has the same. ``model``: the Hugging Face folder that it trains; "" where
    nobody says.
    """

    directory: Path | None
    name: str
    address: str = "127.0.0.1"
    rank: int = 0
    world_size: int = 1
    run: str = ""
    model: str = ""

    @property
    def elsewhere(self) -> str:
        """Why other members of the run may not see the memory of this host; "" where all do."""
        if self.directory is None:
            return "the run's memory is not in sight of this process"
        loopback = self.address.startswith("127.") or self.address in ("::1", "localhost")
        return "" if loopback else f"the run is served to other hosts, which reach this one at {self.address}"


class WeightTransport(abc.ABC):
    """A way to move weights. Made as ``factory(**options)`` with the options of ``weight_publisher`` at the publishing end, and
    without any at the fetching end, which learns all it needs from ``where``. Options it cannot work with raise
    ConfigError when it is made; a host it cannot work on, when its end is."""

    @abc.abstractmethod
    def sender(self, host: Host) -> WeightSender:
        """The publishing end. Raises ConfigError with the reason and what to use instead."""

    @abc.abstractmethod
    def receiver(self, host: Host) -> WeightReceiver:
        """The fetching end. Raises ConfigError with the reason and what to use instead."""

    def check(self) -> None:
        """Raises ConfigError that ``sender`` would raise in a process like this one, as far as it is known before there is a
        run. Optional."""


class Room(abc.ABC):
    """Memory for a chunk. ``memory``: uint8 (nbytes,), written by the publisher; a numpy array, or a torch tensor on a device."""

    memory: Any

    @abc.abstractmethod
    def trim(self, nbytes: int) -> None:
        """Only so many of its first bytes are used; ``memory`` is that long from now on."""

    def full(self) -> None:
        """Its bytes are all there, and will not change. Of the rooms of a version in their order, before it is sent, by any thread.
        Optional."""


class WeightSender(abc.ABC):
    """The publishing end. Calls come one at a time, ``send`` from another thread than ``room``.

    One version is written at a time: its chunks get their ``room`` one after another, then it is either sent or abandoned.
    """

    outlives: ClassVar[bool] = False
    """Whether what was sent can still be fetched once this process has died."""

    def adopt(self, kept: Sequence[tuple[Manifest, bytes]]) -> None:
        """Called once, first of all: what publishers before this one left and is still to be kept, of this transport, oldest
        first. Whatever else they left can go, since a run has one publisher at a time. Optional."""

    @abc.abstractmethod
    def room(self, nbytes: int) -> Room:
        """Room for the next chunk of the version being written. Raises MemoryFull. Receivers must not hold it up."""

    def prepare(self, sizes: Sequence[int]) -> Iterator[None]:
        """A version whose chunks have these sizes comes next: get memory for it, a step at each ``next``, so that it takes no
        time when it is written. It may be left at any step. Raises MemoryFull. Optional."""
        return iter(())

    @abc.abstractmethod
    def send(self, manifest: Manifest) -> bytes:
        """The version is written, in the rooms given since the last one, in order: make it available. Returns what a receiver
        needs to find it. Raises MemoryFull, WireError, OSError: then the version is abandoned."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """The version being written, or just sent, will never be announced."""

    @abc.abstractmethod
    def keep(self, versions: Sequence[int]) -> None:
        """Of all that were sent or adopted, these may still be asked for; the others' memory is free. Never waits."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Host memory held for weights."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop. What receivers hold stays valid; what outlives this process may stay. Idempotent."""


@dataclass
class Fetched:
    """A version's bytes at the fetching end, verified. ``chunks``: uint8 (nbytes,) each, contiguous, writable
    without harm to anyone else. ``moved``: bytes that had to be moved for it (0 where they were mapped), ``encoding``
    how: mapped, full or delta. ``places``: of each chunk, where it lies in a file, if other processes of this host can map that
    until ``release``, which gives the bytes back; else none."""

    manifest: Manifest
    chunks: Sequence[Any]
    moved: int = 0
    encoding: str = "full"
    on_release: Callable[[], None] | None = None
    places: Sequence[FilePlace] = ()

    def release(self) -> None:
        """Idempotent. Views that are still held stay valid."""
        self.chunks = self.places = ()
        freed, self.on_release = self.on_release, None
        if freed is not None:
            freed()


class WeightReceiver(abc.ABC):
    """The fetching end. Blocking; called in a thread, one call at a time, while the engine generates."""

    keeps_base: ClassVar[bool] = False
    """Whether it can fetch less when it is given the version this replica has loaded: then that is kept for it."""

    @abc.abstractmethod
    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        """Fetch and verify a version. ``where`` comes from another process and is to be validated.

        ``base``: of the same rank's publication, an earlier version that this replica still has. What is returned never shares
        memory with it. Raises VersionGone (it is kept no longer: ask for the newest), DigestMismatch naming bucket and
        tensors, WireError or DeadlineExceeded naming the peer, MemoryFull. After any of them it can be asked again.
        """

    def interrupt(self) -> None:
        """Make a ``fetch`` under way in another thread raise soon: its version is wanted no more. Optional."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what the receiver holds. Idempotent. What was fetched stays valid until it is released."""
