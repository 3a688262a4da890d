"""WeightSync: publishing versions, and taking them up. What is current is the ledger's to say.

publisher.publish(step.version + 1, engine.named_weights())     # trainer: returns when training may go on
for update in weight_updates:                                   # replica: prefetched, verified
    with update: engine.load(update)                            # leaving commits
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Set
from typing import Any

import msgspec

from ..errors import ConfigError, DeadlineExceeded, Ended, VersionGone, WeightMismatch
from ..interfaces import WeightReceiver, WeightTransport, WeightUpdate
from ..ledger import commands as cmd
from ..plugins import registry
from ..queue import LoopPort, TransferQueue
from ..queue._once import drive
from ..types import Manifest
from ..types import events as ev

ASK_AGAIN_S = 60.0


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


class WeightUpdates:
    """New versions for a replica, on its event loop: fetched and verified before they are handed out.

    Versions that were passed over while one was fetched are skipped: the newest wins. A version is committed
    by ``commit`` after the engine took it; the ledger counts the replica as being on it from then on.
    """

    def __init__(self, queue: TransferQueue, loaded: int | None) -> None:
        self._connection = queue._port.connection
        self._port = LoopPort(self._connection)
        self._receivers: dict[str, WeightReceiver] = {}
        self.loaded = loaded

    async def staged(self, after: int) -> AsyncIterator[WeightUpdate]:
        """Each newest version above ``after``, once it lies verified on this host. Ends with the run."""
        while True:
            try:
                version = await self._port.send(cmd.AwaitVersion(after=after, timeout_s=ASK_AGAIN_S))
            except DeadlineExceeded:  # a step may take hours; a server that is gone is noticed
                continue
            except Ended:
                return
            after = version.version
            manifest = msgspec.msgpack.decode(version.manifest, type=Manifest)
            try:
                yield await asyncio.to_thread(self._receiver(version.transport).fetch, manifest, version.where)
            except VersionGone:
                continue  # a newer one is there already

    async def commit(self, update: WeightUpdate, names: Set[str]) -> None:
        """The engine took ``names`` of ``update``. Raises WeightMismatch unless they are the manifest's."""
        check_names(update.manifest, names)
        await self._port.send(cmd.Loaded(version=update.version))
        self.loaded = update.version

    def close(self) -> None:
        for each in self._receivers.values():
            each.close()

    def _receiver(self, transport: str) -> WeightReceiver:
        if transport not in self._receivers:
            self._connection.need_memory(f"weights transport {transport!r}")
            self._receivers[transport] = transport_named(transport).receiver(self._connection.directory)
        return self._receivers[transport]


def check_names(manifest: Manifest, names: Set[str]) -> None:
    """Raise WeightMismatch, naming tensors, unless the names an engine took are exactly the manifest's."""
    published = {tensor.name for tensor in manifest.tensors}
    for what, odd in (
        ("were not taken by the engine", published - names),
        ("were never published", names - published),
    ):
        if odd:
            listed = ", ".join(sorted(odd)[:10])
            more = f" and {len(odd) - 10} more" if len(odd) > 10 else ""
            raise WeightMismatch(
                f"version {manifest.version}: {len(odd)} of {len(published)} tensors {what}: {listed}{more}"
            )
