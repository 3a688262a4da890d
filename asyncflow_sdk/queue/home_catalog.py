"""HomeCatalogs of a run with a ledger: for its clients and units, and for the server's own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from ..errors import ConfigError
from ..interfaces.store import HomeCatalog, HomeOffer, StorageHome
from ..ledger import commands as cmd
from .stores.fetch import NeededRequest


class LedgerCatalog(HomeCatalog):
    """``send``: sends a command to the server, and returns the reply. Thread-safe if it is."""

    def __init__(self, send: Callable[[Any], Any]) -> None:
        self._send = send

    def open(self, offer: HomeOffer) -> tuple[int, int]:
        opened = self._send(
            cmd.OpenHome(
                store=offer.store, name=offer.name, identity=offer.identity, address=offer.address, key=offer.key,
                directory=offer.directory, owner=offer.owner,
            )
        )  # fmt: skip
        return opened.home, opened.epoch

    def homes(self) -> Sequence[StorageHome]:
        return storage_homes(self._send(cmd.GetHomes()))

    def needed(self, home: int, epoch: int) -> tuple[Set[str], Set[int]]:
        found = self._send(NeededRequest(home, epoch))
        return set(found.segments), set(found.sessions)


class ServerCatalog(HomeCatalog):
    """The homes as the server's own process reads them. ``listed``: ``HomeRegistry.listed``.
    Thread-safe."""

    def __init__(self, listed: Callable[[], Any]) -> None:
        self._listed = listed

    def homes(self) -> Sequence[StorageHome]:
        """Return the homes as of now, without waiting for the server's thread."""
        return storage_homes(self._listed())

    def open(self, offer: HomeOffer) -> tuple[int, int]:
        raise ConfigError("the queue server serves home 0 only")

    def needed(self, home: int, epoch: int) -> tuple[Set[str], Set[int]]:
        raise ConfigError("the queue server serves home 0 only")


def storage_homes(listed: cmd.HomeList) -> tuple[StorageHome, ...]:
    """Return the homes of a ledger's list. An absent one has no address."""
    return tuple(
        StorageHome(
            home=each.home, epoch=each.epoch, name=each.name, address=each.address if each.absent_s < 0 else "",
            key=each.key, directory=each.directory, owner=each.owner, lost=each.lost,
        )
        for each in listed.homes
    )  # fmt: skip
