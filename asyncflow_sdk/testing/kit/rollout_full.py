"""What comes up in long runs: updates that fail, caches, aborts, memory."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np

from ...errors import EngineError
from ...interfaces import Completion
from ...weights.proof import check_held
from .check import check, expect, needs
from .rollout_lab import RolloutLab, resident_bytes

UPDATES, GROWN = 12, 3.0


@check(
    "rollout", "full",
    means="responses begin with keys and values of weights that are gone: tokens of no version at all",
    look="prefix or KV caches: empty them in load_weights(), after the last request under the old weights has ended",
)  # fmt: skip
async def stale_cache(lab: RolloutLab) -> None:
    """A prompt that was read under the old weights is read anew under the new ones, also where it only begins another."""
    prompt = np.resize(lab.policy.prompts(1, seed=20)[0], min(64, lab.context - 24)).astype(np.int32)
    longer = np.concatenate([prompt, lab.policy.prompts(1, seed=21)[0]])[: lab.context - 10]
    for _ in range(2):
        await lab.check_greedy([prompt])
        await lab.check_greedy([prompt])  # from a cache, if there is one
        await lab.update()
        await lab.check_greedy([prompt, longer], when=" of a prompt seen before the update")


@check(
    "rollout", "full",
    means="a tensor that has nowhere to go is dropped in silence: an engine that half follows the trainer",
    look="load_weights(): compare every name with what the model has, and raise WeightMismatch naming the odd ones",
)  # fmt: skip
async def unknown_tensor(lab: RolloutLab) -> None:
    """A tensor that the engine has no place for is refused by its name, and never said to be taken."""
    version = lab.version + 1
    tensors = {**lab.policy.tensors(version), "model.layers.0.not_there.weight": np.ones((4, 4), np.float32)}
    taken = await _refused(lab, lab.make_update(version, tensors))
    expect(
        taken is None or "model.layers.0.not_there.weight" not in taken,
        "load_weights() said that it took 'model.layers.0.not_there.weight', which no model has",
    )
    await _sound(lab, version, "a version with a tensor too many")


@check(
    "rollout", "full",
    means="weights are read in the wrong order, or cut off, and the model talks nonsense",
    look="load_weights(): compare shapes before anything is written; a view or a broadcast hides the difference",
)  # fmt: skip
async def misshapen_tensor(lab: RolloutLab) -> None:
    """A tensor of another shape is refused."""
    version = lab.version + 1
    tensors = dict(lab.policy.tensors(version))
    name = max(
        (n for n, a in tensors.items() if a.ndim == 2 and a.shape[0] != a.shape[1]), key=lambda n: tensors[n].size
    )
    for shaped in (np.ascontiguousarray(tensors[name].T), np.ascontiguousarray(tensors[name][1:])):
        update = lab.make_update(version, {**tensors, name: shaped})
        taken = await _refused(lab, update)
        expect(
            taken is None or lab.engine.weight_name(name) not in taken,
            f"{name!r} was taken as {list(shaped.shape)}, and the model has {list(tensors[name].shape)}",
        )
    await _sound(lab, version, "a misshapen version")


@check(
    "rollout", "full",
    means="after a broken transfer the engine answers from a mixture of two versions, and says it is one of them",
    look="load_weights(): check before writing; when it breaks off later, refuse requests until a whole version is loaded",
)  # fmt: skip
async def torn_update(lab: RolloutLab) -> None:
    """A load that breaks off half-way raises; then the engine answers from the old version, or not at all, until one is whole."""
    prompts = lab.policy.prompts(3, seed=22)
    before, version = lab.version, lab.version + 1
    count = len(lab.policy.tensors(version))
    for breaks_after in {1, count // 2, count - 1} & set(range(count)):
        taken = await _refused(lab, lab.make_update(version, breaks_after=breaks_after))
        expect(
            taken is None,
            f"load_weights() returned, as if all was well, when tensor {breaks_after} of {count} could not be read",
        )
        with contextlib.suppress(EngineError):  # it may refuse, in so many words
            await lab.check_greedy(prompts, when=" after a load that broke off")
    await lab.update(before)
    await lab.check_greedy(prompts, when=" after the version before was loaded again")
    await lab.update(version)
    await lab.check_greedy(prompts, when=" after the version was loaded whole")


@check(
    "rollout", "full",
    means="memory of a version is used again for the next one while the engine still computes from it: weights that change by themselves",
    look="load_weights(): copy each tensor; what it is given belongs to it only until it returns",
)  # fmt: skip
async def keeps_no_view(lab: RolloutLab) -> None:
    """When load_weights() has returned, what becomes of the memory it read from does not matter."""
    update = lab.make_update(lab.version + 1)
    await lab.load(update)
    update.scribble()
    await lab.check_greedy(lab.policy.prompts(3, seed=23), when=" after the update's memory was written over")


@check(
    "rollout", "full",
    means="replicas stop following the trainer after the first few versions",
    look="what load_weights() does once only: hooks, buffers, flags that are set and never taken back",
)  # fmt: skip
async def updates_in_a_row(lab: RolloutLab) -> None:
    """Several versions one after another, one twice, and an older one again, as after a rollback."""
    first = lab.version + 1
    for version in (first, first + 1, first + 2, first + 2, first):
        await lab.update(version)
        await lab.check_greedy(lab.policy.prompts(2, seed=version), when=f" after version {version}")


@check(
    "rollout", "full",
    means="every version costs memory that never comes back: a run of some hours is killed",
    look="references to old tensors, to updates, to results of requests; caches that are keyed by version",
)  # fmt: skip
async def memory(lab: RolloutLab) -> None:
    """Loading version after version takes no more and more memory."""
    prompt = lab.policy.prompts(1, seed=24)
    nbytes = sum(array.nbytes for array in lab.policy.tensors(lab.version).values())
    first = lab.version + 1

    async def some(count: int) -> None:
        for number in range(count):
            await lab.update(first + number % 2)
            await lab.check_greedy(prompt)

    await some(4)
    before = resident_bytes()
    await some(UPDATES)
    grown = resident_bytes() - before
    allowed = int(GROWN * nbytes) + (24 << 20)
    if grown > allowed:  # an allocator may have grown once
        before = resident_bytes()
        await some(UPDATES)
        grown = resident_bytes() - before
    expect(
        grown <= allowed,
        f"{UPDATES} updates of a model of {nbytes >> 10} KB took {grown >> 20} MB that did not come back",
    )


@check(
    "rollout", "full",
    means="rows that nobody wants any more go on taking room, until the replica does nothing else; or others are cut off with them",
    look="generate(): a try/finally that aborts its requests in the engine when the generator is closed or cancelled",
)  # fmt: skip
async def abort(lab: RolloutLab) -> None:
    """Cancelling one generation ends it and no other, and gives its room back."""
    prompts = lab.policy.prompts(3, seed=25)
    most = min(128, lab.context - 32)
    kept = lab.request(prompts[0], max_tokens=min(32, most))
    for turn in range(6):
        doomed = [
            asyncio.create_task(lab.answer(lab.request(prompts[1], max(lab.rows // 2, 1), temperature=1.0, max_tokens=most, seed=turn)))
            for _ in range(2)
        ]  # fmt: skip
        beside = asyncio.create_task(lab.answer(kept))
        for _ in range(turn):  # at once, then later and later
            await asyncio.sleep(0.005)
        for task in doomed:
            task.cancel()
        for ended in await asyncio.gather(*doomed, return_exceptions=True):
            cancelled = isinstance(ended, (asyncio.CancelledError, list))  # a list: it had ended before
            expect(cancelled, f"a generation that was cancelled raised {ended!r}")
        ((got,),) = await asyncio.gather(beside)
        lab.check_response(
            prompts[0],
            got,
            lab.policy.greedy(lab.version, prompts[0], kept.sampling.max_tokens),
            when=" beside one that was cancelled",
        )
    await lab.check_greedy(lab.policy.prompts(lab.rows, seed=26), when=" after generations were cancelled")


@check(
    "rollout", "full",
    means="the staleness of tokens is computed from versions that did not draw them",
    look="the spans of a Completion: the version held when each token was drawn, whatever is newest elsewhere",
)  # fmt: skip
@needs(lambda lab: lab.engine.capabilities.token_versions, "it gives no versions of tokens")
async def versions(lab: RolloutLab) -> None:
    """Spans name the version that the engine holds, before and after an update."""
    for _ in range(2):
        for prompt in lab.policy.prompts(2, seed=27):
            for got in await lab.answer(lab.request(prompt, 2 if lab.rows > 1 else 1, temperature=1.0, seed=1)):
                named = {span.version for span in got.spans}
                expect(named <= {lab.version}, f"spans name versions {sorted(named)}, and {lab.version} is held")
        await lab.update()


@check(
    "rollout", "full",
    means="tokens are said to be of a version that did not draw them, or come from keys and values of the one before",
    look="load_weights() while requests run: stop between two tokens, load, read anew what runs, go on; spans and log-probs follow",
)  # fmt: skip
@needs(lambda lab: "in_flight" in lab.engine.capabilities.swap, "it takes no weights while requests run")
async def update_in_flight(lab: RolloutLab) -> None:
    """Weights that come while requests run: each token's span and log-prob are of the version that drew it."""
    prompts, tokens, mixed = lab.policy.prompts(min(4, lab.rows), seed=28), lab.context - 32, 0
    for turn in range(8):
        old, new = lab.version, lab.version + 1
        running = asyncio.create_task(
            lab.answers([lab.request(p, temperature=1.0, max_tokens=tokens, seed=turn) for p in prompts])
        )
        await asyncio.sleep(0.01 * turn)
        await lab.update(new)
        for prompt, (got,) in zip(prompts, await running, strict=True):
            ids = np.asarray(got.token_ids, np.int32)
            mixed += len({span.version for span in got.spans}) > 1
            for span in got.spans:
                expect(span.version in (old, new), f"a span names version {span.version}; {old} and {new} were held")
                wanted = lab.policy.logprobs(
                    span.version, np.concatenate([prompt, ids[: span.start]]), ids[span.start : span.end]
                )
                apart = float(np.abs(np.asarray(got.logprobs)[span.start : span.end] - wanted).max())
                expect(
                    apart <= lab.tolerance,
                    f"tokens {span.start} to {span.end} are said to be of version {span.version}, and their log-probs are up to {apart:.3g} from its",
                )
        if mixed >= 2:
            return
    expect(
        mixed,
        "in 8 updates while requests ran, no response got tokens of both versions: the engine waits for their end",
    )


