"""StorageUnit: serves the memory of one host to clients elsewhere.

    unit = StorageUnit(catalog, run="asyncflow-0-17-ab", name="node7", host="10.0.0.7", member=member)
    unit.serve(ended)                       # until the run ends; gives a sign of life every few seconds
    unit.close(keep=False)

Clients on its host write segments into its directory and map them. It has no ledger, no journal and
no state but these files, so its process may die: the next unit of the run on this host finds them. If
they have to be on a disk (``synced``), also after a restart of the host: it checks the digest of each
block first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from ...errors import AsyncFlowError, LeaseLost, ProtocolError, ServerLost, WireError
from ...interfaces.store import HomeCatalog, HomeOffer, HomeUnit
from ...memory import KEEP_S, HomeDirectory, Mapper
from ...wire import Frames, Member, Service
from .blocks import is_intact
from .fetch import FetchReply, FetchRequest, check_parts, encode, read_parts
from .home_clients import MAX_REQUEST_BYTES
from .homes import HomeId, home_of, owner_of, session_of, this_host
from .reader import ColumnReader

BEAT_S = 5.0
"""Interval of signs of life."""
ALONE_S = 3600.0
"""A unit without contact to its run's server for this long ends."""
DISK_KEEP_S = 7 * 24 * 3600.0
"""Files on a disk outlive their unit for this long."""
THREADS = 2
SMALL_BYTES = 1 << 20
"""Blocks of up to this size are read in the service's thread."""
STORE = "hosts"
_decode = msgspec.msgpack.Decoder(FetchRequest).decode
_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_log = logging.getLogger(__name__)


class UnitHost(NamedTuple):
    """The host of a unit. ``address``: its IP address."""

    address: str


