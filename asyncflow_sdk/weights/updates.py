"""WeightUpdates: new versions for a replica, fetched and verified while it generates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Set

import msgspec

from ..errors import DeadlineExceeded, Ended, VersionGone
from ..interfaces import WeightReceiver, WeightUpdate
from ..ledger import commands as cmd
from ..queue import LoopPort, TransferQueue
from ..types import Manifest

ASK_AGAIN_S = 60.0


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
