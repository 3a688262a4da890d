"""What replica and trainer processes of the weight tests do."""

import msgspec
import numpy as np
from children import hear, say

from asyncflow_sdk.queue import Connection, open_queue
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.weights import Update, WeightPublisher
from asyncflow_sdk.weights.shm import ShmReceiver


def hold(directory: str, manifest: str, where: str) -> None:
    """Fetch a version and hold it; say what it holds now, and again when told to."""
    from pathlib import Path

    told = msgspec.json.decode(manifest, type=Manifest)
    fetched = ShmReceiver(Path(directory)).fetch(told, bytes.fromhex(where), timeout_s=10.0)
    arrays = dict(Update(told.version, [fetched]).arrays())
    say(float(arrays["w"][0]))
    hear()
    say([float(arrays["w"].min()), float(arrays["w"].max())])


def publish_until_killed(address: str) -> None:
    """Publish version 1; then say that version 2 has begun, from within it, and wait to be killed."""
    publisher = WeightPublisher(open_queue(Connection(address, "trainer")))
    publisher.publish(1, [("w", np.full(1 << 20, 1, np.float32))]).wait()

    def weights():  # type: ignore[no-untyped-def]
        yield "w", np.full(1 << 20, 2, np.float32)
        say("in the middle")
        hear()

    publisher.publish(2, weights())
