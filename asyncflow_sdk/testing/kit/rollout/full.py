"""Checks for long runs: growing memory, cancelled rows, prompts of just the context's length."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from ..check import CheckFailed, DoesNotApply, checks, expect
from ..resources import Growth
from .lab import RolloutLab

UPDATES, LOADED_BYTES = (6, 400), 64 << 20
"""The bounds of the number of loads in the search for growing memory, and the bytes they add up to within these."""
CANCELLED = 64
ATTEMPTS = 3
FILLED = 512
GROWN, ALLOCATOR_BYTES = 3.0, 8 << 20


async def memory(lab: RolloutLab) -> str:
    """Repeated loads take no growing memory, shared memory, GPU memory, descriptors, threads or processes."""
    prompt = lab.policy.prompts(1, seed=24)
    nbytes = sum(array.nbytes for array in lab.policy.tensors(lab.version).values())
    first = lab.version + 1
    count = int(np.clip(LOADED_BYTES // nbytes, *UPDATES))

    async def _some(count: int) -> None:
        for number in range(count):
            await lab.update(first + number % 2)
            if number % (1 + count // UPDATES[0]) == 0:
                await lab.check_greedy(prompt)

    began = time.monotonic()
    await _some(2 * UPDATES[0])
    each_s = (time.monotonic() - began) / (2 * UPDATES[0])
    count = max(min(count, int(lab.limit_s / 6 / each_s)), UPDATES[0])
    growth = Growth(nbytes=int(GROWN * nbytes) + ALLOCATOR_BYTES, count=count // 2)
    while growth.goes_on():
        lab.doing = f"loading {count} versions"
        await _some(count)
    growth.check("updates", count, nbytes)
    few = f"{count} versions of {nbytes >> 10} KB each were too few to show as memory that grows"
    return "" if count * nbytes > growth.nbytes else few


async def abort(lab: RolloutLab) -> None:
    """Cancelling one generation ends it and no other, and frees its capacity."""
    prompts, most = lab.policy.prompts(3, seed=25), min(64, lab.context - 32)
    kept = lab.request(prompts[0], max_tokens=min(32, most))
    rows, drawn = max((lab.rows - 1) // 2, 1), {"temperature": 1.0, "seed": 1}
    many = lab.request(prompts[1], rows, max_tokens=most, **drawn)
    whole_s = min([await lab.timed([many]), await lab.timed([many])])  # the machine may stand still in one
    wanted = lab.policy.greedy(lab.version, prompts[0], kept.sampling.max_tokens)
    for turn in range(4):
        beside = [asyncio.create_task(lab.answer(kept)) for _ in range(lab.rows > 1)]
        doomed = [asyncio.create_task(lab.answer(many)) for _ in range(2 if lab.rows > 2 else 1)]
        await asyncio.sleep(whole_s * turn / 4)  # at once, then later and later
        for task in doomed:
            task.cancel()
        lab.doing = "waiting for generations to end that were cancelled"
        for ended in await asyncio.gather(*doomed, return_exceptions=True):
            cancelled = isinstance(ended, (asyncio.CancelledError, list))  # a list: it had ended before
            expect(cancelled, f"a generation that was cancelled raised {ended!r}")
        lab.doing = "waiting for a generation beside others that were cancelled: was it ended with them?"
        try:
            whole = await asyncio.gather(*beside)
        except Exception as error:
            raise CheckFailed(f"cancelling a generation ended another one too: {error}") from error
        for (got,) in whole:
            lab.check_response(prompts[0], got, wanted, when=" beside one that was cancelled")
        lab.doing = "waiting for as many responses as there is room for: that of cancelled ones has not come back"
        await lab.check_greedy(lab.policy.prompts(lab.rows, seed=26), when=" after generations were cancelled")
    longer = lab.request(prompts[1], rows, max_tokens=min(4 * most, lab.context - 16), **drawn)
    for _ in range(ATTEMPTS):  # one that goes on with them does so each time, and a busy machine does not
        for _ in range(CANCELLED):
            task = asyncio.create_task(lab.answer(longer))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        # were they still decoded, there would be work for more than CANCELLED times whole_s
        one = asyncio.create_task(lab.answer(lab.request(prompts[2], max_tokens=1)))
        done, _ = await asyncio.wait([one], timeout=CANCELLED * whole_s / 8)
        await one
        if done:
            return
    raise CheckFailed(
        f"after {CANCELLED} generations were cancelled, each longer than one of {whole_s:.2g} s, one token takes"
        f" more than {CANCELLED * whole_s / 8:.2g} s, each of {ATTEMPTS} times: what is cancelled is still decoded"
        " to its end"
    )


async def whole_context(lab: RolloutLab) -> None:
    """A prompt and a response filling the whole context are answered."""
    context = lab.context
    if context > FILLED:
        raise DoesNotApply(f"its context is {context} tokens, and the policy is too slow for more than {FILLED}")
    prompt = np.resize(lab.policy.prompts(1, seed=32)[0], context - 4).astype(np.int32)
    (got,) = await lab.answer(lab.request(prompt, max_tokens=4))
    lab.check_response(prompt, got, lab.policy.greedy(lab.version, prompt, 4), when=" at the end of the context")


CHECKS = checks("rollout", {
    memory: ("full", ("updates_in_a_row",), "every version leaks memory: a run is killed after some hours",
        "references to old tensors, updates and results of requests; caches keyed by version"),
    abort: ("full", ("company", "logprobs"),
        "cancelled rows keep their capacity until the replica is full; or other rows are aborted with them",
        "generate(): abort the engine's requests in a finally, for a closed or cancelled generator"),
    whole_context: ("full", ("greedy", "logprobs"),
        "the longest possible prompts are refused or cut: the hardest ones are missing from training",
        "the sum of prompt and max_tokens may be the whole context, no less"),
})  # fmt: skip
