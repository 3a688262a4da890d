"""WeightUpdate: a version handed to an engine. WeightTransport: moves a version's chunks of bytes; it knows no tensors.

sender.room(nbytes) ... sender.send(manifest) -> where          # trainer: fills chunks, then sends them
receiver.fetch(manifest, where) -> Fetched                      # replica: the same bytes, verified
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..types import Manifest

Bytes = npt.NDArray[np.uint8]
NamedWeights = Mapping[str, Any] | Iterable[tuple[str, Any]]


class TensorType(NamedTuple):
    """The type of a whole tensor. ``dtype``: its name in torch's spelling."""

    dtype: str
    shape: tuple[int, ...]


class FilePlace(NamedTuple):
    """A place in a file, mappable by other processes of this host: ``offset`` bytes from its start."""

    path: str
    offset: int


class WeightUpdate(abc.ABC):
    """A verified version, ready to load: its bytes equal its manifests' digests. Iterating yields (name, torch
    tensor), ``arrays()`` (name, numpy array): whole tensors, in the order of ``tensors``, valid until ``release``.
    Writing into them changes nothing elsewhere. ``root``: digest of the whole version. ``untrained``: names left out
    of every version of the run; the engine keeps its own folder's tensors."""

    version: int
    tensors: Mapping[str, TensorType]
    root: str
    untrained: Sequence[str] = ()

    @abc.abstractmethod
    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Yield (name, array), with ml_dtypes for bfloat16 and others unknown to numpy."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, torch tensor)."""

    def place(self, name: str) -> FilePlace | None:
        """Return the place of a whole tensor in C order, for engines in other processes; None if only this process can
        read it. Valid until ``release``; nothing writes there."""
        return None

    @abc.abstractmethod
    def release(self) -> None:
        """Give the bytes back. Idempotent."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """The end of a transport, and its host. ``directory``: the run's shared memory; None if not visible here (another
    host or container). ``name``: unique in the run, valid as a file name. ``run``: unique name of the run, the same
    after a resume; "" if unknown. ``address``: IP address of this host for other members of the run; a loopback
    address if all are on this host. ``rank`` of ``world_size``: the part of each version from a publishing end; the
    same for its successor. ``model``: the Hugging Face folder being trained; "" if unknown. ``identity``: the same
    for all processes of this user able to map each other's shared memory. ``member``: this process in its run, for
    ``wire.Service`` and ``ServiceClient``; None without a run."""

    directory: Path | None
    name: str
    address: str = "127.0.0.1"
    rank: int = 0
    world_size: int = 1
    run: str = ""
    model: str = ""
    identity: str = ""
    member: Any = None

    @property
    def own_key(self) -> Any:
        """This process's key for services of other members; None without a run."""
        return None if self.member is None else self.member.key

    @property
    def elsewhere(self) -> str:
        """Why other members of the run may not see this host's memory; "" if all do."""
        if self.directory is None:
            return "the run's memory is not in sight of this process"
        loopback = self.address.startswith("127.") or self.address in ("::1", "localhost")
        return "" if loopback else f"the run is served to other hosts, which reach this one at {self.address}"


class WeightTransport(abc.ABC):
    """A way to move weights. Made as ``factory(**options)``: at the publishing end with the options of
    ``weight_publisher``, at the fetching end without any, because ``where`` holds all it needs. Raises ConfigError for
    invalid options."""

    @abc.abstractmethod
    def sender(self, host: Host) -> WeightSender:
        """Return the publishing end. Raises ConfigError for an unsuitable host, with the reason and an alternative."""

    @abc.abstractmethod
    def receiver(self, host: Host) -> WeightReceiver:
        """Return the fetching end. Raises ConfigError as ``sender`` does."""

    def check(self) -> None:
        """Raise the ConfigError of ``sender`` in a process like this one before there is a run, as far as it is known.
        Optional."""


class Room(abc.ABC):
    """Memory for a chunk. ``memory``: uint8 (nbytes,), a numpy array or a torch tensor on a device, written by the
    publisher."""

    memory: Any

    @abc.abstractmethod
    def trim(self, nbytes: int) -> None:
        """Shorten ``memory`` to its first ``nbytes``: the rest is not used."""


class WeightSender(abc.ABC):
    """The publishing end. Called by one thread at a time, ``send`` in another thread than ``room``. One version is
    written at a time: a ``room`` for each chunk in order, then ``send`` or ``abandon``. ``outlives``: True if sent
    versions can be fetched after this process has died."""

    outlives: ClassVar[bool] = False

    def adopt(self, kept: Sequence[tuple[Manifest, bytes]]) -> None:
        """Take over the ``kept`` versions of earlier publishers with this transport, oldest first. Called once, first
        of all. Anything else of theirs may be removed: a run has one publisher at a time. Optional."""

    @abc.abstractmethod
    def room(self, nbytes: int) -> Room:
        """Return room for the next chunk. Never waits for receivers. Raises MemoryFull."""

    def prepare(self, sizes: Sequence[int]) -> Iterator[None]:
        """Get memory, ahead of time, for a next version with chunks of these sizes: one step at each ``next``. The
        caller may stop after any step. Raises MemoryFull. Optional."""
        return iter(())

    @abc.abstractmethod
    def send(self, manifest: Manifest) -> bytes:
        """Make the version in the rooms since the last one, in order, available. Return ``where`` for receivers. Raises
        MemoryFull, WireError, OSError; the caller then abandons the version."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Discard the version being written or just sent: it will never be announced."""

    @abc.abstractmethod
    def keep(self, versions: Sequence[int]) -> None:
        """Free all sent or adopted versions except these. Never waits."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of host memory held for weights."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop. Fetched versions stay valid; with ``outlives``, sent ones may stay. Idempotent."""


@dataclass
class Fetched:
    """A version's bytes at the fetching end, verified. ``chunks``: uint8 (nbytes,) each, contiguous; writing into them
    changes nothing elsewhere. ``moved``: bytes moved by ``encoding``: mapped (0 bytes), full or delta. ``places``: of
    each chunk in a file, if other processes of this host can map it until ``release``; else empty. ``notes``: troubles
    on the way, for people. ``is_base``: False if a later fetch has no use for it."""

    manifest: Manifest
    chunks: Sequence[Any]
    moved: int = 0
    encoding: str = "full"
    places: Sequence[FilePlace] = ()
    notes: Sequence[str] = ()
    is_base: bool = True

    def release(self) -> None:
        """Give the bytes back. Existing views stay valid. Idempotent."""
        self.chunks = self.places = ()


class WeightReceiver(abc.ABC):
    """The fetching end. Blocking; called in a thread, one call at a time, while the engine generates. ``keeps_base``:
    True if it fetches less given the loaded version; this is then kept for it."""

    keeps_base: ClassVar[bool] = False

    @abc.abstractmethod
    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        """Fetch and verify a version. ``where``: from another process, so validate it. ``base``: an earlier version
        from the same rank, still held here; the result shares no memory with it. Raises VersionGone (not kept any
        more: fetch the newest), DigestMismatch naming bucket and tensors, WireError or DeadlineExceeded naming the
        peer, MemoryFull. Can be called again after any of them."""

    def interrupt(self) -> None:
        """Make a running ``fetch`` in another thread raise soon. Optional."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free the receiver's resources. Fetched versions stay valid until released. Idempotent."""
