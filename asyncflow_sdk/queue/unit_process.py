"""run_unit: a storage unit as a process of its own, until its run ends.

python -m asyncflow_sdk.queue.unit_process < config.json     # a UnitConfig; started by ``ensure_unit``
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Callable

import msgspec

from ..errors import AsyncFlowError, ProtocolError
from ..interfaces.store import HomeOffer
from ..wire import Member, RunKey, own_address
from .connection import Connection
from .protocol import LedgerCatalog
from .stores.unit import BEAT_S, StorageUnit, UnitConfig, remove_unit_log


class UnitCatalog(LedgerCatalog):
    """The catalog of a run, for its unit. ``connection``: opened again after the server has ended its
    session, because the unit was silent for too long. Not thread-safe."""

    def __init__(self, config: UnitConfig) -> None:
        super().__init__(lambda command: self.connection.ask(command))
        self._config = config
        self.connection = self._connect(config.key)

    def _connect(self, key: RunKey | None) -> Connection:
        return Connection(self._config.address, "store", key=key, insecure=self._config.insecure)

    @property
    def member(self) -> Member:
        """This unit in its run, whatever its session."""
        return Member(self.connection.key, lambda keys: self.connection.members(keys))

    def open(self, offer: HomeOffer) -> tuple[int, int]:
        try:
            return super().open(offer)
        except ProtocolError:  # its session is unknown now; its key is accepted while its home waits
            ended, self.connection = self.connection, self._connect(self.connection.wire.key)
            ended.close(ended=True)
            return super().open(offer)


def run_unit(
    config: UnitConfig, say: Callable[[str], None], stop: threading.Event, *, beat_s: float = BEAT_S
) -> None:
    """Serve this host's home until the run ends or ``stop`` is set. ``say``: gets one line once it is open. After
    ``stop`` the files are left to the next unit. Raises ConfigError, AccessDenied, ServerLost."""
    catalog = UnitCatalog(config)
    connection = catalog.connection
    try:
        host = own_address(connection.wire.address, connection.server_addresses)
        name = config.name or f"{socket.gethostname()}-{host}"
        member = None if config.insecure else catalog.member
        unit = connection.store.open_unit(catalog, name, host) or StorageUnit(
            catalog, connection.run, name=name, host=host, member=member, listen=config.listen
        )
        over = False
        try:
            (home, epoch), offer = unit.where, unit.offer
            say(f"home {home}, epoch {epoch}, is served at {offer.address}; its payload: {offer.directory}")
            over = unit.serve(lambda: catalog.connection.wire.server_closed, stop, beat_s=beat_s)
        finally:
            unit.close(keep=not over)
            if over:
                remove_unit_log(connection.run)
    finally:
        catalog.connection.close()


def main() -> int:
    """Run the unit of the config on stdin. SIGTERM ends it."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker that started it
    try:
        config = msgspec.json.decode(sys.stdin.buffer.read(), type=UnitConfig)
        run_unit(config, lambda text: print(text, flush=True), stop)
    except (AsyncFlowError, msgspec.MsgspecError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