@check(
    "rollout", "full",
    means="what was generated before a swap is thrown away, or goes on as another response",
    look="interrupt(): end what runs, with the tokens it has and finish_reason aborted; `drawn` of the request that goes on",
)  # fmt: skip
@needs(lambda lab: "partial" in lab.engine.capabilities.swap, "it cannot be interrupted")
async def interrupted(lab: RolloutLab) -> None:
    """Responses that are interrupted come with the tokens they have, and go on where they were."""
    prompts, tokens, cut = lab.policy.prompts(min(4, lab.rows), seed=29), min(128, lab.context - 32), 0
    for turn in range(8):
        requests = [lab.request(p, max_tokens=tokens) for p in prompts]
        running = [asyncio.create_task(lab.answer(request, aborted=True)) for request in requests]
        await asyncio.sleep(0.01 * turn)
        await lab.engine.interrupt()
        for prompt, (got,) in zip(prompts, await asyncio.gather(*running), strict=True):
            wanted = lab.policy.greedy(lab.version, prompt, tokens)
            have = np.asarray(got.token_ids, np.int32)
            lab.check_response(
                prompt,
                got,
                wanted[: len(have)] if got.finish_reason == "aborted" else wanted,
                when=" of an interrupted response",
            )
            if got.finish_reason != "aborted" or len(have) == tokens:
                continue
            cut += len(have) > 0
            rest = lab.request(np.concatenate([prompt, have]), max_tokens=tokens - len(have), drawn=len(have))
            (more,) = await lab.answer(rest)
            lab.check_response(rest.prompt_ids, more, wanted[len(have) :], when=" of a response that goes on")
        if cut >= 2:
            return
    expect(cut, "in 8 interruptions no response came back with some of its tokens: either none or all of them")


