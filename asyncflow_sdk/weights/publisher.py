"""WeightPublisher: publishes versions for a trainer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from ..errors import ConfigError
from ..interfaces import WeightTransport
from ..ledger import commands as cmd
from ..plugins import registry
from ..queue import TransferQueue
from ..queue._once import drive
from ..types import Manifest
from ..types import events as ev


def transport_named(name: str) -> WeightTransport:
    """A transport found through the hook. Raises PluginError that lists the known ones."""
    made: WeightTransport = registry().get("transport", name).load()()
    return made


_publishers = itertools.count()  # a session may publish from more than one, one after another


class WeightPublisher:
    """Publishes versions for a trainer. Not thread-safe."""

    def __init__(self, queue: TransferQueue, transport: str = "shm") -> None:
        self._port = queue._port
        self._connection = self._port.connection
        self.transport = transport
        self._connection.need_memory(f"weights transport {transport!r}")
        self._sender = transport_named(transport).sender(
            self._connection.directory, f"{self._connection.session}-{next(_publishers)}"
        )

    def publish(self, version: int, weights: Iterable[tuple[str, Any]]) -> Manifest:
        """Make ``weights`` the current version; returns when training may change them again (one copy).

        ``version`` must be above every one published before. Raises ConfigError, WeightMismatch, MemoryFull;
        then the version before stays current.
        """
        began, version = time.monotonic(), int(version)
        manifest, where = self._sender.send(version, weights)
        command = cmd.Publish(
            version=version, manifest=msgspec.msgpack.encode(manifest), transport=self.transport,
            where=where, root=manifest.root, nbytes=manifest.nbytes,
        )  # fmt: skip
        try:
            drive(self._port.send(command))
        except ConfigError:
            self._sender.withdraw(version)
            raise
        took = time.monotonic() - began
        self._connection.report(
            ev.Span(time_s=began, worker=self._connection.name, kind="publish", seconds=took, version=version)
        )
        return manifest

    def close(self) -> None:
        """Stop publishing."""
        self._sender.close()
