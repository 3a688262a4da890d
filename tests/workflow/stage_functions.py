"""Stage functions and an engine that worker processes can import."""

import asyncio
from pathlib import Path

import numpy as np
from gates import meet

import asyncflow_sdk as af

_running = [0, 0]
_overlap = asyncio.Event()


async def slowly_scored(response_ids):
    """How many calls ran at a time, seen from this one. The first waits for another."""
    _running[0] += 1
    if _running[0] > 1:
        _overlap.set()
    await asyncio.wait_for(_overlap.wait(), 60)
    await asyncio.sleep(0.02)
    seen = _running[0]
    _running[0] -= 1
    _running[1] = max(_running[1], seen)
    return [seen for _ in response_ids]


def most_at_a_time():
    return _running[1]


def spread_of_group(reward, groups):
    """How many rows of its group each row came with."""
    _, where, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return counts[where]


class Shouting(af.RolloutEngine):
    """Says 7 as often as the prompt has tokens."""

    def __init__(self, model=""):
        self._steps = 0.0

    async def generate(self, request):
        for index in range(request.n):
            await asyncio.sleep(0.005)
            tokens = len(request.prompt_ids)
            yield af.Completion(index, np.full(tokens, 7, np.int32), np.full(tokens, -self._steps, np.float32))

    async def load_weights(self, update):
        arrays = dict(update.arrays())
        self._steps = float(arrays["scale"])
        return set(arrays)


class ShoutingTogether(Shouting):
    """Says nothing before another replica was asked, too."""

    capabilities = af.Capabilities(max_rows=8)

    def __init__(self, model="", *, met):
        super().__init__(model)
        self._met = Path(met)

    async def generate(self, request):
        await meet(self._met)
        async for completion in super().generate(request):
            yield completion
