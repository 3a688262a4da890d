"""StorageUnit: serves the memory of one host to clients elsewhere.

    unit = StorageUnit(catalog, run="asyncflow-0-17-ab", name="node7", host="10.0.0.7", key=run_key)
    unit.serve(ended)                       # until the run ends; gives a sign of life every few seconds
    unit.close(keep=False)

Clients on its host write segments into its directory and map them. It has no ledger, no journal and
no state but these files, so its process may die: the next unit of the run on this host finds them.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...errors import AsyncFlowError, ConfigError, LeaseLost, ProtocolError, WireError
from ...interfaces.store import HomeCatalog, HomeOffer
from ...memory import HomeDirectory, Mapper
from ...wire import Frames, RunKey, ServerKeys, Service, generate_keys
from .fetch import FetchRequest, check_parts, encode, read_parts
from .home_clients import MAX_REQUEST_BYTES
from .homes import HomeId, home_of, owner_of, session_of
from .reader import ColumnReader
from .replica_arenas import ReplicaArenas
from .replica_chunks import KeptReplica, ReplicaChunk

BEAT_S = 5.0
"""Interval of signs of life."""
ALONE_S = 3600.0
"""A unit without contact to its run's server for this long ends."""
THREADS = 2
STORE = "hosts"
_decode = msgspec.msgpack.Decoder(FetchRequest | ReplicaChunk).decode
_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_log = logging.getLogger(__name__)


class UnitHost(NamedTuple):
    """The host of a unit. ``address``: its IP address."""

    address: str


class StorageUnit:
    """A home in a directory of this host, and its socket.

    ``name``: of the home, unique in the run. ``host``: the IP address at which others reach this
    host. ``listen``: an address; default: a free port of ``host``. ``key``: a key of the run's
    clients, which is accepted; None: ``insecure``, everyone is. ``base``: see ``HomeDirectory``.
    Raises ConfigError, ServerLost; FileNotFoundError if files that an earlier unit left are gone: then
    its directory is removed, and the next unit begins anew.
    """

    def __init__(
        self,
        catalog: HomeCatalog,
        run: str,
        *,
        name: str,
        host: str,
        key: RunKey | None,
        insecure: bool = False,
        listen: str | None = None,
        base: Path | None = None,
    ) -> None:
        if key is None and not insecure:
            raise ConfigError(
                "a storage unit needs the run's key, or insecure=True if the run is served without keys"
            )
        self._catalog = catalog
        self._directory = HomeDirectory(run, base)
        self.directory = self._directory.path
        self._mapper = Mapper(self.directory)
        self._reader = ColumnReader(self._mapper)
        self._replicas = ReplicaArenas(self.directory)
        self._threads = ThreadPoolExecutor(THREADS, "asyncflow-unit")
        self._service: Service | None = None
        self._closed = False
        try:
            keys = None if key is None else msgspec.structs.replace(generate_keys().server, clients=(key.public,))
            self._service = Service(
                UnitHost(host), self, listen=listen, keys=keys, insecure=insecure, max_call_bytes=MAX_REQUEST_BYTES
            )
            self._offer = self._describe(name, keys)
            self.where = HomeId(0, 0)
            self.beat()
        except BaseException as error:
            self.close(keep=not isinstance(error, FileNotFoundError))
            raise

    @property
    def address(self) -> str:
        """The address of its socket."""
        return self._offer.address

    def _describe(self, name: str, keys: ServerKeys | None) -> HomeOffer:
        assert self._service is not None
        owner = owner_of(self.directory)
        return HomeOffer(
            store=STORE, name=name, identity=owner, address=self._service.address, key="" if keys is None else keys.public,
            directory=str(self.directory), owner=owner,
        )  # fmt: skip

    def beat(self) -> None:
        """Give a sign of life, and remove the segments of lost epochs and of ended sessions. Raises
        ServerLost, ConfigError, FileNotFoundError if its directory or a needed segment is gone."""
        self._directory.touch()
        # before the server is asked: later segments may be of sessions that it does not list
        there, held = self._directory.segments(), self._replicas.held()
        self.where = where = HomeId(*self._catalog.open(self._offer))
        needed, sessions = self._catalog.needed(*where)
        for path in there:
            writable = session_of(path.name) in sessions and not self._replicas.abandoned(path.name)
            if home_of(path.name) != where or not (path.name in needed or writable):
                path.unlink(missing_ok=True)
        self._replicas.sweep(held, where, sessions, lambda: self._catalog.needed_replicas(*where))
        self._check_segments(needed)

    def _check_segments(self, needed: Set[str]) -> None:
        missing = {name for name in needed if not (self.directory / name).exists()}
        if missing and (gone := missing & self._catalog.needed(*self.where)[0]):  # else its rows ended meanwhile
            raise FileNotFoundError(errno.ENOENT, "a segment was removed", str(self.directory / min(gone)))

    def serve(self, ended: Callable[[], bool], stop: threading.Event, *, beat_s: float = BEAT_S) -> bool:
        """Serve until the run has ended, or ``stop`` is set. Return True if its files are needed no more:
        the run has ended, its server was silent for ALONE_S, or files of it are gone. Raises
        ConfigError if another unit has taken its place."""
        heard = time.monotonic()
        while not stop.wait(beat_s):
            try:
                self.beat()
                heard = time.monotonic()
            except FileNotFoundError as error:
                _log.error("files of this storage unit are gone: %s", error)
                return True
            except WireError as error:
                if ended() or time.monotonic() - heard > ALONE_S:
                    return True
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
        self._replicas.close()
        self._directory.close(keep=keep)

    # ---- called by the service

    def request(self, peer: str, ticket: int, body: bytes, frames: Frames) -> None:
        """See ``ServiceHandler.request``. Columns are read, and replicas written, in other threads."""
        try:
            request = _decode(body)
        except _BAD as error:
            raise ProtocolError(f"this request to a storage unit cannot be read: {error}") from None
        if isinstance(request, ReplicaChunk):
            if len(frames) != 1:
                raise ProtocolError(f"{len(frames)} frames came with a chunk of a block")
            self._threads.submit(self._answer, ticket, lambda: self._keep(request, frames[0]))
            return
        check_parts(request.parts)
        for part in request.parts:
            for segment in part.slices.segments:
                if home_of(segment) != self.where:
                    raise LeaseLost(
                        f"segment {segment[:100]!r} is not in epoch {self.where.epoch} of home {self.where.home}"
                    )
        self._threads.submit(self._answer, ticket, lambda: read_parts(self._reader, request.parts))

    def _keep(self, chunk: ReplicaChunk, data: Any) -> tuple[KeptReplica, Frames]:
        return KeptReplica(self._replicas.write(self.where, chunk, data)), ()

    def _answer(self, ticket: int, make: Callable[[], tuple[Any, Frames]]) -> None:
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
