"""TransportPublisher: publishes versions for a trainer.

    publisher = TransportPublisher(queue, "shm", dtype="bfloat16")
    publication = publisher.publish(version, engine.named_weights())   # copied: training may go on
    publication.wait()                                                 # current; otherwise the next publish says what went wrong

Tensors are hashed as they are copied, or by a thread behind; when they all are, it makes the version available and
tells the ledger. One version at a time is under way.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
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
from .arguments import lasts, pairs, version_number
from .choices import AUTO, choose_transport, make_transport
from .chunk_copier import helps
from .hashing import BucketDigests
from .host import host_of
from .publication import TransportPublication
from .writer import DtypePolicy, Rename, VersionWriter

_publishers = itertools.count()  # a session may publish from more than one, one after another


def check_publishing(transport: str, options: Mapping[str, Any]) -> None:
    """Raises before there is a run what ``TransportPublisher(queue, transport, **options)`` would raise in a process like this one."""
    own = inspect.signature(TransportPublisher).parameters
    elsewhere = sorted(options.keys() & {"queue", "transport", "dtype"})
    if elsewhere:
        raise ConfigError(
            f"{', '.join(map(repr, elsewhere))} is no option of a transport; give it beside the options"
        )
    make_transport(transport, **{name: value for name, value in options.items() if name not in own}).check()


class TransportPublisher(WeightPublisher):
    """Publishes versions through a ``WeightTransport``, for a trainer, or for rank ``rank`` of ``world_size`` that each publish a part.

    ``transport``: "auto" is shm where all of the run are on this host, else tcp. ``dtype``: in which floating-point tensors are published, or a function from name and dtype to dtype. ``rename``: from the
    engine's names to those of the checkpoint. ``digests`` False: nothing can be verified. ``timeout_s``: how long the delivery
    of a version may hold up the next. ``no_rollback``: why the trainer cannot load the bytes of an earlier version: rollbacks are
    refused with this reason. ``model``: the Hugging Face folder that is trained, whose configuration and
    tokenizer transport ``file`` puts beside the weights. ``options``: of the transport. One live publisher a run: raises ConfigError for
    another, for a dtype that is not one of floating-point numbers, and for what the transport cannot do.
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
        self._doubtful: int | None = None  # a version of which the server's last word was lost
        self._preparing: Future[None] | None = None
        self._needed = threading.Event()  # the sender, by somebody else than who prepares
        self._closed = False
        role = run_blocking(
            self._port.send(cmd.OpenPublisher(rank=rank, world_size=world_size, no_rollback=no_rollback))
        )
        try:  # with the role: what a live publisher has is touched by no other
            self._sender = made.sender(host)
            try:
                kept = [part for _, part in role.kept if part.transport == transport]
                self._sender.adopt(
                    [(manifest, p.where) for p in kept if (manifest := _readable(p.manifest)) is not None]
                )
            except BaseException:
                self._sender.close()
                raise
        except BaseException:
            with contextlib.suppress(AsyncFlowError):
                run_blocking(self._port.send(cmd.ClosePublisher()))
            raise
        self.current: int = role.version
        """The newest version that is known here: current, or, of several ranks, one that this rank's part of is there."""
        self._background = ThreadPoolExecutor(1, thread_name_prefix="asyncflow-publish")

    @property
    def nbytes(self) -> int:
        return self._sender.nbytes

    def publish(
        self, version: int, weights: Mapping[str, Any] | Iterable[tuple[str, Any]], *, probe: Probe | None = None
    ) -> TransportPublication:
        version, lasting, weights = version_number(version), lasts(weights), pairs(version, weights)
        if probe is not None:
            probe = validate_probe(probe, scored=True)
        self._settle(f"version {version} cannot be published yet", self.timeout_s)
        if self._closed:
            raise ConfigError(f"version {version}: this publisher is closed")
        began = time.monotonic()
        self._stop_preparing()
        hashing = BucketDigests(self._background) if self._digests else None
        writer = VersionWriter(
            version, self._sender.room, hashing, helper=self._background if helps() else None, dtype=self._dtype,
            rename=self._rename, sizes=self._sizes,
        )  # fmt: skip
        announced = True
        try:
            try:
                told = run_blocking(self._port.send(cmd.Announce(version=version, timeout_s=self.timeout_s)))
            except AsyncFlowError:
                announced = False
                raise
            finally:
                self._clear_doubt()
            if told.lost and self._newest is not None:
                self._newest._lose(told.lost)
            self._keep(told.keep)
            sizes = writer.write(weights, lasting=lasting)
            if not writer.tensors and self.world_size == 1:
                raise WeightMismatch(f"version {version} has no tensors")
            self._sizes, self._delivery = writer.sizes, TransportPublication(version)
            self._newest = self._delivery
            self._background.submit(self._deliver, self._delivery, writer.tensors, sizes, hashing, probe)
        except BaseException as error:
            self._delivery = None
            if announced:
                if hashing is not None:
                    hashing.cancel()
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
        version = version_number(version)
        self._settle(f"version {version} cannot be rolled back to yet", self.timeout_s)
        reply = run_blocking(self._port.send(cmd.Rollback(version=version, reason=reason)))
        self.current, self._doubtful = reply.version, None
        return RollbackResult(reply.version, reply.expired, reply.checkpoint)

    def flush(self, timeout_s: float | None = None) -> None:
        self._settle("not everything is published", self.timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        if self._closed:
            return
        self._closed, delivery = True, self._delivery
        try:
            self.flush()
        finally:
            if delivery is not None:
                delivery._give_up(WeightError("the publisher was closed"))
            self._stop_preparing()
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
        self,
        publication: TransportPublication,
        tensors: Any,
        sizes: Sequence[int],
        hashing: BucketDigests | None,
        probe: Probe | None,
    ) -> None:
        version = publication.version
        try:
            digests = [()] * len(sizes) if hashing is None else hashing.digests()
            chunks = tuple(Chunk(*each) for each in zip(sizes, digests, strict=True))
            manifest = Manifest(version, tensors, chunks, BUCKET_BYTES)
            publication.doing = f"being sent through transport {self.transport!r}"
            where = self._sender.send(manifest)
            publication.doing = f"being told to the server at {self._connection.wire.address}"
            part = cmd.VersionPart(
                manifest=msgspec.msgpack.encode(manifest), transport=self.transport, where=where, root=manifest.root,
                nbytes=manifest.nbytes, outlives=self._sender.outlives,
            )  # fmt: skip
            command = cmd.Publish(version=version, part=part, probe=msgspec.msgpack.encode(probe) if probe else b"")
            publication._last_word()
            keep = run_blocking(self._port.send(command)).keep
        except BaseException as error:
            if publication.done:  # given up, and so was the role
                return
            if isinstance(error, ServerLost) and publication.told:
                self._doubtful = version
                error = ServerLost(f"{error}. Nobody knows whether it is current; the next publish finds out")
            else:
                with contextlib.suppress(Exception):
                    self._sender.abandon()
                self._withdraw(version, error)
            publication._failed(error)
        else:
            self.current = version
            self._keep(keep)
            self._needed.clear()
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._preparing = self._background.submit(self._prepare)
            publication._done.set_result(manifest)

    def _keep(self, versions: Sequence[int]) -> None:
        """What is not freed now is freed with the next version: no reason to have none."""
        try:
            self._sender.keep(versions)
        except Exception as error:
            self._note(f"memory of versions that are kept no longer is not free yet: {type(error).__name__}: {error}")

    def _clear_doubt(self) -> None:
        """Find out what became of a version of which the last word was lost, once it cannot arrive any more."""
        if self._doubtful is None:
            return
        with contextlib.suppress(AsyncFlowError):
            self.current = run_blocking(self._port.send(cmd.GetStatus())).version
            if self.current == self._doubtful:
                self._note(f"version {self.current} is current: only the server's answer was lost")
            self._doubtful = None

    def _note(self, text: str) -> None:
        worker = self._connection.name
        self._connection.report(ev.Note(time_s=time.monotonic(), worker=worker, text=text, level="warning"))

    def _prepare(self) -> None:
        """Get memory for the next version while nobody waits for it."""
        with contextlib.suppress(MemoryFull):  # it will be said when it is needed
            for _ in self._sender.prepare(self._sizes):
                if self._needed.is_set():
                    return

    def _stop_preparing(self) -> None:
        self._needed.set()
        if self._preparing is not None:
            wait_for([self._preparing])  # a step at most

    def _withdraw(self, version: int, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(AsyncFlowError):
            run_blocking(self._port.send(cmd.Withdraw(version=version, reason=reason[:1000])))

    def _settle(self, what: str, timeout_s: float) -> None:
        """Wait for the version under way, and until the sender is free. Raises what went wrong with it, once."""
        delivery = self._delivery
        if delivery is not None and not delivery._heard:
            try:
                delivery.wait(timeout_s)
            except DeadlineExceeded as error:
                raise DeadlineExceeded(f"{what}: {error}") from None
            finally:
                if delivery.done:
                    self._delivery = None


def _readable(manifest: bytes) -> Manifest | None:
    """Of a publisher before this one; what it spoilt must not keep this one from going on."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.msgpack.decode(manifest, type=Manifest)
    return None
