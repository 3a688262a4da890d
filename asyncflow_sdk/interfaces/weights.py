"""Moving weights: WeightUpdate, what an engine is given; WeightTransport, how it gets there."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..types import Manifest


class WeightUpdate(abc.ABC):
    """A verified version, ready to be loaded: its bytes equal its manifest's digests.

    Iterating gives (name, torch tensor); ``arrays()`` gives (name, numpy array) where torch is not
    wanted. Tensors are valid until the update is released; copy what is kept. They may be written into
    without harm to anyone else.
    """

    manifest: Manifest

    @property
    def version(self) -> int:
        return self.manifest.version

    @abc.abstractmethod
    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """(name, array) in the order of the manifest; bfloat16 and the like by ml_dtypes."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """(name, torch tensor) in the order of the manifest."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give the bytes back. Idempotent."""


class WeightTransport(abc.ABC):
    """A way to move weights. Made without arguments; ``directory`` is the run's, on this host."""

    @abc.abstractmethod
    def sender(self, directory: Path, name: str) -> WeightSender:
        """The publishing end. ``name`` is this session's alone."""

    @abc.abstractmethod
    def receiver(self, directory: Path) -> WeightReceiver:
        """The fetching end."""


class WeightSender(abc.ABC):
    """The publishing end of a transport. Not thread-safe."""

    @abc.abstractmethod
    def send(self, version: int, weights: Iterable[tuple[str, Any]]) -> tuple[Manifest, bytes]:
        """Copy the weights to where receivers can fetch them; no receiver can hold it up.

        Returns the manifest and what a receiver of this transport needs to find the bytes. The caller
        announces both through the ledger; until then nobody fetches them.
        """

    def withdraw(self, version: int) -> None:
        """The version just sent was refused and will never be announced: keep the ones before it instead.
        Optional; the default keeps it until newer ones push it out."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop keeping versions. Updates that receivers still hold stay valid."""


class WeightReceiver(abc.ABC):
    """The fetching end of a transport. Blocking; called in a thread."""

    @abc.abstractmethod
    def fetch(self, manifest: Manifest, where: bytes) -> WeightUpdate:
        """Fetch and verify a version. Raises VersionGone, or DigestMismatch naming bucket and tensors."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what the receiver holds."""
