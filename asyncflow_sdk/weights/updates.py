"""WeightUpdates: the versions of one replica, from staged to committed.

updates = WeightUpdates(queue, loaded=None, changed=wake.set)
updates.start()
await updates.permission(updates.staged.version)       # while the engine generates
update = updates.take()
await updates.commit(update, await engine.load_weights(update))
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable

from ..errors import AsyncFlowError, ConfigError, DeadlineExceeded, VersionGone
from ..ledger import commands as cmd
from ..queue import Connection, LoopPort, QueueClient
from ..types.defaults import FETCH_S
from .prefetch import ASK_AGAIN_S, CLOSE_S, Prefetch, Staged
from .proof import check_names

_replicas: weakref.WeakKeyDictionary[Connection, object] = weakref.WeakKeyDictionary()
"""The place of each connection's replica: the ledger knows one a session."""
_lock = threading.Lock()


class WeightUpdates:
    """New versions for a replica, on its event loop: fetched and verified in the background, the newest first.

    ``loaded``: the version that the engine has; None for none. ``changed`` is called when there is something to look at: a
    version is ``staged``, there is a ``failure``, or the run has ``ended``. ``rename``: from published names to the engine's.
    From ``claim``, ``join`` or ``start`` to ``close`` it is the connection's only one. Nothing here is thread-safe.
    """

    def __init__(
        self,
        queue: QueueClient,
        loaded: int | None,
        changed: Callable[[], None],
        *,
        rename: Callable[[str], str] | None = None,
        fetch_timeout_s: float = FETCH_S,
    ) -> None:
        connection = queue.connection
        self._port = LoopPort(connection)
        self._prefetch = Prefetch(
            connection, -1 if loaded is None else loaded, changed, rename=rename, fetch_timeout_s=fetch_timeout_s
        )
        self._place = object()
        self._told: cmd.Version | None = None  # of the version that is loaded
        self.loaded = loaded
        self._unpermitted = ""  # why a permission to swap has not come yet, in the ledger's words

    def claim(self) -> None:
        """Take the connection's place of a replica, until ``close``; ``join`` and ``start`` do it, too."""
        connection = self._port.connection
        with _lock:
            if _replicas.setdefault(connection, self._place) is not self._place:
                raise ConfigError(
                    f"{connection.name} takes weight updates for another engine already, and a connection is one replica:"
                    " close those first, or connect again for this one"
                )

    async def join(self) -> None:
        """Say what the engine has loaded, and begin to fetch. Raises ConfigError as ``start`` does."""
        self.claim()
        if self.loaded is not None:
            await self._port.send(cmd.ReportLoaded(version=self.loaded))
        self.start()

    def start(self) -> None:
        """Begin to fetch. From now on the ledger counts this session as a replica. Raises ConfigError when it is one already,
        for another engine."""
        self.claim()
        self._prefetch.start()

    @property
    def staged(self) -> Staged | None:
        """The newest version that lies verified on this host and was not taken."""
        return self._prefetch.staged

    @property
    def failure(self) -> Exception | None:
        """What no further try will mend."""
        return self._prefetch.failure

    @property
    def waits_for(self) -> str:
        """Why no newer version is loaded, as far as it is known here; "" where nothing is wrong."""
        return self._unpermitted or self._prefetch.trouble

    async def why(self) -> str:
        """Why no newer version is loaded, also as the run sees it: "; ..." to end a sentence with, or nothing."""
        parts = [self.waits_for]
        with contextlib.suppress(AsyncFlowError):
            session = self._port.connection.session
            report = await self._port.send(cmd.GetStatus())
            parts += [p.why for p in report.parked if p.session == session and p.verb.startswith(("weights", "load"))]
        return "".join(f"; {part}" for part in parts if part)

    @property
    def ended(self) -> bool:
        """Whether no further version will come."""
        return self._prefetch.ended

    async def permission(self, version: int, *, timeout_s: float | None = None) -> bool:
        """Wait until this replica may load a version it has staged. False when a newer one has taken its place, which
        may still have to be fetched: nothing is staged then. Waits as long as it takes, but for a ``timeout_s``: then
        DeadlineExceeded says for whom."""
        while True:
            try:
                await self._port.send(
                    cmd.Swap(version=version, timeout_s=ASK_AGAIN_S if timeout_s is None else timeout_s)
                )
            except VersionGone:  # it may never be loaded any more: not to be asked for again
                self._unpermitted = ""
                self._prefetch.drop(version)
                return False
            except ConfigError:
                if self.staged is not None and self.staged.version == version:
                    raise
                return False
            except DeadlineExceeded as error:
                self._unpermitted = str(error)
                if timeout_s is not None:
                    raise
            else:
                self._unpermitted = ""
                return True

    def take(self) -> Staged:
        """The staged version, to be committed or given up."""
        return self._prefetch.take()

    async def commit(self, update: Staged, names: Iterable[str] | None = None) -> None:
        """The engine generates with ``update`` from now on; it took ``names`` of it, or what it took is proven already. Raises
        WeightMismatch unless they are the update's; then nothing is committed."""
        if names is not None:
            check_names(update, names)
        try:
            await self._port.send(cmd.ReportLoaded(version=update.version))
        finally:
            self._prefetch.done()
        self.loaded, self._told = update.version, update.told
        self._prefetch.succeeded()
        self._prefetch.keep_base(update)

    async def give_up(self, update: Staged, reason: str, *, again: bool = True) -> None:
        """``update`` was not loaded: the engine is on what it had. Unless not ``again``, it comes again after a while, or a
        newer one does."""
        update.release()
        try:
            await self._port.send(cmd.ReportLoadFailed(version=update.version, reason=reason))
        finally:
            self._prefetch.done()
        if again:
            self._prefetch.again(update.version)

    async def previous(self) -> Staged:
        """The version that the engine has, fetched again. Raises VersionGone where it is kept no longer, or was never fetched;
        else what fetching raises."""
        if self._told is None:
            raise VersionGone("the weights that the engine began with were never published")
        return await self._prefetch.fetch(self._told)

    async def fetch(self, update: Staged) -> Staged:
        """The same version once more. Raises what fetching raises."""
        return await self._prefetch.fetch(update.told)

    def restored(self, update: Staged) -> None:
        """The engine has taken the version it had once more."""
        self._prefetch.keep_base(update)

    async def close(self) -> None:
        """Stop, and free what is held: this session is no replica any more. Idempotent."""
        try:
            await self._prefetch.close()
        finally:
            await self._retire()

    async def _retire(self) -> None:
        """Give the place up, and with it what others may wait for: a permission, a part in the quorum."""
        connection = self._port.connection
        if _replicas.get(connection) is not self._place:
            return
        try:
            with contextlib.suppress(AsyncFlowError, asyncio.TimeoutError):  # a server that is gone knows no replica
                await asyncio.wait_for(self._port.send(cmd.Retire()), CLOSE_S)
        finally:
            with _lock:
                _replicas.pop(connection, None)
