"""TransportPublisher: publishes versions for a trainer.

    publisher = TransportPublisher(queue, "shm", dtype="bfloat16")
    publication = publisher.publish(version, engine.named_weights(), untrained=engine.untrained)   # copied: training may go on
    publication.wait()                                                                             # current

``VersionWriter`` copies the tensors. A background thread completes their digests, sends the version through the
transport and reports it to the ledger. One version at a time is in progress; an error of its delivery is raised by
``wait`` or by the next ``publish``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

import msgspec

from .. import errors
from ..interfaces import Publication, RollbackResult, WeightPublisher
from ..interfaces.weights import NamedWeights
from ..ledger import commands as cmd
from ..queue import QueueClient
from ..queue.connection import BlockingPort
from ..queue.coroutines import run_blocking
from ..types import Chunk, Manifest, Probe
from ..types import events as ev
from ..types.config import validate_probe
from ..types.defaults import FETCH_S
from ..types.dtypes import check_floating
from ..types.manifest import BUCKET_BYTES
from .fetcher import decode_manifest
from .host import AUTO, host_of, make_transport
from .writer import BucketDigests, DtypePolicy, Rename, VersionWriter

_publishers = itertools.count()  # a session may open several, one after another
_STABLE = {dict, OrderedDict, list, tuple, type({}.items()), type(OrderedDict().items())}
"""Types whose tensors all exist; exact types only: a subclass may create tensors while it is iterated."""
_WANTED = "weights are a mapping of names to tensors, such as a state_dict(), or an iterable of such pairs"


class TransportPublication(Publication):
    """A version on its way from the trainer: hashed, sent, and made current. ``reported``: True once the server was
    asked to make it current. ``raised``: True once ``wait`` has raised or returned its result."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._stage = "being hashed"
        self.reported = self.raised = False
        self._result: Future[Manifest] = Future()
        self._lost = ""
        self._lock = threading.RLock()

    @property
    def done(self) -> bool:
        """True once the version is current, or has failed."""
        return self._result.done()

    def wait(self, timeout_s: float = FETCH_S) -> Manifest:
        """Return the manifest once the version is published; see ``Publication.wait``."""
        wait_for([self._result], timeout_s)
        if not self.done:
            raise errors.DeadlineExceeded(
                f"version {self.version} is not published after {timeout_s:g} s: it is {self._stage}"
            )
        self.raised = True
        manifest = self._result.result()
        if self._lost:
            raise errors.WeightError(self._lost)
        return manifest

    # ---- called by the publisher

    def enter(self, stage: str) -> None:
        """Note what is done with the version now, for errors."""
        self._stage = stage

    def succeed(self, manifest: Manifest) -> None:
        """Set the result: the version is current."""
        self._result.set_result(manifest)

    def fail(self, error: BaseException) -> None:
        """Set ``error`` as the result. No effect once there is one."""
        what = f"version {self.version} failed while it was {self._stage}"
        try:
            if not isinstance(error, errors.AsyncFlowError):
                raise errors.WeightError(f"{what}: {type(error).__name__}: {error}") from error
            if f"version {self.version}" not in str(error):
                raise type(error)(f"{what}: {error}") from error
            explained: BaseException = error
        except errors.AsyncFlowError as named:
            explained = named
        with self._lock:
            if not self.done:
                self._result.set_exception(explained)

    def lose(self, reason: str) -> None:
        """Note that another rank withdrew the version. ``reason`` names the rank."""
        self._lost = reason

    def start_report(self) -> None:
        """Note that only the server's reply decides now. Raises WeightError after ``give_up``."""
        with self._lock:
            if self.done:
                raise errors.WeightError(f"version {self.version} was given up")
            self.reported = True

    def give_up(self, error: BaseException) -> None:
        """Fail, unless the server was asked already: that request has its own deadline."""
        with self._lock:
            if not self.reported:
                self.fail(error)


