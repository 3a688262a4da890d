"""VersionFetcher: fetch all parts of a version through their transports, and verify them.

Restoration: the version that a trainer must load after a rollback, before it may publish again.

    pending = get_restoration(queue)                              # None: no rollback is pending
    with pending.fetch() as update:
        engine.load_weights(update)
    queue.send(cmd.ReportRestored(version=pending.version))        # versions may be published again
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import msgspec

from ..errors import DigestMismatch, ProtocolError, WeightError
from ..interfaces import Fetched, WeightReceiver, WeightUpdate
from ..ledger import commands as cmd
from ..queue import Connection, QueueClient
from ..types import Manifest, Probe
from ..types import events as ev
from ..types.config import validate_probe
from ..types.defaults import FETCH_S
from .host import host_of, make_transport
from .update import Update

CLOSE_S = 5.0  # longest wait for an interrupted fetch (seconds)
_host_numbers = itertools.count()
T = TypeVar("T")


class StagedVersion(Update):
    """A verified version on this host. ``announcement``: from the ledger. ``probe``: may be None."""

    def __init__(self, announcement: cmd.Version, parts: list[Fetched], rename: Callable[[str], str] | None) -> None:
        super().__init__(announcement.version, parts, rename)
        self.announcement = announcement
        self.parts: dict[int, Fetched] = dict(enumerate(parts))
        self.probe = _decode_probe(announcement)


class VersionFetcher:
    """Fetches one version at a time, each part in a thread. Not thread-safe.

    It owns the receivers, and the *base*: the loaded version, kept if a receiver can fetch less with its help.
    ``rename``: from published names to the engine's. ``timeout_s``: limit of each part.
    """

    def __init__(self, connection: Connection, rename: Callable[[str], str] | None, timeout_s: float) -> None:
        self._connection, self._rename, self._timeout_s = connection, rename, timeout_s
        self._receivers: dict[str, WeightReceiver] = {}
        self._stuck: set[WeightReceiver] = set()  # their thread did not end in time
        self._interruptible: WeightReceiver | None = None
        self._lock = asyncio.Lock()
        self._base: StagedVersion | None = None
        self._former_bases: list[StagedVersion] = []  # the fetch in progress may still read them

    async def fetch(
        self, announcement: cmd.Version, *, use_base: bool = False, interruptible: bool = False
    ) -> StagedVersion:
        """Fetch a version, after the fetch in progress. ``interruptible``: ``interrupt`` may end it. Raises the errors
        of receivers, ProtocolError for a broken announcement, and WeightMismatch for parts that do not fit together."""
        async with self._lock:
            base = self._base.parts if use_base and self._base is not None else {}
            fetched: list[Fetched] = []
            try:
                for rank, part in enumerate(announcement.parts):
                    manifest = decode_manifest(announcement.version, rank, part)
                    receiver = self._receiver(part.transport)
                    self._interruptible = receiver if interruptible else None
                    usable = base.get(rank) if receiver.keeps_base else None
                    fetched.append(await self._fetch_part(receiver, manifest, part.where, usable))
                    for text in fetched[-1].notes:
                        name = self._connection.name
                        note = ev.Note(time_s=time.monotonic(), worker=name, text=text, level="warning")
                        self._connection.report(note)
                return StagedVersion(announcement, fetched, self._rename)
            except BaseException:
                for each in fetched:
                    each.release()
                raise
            finally:
                self._interruptible = None
                self._release_former_bases()

    def interrupt(self) -> bool:
        """End the interruptible fetch in progress soon. Return False if there is none."""
        if self._interruptible is None:
            return False
        self._interruptible.interrupt()
        return True

    def keep_base(self, loaded: StagedVersion) -> None:
        """Make ``loaded`` the base, or release it if no receiver can use it. The former base is
        released after the fetch in progress."""
        if self._base is not None:
            self._former_bases.append(self._base)
        self._base = None
        if not self._lock.locked():
            self._release_former_bases()
        parts = loaded.announcement.parts
        if any(loaded.parts[rank].is_base and self._receiver(p.transport).keeps_base for rank, p in enumerate(parts)):
            self._base = loaded
        else:
            loaded.release()

    def close(self) -> None:
        """Close the receivers and release the bases. No fetch may be in progress, except one that
        could not be interrupted: it continues to its end."""
        for receiver in self._receivers.values():
            if receiver not in self._stuck:
                receiver.close()
        for version in (self._base, *self._former_bases):
            if version is not None:
                version.release()
        self._base = None

    async def _fetch_part(
        self, receiver: WeightReceiver, manifest: Manifest, where: bytes, base: Fetched | None
    ) -> Fetched:
        work = run_in_thread("fetch", lambda: receiver.fetch(manifest, where, base=base, timeout_s=self._timeout_s))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            receiver.interrupt()
            if not (await asyncio.wait([work], timeout=CLOSE_S))[0]:
                self._stuck.add(receiver)
            work.add_done_callback(_release_result)
            raise

    def _release_former_bases(self) -> None:
        while self._former_bases:
            self._former_bases.pop().release()

    def _receiver(self, transport: str) -> WeightReceiver:
        if transport not in self._receivers:
            host = host_of(self._connection, f"{self._connection.session}-{next(_host_numbers)}")
            self._receivers[transport] = make_transport(transport).receiver(host)
        return self._receivers[transport]


def decode_manifest(version: int, rank: int, part: cmd.VersionPart) -> Manifest:
    """Decode the manifest of rank ``rank``'s part. Raises ProtocolError if it cannot be decoded,
    and DigestMismatch if it is not the published one."""
    with _readable(f"version {version}: the manifest of rank {rank}'s part"):
        manifest = msgspec.msgpack.decode(part.manifest, type=Manifest)
    if manifest.root != part.root:
        raise DigestMismatch(f"version {version}: the manifest of rank {rank}'s part differs from what was published")
    return manifest


def _decode_probe(announcement: cmd.Version) -> Probe | None:
    if not announcement.probe:
        return None
    with _readable(f"version {announcement.version}: its probe"):
        return validate_probe(msgspec.msgpack.decode(announcement.probe, type=Probe), scored=True)


@contextlib.contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{what} cannot be read: {error}") from None


def _release_result(work: asyncio.Future[Fetched]) -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().release()


def run_in_thread(name: str, function: Callable[[], T]) -> asyncio.Future[T]:
    """Return a future of the result of ``function``, run in a new daemon thread: the default executor would delay the
    end of the process until the call returns."""
    result: Future[T] = Future()

    def work() -> None:
        result.set_running_or_notify_cancel()
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, name=f"asyncflow-{name}", daemon=True).start()
    return asyncio.wrap_future(result)


class Restoration:
    """``version``: the number to load. ``source``: the number under which its bytes were published.
    ``checkpoint``: the step of the checkpoint with its optimizer state; -1 without one."""

    def __init__(self, queue: QueueClient, reply: cmd.RestoreTarget) -> None:
        self.version, self.source, self.checkpoint = reply.version, reply.source, reply.checkpoint
        self._queue, self._reply = queue, reply

    @classmethod
    def decoded(cls, queue: QueueClient, packed: bytes) -> Restoration | None:
        """Decode the restoration packed by another rank; None if there is none."""
        reply = msgspec.msgpack.decode(packed, type=cmd.RestoreTarget)
        return None if reply.version < 0 else cls(queue, reply)

    @contextlib.contextmanager
    def fetch(self, timeout_s: float = FETCH_S) -> Iterator[WeightUpdate]:
        """Fetch and verify all ranks' parts of the version; the bytes are released after the block.
        This process does not count as a replica. ``timeout_s``: for all parts together. Raises
        WeightError if the bytes are no longer kept, and the errors of receivers."""
        if not self._reply.parts:
            raise WeightError(
                f"version {self.version} cannot be restored: {self._reply.why or 'it is not kept any more'}"
            )
        connection, until = self._queue.connection, time.monotonic() + timeout_s
        with contextlib.ExitStack() as ending:
            fetched = []
            for rank, part in enumerate(self._reply.parts):
                manifest = decode_manifest(self.version, rank, part)
                host = host_of(connection, f"{connection.session}-restored-{next(_host_numbers)}")
                receiver = make_transport(part.transport).receiver(host)
                ending.callback(receiver.close)
                left_s = max(until - time.monotonic(), 0.0)
                fetched.append(receiver.fetch(manifest, part.where, timeout_s=left_s))
                ending.callback(fetched[-1].release)
            update = Update(self.version, fetched)
            ending.callback(update.release)
            yield update


def fetch_version(queue: QueueClient, version: int) -> Restoration:
    """Return a kept version, to ``fetch`` it."""
    return Restoration(queue, queue.send(cmd.GetRestoreTarget(version=version)))


def pack_restoration(queue: QueueClient) -> bytes:
    """Return the ledger's restoration, encoded for the other ranks."""
    return msgspec.msgpack.encode(queue.send(cmd.GetRestoreTarget()))


def get_restoration(queue: QueueClient) -> Restoration | None:
    """Return the version that the trainer must load; None if no rollback is pending."""
    return Restoration.decoded(queue, pack_restoration(queue))
