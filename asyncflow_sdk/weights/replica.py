"""ReplicaSubscriber: one replica's weights, from an announced version to a loaded one.

    announced ──▶ fetched, verified ──▶ staged ──request──▶ permitted ──take──▶ loading ──commit──▶ loaded
                    │       ▲             └── a newer version replaces it          │
                    └ later ┘◀───────────────────────────── give_up, recover ──────┘

Fetching goes on in the background while an older version is staged or loading. Everything runs on one event loop and
never blocks it.

    subscriber.request_permission()                            # while the engine generates
    update = subscriber.take()                                 # once it is ``permitted``
    await loader.load(update); await subscriber.commit()       # after an error: await subscriber.recover(loader, error)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from ..errors import (
    AsyncFlowError,
    ConfigError,
    DeadlineExceeded,
    DigestMismatch,
    Ended,
    MemoryFull,
    VersionGone,
    WeightError,
    WeightMismatch,
    WireError,
)
from ..ledger import commands as cmd
from ..queue import Connection, LoopPort, QueueClient
from ..queue.coroutines import wait_for_event
from ..types.defaults import FETCH_S
from .engine_loader import EngineLoader, check_names
from .fetcher import CLOSE_S, StagedVersion, VersionFetcher

POLL_S = 60.0
"""Duration of one request. A step may take hours, but a lost server must be noticed."""
RETRY_S = 0.5
RETRY_MOST_S = 30.0
GIVE_UP_AFTER = 5  # loads that may fail one after another before a replica ends
RETRYABLE = (VersionGone, DigestMismatch, WireError, DeadlineExceeded, MemoryFull, OSError)
"""Errors of a fetch that another attempt may not have."""

_replicas: weakref.WeakSet[Connection] = weakref.WeakSet()
"""Connections that are a replica: the ledger knows one replica a session."""
_lock = threading.Lock()


class ReplicaSubscriber:
    """Fetches the newest version in the background, asks the ledger for permission to load it, and reports the
    result.

    ``loaded``: the engine's version; None for none. ``own``: True if it names the engine's initial weights; a
    published version of that number is loaded all the same. ``changed`` is set when a version is staged or permitted,
    on a ``failure``, and when the run has ``ended``. ``rename``: from published names to the engine's. ``task``: of
    its rows. From ``open`` to ``close`` it is the connection's only replica. Not thread-safe.

    Failed versions are reported and retried with a growing delay; a newer version is fetched at once. A newer version
    interrupts the fetch of an older one, but never twice in a row: otherwise a replica slower than the trainer would
    never get any.
    """

    def __init__(
        self,
        queue: QueueClient,
        loaded: int | None,
        changed: asyncio.Event,
        *,
        own: bool = False,
        rename: Callable[[str], str] | None = None,
        fetch_timeout_s: float = FETCH_S,
        task: str = "",
    ) -> None:
        self._task, self._changed = task, changed
        self._port = LoopPort(queue.connection)
        self._fetcher = VersionFetcher(queue.connection, rename, fetch_timeout_s)
        self._background: list[asyncio.Task[None]] = []
        self._opened = False
        self.loaded, self._own = loaded, own
        self.failure: Exception | None = None
        """An error that no retry can help."""
        self.ended = False
        """True once no further version will be published."""
        # the newest version that the ledger announced, and its fetch
        self._announced: cmd.Version | None = None
        self._announced_newer = asyncio.Event()
        self._handled = -1 if loaded is None or own else loaded  # the newest version that was staged or is loaded
        self._interrupted = False
        self._failed = -1  # to be fetched again, at ``_retry_at``
        self._retry_at, self._retries = 0.0, 0
        self._fetch_error = ""
        # the staged version, and the permission to load it
        self._staged: StagedVersion | None = None
        self._permitted: StagedVersion | None = None
        self._requested: StagedVersion | None = None
        self._request: asyncio.Task[None] | None = None
        # the version that is being loaded, and the loaded one
        self._loading: StagedVersion | None = None
        self._not_loading = asyncio.Event()
        self._not_loading.set()
        self._loaded: cmd.Version | None = None
        self._failed_loads = 0

    @property
    def staged(self) -> bool:
        """True if a version is staged, and permission to load it was not requested yet."""
        return self._staged is not None and self._staged not in (self._permitted, self._requested)

    @property
    def permitted(self) -> bool:
        """True if the staged version may be loaded."""
        return self._staged is not None and self._permitted is self._staged

    async def open(self) -> None:
        """Report the loaded version, and start to fetch. From now on the ledger counts this session
        as a replica. Raises ConfigError if it is one already, for another engine."""
        connection = self._port.connection
        with _lock:
            if connection in _replicas:
                raise ConfigError(
                    f"{connection.name} takes weight updates for another engine already, and a connection is one"
                    " replica: close those first, or connect again for this one"
                )
            _replicas.add(connection)
        self._opened = True
        if self.loaded is not None:
            await self._port.send(cmd.ReportLoaded(version=self.loaded, own=self._own))
        self._background = [asyncio.create_task(self._guard(each)) for each in (self._watch, self._keep_staged)]

    async def close(self) -> None:
        """Stop, retire, and release all versions except the one being loaded. Idempotent."""
        try:
            self._cancel_request()
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            self._fetcher.close()
            self._drop_staged()
        finally:
            if self._opened:  # others may wait for its permission or its vote
                self._opened = False
                try:
                    with contextlib.suppress(AsyncFlowError, asyncio.TimeoutError):  # the server may be lost
                        await asyncio.wait_for(self._port.send(cmd.Retire()), CLOSE_S)
                finally:
                    with _lock:
                        _replicas.discard(self._port.connection)

    async def diagnose(self) -> str:
        """Return the reason why no newer version is loaded: "; ..." to append to a sentence, or ""."""
        parts = [self._fetch_error]
        with contextlib.suppress(AsyncFlowError):
            session = self._port.connection.session
            report = await self._port.send(cmd.GetStatus())
            parts += [p.why for p in report.parked if p.session == session and p.verb.startswith(("weights", "load"))]
        return "".join(f"; {part}" for part in parts if part)

    # ---- from staged to permitted

    def request_permission(self) -> None:
        """Request permission to load the staged version, in the background and only once."""
        if self.staged:
            self._cancel_request()
            self._requested = self._staged
            self._request = asyncio.create_task(self._guard(self._await_permission, self._requested))

    async def try_permission(self) -> bool:
        """Return True if the staged version may be loaded now. Does not wait for other replicas."""
        with contextlib.suppress(DeadlineExceeded):
            await self._get_permission(0.0)
        return self.permitted

    async def next(self, timeout_s: float) -> StagedVersion | None:
        """Wait for the next version and for permission to load it, and take it. Return None at the
        end of the run. Raises DeadlineExceeded with the reason."""
        until = time.monotonic() + timeout_s
        while True:
            self._changed.clear()
            left_s = max(until - time.monotonic(), 0.0)
            if self.failure is not None:
                raise self.failure
            if self._staged is not None:
                version = self._staged.version
                try:
                    await self._get_permission(left_s)
                except DeadlineExceeded as error:
                    raise DeadlineExceeded(
                        f"version {version} could not be loaded in {timeout_s:g} s: {error}"
                    ) from None
                if self.permitted:
                    return self.take()
            elif self.ended:
                return None
            elif not await wait_for_event(self._changed, left_s):
                on = "no version" if self.loaded is None else f"version {self.loaded}"
                raise DeadlineExceeded(
                    f"no version was published and fetched in {timeout_s:g} s; this replica has {on}"
                    f"{await self.diagnose()}"
                )

    async def _await_permission(self, staged: StagedVersion | None) -> None:
        try:
            while self._staged is staged and not self.permitted:
                with contextlib.suppress(DeadlineExceeded):
                    await self._get_permission(POLL_S)
        finally:
            if self._requested is staged:
                self._requested = self._request = None
            self._changed.set()

    async def _get_permission(self, timeout_s: float) -> None:
        """Wait for permission to load the staged version. Return without it if a newer version replaces that one, or
        it may never be loaded any more. Raises DeadlineExceeded naming the replicas that it waits for."""
        staged = self._staged
        if staged is None:
            return
        try:
            await self._port.send(cmd.Swap(version=staged.version, timeout_s=timeout_s))
        except VersionGone:
            if self._staged is staged:
                self._drop_staged()
        except ConfigError:
            if self._staged is staged:
                raise
        else:
            self._permitted = staged

    def _cancel_request(self) -> None:
        if self._request is not None:
            self._request.cancel()
            self._requested = self._request = None

    def _drop_staged(self) -> None:
        replaced, self._staged = self._staged, None
        if replaced is not None:
            replaced.release()

    # ---- from permitted to loaded

    def take(self) -> StagedVersion:
        """Begin to load the permitted version, and return it. It is loaded even if a newer version
        is announced: otherwise a slow replica would never load any."""
        staged, self._staged, self._permitted = self._staged, None, None
        assert staged is not None, "no version is staged"
        self._loading = staged
        self._not_loading.clear()
        return staged

    async def take_newer(self) -> StagedVersion:
        """Return the version to load: a newer staged one if it is permitted at once."""
        taken = self._loading
        assert taken is not None, "no version was taken"
        if self._staged is not None:
            self._cancel_request()
            if await self.try_permission():
                taken.release()
                return self.take()
        return taken

    async def commit(self, names: Iterable[str] | None = None) -> None:
        """Report that the engine generates with the version from now on. ``names``: the tensors it took; None if they
        are proven. Raises WeightMismatch unless they are the version's; nothing is committed then."""
        update = self._loading
        assert update is not None, "no version was taken"
        if names is not None:
            check_names(update, names)
        await self._port.send(cmd.ReportLoaded(version=update.version))
        self._loading = None
        self._not_loading.set()
        self.loaded, self._loaded = update.version, update.announcement
        self._failed_loads = self._retries = 0
        self._fetcher.keep_base(update)

    async def give_up(self, reason: str, *, again: bool = True) -> None:
        """Report that the version was not loaded: the engine has its former weights. ``again``:
        fetch it once more after a while, unless a newer one is announced."""
        update, self._loading = self._loading, None
        assert update is not None, "no version was taken"
        update.release()
        try:
            await self._port.send(cmd.ReportLoadFailed(version=update.version, reason=reason))
        finally:
            if self._loading is None:
                self._not_loading.set()
        if again:
            self._delay_retry(update.version)
            self._announced_newer.set()

    async def recover(self, loader: EngineLoader, error: Exception) -> None:
        """Bring the engine back to a whole version after a load failed with ``error``: load the former version again,
        or this one if the former is no longer kept. Raises ``error`` if a retry cannot help (WeightMismatch,
        ConfigError); WeightError if neither version can be loaded, or after GIVE_UP_AFTER failed loads in a row. Then
        the engine must not generate any more."""
        update, former = self._loading, self.loaded
        assert update is not None, "no version was taken"
        update.release()
        if isinstance(error, (WeightMismatch, ConfigError)):
            raise error
        self._failed_loads += 1
        if former is not None:
            try:
                whole = await self._load_whole(loader, update.announcement)
            except Exception as again:
                raise WeightError(
                    f"version {update.version} could not be loaded ({describe(error)}), and neither could version"
                    f" {former} again ({describe(again)}): {loader.engine_name} holds neither and must not"
                    " generate any more"
                ) from error
            if whole.version == update.version:
                self._loading = whole
                await self.commit()
                return
            self._fetcher.keep_base(whole)
        await self.give_up(describe(error))
        if self._failed_loads >= GIVE_UP_AFTER:
            raise WeightError(
                f"{self._failed_loads} loads failed one after another, the last of version {update.version}:"
                f" {describe(error)}"
            ) from error

    async def _load_whole(self, loader: EngineLoader, failed: cmd.Version) -> StagedVersion:
        """Load the former version, or the failed one if the former is gone."""
        try:
            if self._loaded is None:
                raise VersionGone("the weights that the engine began with were never published")
            whole = await self._fetcher.fetch(self._loaded)
        except VersionGone as gone:
            try:
                whole = await self._fetcher.fetch(failed)
            except Exception:
                raise gone from None
        try:
            await loader.load(whole)
        except BaseException:
            whole.release()
            raise
        return whole

    # ---- from announced to staged, in the background

    async def _guard(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        try:
            await work(*args)
        except Exception as error:
            self.failure = self.failure or error
            self._changed.set()

    async def _watch(self) -> None:
        after = self._handled
        while True:
            try:
                version = await self._port.send(cmd.AwaitVersion(after=after, timeout_s=POLL_S, task=self._task))
            except DeadlineExceeded:
                continue
            except Ended:
                self.ended = True
                self._changed.set()
                return
            self._announced, after = version, version.version
            self._announced_newer.set()
            if not self._interrupted:
                self._interrupted = self._fetcher.interrupt()

    async def _keep_staged(self) -> None:
        while True:
            announced = await self._next_to_fetch()
            began = time.monotonic()
            try:
                use_base = self._failed != announced.version  # the base may be wrong
                staged = await self._fetcher.fetch(announced, use_base=use_base, interruptible=True)
            except RETRYABLE as error:
                await self._retry_later(announced, error)
            except Exception as error:
                await self._report_failed_fetch(announced, error)
                raise
            else:
                await self._stage(staged, time.monotonic() - began)

    async def _next_to_fetch(self) -> cmd.Version:
        """Wait for the newest unhandled version, and until a failed one may be retried."""
        while True:
            self._announced_newer.clear()
            wait_s, newest = None, self._announced
            if newest is not None and newest.version == self._failed:
                wait_s = self._retry_at - time.monotonic()
            elif newest is not None and newest.version > self._handled:
                wait_s = 0.0
            if newest is not None and wait_s is not None and wait_s <= 0:
                return newest
            await wait_for_event(self._announced_newer, wait_s)

    async def _stage(self, staged: StagedVersion, seconds: float) -> None:
        version, parts = staged.version, staged.parts.values()
        skipped = max(version - self._handled - 1, 0) if self._handled >= 0 else 0
        moved, encoding = sum(part.moved for part in parts), "+".join(sorted({part.encoding for part in parts}))
        command = cmd.ReportStaged(version=version, skipped=skipped, moved=moved, encoding=encoding, seconds=seconds)
        self._handled, self._failed, self._interrupted, self._fetch_error = version, -1, False, ""
        report = asyncio.ensure_future(self._port.send(command))
        await asyncio.sleep(0)  # the report is sent before any request for permission
        self._drop_staged()
        self._staged = staged
        self._changed.set()
        await report

    async def _retry_later(self, announced: cmd.Version, error: Exception) -> None:
        """Report a failed fetch and delay the next attempt, unless a newer version is announced."""
        if self._announced is not None and self._announced.version > announced.version:
            return
        if isinstance(error, VersionGone):
            try:
                newest = await self._port.send(
                    cmd.AwaitVersion(after=announced.version - 1, timeout_s=POLL_S, task=self._task)
                )
            except (DeadlineExceeded, Ended):  # its bytes are lost, and there is no newer version
                newest = announced
            if newest.version > announced.version:
                if self._announced is None or newest.version > self._announced.version:
                    self._announced = newest  # _watch receives it, too, but maybe after the next attempt
                return
        self._delay_retry(announced.version)
        await self._report_failed_fetch(announced, error)

    async def _report_failed_fetch(self, announced: cmd.Version, error: Exception) -> None:
        self._fetch_error = f"version {announced.version} could not be fetched: {describe(error)}"
        await self._not_loading.wait()  # the ledger would take the report for the end of the load in progress
        await self._port.send(cmd.ReportLoadFailed(version=announced.version, reason=describe(error)))

    def _delay_retry(self, version: int) -> None:
        self._failed = version
        self._retry_at = time.monotonic() + min(RETRY_S * 2**self._retries, RETRY_MOST_S)
        self._retries = min(self._retries + 1, 16)


def describe(error: BaseException) -> str:
    """Return class and message of an error, as reported to the ledger."""
    return f"{type(error).__name__}: {error}"[:1000]
