"""VersionFetcher: fetch all parts of a version through their transports, and verify them."""

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

from ..errors import DigestMismatch, ProtocolError
from ..interfaces import Fetched, WeightReceiver
from ..ledger import commands as cmd
from ..queue import Connection
from ..types import Manifest, Probe
from ..types import events as ev
from ..types.config import validate_probe
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
    """Raises ProtocolError."""
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
    """Release a part that arrived after its fetch was cancelled."""
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
