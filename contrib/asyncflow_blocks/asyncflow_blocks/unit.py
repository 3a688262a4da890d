"""BlockUnit: the storage unit of a host whose memory belongs to a ``BlockStore``.

It opens the memory, serves its home with signs of life, and frees blocks of sessions that have ended.
The home's identity is that of the contents, so a loss is noticed by the next sign of life.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from asyncflow_sdk.errors import StoreUnavailable, WireError
from asyncflow_sdk.interfaces import HomeCatalog, HomeOffer, HomeUnit
from asyncflow_sdk.queue.stores.homes import HomeId, segment_prefix, session_of, this_host
from asyncflow_sdk.queue.stores.unit import ALONE_S, BEAT_S

from .interface import BlockMemory

_log = logging.getLogger(__name__)


class BlockUnit(HomeUnit):
    """``store``: kind of the store. ``name``: of the home, unique in the run. It closes ``memory``. Raises
    ConfigError, ServerLost, StoreUnavailable."""

    where: HomeId

    def __init__(self, catalog: HomeCatalog, memory: BlockMemory, *, store: str, name: str) -> None:
        self._catalog, self.memory, self._store, self._name = catalog, memory, store, name
        self.where = HomeId(0, 0)
        self._identity = ""
        self._newest = 0  # session that was looked at
        self._ended: set[int] = set()  # sessions to look at again: rows may need their blocks
        try:
            self.beat()
        except BaseException:
            self.close(keep=True)
            raise

    def beat(self) -> None:
        """Give a sign of life, and free blocks of lost epochs and of ended sessions. Raises ServerLost,
        ConfigError, StoreUnavailable."""
        identity = self.memory.check()
        offer = HomeOffer(
            store=self._store, name=self._name, identity=identity, address=self.memory.address,
            directory=identity, owner=this_host(),
        )  # fmt: skip
        before = self._identity, self.where
        self.where = where = HomeId(*self._catalog.open(offer))
        self.offer, self._identity = offer, identity
        if before[1] != where:
            self._newest, self._ended = 0, set()
            if before[0] == identity:  # given up, and still there
                self.memory.free_all([f"{identity}/h{before[1].home}.{before[1].epoch}!"])
        self._free_ended()

    def _free_ended(self) -> None:
        needed, sessions = self._catalog.needed(*self.where)
        newest = max(sessions, default=0)
        self._ended.update(range(self._newest + 1, newest + 1))
        self._newest = max(newest, self._newest)
        over = self._ended - set(sessions) - {session_of(segment) for segment in needed}
        if over:
            self.memory.free_all([f"{self._identity}/{segment_prefix(self.where, each)}" for each in sorted(over)])
            self._ended -= over

    def serve(self, ended: Callable[[], bool], stop: threading.Event, *, beat_s: float = BEAT_S) -> bool:
        """Serve until the run has ended, or ``stop`` is set. Return True if its blocks are needed no more:
        the run has ended, or its server was silent for ALONE_S. Raises ConfigError if another unit has
        taken its place."""
        heard = time.monotonic()
        while not stop.wait(beat_s):
            try:
                self.beat()
                heard = time.monotonic()
            except (WireError, StoreUnavailable) as error:
                if ended() or time.monotonic() - heard > ALONE_S:
                    return True
                _log.warning("no sign of life of home %d: %s", self.where.home, error)
        return ended()

    def close(self, *, keep: bool) -> None:
        """Stop serving. ``keep``: leave the blocks to the next unit, if they can outlive this process.
        Idempotent."""
        self.memory.close(keep=keep)
