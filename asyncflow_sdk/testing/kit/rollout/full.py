"""Checks for long runs: growing memory, cancelled rows, prompts of just the context's length."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from ..check import CheckFailed, DoesNotApply, check, expect
from ..resources import Growth, Held
from .lab import RolloutLab

UPDATES, LOADED_BYTES = (6, 400), 64 << 20
"""The bounds of the number of loads in the search for growing memory, and the bytes they add up to within these."""
CANCELLED = 64
ATTEMPTS = 3
FILLED = 512
GROWN, ALLOCATOR_BYTES = 3.0, 8 << 20


@check(
    "rollout", "full",
    impact="every version leaks memory: a run is killed after some hours",
    hint="references to old tensors, updates and results of requests; caches keyed by version",
    after=("updates_in_a_row",),
)  # fmt: skip
async def memory(lab: RolloutLab) -> str:
    """Repeated loads take no growing memory, shared memory, GPU memory, descriptors, threads or
    processes."""
    prompt = lab.policy.prompts(1, seed=24)
    nbytes = sum(array.nbytes for array in lab.policy.tensors(lab.version).values())
    first = lab.version + 1

    count = int(np.clip(LOADED_BYTES // nbytes, *UPDATES))

    async def some(count: int) -> None:
        """Load versions in turn, with a response now and then."""
        for number in range(count):
            await lab.update(first + number % 2)
            if number % (1 + count // UPDATES[0]) == 0:
                await lab.check_greedy(prompt)

    began = time.monotonic()
    await some(2 * UPDATES[0])
    each_s = (time.monotonic() - began) / (2 * UPDATES[0])
    count = max(min(count, int(lab.limit_s / 6 / each_s)), UPDATES[0])
    growth = Growth(nbytes=int(GROWN * nbytes) + ALLOCATOR_BYTES, count=count // 2)
    for _ in range(3):
        lab.doing = f"loading {count} versions"
        before = Held.now()
        await some(count)
        if not growth.look(before):
            seen = count * nbytes > growth.nbytes
            return (
                ""
                if seen
                else f"{count} versions of {nbytes >> 10} KB each were too few to show as memory that grows"
            )
    raise CheckFailed(growth.said("updates", count, nbytes))


@check(
    "rollout", "full",
    impact="cancelled rows keep their capacity until the replica is full; or other rows are aborted with them",
    hint="generate(): abort the engine's requests in a finally, for a closed or cancelled generator",
    after=("company", "logprobs"),
)  # fmt: skip
async def abort(lab: RolloutLab) -> None:
    """Cancelling one generation ends it and no other, and frees its capacity."""
    prompts = lab.policy.prompts(3, seed=25)
    most = min(64, lab.context - 32)
    kept = lab.request(prompts[0], max_tokens=min(32, most))
    many = lab.request(prompts[1], max((lab.rows - 1) // 2, 1), temperature=1.0, max_tokens=most, seed=1)
    whole_s = min([await lab.timed([many]), await lab.timed([many])])  # the machine may stand still in one
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
        wanted = lab.policy.greedy(lab.version, prompts[0], kept.sampling.max_tokens)
        for (got,) in whole:
            lab.check_response(prompts[0], got, wanted, when=" beside one that was cancelled")
        lab.doing = "waiting for as many responses as there is room for: that of cancelled ones has not come back"
        await lab.check_greedy(lab.policy.prompts(lab.rows, seed=26), when=" after generations were cancelled")
    longer = lab.request(prompts[1], many.n, temperature=1.0, max_tokens=min(4 * most, lab.context - 16), seed=1)
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
    expect(
        False,
        f"after {CANCELLED} generations were cancelled, each longer than one of {whole_s:.2g} s, one token takes"
        f" more than {CANCELLED * whole_s / 8:.2g} s, each of {ATTEMPTS} times: what is cancelled is still decoded"
        " to its end",
    )


@check(
    "rollout", "full",
    impact="the longest possible prompts are refused or cut: the hardest ones are missing from training",
    hint="the sum of prompt and max_tokens may be the whole context, no less",
    after=("greedy", "logprobs"),
)  # fmt: skip
async def whole_context(lab: RolloutLab) -> None:
    """A prompt and a response filling the whole context are answered."""
    context = lab.context
    if context > FILLED:
        raise DoesNotApply(f"its context is {context} tokens, and the policy is too slow for more than {FILLED}")
    prompt = np.resize(lab.policy.prompts(1, seed=32)[0], context - 4).astype(np.int32)
    (got,) = await lab.answer(lab.request(prompt, max_tokens=4))
    lab.check_response(prompt, got, lab.policy.greedy(lab.version, prompt, 4), when=" at the end of the context")
