"""WeightSync: moves versions of the policy's weights from one publisher to any number of replicas.

    publisher = run.weight_publisher("shm")                              # the trainer
    publisher.publish(version, engine.named_weights(), untrained=engine.untrained)   # returns when the weights may change again

    for update in run.weight_updates():                                  # a replica: versions arrive fetched and verified
        with update:                                                     # leaving the block commits; an exception does not
            engine.load_weights(dict(update))

A ``WeightTransport`` moves the bytes. The ledger alone decides about the current version and the time of each
replica's load. Promises of every implementation:

- Version numbers rise and are never reused: a rollback gives the bytes of an old version a new number.
- A version is published whole or not at all. If it fails, the previous one stays current.
- A replica gets a version only if its bytes match the manifest's digests, and commits it only if the engine took every
  tensor.
- Every wait has a deadline, and its error names the missing thing.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..types import Manifest, Probe
from ..types.defaults import FETCH_S, NEXT_S
from .weights import NamedWeights, WeightUpdate


class Publication(abc.ABC):
    """A version being published. Thread-safe."""

    version: int

    @property
    @abc.abstractmethod
    def done(self) -> bool:
        """True once this publisher's part of the version is published, or has failed."""

    @abc.abstractmethod
    def wait(self, timeout_s: float = FETCH_S) -> Manifest:
        """Return the manifest once this publisher's part of the version is published. Raises the error of a failed
        version, WeightError naming the rank of its withdrawal, and DeadlineExceeded after ``timeout_s``."""


@dataclass(frozen=True)
class RollbackResult:
    """The result of a rollback. ``version``: the new, current number. ``expired``: ended rows of the withdrawn
    versions. ``checkpoint``: step of the checkpoint with this version's optimizer state; -1 without one."""

    version: int
    expired: int
    checkpoint: int

    @property
    def optimizer(self) -> str:
        """Origin of the trainer's optimizer state: "checkpoint of step N", or "fresh"."""
        return "fresh" if self.checkpoint < 0 else f"checkpoint of step {self.checkpoint}"


class WeightPublisher(AbstractContextManager["WeightPublisher"], abc.ABC):
    """The trainer's end, or one rank's, for its part. One a run. Not thread-safe; use it in a ``with`` block.
    ``current``: the newest version known here; for a rank, the newest with its part published."""

    current: int

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of host memory held for weights."""

    @abc.abstractmethod
    def publish(
        self, version: int, weights: NamedWeights, *, probe: Probe | None = None, untrained: Sequence[str] = ()
    ) -> Publication:
        """Make ``weights`` the current version. Return once they are copied and training may change them; the
        delivery continues in the background. ``version`` must be above all earlier ones. ``weights``: a mapping, or
        pairs of name and tensor or ``Shard``; each tensor is released before the next is taken, unless a dict or list
        holds them all. ``probe``: verifies engines after their load. ``untrained``: names of the model folder in no
        version. Raises ConfigError, WeightMismatch, SchemaError, MemoryFull: the previous version stays current. Also
        raises the error of the previous publication, and DeadlineExceeded while it is running."""

    @abc.abstractmethod
    def rollback(self, version: int, reason: str = "") -> RollbackResult:
        """See ``WeightSync.rollback``. Nothing can be published until the trainer has loaded it."""

    @abc.abstractmethod
    def flush(self, timeout_s: float | None = None) -> None:
        """Wait for everything published so far; see ``Publication.wait``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Flush, and let another publisher take over. A version not delivered in time is withdrawn. The current
        version stays current: replicas can fetch it if the transport outlives its publisher. Idempotent."""


class LoadableUpdate(
    WeightUpdate, AbstractContextManager["LoadableUpdate"], AbstractAsyncContextManager["LoadableUpdate"]
):
    """A version to be loaded now. Change the engine only inside its ``with`` (or ``async with``) block. Leaving the
    block commits the version: the engine generates with it from then on. It must have taken every tensor, as named by
    ``took``, else by iteration; WeightMismatch names missing ones. After an exception, the engine must hold the whole
    previous version, or generate nothing any more. ``probe``: sequences with log-probs by this version, if the
    trainer gave some."""

    probe: Probe | None

    @abc.abstractmethod
    def took(self, names: Iterable[str]) -> None:
        """Name the tensors loaded according to the engine: iterating proves no load."""


class WeightSubscriber(AbstractContextManager["WeightSubscriber"], abc.ABC):
    """A replica's end: iterates over versions, always the newest, until the run ends. While it is open, its session
    counts as a replica, and others may wait for it: close it, best by ``with``, when leaving the loop early. Versions
    are fetched and verified in the background. A version is skipped if its block is not entered. A failed one is
    offered again later, unless there is a newer one. One thread or task iterates; any may call ``close``."""

    @property
    @abc.abstractmethod
    def loaded(self) -> int | None:
        """The version committed last; None before one."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[LoadableUpdate]: ...

    @abc.abstractmethod
    def __aiter__(self) -> AsyncIterator[LoadableUpdate]: ...

    @abc.abstractmethod
    def close(self) -> None:
        """Stop fetching and being a replica. The version in use can no longer be committed. Idempotent."""


class WeightSync(abc.ABC):
    """Opens both ends. Implemented by ``Run``."""

    @abc.abstractmethod
    def weight_publisher(self, transport: str = "auto", **options: Any) -> WeightPublisher:
        """Open the trainer's end. ``transport``: its name; "auto": shm if all members of the run are on this host,
        else tcp. ``options``: of the publisher (rank, world_size, dtype, ...) and of the transport. Raises
        ConfigError if another publisher is open, and for an unsuitable transport."""

    @abc.abstractmethod
    def weight_updates(
        self,
        *,
        loaded: int | None = None,
        timeout_s: float = NEXT_S,
        fetch_timeout_s: float = FETCH_S,
        rename: Callable[[str], str] | None = None,
    ) -> WeightSubscriber:
        """Open a replica's end. ``loaded``: the version already in its engine. ``timeout_s``: limit of the wait for a
        version, ``fetch_timeout_s``: of its fetch. ``rename``: maps the checkpoint's names to the engine's. Raises
        ConfigError if this session is a replica already."""

    @abc.abstractmethod
    def rollback(self, version: int, reason: str = "") -> RollbackResult:
        """Make the weights of a kept version current again, under a new number. Rows generated by the withdrawn
        versions expire. ``reason``: for people. Raises ConfigError listing the kept versions."""