class StorageUnit(HomeUnit):
    """A home in a directory of this host, and its socket.

    ``name``: of the home, unique in the run. ``host``: the IP address at which others reach this
    host. ``listen``: an address; default: a free port of ``host``. ``member``: this
    process in the run, to admit its other members; None: without keys, everyone is admitted.
    ``base``: see ``HomeDirectory``.
    ``synced``: blocks are sealed and on a disk. Raises ConfigError, ServerLost.
    """

    where: HomeId

    def __init__(
        self,
        catalog: HomeCatalog,
        run: str,
        *,
        name: str,
        host: str,
        member: Member | None,
        listen: str | None = None,
        base: Path | None = None,
        synced: bool = False,
    ) -> None:
        self._catalog = catalog
        self._synced = synced
        self._directory = HomeDirectory(run, base, keep_s=DISK_KEEP_S if synced else KEEP_S)
        self.directory = self._directory.path
        self._mapper = Mapper(self.directory)
        self._reader = ColumnReader(self._mapper)
        self._threads = ThreadPoolExecutor(THREADS, "asyncflow-unit")
        self._service: Service | None = None
        self._closed = self._ready = False
        try:
            self._service = Service(
                UnitHost(host),
                self,
                listen=listen,
                member=member,
                insecure=member is None,
                max_call_bytes=MAX_REQUEST_BYTES,
            )
            self.offer = self._describe(name, self._service)
            self.where = HomeId(0, 0)
            if synced and self._directory.found:
                self._check_contents()
            self.beat()
            self._ready = True
        except BaseException:
            self.close(keep=True)
            raise

    def _describe(self, name: str, service: Service) -> HomeOffer:
        return HomeOffer(
            store=STORE, name=name, identity=self._directory.contents, address=service.address,
            key=service.public, directory=str(self.directory), owner=owner_of(self.directory),
        )  # fmt: skip

    def _check_contents(self) -> None:
        """Give up the needed blocks that are damaged. Meanwhile the home is open, but nothing is served."""
        checking = msgspec.structs.replace(self.offer, directory="", owner=this_host())
        self.where = where = HomeId(*self._catalog.open(checking))
        heard, damaged = time.monotonic(), list[int]()
        for segment, places in self._catalog.needed_blocks(*where).items():
            for start, serial, nbytes in places:
                if not is_intact(self.directory / segment, start, serial, nbytes):
                    damaged.append(serial)
                if time.monotonic() - heard > BEAT_S:
                    if HomeId(*self._catalog.open(checking)) != where:  # evicted meanwhile
                        return
                    heard = time.monotonic()
        self._lose(damaged, "blocks on its disk were found damaged after a restart")

    def _lose(self, serials: Collection[int], reason: str) -> None:
        if serials:
            _log.error("home %d: %s; blocks lost: %d", self.where.home, reason, len(serials))
            self._catalog.lose(*self.where, serials, reason)

    def beat(self) -> None:
        """Give a sign of life, remove the segments of lost epochs and of ended sessions, and give up
        blocks without a file. Raises ServerLost, ConfigError, FileNotFoundError if its directory is
        gone."""
        self._directory.touch()
        there = self._directory.segments()  # later ones may be of sessions that the server does not list
        self.where = where = HomeId(*self._catalog.open(self.offer))
        needed, sessions = self._catalog.needed(*where)
        for path in there:
            if home_of(path.name) != where or not (path.name in needed or session_of(path.name) in sessions):
                path.unlink(missing_ok=True)
        if missing := {name for name in needed if not (self.directory / name).exists()}:
            blocks = self._catalog.needed_blocks(*where)  # without those whose rows ended meanwhile
            gone = {name: places for name, places in blocks.items() if name in missing}
            serials = {serial for places in gone.values() for _, serial, _ in places}
            self._lose(serials, f"files were removed: {', '.join(sorted(gone))}")

    def serve(self, ended: Callable[[], bool], stop: threading.Event, *, beat_s: float = BEAT_S) -> bool:
        """Serve until the run has ended, its server was silent for ALONE_S, or ``stop`` is set. Return True
        if its files are needed no more. Raises ConfigError if another unit has taken its place."""
        heard = time.monotonic()
        while not stop.wait(beat_s):
            try:
                self.beat()
                heard = time.monotonic()
            except FileNotFoundError as error:
                _log.error("the directory of this storage unit is gone: %s", error)
                return True
            except WireError as error:
                if ended() or time.monotonic() - heard > ALONE_S:
                    return ended() or not self._synced
                _log.warning("the run's server does not answer this storage unit: %s", error)
        return ended()

    def close(self, *, keep: bool) -> None:
        """Stop serving. ``keep``: leave the files to the next unit; else remove them. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._service is not None:
            self._service.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._mapper.close()
        self._directory.close(keep=keep)

    # ---- called by the service

    def request(self, peer: str, ticket: int, body: bytes, frames: Frames) -> None:
        """See ``ServiceHandler.request``. Large columns are read in other threads."""
        try:
            request = _decode(body)
        except _BAD as error:
            raise ProtocolError(f"this request to a storage unit cannot be read: {error}") from None
        if not self._ready:
            raise ServerLost("this storage unit checks the files of an earlier one first")
        check_parts(request.parts)
        for part in request.parts:
            for segment in part.slices.segments:
                if home_of(segment) != self.where:
                    raise LeaseLost(
                        f"segment {segment[:100]!r} is not in epoch {self.where.epoch} of home {self.where.home}"
                    )
        nbytes = sum(int(np.frombuffer(part.slices.blocks, np.int64)[4::6].sum()) for part in request.parts)
        run = self._threads.submit if nbytes > SMALL_BYTES else lambda do, *arguments: do(*arguments)
        run(self._answer, ticket, lambda: read_parts(self._reader, request.parts))

    def _answer(self, ticket: int, make: Callable[[], tuple[FetchReply, Frames]]) -> None:
        assert self._service is not None
        try:
            reply, frames = make()
        except AsyncFlowError as error:
            self._service.fail(ticket, error)
        except Exception as error:  # one request must not end the unit
            _log.exception("a storage unit failed at a request")
            self._service.fail(ticket, ProtocolError(f"the storage unit failed at this request: {error!r}"))
        else:
            self._service.answer(ticket, encode(reply), frames)

    def gone(self, peer: str) -> None:
        """See ``ServiceHandler.gone``. Nothing is kept for a peer."""
