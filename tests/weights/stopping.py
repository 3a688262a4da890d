"""Trainers and replicas in processes of their own, which stop at a named moment, to be killed or frozen there.

A child prints a list for each thing it has done: ["published", 3, bytes held], ["on", 3, versions of the tensors it holds],
["at", "sending"]: it has stopped there, and goes on with the next line that it reads. The transports stop in a call of the
publisher or of the replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from children import hear, say

import asyncflow_sdk as af
from asyncflow_sdk.plugins import registry

TENSORS, ELEMENTS = 6, 1 << 17
MODEL = TENSORS * ELEMENTS * 4
ARMED: set[str] = set()
"""Moments at which this process stops, once each."""


def reach(moment: str) -> None:
    if moment in ARMED:
        ARMED.remove(moment)
        say(["at", moment])
        hear()


def stopping(end: Any, method: str, before: str, after: str) -> Any:
    """The end of a transport, which stops before and after a call of its ``method``."""
    plain = getattr(end, method)

    def call(*arguments: Any, **options: Any) -> Any:
        reach(before)
        result = plain(*arguments, **options)
        reach(after)
        return result

    setattr(end, method, call)
    return end


def stop_in(transport: str) -> None:
    """Let both ends of a transport stop in this process."""
    kind: Any = registry().get("transport", transport).load()
    sender, receiver = kind.sender, kind.receiver
    kind.sender = lambda self, host: stopping(sender(self, host), "send", "sending", "sent")
    kind.receiver = lambda self, host: stopping(receiver(self, host), "fetch", "", "fetching")


def weights(version: int) -> Iterator[tuple[str, Any]]:
    """3 MB that all hold the version, and an eighth more from tensor to tensor."""
    reach("announced")
    for n in range(TENSORS):
        if n == TENSORS // 2:
            reach("copying")
        yield f"layer.{n}.weight", np.full(ELEMENTS, version + n / 8, np.float32)


def versions_of(update: Any) -> list[float]:
    """The versions of the tensors of an update: one, if it is whole. Stops in the midst of ``loading``."""
    found: set[float] = set()
    for n, (_, array) in enumerate(update.arrays()):
        if n == TENSORS // 2:
            reach("loading")
        found |= {float(array.min()) - n / 8, float(array.max()) - n / 8}
    return sorted(found)


def train(address: str, transport: str, options: dict[str, Any], moment: str) -> None:
    """Publish the next version; then one with each line, stopping in the first of them at ``moment``."""
    stop_in(transport)
    run = af.connect(address, name="trainer")
    with run.weight_publisher(transport, **options) as publisher:
        version = max(publisher.current, 0)
        while True:
            version += 1
            publisher.publish(version, weights(version)).wait()
            say(["published", version, publisher.nbytes])
            hear()
            ARMED.add(moment)
            moment = ""


def replicate(address: str, transport: str, moment: str, name: str) -> None:
    """Load version after version; stop at ``moment`` of the second."""
    stop_in(transport)
    run = af.connect(address, name=name)
    for loaded, update in enumerate(run.weight_updates(), 1):
        reach("swapping")
        with update:
            versions = versions_of(update)
        reach("committed")
        if loaded == 1:
            ARMED.add(moment)  # before the next version may be published
        say(["on", update.version, versions])
