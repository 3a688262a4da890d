"""What trainer and replica on two hosts do."""

import asyncio
import contextlib
from typing import Any

import numpy as np
from children import hear, say

import asyncflow_sdk as af
from asyncflow_sdk.weights import WeightPublisher, WeightUpdates

COUNT = 1 << 20


def train(directory: str, address: str, options: dict[str, Any]) -> None:
    """Serve a run, and publish a version each time it is told to; say the sum of its bits."""
    with af.serve(directory, address=address) as run:
        publisher = WeightPublisher(run.queue, "tcp", **options)
        numbers = np.random.default_rng(0)
        weights = (numbers.standard_normal(COUNT) * 0.02).astype(np.float32)
        say(run.address)
        for version in range(1, 100):
            if hear() != "publish":
                return
            weights[numbers.random(COUNT) < 0.01] *= np.float32(1.0000001)
            publisher.publish(version, [("w", weights)]).wait(60.0)
            say(int(weights.view(np.uint32).sum(dtype=np.uint64)))


def replicate(address: str, key: str) -> None:
    """Take up each version; say what it is, and how it came."""
    asyncio.run(_replicate(address, key))


async def _replicate(address: str, key: str) -> None:
    run = await asyncio.to_thread(lambda: af.connect(address, key=key, name="replica"))
    changed = asyncio.Event()
    updates = WeightUpdates(run.queue, None, changed.set)
    updates.start()
    say("ready")
    told = asyncio.create_task(asyncio.to_thread(hear))
    loaded: list[int] = []
    while not told.done():
        waits = asyncio.create_task(changed.wait())
        await asyncio.wait([waits, told], return_when=asyncio.FIRST_COMPLETED)
        changed.clear()
        if updates.failure is not None:
            raise updates.failure
        staged = updates.staged
        if staged is None or staged.version in loaded[:1]:
            continue
        assert await updates.permission(staged.version)
        update = updates.take()
        arrays = dict(update.arrays())
        loaded = [update.version, int(arrays["w"].view(np.uint32).sum(dtype=np.uint64))]
        part = update.parts[0]
        await updates.commit(update, {"w"})
        say([loaded, part.encoding, part.moved, part.manifest.nbytes])
    say(loaded)
    with contextlib.suppress(Exception):
        await updates.close()