@check(
    "rollout", "full",
    means="the proof of each swap proves nothing: weights that were not taken go unseen, or right ones are refused",
    look="logprobs(): the same numbers as generate() gives at temperature 1, for any prompts and responses",
)  # fmt: skip
@needs(lambda lab: lab.engine.capabilities.logprobs, "it cannot score given responses")
async def scores(lab: RolloutLab) -> None:
    """logprobs() of given responses are those of the weights held now."""
    prompts, responses = lab.policy.prompts(5, seed=30), lab.policy.prompts(5, longest=20, seed=31)
    for _ in range(2):
        scored = await lab.engine.logprobs([p.tolist() for p in prompts], [r.tolist() for r in responses])
        expect(len(scored) == len(responses), f"logprobs() gave {len(scored)} rows for {len(responses)} responses")
        for prompt, response, got in zip(prompts, responses, scored, strict=True):
            expect(
                len(got) == len(response),
                f"logprobs() gave {len(got)} numbers for a response of {len(response)} tokens",
            )
            lab.check_logprobs(prompt, Completion(0, response, np.asarray(got, np.float32)), when=" by logprobs()")
        await lab.update()


@check(
    "rollout", "full",
    means="the proof of each swap proves nothing: what is hashed is not what the engine computes from",
    look="held_weights(): the live parameters, in the names, dtypes and shapes of the version that was loaded",
)  # fmt: skip
@needs(lambda lab: lab.engine.capabilities.held_weights, "it does not hold weights as they were published")
async def holds(lab: RolloutLab) -> None:
    """held_weights() are the version that was loaded, byte for byte."""
    for _ in range(2):
        version = await lab.update()
        update = lab.make_update(version)
        check_held(update, lab.engine.held_weights())
        update.release()


@check(
    "rollout", "full",
    means="prompts that just fit are refused or cut: the longest, hardest ones are missing from training",
    look="the sum of prompt and max_tokens may be the whole context, no less",
)  # fmt: skip
async def whole_context(lab: RolloutLab) -> None:
    """A prompt and a response that together fill the context are answered."""
    context = min(lab.context, 512)
    if context < lab.context:
        return
    prompt = np.resize(lab.policy.prompts(1, seed=32)[0], context - 4).astype(np.int32)
    (got,) = await lab.answer(lab.request(prompt, max_tokens=4))
    lab.check_response(prompt, got, lab.policy.greedy(lab.version, prompt, 4), when=" at the end of the context")


async def _refused(lab: RolloutLab, update: Any) -> set[str] | None:
    """The names that were taken, or None when the load raised. The lab's version is what it was."""
    held = lab.version
    try:
        return set(await lab.load(update))
    except AssertionError:
        raise
    except Exception:
        return None
    finally:
        lab.version = held


async def _sound(lab: RolloutLab, version: int, after: str) -> None:
    """A whole version loads, and the engine is on it."""
    await lab.update(version)
    await lab.check_greedy(lab.policy.prompts(3, seed=33), when=f" after {after} and then a whole one")
