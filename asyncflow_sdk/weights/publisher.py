"""TransportPublisher: publishes versions for a trainer.

    publisher = TransportPublisher(queue, "shm", dtype="bfloat16")
    publication = publisher.publish(version, engine.named_weights(), untrained=engine.untrained)   # copied: training may go on
    publication.wait()                                                                             # current

``VersionWriter`` copies the tensors. A background thread completes their digests, sends the version
through the transport and reports it to the ledger. One version at a time is in progress; an error
of its delivery is raised by ``wait`` or by the next ``publish``.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

import msgspec

from ..errors import (
    AsyncFlowError,
    ConfigError,
    DeadlineExceeded,
    MemoryFull,
    ServerLost,
    WeightError,
    WeightMismatch,
)
from ..interfaces import RollbackResult, WeightPublisher
from ..interfaces.weights import NamedWeights
from ..ledger import commands as cmd
from ..queue import QueueClient
from ..queue.connection import BlockingPort
from ..queue.coroutines import run_blocking
from ..types import Chunk, Manifest, Probe
from ..types import events as ev
from ..types.defaults import FETCH_S
from ..types.dtypes import check_floating
from ..types.manifest import BUCKET_BYTES
from ..types.probe import validate_probe
from .arguments import is_stable, iterate_pairs, version_number
from .choices import AUTO, choose_transport, make_transport
from .chunk_copier import BucketDigests, has_spare_core
from .host import host_of
from .publication import TransportPublication
from .writer import DtypePolicy, Rename, VersionWriter

_publishers = itertools.count()  # a session may open several, one after another


def check_publisher(transport: str, options: Mapping[str, Any]) -> None:
    """Raise the errors of ``TransportPublisher(queue, transport, **options)`` in a process like
    this one, as far as they are known before there is a run."""
    own = inspect.signature(TransportPublisher).parameters
    elsewhere = sorted(options.keys() & {"queue", "transport", "dtype"})
    if elsewhere:
        raise ConfigError(
            f"{', '.join(map(repr, elsewhere))} is no option of a transport; give it beside the options"
        )
    make_transport(transport, **{name: value for name, value in options.items() if name not in own}).check()


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
            transport = self.transport = choose_transport(host.elsewhere, {}).chosen
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
        try:  # only the live publisher may change its transport's versions
            self._sender = made.sender(host)
            try:
                kept = [part for _, part in opened.kept if part.transport == transport]
                self._sender.adopt(
                    [(manifest, p.where) for p in kept if (manifest := _decode_or_none(p.manifest)) is not None]
                )
            except BaseException:
                self._sender.close()
                raise
        except BaseException:
            with contextlib.suppress(AsyncFlowError):
                run_blocking(self._port.send(cmd.ClosePublisher()))
            raise
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
        version, stable = version_number(version), is_stable(weights)
        pairs = iterate_pairs(version, weights)
        if probe is not None:
            probe = validate_probe(probe, scored=True)
        self._wait_for_delivery(f"version {version} cannot be published yet", self.timeout_s)
        if self._closed:
            raise ConfigError(f"version {version}: this publisher is closed")
        began = time.monotonic()
        self._stop_preparation()
        digests = BucketDigests(self._background) if self._digests else None
        writer = VersionWriter(
            version, self._sender.room, digests, helper=self._background if has_spare_core() else None, dtype=self._dtype,
            rename=self._rename, sizes=self._sizes,
        )  # fmt: skip
        is_announced = True
        try:
            try:
                announced = run_blocking(self._port.send(cmd.Announce(version=version, timeout_s=self.timeout_s)))
            except AsyncFlowError:
                is_announced = False
                raise
            finally:
                self._resolve_unconfirmed()
            if announced.lost and self._newest is not None:
                self._newest.lose(announced.lost)
            self._free_all_but(announced.keep)
            sizes = writer.write(pairs, stable=stable)
            if not writer.tensors and self.world_size == 1:
                raise WeightMismatch(f"version {version} has no tensors")
            self._sizes, self._delivery = writer.sizes, TransportPublication(version)
            self._newest = self._delivery
            draft = Manifest(version, writer.tensors, tuple(map(Chunk, sizes)), BUCKET_BYTES, tuple(untrained))
            self._background.submit(self._deliver, self._delivery, draft, digests, probe)
        except BaseException as error:
            self._delivery = None
            if is_announced:
                if digests is not None:
                    digests.cancel()
                with contextlib.suppress(Exception):
                    self._sender.abandon()
                self._withdraw(version, error)
            raise
        took = time.monotonic() - began
        self._connection.report(
            ev.Span(time_s=began, worker=self._connection.name, kind="publish", seconds=took, version=version)
        )
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
                delivery.give_up(WeightError("the publisher was closed"))
            self._stop_preparation()
            self._background.shutdown(wait=False, cancel_futures=True)
            with contextlib.suppress(AsyncFlowError):
                run_blocking(self._port.send(cmd.ClosePublisher()))
            self._sender.close()

    def __enter__(self) -> TransportPublisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- behind

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
            if isinstance(error, ServerLost) and publication.reported:
                self._unconfirmed = version
                error = ServerLost(f"{error}. Nobody knows whether it is current; the next publish finds out")
            else:
                with contextlib.suppress(Exception):
                    self._sender.abandon()
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
        with contextlib.suppress(AsyncFlowError):
            self.current = run_blocking(self._port.send(cmd.GetStatus())).version
            if self.current == self._unconfirmed:
                self._note(f"version {self.current} is current: only the server's answer was lost")
            self._unconfirmed = None

    def _note(self, text: str) -> None:
        worker = self._connection.name
        self._connection.report(ev.Note(time_s=time.monotonic(), worker=worker, text=text, level="warning"))

    def _prepare(self) -> None:
        """Allocate memory for the next version in advance."""
        with contextlib.suppress(MemoryFull):  # raised again when the memory is needed
            for _ in self._sender.prepare(self._sizes):
                if self._memory_needed.is_set():
                    return

    def _stop_preparation(self) -> None:
        self._memory_needed.set()
        if self._preparation is not None:
            wait_for([self._preparation])  # one step at most

    def _withdraw(self, version: int, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(AsyncFlowError):
            run_blocking(self._port.send(cmd.Withdraw(version=version, reason=reason[:1000])))

    def _wait_for_delivery(self, what: str, timeout_s: float) -> None:
        """Wait until the sender is free. Raises the error of the version in progress, once."""
        delivery = self._delivery
        if delivery is not None and not delivery.raised:
            try:
                delivery.wait(timeout_s)
            except DeadlineExceeded as error:
                raise DeadlineExceeded(f"{what}: {error}") from None
            finally:
                if delivery.done:
                    self._delivery = None


def _decode_or_none(manifest: bytes) -> Manifest | None:
    """Decode a former publisher's manifest; None if it is broken."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.msgpack.decode(manifest, type=Manifest)
    return None
