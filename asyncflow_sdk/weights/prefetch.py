"""Prefetch: keeps the newest version staged on this host while an engine generates.

announced by the ledger → fetched and verified by the transports of its parts → staged, until it is taken, or replaced
by a newer one. A thread fetches; everything else runs on one event loop, and never blocks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from ..errors import DeadlineExceeded, DigestMismatch, Ended, MemoryFull, ProtocolError, VersionGone, WireError
from ..interfaces import Fetched, WeightReceiver
from ..ledger import commands as cmd
from ..queue import Connection, LoopPort
from ..queue.coroutines import wait_for_event
from ..types import Manifest, Probe
from ..types.defaults import FETCH_S
from ..types.probe import validate_probe
from .host import host_of
from .publisher import transport_named
from .update import Update

ASK_AGAIN_S = 60.0
"""How long one request for the next version waits: a step may take hours, and a server that is gone is noticed."""
RETRY_S = 0.5
RETRY_MOST_S = 30.0
CLOSE_S = 5.0
COMES_AGAIN = (VersionGone, DigestMismatch, WireError, DeadlineExceeded, MemoryFull, OSError)
"""What a fetch may fail with that another try may not."""

_names = itertools.count()
T = TypeVar("T")


class Staged(Update):
    """A version on this host. ``told``: what the ledger said of it. ``probe``: what it can be probed with."""

    def __init__(self, told: cmd.Version, parts: list[Fetched], rename: Callable[[str], str] | None) -> None:
        super().__init__(told.version, parts, rename)
        self.told = told
        self.parts: dict[int, Fetched] = dict(enumerate(parts))
        self.probe = _probe(told)


class Prefetch:
    """Fetches versions above ``after`` in the background from ``start`` on. ``staged``: the newest that is here and not taken;
    ``base``: the one that the engine has loaded, for receivers that fetch less with it.

    ``changed`` is called on the loop when there is something to look at: a version is staged, ``failure`` is set, or the run
    has ``ended``. What fails is told to the ledger and tried again, later and later; a newer version at once. A newer
    version stops the fetch of an older one, but not twice in a row, or a replica slower than the trainer would never
    have any.
    """

    def __init__(
        self,
        connection: Connection,
        after: int,
        changed: Callable[[], None],
        *,
        rename: Callable[[str], str] | None = None,
        fetch_timeout_s: float = FETCH_S,
    ) -> None:
        self._connection, self._port = connection, LoopPort(connection)
        self._changed, self._rename, self._fetch_timeout_s = changed, rename, fetch_timeout_s
        self.staged: Staged | None = None
        self.base: Staged | None = None
        self.failure: Exception | None = None
        self.trouble = ""
        """What the newest version could not be fetched for; "" once it, or a newer one, is."""
        self.ended = False
        self._newest: cmd.Version | None = None
        self._news = asyncio.Event()
        self._dealt_with = after  # the newest version that is staged, or was taken
        self._last_staged = self._failed_version = self._without_base = -1
        self._again_at, self._tries = 0.0, 0
        self._receivers: dict[str, WeightReceiver] = {}
        self._one_at_a_time = asyncio.Lock()
        self._retired: list[Staged] = []  # was the base, and a fetch under way may still use it
        self._base_in_use = False
        self._nothing_taken = asyncio.Event()
        self._nothing_taken.set()
        self._stoppable: WeightReceiver | None = None  # it fetches what a newer version makes useless
        self._stopped = False
        self._stuck: set[WeightReceiver] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._tasks = [asyncio.create_task(self._guard(each)) for each in (self._watch, self._keep_staged)]

    def take(self) -> Staged:
        """The staged version, the caller's from now on."""
        taken, self.staged = self.staged, None
        assert taken is not None
        self._nothing_taken.clear()
        return taken

    def drop(self, version: int) -> None:
        """A version that is staged may not be loaded any more: nothing is staged until a newer one is."""
        if self.staged is not None and self.staged.version == version:
            gone, self.staged = self.staged, None
            gone.release()

    def done(self) -> None:
        """What was taken is loaded, or will not be."""
        self._nothing_taken.set()

    def again(self, version: int) -> None:
        """A version that was taken could not be loaded: it is fetched once more, after a while, unless a newer one comes."""
        self._wait_longer(version)
        if self._newest is not None and self._newest.version == version:
            self._dealt_with = version - 1
            self._news.set()

    def succeeded(self) -> None:
        """The last load went well: the next failure is the first."""
        self._tries = 0

    async def fetch(self, told: cmd.Version) -> Staged:
        """Fetch and verify a version, after the one that is being fetched. Raises what receivers raise; WeightMismatch for parts
        that do not fit each other."""
        async with self._one_at_a_time:
            return await self._fetch(told, {})

    def keep_base(self, loaded: Staged) -> None:
        """The engine is on ``loaded``: what receivers can use of it stays until the engine is on another."""
        if self.base is not None:
            self._retired.append(self.base)
        self.base = None
        self._release_retired()
        if any(self._receiver(part.transport).keeps_base for part in loaded.told.parts):
            self.base = loaded
        else:
            loaded.release()

    async def close(self) -> None:
        """Stop, and free what is held; what was taken is the caller's. A fetch that does not let itself be stopped within
        seconds is left to its end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for receiver in self._receivers.values():
            if receiver not in self._stuck:  # what a thread is still at must not be taken from under it
                receiver.close()
        for held in (self.staged, self.base, *self._retired):
            if held is not None:
                held.release()
        self.staged = self.base = None

    # ---- behind

    async def _guard(self, work: Callable[[], Any]) -> None:
        try:
            await work()
        except Exception as error:
            self.failure = self.failure or error
            self._changed()

    async def _watch(self) -> None:
        """Hear of each newest version."""
        after = self._dealt_with
        while True:
            try:
                version = await self._port.send(cmd.AwaitVersion(after=after, timeout_s=ASK_AGAIN_S))
            except DeadlineExceeded:
                continue
            except Ended:
                self.ended = True
                self._changed()
                return
            self._newest, after = version, version.version
            self._news.set()
            if self._stoppable is not None and not self._stopped:
                self._stopped = True
                self._stoppable.interrupt()

    async def _keep_staged(self) -> None:
        while True:
            told = await self._next()
            began = time.monotonic()
            try:
                async with self._one_at_a_time:
                    staged = await self._fetch(told, self.base.parts if self.base is not None else {}, stoppable=True)
            except COMES_AGAIN as error:
                await self._failed(told, error)
            except Exception as error:
                await self._say(told, error)
                raise
            else:
                await self._stage(told, staged, time.monotonic() - began)

    async def _stage(self, told: cmd.Version, staged: Staged, seconds: float) -> None:
        skipped = max(told.version - self._last_staged - 1, 0) if self._last_staged >= 0 else 0
        encodings = sorted({part.encoding for part in staged.parts.values()})
        moved = sum(part.moved for part in staged.parts.values())
        command = cmd.ReportStaged(
            version=told.version, skipped=skipped, moved=moved, encoding="+".join(encodings), seconds=seconds
        )
        self._stopped, self._without_base, self.trouble = False, -1, ""
        self._dealt_with = self._last_staged = told.version
        told_of = asyncio.ensure_future(self._port.send(command))
        await asyncio.sleep(0)  # it is on its way: who sees it staged, and asks to load it, does so behind it
        before, self.staged = self.staged, staged
        if before is not None:
            before.release()
        self._changed()
        await told_of

    async def _next(self) -> cmd.Version:
        """The newest version, once it is one to be fetched, and not one to be let alone for a while."""
        while True:
            self._news.clear()
            wait_s = None
            if self._newest is not None and self._newest.version > self._dealt_with:
                wait_s = self._again_at - time.monotonic() if self._newest.version == self._failed_version else 0.0
                if wait_s <= 0:
                    return self._newest
            await wait_for_event(self._news, wait_s)

    async def _failed(self, told: cmd.Version, error: Exception) -> None:
        """Tell it, and let the version alone for a while; but for one whose place a newer one has taken."""
        if self._newest is not None and self._newest.version > told.version:
            return
        if isinstance(error, VersionGone):
            try:
                newest = await self._port.send(cmd.AwaitVersion(after=told.version - 1, timeout_s=ASK_AGAIN_S))
            except (DeadlineExceeded, Ended):  # what had its bytes is gone, and nothing newer is there
                newest = told
            if newest.version > told.version:
                if self._newest is None or newest.version > self._newest.version:
                    self._newest = newest  # _watch hears of it, too, but maybe not before the next try
                return
        self._without_base = told.version  # it may be the base that is wrong
        self._wait_longer(told.version)
        await self._say(told, error)

    async def _say(self, told: cmd.Version, error: Exception) -> None:
        self.trouble = f"version {told.version} could not be fetched: {said(error)}"
        await self._nothing_taken.wait()  # the ledger would take it for the end of the load that is under way
        await self._port.send(cmd.ReportLoadFailed(version=told.version, reason=said(error)))

    def _wait_longer(self, version: int) -> None:
        self._failed_version = version
        self._again_at = time.monotonic() + min(RETRY_S * 2**self._tries, RETRY_MOST_S)
        self._tries = min(self._tries + 1, 16)

    # ---- fetching

    async def _fetch(self, told: cmd.Version, base: Mapping[int, Fetched], *, stoppable: bool = False) -> Staged:
        fetched: list[Fetched] = []
        self._base_in_use = bool(base)
        try:
            for rank, part in enumerate(told.parts):
                manifest = manifest_of(told.version, rank, part)
                receiver = self._receiver(part.transport)
                usable = receiver.keeps_base and self._without_base != told.version
                self._stoppable = receiver if stoppable else None
                fetched.append(
                    await self._fetch_part(receiver, manifest, part.where, base.get(rank) if usable else None)
                )
            return Staged(told, fetched, self._rename)
        except BaseException:
            for each in fetched:
                each.release()
            raise
        finally:
            self._stoppable, self._base_in_use = None, False
            self._release_retired()

    async def _fetch_part(
        self, receiver: WeightReceiver, manifest: Manifest, where: bytes, base: Fetched | None
    ) -> Fetched:
        timeout_s = self._fetch_timeout_s
        work = in_thread("fetch", lambda: receiver.fetch(manifest, where, base=base, timeout_s=timeout_s))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            receiver.interrupt()
            if not (await asyncio.wait([work], timeout=CLOSE_S))[0]:
                self._stuck.add(receiver)
            work.add_done_callback(_release)
            raise

    def _release_retired(self) -> None:
        if not self._base_in_use:
            for each in self._retired:
                each.release()
            self._retired.clear()

    def _receiver(self, transport: str) -> WeightReceiver:
        if transport not in self._receivers:
            host = host_of(self._connection, f"{self._connection.session}-{next(_names)}")
            self._receivers[transport] = transport_named(transport).receiver(host)
        return self._receivers[transport]


def _probe(told: cmd.Version) -> Probe | None:
    """What the version can be probed with. Raises ProtocolError for what no publisher says."""
    try:
        return validate_probe(msgspec.msgpack.decode(told.probe, type=Probe), scored=True) if told.probe else None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"version {told.version}: its probe cannot be read: {error}") from None


def manifest_of(version: int, rank: int, part: cmd.VersionPart) -> Manifest:
    """The manifest of rank ``rank``'s part. Raises ProtocolError if it cannot be decoded, and DigestMismatch if it is not the one
    that was published."""
    try:
        manifest = msgspec.msgpack.decode(part.manifest, type=Manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(
            f"version {version}: the manifest of rank {rank}'s part cannot be read: {error}"
        ) from None
    if manifest.root != part.root:
        raise DigestMismatch(f"version {version}: the manifest of rank {rank}'s part differs from what was published")
    return manifest


def said(error: BaseException) -> str:
    """What failed, as the ledger is told."""
    return f"{type(error).__name__}: {error}"[:1000]


def _release(work: asyncio.Future[Fetched]) -> None:
    """Of what nobody waits for any more."""
    if not work.cancelled() and work.exception() is None:
        work.result().release()


def in_thread(name: str, function: Callable[[], T]) -> asyncio.Future[T]:
    """Run something that blocks beside the event loop. The thread holds up no process that wants to end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def give(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def work() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = function(), None
        except BaseException as error:
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            loop.call_soon_threadsafe(give, *outcome)

    threading.Thread(target=work, name=f"asyncflow-{name}", daemon=True).start()
    return future