class TransportPublisher(WeightPublisher):
    """Publishes versions through a ``WeightTransport``, for a trainer, or for rank ``rank`` of
    ``world_size`` ranks with a part each.

    ``transport``: "auto" is shm if all members of the run are on this host, else tcp. ``dtype``: of published
    floating-point tensors, or a function from name and dtype to dtype. ``rename``: from the engine's names to the
    checkpoint's. ``digests`` False: nothing can be verified. ``timeout_s``: how long the delivery of a version may
    delay the next. ``no_rollback``: the reason for refusing rollbacks, if the trainer cannot load an earlier version.
    ``model``: the trained Hugging Face folder; transport ``file`` copies its configuration and tokenizer beside the
    weights. ``options``: of the transport.

    Raises ConfigError if the run has another live publisher, for a ``dtype`` without floating-point
    numbers, and for options and hosts that the transport cannot work with.
    """

    def __init__(
        self,
        queue: QueueClient,
        transport: str = AUTO,
        *,
        rank: int = 0,
        world_size: int = 1,
        dtype: DtypePolicy | None = None,
        rename: Rename | None = None,
        digests: bool = True,
        timeout_s: float = FETCH_S,
        no_rollback: str = "",
        model: str | os.PathLike[str] = "",
        **options: Any,
    ) -> None:
        if dtype is not None and not callable(dtype):
            check_floating(dtype)
        self._connection = queue.connection
        self._port = BlockingPort(self._connection)
        self.transport, self.rank, self.world_size, self.timeout_s = transport, rank, world_size, timeout_s
        self._dtype, self._rename, self._digests = dtype, rename, digests
        name = f"{self._connection.session}-{next(_publishers)}"
        host = host_of(self._connection, name, rank=rank, world_size=world_size, model=os.fspath(model))
        if transport == AUTO:
            transport = self.transport = "tcp" if host.elsewhere else "shm"
        made = make_transport(transport, **options)
        self._sizes: Sequence[int] = ()
        self._delivery: TransportPublication | None = None
        self._newest: TransportPublication | None = None
        self._unconfirmed: int | None = None  # the server's reply about this version was lost
        self._preparation: Future[None] | None = None
        self._memory_needed = threading.Event()  # the next version needs the sender
        self._closed = False
        opened = run_blocking(
            self._port.send(cmd.OpenPublisher(rank=rank, world_size=world_size, no_rollback=no_rollback))
        )
        with contextlib.ExitStack() as undo:  # only the live publisher may change its transport's versions
            undo.callback(self._retire)
            self._sender = made.sender(host)
            undo.callback(self._sender.close)
            kept: list[tuple[Manifest, bytes]] = []
            for version, part in opened.kept:
                if part.transport == transport:
                    with contextlib.suppress(errors.AsyncFlowError):  # a broken manifest of a former publisher
                        kept.append((decode_manifest(version, rank, part), part.where))
            self._sender.adopt(kept)
            undo.pop_all()
        self.current: int = opened.version
        """The newest version known here; of several ranks, the newest of this rank's parts."""
        self._background = ThreadPoolExecutor(1, thread_name_prefix="asyncflow-publish")

    @property
    def nbytes(self) -> int:
        """Return the bytes of host memory held for weights."""
        return self._sender.nbytes

    def publish(
        self, version: int, weights: NamedWeights, *, probe: Probe | None = None, untrained: Sequence[str] = ()
    ) -> TransportPublication:
        """Make ``weights`` the current version; see ``WeightPublisher.publish``."""
        version, stable = version_number(version), type(weights) in _STABLE
        pairs = _pairs(version, weights)
        if probe is not None:
            probe = validate_probe(probe, scored=True)
        self._wait_for_delivery(f"version {version} cannot be published yet", self.timeout_s)
        if self._closed:
            raise errors.ConfigError(f"version {version}: this publisher is closed")
        began = time.monotonic()
        self._stop_preparation()
        digests = BucketDigests(self._background) if self._digests else None
        writer = VersionWriter(
            version, self._sender.room, digests, helper=self._background if len(os.sched_getaffinity(0)) > 1 else None, dtype=self._dtype,
            rename=self._rename, sizes=self._sizes,
        )  # fmt: skip
        self._delivery = announced = None
        try:
            try:
                announced = run_blocking(self._port.send(cmd.Announce(version=version, timeout_s=self.timeout_s)))
            finally:
                self._resolve_unconfirmed()
            if announced.lost and self._newest is not None:
                self._newest.lose(announced.lost)
            self._free_all_but(announced.keep)
            sizes = writer.write(pairs, stable=stable)
            if not writer.tensors and self.world_size == 1:
                raise errors.WeightMismatch(f"version {version} has no tensors")
            self._sizes, self._delivery = writer.sizes, TransportPublication(version)
            self._newest = self._delivery
            draft = Manifest(version, tuple(writer.tensors), tuple(map(Chunk, sizes)), BUCKET_BYTES, tuple(untrained))
            self._background.submit(self._deliver, self._delivery, draft, digests, probe)
        except BaseException as error:
            self._delivery = None
            if digests is not None:
                digests.cancel()
            if announced is not None or not isinstance(error, errors.AsyncFlowError):  # else it was refused
                self._withdraw(version, error)
            raise
        worker, took = self._connection.name, time.monotonic() - began
        self._connection.report(ev.Span(time_s=began, worker=worker, kind="publish", seconds=took, version=version))
        return self._delivery

    def rollback(self, version: int, reason: str = "") -> RollbackResult:
        """Make a kept version current under a new number; see ``WeightPublisher.rollback``."""
        version = version_number(version)
        self._wait_for_delivery(f"version {version} cannot be rolled back to yet", self.timeout_s)
        reply = run_blocking(self._port.send(cmd.Rollback(version=version, reason=reason)))
        self.current, self._unconfirmed = reply.version, None
        return RollbackResult(reply.version, reply.expired, reply.checkpoint)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything published is current; see ``WeightPublisher.flush``."""
        self._wait_for_delivery("not everything is published", self.timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Flush, and let another publisher take over; see ``WeightPublisher.close``."""
        if self._closed:
            return
        self._closed, delivery = True, self._delivery
        try:
            self.flush()
        finally:
            if delivery is not None:
                delivery.give_up(errors.WeightError("the publisher was closed"))
            self._stop_preparation()
            self._background.shutdown(wait=False, cancel_futures=True)
            self._retire()
            self._sender.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- in the background

    def _deliver(
        self, publication: TransportPublication, draft: Manifest, digests: BucketDigests | None, probe: Probe | None
    ) -> None:
        version = publication.version
        try:
            found = [()] * len(draft.chunks) if digests is None else digests.wait()
            chunks = tuple(Chunk(each.nbytes, of) for each, of in zip(draft.chunks, found, strict=True))
            manifest = msgspec.structs.replace(draft, chunks=chunks)
            publication.enter(f"being sent through transport {self.transport!r}")
            where = self._sender.send(manifest)
            publication.enter(f"being told to the server at {self._connection.wire.address}")
            part = cmd.VersionPart(
                manifest=msgspec.msgpack.encode(manifest), transport=self.transport, where=where, root=manifest.root,
                nbytes=manifest.nbytes, outlives=self._sender.outlives,
            )  # fmt: skip
            command = cmd.Publish(version=version, part=part, probe=msgspec.msgpack.encode(probe) if probe else b"")
            publication.start_report()
            keep = run_blocking(self._port.send(command)).keep
        except BaseException as error:
            if publication.done:  # given up, and the publisher is closed
                return
            if isinstance(error, errors.ServerLost) and publication.reported:
                self._unconfirmed = version
                error = errors.ServerLost(f"{error}. Nobody knows whether it is current; the next publish finds out")
            else:
                self._withdraw(version, error)
            publication.fail(error)
        else:
            self.current = version
            self._free_all_but(keep)
            self._memory_needed.clear()
            with contextlib.suppress(RuntimeError):  # the publisher was closed
                self._preparation = self._background.submit(self._prepare)
            publication.succeed(manifest)

    def _free_all_but(self, versions: Sequence[int]) -> None:
        """Free the memory of other versions; memory still in use, with the next version."""
        try:
            self._sender.keep(versions)
        except Exception as error:
            self._note(f"memory of versions that are kept no longer is not free yet: {type(error).__name__}: {error}")

    def _resolve_unconfirmed(self) -> None:
        """Ask whether a version became current whose reply was lost. Call after the next request,
        behind which the lost one cannot arrive."""
        if self._unconfirmed is None:
            return
        with contextlib.suppress(errors.AsyncFlowError):
            self.current = run_blocking(self._port.send(cmd.GetStatus())).version
            if self.current == self._unconfirmed:
                self._note(f"version {self.current} is current: only the server's answer was lost")
            self._unconfirmed = None

    def _note(self, text: str) -> None:
        worker = self._connection.name
        self._connection.report(ev.Note(time_s=time.monotonic(), worker=worker, text=text, level="warning"))

    def _prepare(self) -> None:
        with contextlib.suppress(errors.MemoryFull):  # raised again when the memory is needed
            for _ in self._sender.prepare(self._sizes):
                if self._memory_needed.is_set():
                    return

    def _retire(self) -> None:
        with contextlib.suppress(errors.AsyncFlowError):
            run_blocking(self._port.send(cmd.ClosePublisher()))

    def _stop_preparation(self) -> None:
        self._memory_needed.set()
        if self._preparation is not None:
            wait_for([self._preparation])  # one step at most

    def _withdraw(self, version: int, error: BaseException) -> None:
        with contextlib.suppress(Exception):
            self._sender.abandon()
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(errors.AsyncFlowError):
            run_blocking(self._port.send(cmd.Withdraw(version=version, reason=reason[:1000])))

    def _wait_for_delivery(self, what: str, timeout_s: float) -> None:
        """Wait until the sender is free. Raises the error of the version in progress, once."""
        delivery = self._delivery
        if delivery is not None and not delivery.raised:
            try:
                delivery.wait(timeout_s)
            except errors.DeadlineExceeded as error:
                raise errors.DeadlineExceeded(f"{what}: {error}") from None
            finally:
                if delivery.done:
                    self._delivery = None


def version_number(version: Any) -> int:
    """Return ``version`` as an int. Raises ConfigError unless it is a whole number of 0 or more."""
    try:
        number = -1 if isinstance(version, bool) else operator.index(version)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 63:
        raise errors.ConfigError(f"the number of a version is an int of 0 or more, not {version!r}")
    return number


def _pairs(version: int, weights: Any) -> Iterator[tuple[str, Any]]:
    """Return pairs of name and tensor. No tensor is referenced here while the next is requested. Raises
    ConfigError for values that are neither a mapping nor pairs."""
    found = weights.items() if isinstance(weights, Mapping) else weights
    if not isinstance(found, Iterable) or isinstance(found, (str, bytes)):
        raise errors.ConfigError(f"version {version}: {_WANTED}, not {_describe(weights)}")
    return map(functools.partial(_pair, version), itertools.count(), found)


def _pair(version: int, number: int, item: Any) -> tuple[str, Any]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise errors.ConfigError(f"version {version}: {_WANTED}; item {number} is {_describe(item)}")
    return item[0], item[1]


def _describe(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"{value!r}"[:80] if isinstance(value, str) else f"a {type(value).__name__}"
