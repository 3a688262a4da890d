"""Trainers and replicas that stop at a named moment, to be killed or frozen there.

A child says what it has done, a list at a time: ["published", 3], ["on", 3, [3.0]] (of which versions are the weights that it
holds), ["at", "sending"] (it has stopped there and goes on when it hears anything).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from children import hear, say
from file_children import mount

import asyncflow_sdk as af
from asyncflow_sdk.errors import MemoryFull
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue import LoopPort
from asyncflow_sdk.types import manifest as manifests
from asyncflow_sdk.weights import WeightPublisher
from asyncflow_sdk.weights.hashing import Hashing

PUBLISHING = ("announced", "copying", "hashing", "sending", "sent", "published")
REPLICA = ("awaiting", "fetching", "staged", "swapping", "loading", "committed")
TENSORS = 6
ELEMENTS = 1 << 19
MODEL = TENSORS * ELEMENTS * 4


def weights(version: int) -> Iterator[tuple[str, Any]]:
    """12 MB that all hold the version, and an eighth more from tensor to tensor."""
    for n in range(TENSORS):
        yield f"layer.{n}.weight", np.full(ELEMENTS, version + n / 8, np.float32)


def versions_of(held: dict[str, Any]) -> list[float]:
    """Which versions these weights are of: of one, if they are whole."""
    offsets = [(array, n / 8) for n, array in enumerate(held.values())]
    return sorted({float(v) - offset for array, offset in offsets for v in (array.min(), array.max())})


def stop(moment: str) -> None:
    say(["at", moment])
    hear()


def once(function: Callable[..., Any], moment: str, *, after: bool = False, at: int = 1) -> Callable[..., Any]:
    """``function``, that stops before or after its call number ``at``."""
    calls: list[int] = []

    def stopping(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == at and not after:
            stop(moment)
        result = function(*arguments, **options)
        if len(calls) == at and after:
            stop(moment)
        return result

    return stopping


# ---- trainers


def train(address: str, transport: str, options: dict[str, Any], moment: str) -> None:
    """Publish the next version; then, told a number of versions, publish them, stopping in the first of them at ``moment``."""
    run = af.connect(address, name="trainer")
    with run.weight_publisher(transport, **options) as publisher:
        version = max(publisher.current, 0) + 1
        publisher.publish(version, weights(version)).wait()
        say(["published", version])
        while count := hear():
            tensors, moment = _armed(publisher, moment), ""
            for _ in range(count):
                version += 1
                publication = publisher.publish(version, tensors(version))
                tensors = weights
            try:
                publication.wait()
            except af.AsyncFlowError as error:
                say(["failed", version, f"{type(error).__name__}: {error}"])
            else:
                say(["published", version, publisher.nbytes])


def _armed(publisher: WeightPublisher, moment: str) -> Callable[[int], Iterator[tuple[str, Any]]]:
    """Weights that are to be published, and the publisher made to stop once."""
    sender: Any = publisher._sender

    def stopping(version: int) -> Iterator[tuple[str, Any]]:
        for n, each in enumerate(weights(version)):
            if (n, moment) in ((0, "announced"), (TENSORS // 2, "copying")):
                stop(moment)
            yield each

    if moment == "hashing":
        Hashing.hashed = once(Hashing.hashed, moment, at=2)  # type: ignore[method-assign]
    elif moment == "sending" and publisher.transport == "file":
        os.fsync = once(os.fsync, moment, at=2)  # the first file is there, the second is not
    elif moment == "sending":
        sender.send = once(sender.send, moment)
    elif moment == "sent":
        sender.send = once(sender.send, moment, after=True)
    elif moment == "published":
        send, keep = sender.send, sender.keep

        def sending(manifest: Any) -> bytes:
            sender.keep = once(keep, moment)  # called next when the version is current
            where: bytes = send(manifest)
            return where

        sender.send = sending
    return stopping


# ---- replicas


def replicate(address: str, moment: str, at: int, name: str = "replica") -> None:
    """Load version after version and say so; stop at ``moment`` of version ``at``, or of the first after it."""
    run = af.connect(address, name=name)
    held: dict[str, Any] = {}
    if moment in ("staged", "swapping", "committed"):
        _stop_after({"staged": cmd.Staged, "swapping": cmd.Swap, "committed": cmd.Loaded}[moment], moment, at)
    if moment == "fetching" and at == 1:
        manifests.digest = once(manifests.digest, moment, at=2)
    for update in run.weight_updates():
        with update:
            for n, (tensor, array) in enumerate(update.arrays()):
                if n == TENSORS // 2 and moment == "loading" and update.version >= at:
                    moment = ""
                    stop("loading")
                held[tensor] = array.copy()
        say(["on", update.version, versions_of(held)])
        if moment == "fetching" and update.version == at - 1:
            manifests.digest = once(manifests.digest, moment, at=2)
    say(["ended"])


def _stop_after(command: type[Any], moment: str, at: int) -> None:
    """In the event loop that talks to the ledger, when it has heard of such a command for a version."""
    send = LoopPort.send
    stopped: list[int] = []

    async def stopping(port: LoopPort, said: Any, *arguments: Any, **options: Any) -> Any:
        reply = await send(port, said, *arguments, **options)
        if isinstance(said, command) and said.version >= at and not stopped:
            stopped.append(1)
            stop(moment)
        return reply

    LoopPort.send = stopping  # type: ignore[method-assign]


# ---- everybody in one process, with a little /dev/shm of its own


def take_what_is_free() -> None:
    """All of /dev/shm but a megabyte; the publisher may be getting memory for its next version meanwhile."""
    with open("/dev/shm/else", "wb") as file:
        while True:
            free = os.statvfs("/dev/shm")
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - (1 << 20))
                return


def fill_up_weights() -> None:
    """Publish a version, one for which there is no room, and the next when there is."""
    if not mount("/dev/shm", 300):
        return
    outcome: dict[str, Any] = {"on": []}
    with af.serve() as run, run.weight_publisher("shm") as publisher:
        updates = iter(run.weight_updates())
        for version in (1, 2, 3):
            if version == 2:
                take_what_is_free()
            elif version == 3:
                os.unlink("/dev/shm/else")
            try:
                parts = range(4 if version == 2 else 1)  # it has memory for another one like the last at hand
                named = ((f"{part}.{name}", tensor) for part in parts for name, tensor in weights(version))
                publisher.publish(version, named).wait()
            except MemoryFull as error:
                outcome["error"] = str(error)
                continue
            with next(updates) as update:
                outcome["on"].append([update.version, versions_of(dict(update.arrays()))])
    say(outcome)
