"""StorageUnit: serves the memory of one host to clients elsewhere. ``ensure_unit`` starts one.

    unit = StorageUnit(catalog, run="asyncflow-0-17-ab", name="node7", host="10.0.0.7", member=member)
    unit.serve(ended)                       # until the run ends; gives a sign of life every few seconds
    unit.close(keep=False)

Clients on its host write segments into its directory and map them. It has no ledger, no journal and
no state but these files, so its process may die: the next unit of the run on this host finds them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from ...errors import AsyncFlowError, DeadlineExceeded, LeaseLost, ProtocolError, WireError
from ...interfaces.store import HomeCatalog, HomeOffer, HomeUnit
from ...memory import HomeDirectory, Mapper
from ...wire import Frames, Member, RunKey, Service
from .fetch import DECODE_ERRORS, MAX_REQUEST_BYTES, FetchReply, FetchRequest, check_parts, encode, read_parts
from .homes import HomeId, home_of, owner_of, session_of
from .reader import ColumnReader

BEAT_S = 5.0
"""Interval of signs of life."""
ALONE_S = 3600.0
"""A unit without contact to its run's server for this long ends."""
START_S = 120.0
"""Limit of the wait for a unit to start: it imports the SDK first, on a host that may be busy."""
PROGRAM = ("-m", "asyncflow_sdk.queue.unit_process")
PAUSE_S = 0.1
THREADS = 2
SMALL_BYTES = 1 << 20
"""Blocks of up to this size are read in the service's thread."""
_decode = msgspec.msgpack.Decoder(FetchRequest).decode
_log = logging.getLogger(__name__)


class StorageUnit(HomeUnit):
    """A home in a directory of this host, and its socket.

    ``name``: of the home, unique in the run. ``host``: the IP address at which others reach this host. ``listen``: an
    address; default: a free port of ``host``. ``member``: this process in the run, to admit its other members; None:
    without keys, everyone is admitted. Raises ConfigError, ServerLost.
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
    ) -> None:
        self._catalog = catalog
        self._directory = HomeDirectory(run)
        self.directory = self._directory.path
        self._mapper = Mapper(self.directory)
        self._reader = ColumnReader(self._mapper)
        self._threads = ThreadPoolExecutor(THREADS, "asyncflow-unit")
        self._service: Service | None = None
        self._closed = False
        try:
            self._service = Service(
                host, self, listen=listen, member=member, insecure=member is None, max_call_bytes=MAX_REQUEST_BYTES
            )
            self.offer = HomeOffer(
                store="hosts", name=name, identity=self._directory.contents, address=self._service.address,
                key=self._service.public, directory=str(self.directory), owner=owner_of(self.directory),
            )  # fmt: skip
            self.beat()
        except BaseException:
            self.close(keep=True)
            raise

    def beat(self) -> None:
        """Give a sign of life, and remove the segments of lost epochs and of ended sessions. If a needed
        file was removed, the contents are given up, and a new epoch begins. Raises ServerLost,
        ConfigError, FileNotFoundError if its directory is gone."""
        self._directory.touch()
        there = self._directory.segments()  # later ones may be of sessions that the server does not list
        self.where = where = HomeId(*self._catalog.open(self.offer))
        needed, sessions = self._catalog.needed(*where)
        for path in there:
            if home_of(path.name) != where or not (path.name in needed or session_of(path.name) in sessions):
                path.unlink(missing_ok=True)
        missing = {name for name in needed if not (self.directory / name).exists()}
        if missing and (gone := missing & self._catalog.needed(*where)[0]):  # rows of the others ended meanwhile
            _log.error("home %d: files were removed, so it begins anew: %s", where.home, ", ".join(sorted(gone)))
            self._directory.begin_anew()
            self.offer = msgspec.structs.replace(self.offer, identity=self._directory.contents)
            self.where = HomeId(*self._catalog.open(self.offer))

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
        self._directory.close(keep=keep)

    # ---- called by the service

    def request(self, peer: str, ticket: int, body: bytes) -> None:
        """See ``ServiceHandler.request``. Large columns are read in other threads."""
        try:
            request = _decode(body)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"this request to a storage unit cannot be read: {error}") from None
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
        except Exception as error:  # one request must not end the unit
            if not isinstance(error, AsyncFlowError):
                _log.exception("a storage unit failed at a request")
                error = ProtocolError(f"the storage unit failed at this request: {error!r}")
            self._service.fail(ticket, error)
        else:
            self._service.answer(ticket, encode(reply), frames)

    def gone(self, peer: str) -> None:
        """See ``ServiceHandler.gone``. Nothing is kept for a peer."""


class UnitConfig(msgspec.Struct, frozen=True):
    """A unit to start. ``address``: of the run. ``name``: of its home; "": a name of this host. ``key``,
    ``insecure``, ``listen``: see ``StorageUnit``."""

    address: str
    name: str = ""
    key: RunKey | None = None
    insecure: bool = False
    listen: str | None = None


def ensure_unit(run: str, config: UnitConfig, is_open: Callable[[], bool], *, timeout_s: float = START_S) -> None:
    """Return once ``is_open`` is true. Else start a unit first, in a session of its own: it outlives this process.
    Workers of one host may start at the same time: the holder of a lock on a file starts the unit, and the others
    wait. Raises DeadlineExceeded, with the end of the unit's output; the errors of ``is_open``."""
    until = time.monotonic() + timeout_s
    log = unit_log(run)
    with _locked(log.with_suffix(".lock"), run, until):
        if is_open():
            return
        with open(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as output:
            process = subprocess.Popen(
                [sys.executable, *PROGRAM], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # the key, which a command line would show
            process.stdin.write(msgspec.json.encode(config))
        while not is_open():
            status = process.poll()
            if status is not None or time.monotonic() >= until:
                why = "did not open its home" if status is None else f"ended with {status}"
                if status is None:
                    process.kill()
                    process.wait()
                with contextlib.suppress(OSError):
                    why += f"; its log, {log}, ends: {log.read_text(errors='replace')[-500:].strip()}"
                raise DeadlineExceeded(f"the storage unit of this host {why}")
            time.sleep(PAUSE_S)


def unit_log(run: str) -> Path:
    """Return the path of the output of a run's unit on this host. The lock has the suffix ".lock"."""
    return Path(tempfile.gettempdir()) / f"asyncflow-{os.getuid()}-{run}-unit.log"


def remove_unit_log(run: str) -> None:
    """Remove the files left by ``ensure_unit``, once the run has ended."""
    for path in (unit_log(run), unit_log(run).with_suffix(".lock")):
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def _locked(path: Path, run: str, until: float) -> Iterator[None]:
    with open(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise DeadlineExceeded(
                        f"another process is starting the storage unit of run {run} on this host, and is not done in"
                        f" time; it holds {path}"
                    ) from None
                time.sleep(PAUSE_S)
        yield
