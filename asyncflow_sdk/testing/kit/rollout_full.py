"""What comes up in long runs: updates that fail, caches, aborts, memory."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import numpy as np

from ...errors import EngineError, WeightError
from ...interfaces import Completion
from ...weights.proof import check_held
from .check import CheckFailed, DoesNotApply, check, expect, needs
from .precision import too_far
from .resources import Growth, Held
from .rollout_lab import Ids, RolloutLab

UPDATES, LOADED_BYTES = (6, 400), 64 << 20
"""So many versions are loaded to see whether memory grows: as many as make this many bytes, within bounds."""
CANCELLED = 64
ATTEMPTS = 3
FILLED = 512
HELD_S, ASKED = 0.3, 4
"""So long a load is held half-way, for requests that each of several askers makes meanwhile."""
GROWN, ALLOCATOR_BYTES = 3.0, 8 << 20


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
    means="a tensor that did not come stays as it was, in silence: an engine that half follows the trainer",
    look="load_weights(): compare the update's names with all that the model has, tied ones once, and raise WeightMismatch naming those that are not there",
)  # fmt: skip
async def missing_tensor(lab: RolloutLab) -> None:
    """A version that lacks a tensor which the model has is refused, and never said to be taken as it is."""
    version = lab.version + 1
    tensors = lab.policy.tensors(version)
    names = [name for name, array in tensors.items() if array.size]
    for name in dict.fromkeys((max(names, key=lambda name: tensors[name].size), names[-1])):
        update = lab.make_update(version, {other: array for other, array in tensors.items() if other != name})
        taken = await _refused(lab, update)
        expect(
            taken != set(update.tensors),
            f"load_weights() took a version without {name!r}, which the model has, and returned the other"
            f" {len(update.tensors)} names, as if it were whole",
        )
    await _sound(lab, version, "a version with a tensor too few")


@check(
    "rollout", "full",
    means="weights are read in the wrong order, or cut off, and the model talks nonsense",
    look="load_weights(): compare shapes before anything is written; a view or a broadcast hides the difference",
)  # fmt: skip
async def misshapen_tensor(lab: RolloutLab) -> None:
    """A tensor of another shape is refused."""
    version = lab.version + 1
    tensors = dict(lab.policy.tensors(version))
    name = max((n for n, a in tensors.items() if a.ndim == 2), key=lambda n: tensors[n].size)
    right = tensors[name]
    for shaped in (right.T, right[1:], right.reshape(-1)):
        if shaped.shape == right.shape:
            continue
        update = lab.make_update(version, {**tensors, name: np.ascontiguousarray(shaped)})
        taken = await _refused(lab, update)
        expect(
            taken is None or lab.engine.weight_name(name) not in taken,
            f"{name!r} was taken as {list(shaped.shape)}, and the model has {list(right.shape)}",
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
        try:
            await lab.check_greedy(prompts, when=" after a load that broke off")
        except EngineError:
            pass  # it may refuse, in so many words
        except CheckFailed as failed:
            new = (
                "it is on the new version" if f"of version {version}" in str(failed) else "it answers from a mixture"
            )
            raise CheckFailed(
                f"{failed}. The load broke off before tensor {breaks_after} of {count}: {new}, and does not refuse"
            ) from None
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
async def memory(lab: RolloutLab) -> str:
    """Loading version after version takes no more and more memory, shared memory, GPU memory, descriptors, threads or processes."""
    prompt = lab.policy.prompts(1, seed=24)
    nbytes = sum(array.nbytes for array in lab.policy.tensors(lab.version).values())
    first = lab.version + 1

    count = int(np.clip(LOADED_BYTES // nbytes, *UPDATES))

    async def some(count: int) -> None:
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
            return "" if seen else f"{count} versions of {nbytes >> 10} KB each were too few to show as memory that grows"
    raise CheckFailed(growth.said("updates", count, nbytes))


@check(
    "rollout", "full",
    means="rows that nobody wants any more go on taking room, until the replica does nothing else; or others are cut off with them",
    look="generate(): a try/finally that aborts its requests in the engine when the generator is closed or cancelled",
)  # fmt: skip
async def abort(lab: RolloutLab) -> None:
    """Cancelling one generation ends it and no other, and gives its room back."""
    prompts = lab.policy.prompts(3, seed=25)
    most = min(64, lab.context - 32)
    kept = lab.request(prompts[0], max_tokens=min(32, most))
    many = lab.request(prompts[1], max((lab.rows - 1) // 2, 1), temperature=1.0, max_tokens=most, seed=1)
    whole_s = await lab.timed([many])
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
        f"after {CANCELLED} generations were cancelled, each longer than one of {whole_s:.2g} s, one token takes more than"
        f" {CANCELLED * whole_s / 8:.2g} s, each of {ATTEMPTS} times: what is cancelled is still decoded to its end",
    )


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
    prompts, tokens, mixed = lab.policy.prompts(min(4, lab.rows), seed=28), min(96, lab.context - 32), 0
    requests = [lab.request(p, temperature=1.0, max_tokens=tokens, seed=1) for p in prompts]
    whole_s = await lab.timed(requests)
    for turn in range(8):
        old, new = lab.version, lab.version + 1
        running = asyncio.create_task(lab.answers(requests))
        await asyncio.sleep(whole_s * ((turn + 1) % 8) / 8)
        await lab.update(new)
        for prompt, (got,) in zip(prompts, await running, strict=True):
            mixed += len({span.version for span in got.spans}) > 1
            _check_mixed(lab, prompt, got, old, new)
        if mixed >= 2:
            return
    expect(
        mixed,
        "in 8 updates while requests ran, no response got tokens of both versions: the engine waits for their end",
    )


def _check_mixed(lab: RolloutLab, prompt: Ids, got: Completion, old: int, new: int) -> None:
    ids = np.asarray(got.token_ids, np.int32)
    for version, start, end in got.spans:
        expect(version in (old, new), f"a span names version {version}; {old} and {new} were held")
        wanted = lab.policy.logprobs(version, np.concatenate([prompt, ids[:start]]), ids[start:end])
        apart = float(np.abs(np.asarray(got.logprobs)[start:end] - wanted).max())
        why = "drawn after it came: what was read before is not read anew by it (old keys and values)"
        expect(
            apart <= lab.tolerance,
            f"tokens {start} to {end} are said to be of version {version}, and their log-probs are up to {apart:.3g}"
            f" from its; they are {why if start else 'the first, before or after it came'}",
        )


@check(
    "rollout", "full",
    means="what is asked for while weights come is answered from a mixture of two versions, and said to be of one of them",
    look="load_weights(): what begins meanwhile waits until all is written, or is answered by the old weights wholly and caches nothing",
)  # fmt: skip
async def during_load(lab: RolloutLab) -> str:
    """Requests that begin while weights come are answered by one version, or by both as their spans say, or refused; in flight never refused."""
    prompts = lab.policy.prompts(min(4, lab.rows), longest=24, seed=34)
    flies, answered = "in_flight" in lab.engine.capabilities.swap, 0
    for at_once in (True, False, True, False):
        old, new, hold = lab.version, lab.version + 1, _Hold()
        loading = asyncio.create_task(lab.load(lab.make_update(new, halfway=hold)))
        await asyncio.sleep(0)
        if not at_once:
            reached = asyncio.create_task(hold.reached.wait())
            await asyncio.wait([loading, reached], return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
        lab.doing = "waiting for requests that began during a load, and for the load"
        asking = [asyncio.create_task(_ask_during(lab, prompt, loading, hold, flies)) for prompt in prompts]
        try:
            await loading
        except EngineError:  # nothing is said to run
            expect(not flies, "load_weights() was refused since requests ran, and capabilities.swap has in_flight")
            await lab.update(new)
        for prompt, completions in zip(prompts, await asyncio.gather(*asking), strict=True):
            for got in completions:
                _check_either(lab, prompt, got, old, new)
            answered += len(completions)
        await lab.check_greedy(prompts, when=" of prompts that were asked while the version came")
    return f"{answered} answers to requests that began during a load"


class _Hold:
    """What an update calls half-way: if another thread reads it, this stays until ``go``, or HELD_S."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._going = threading.Event()

    def __call__(self) -> None:
        if threading.get_ident() == self._thread:  # nobody can ask anything now
            self.reached.set()
            return
        self._loop.call_soon_threadsafe(self.reached.set)
        self._going.wait(HELD_S)

    def go(self) -> None:
        self._going.set()


async def _ask_during(
    lab: RolloutLab, prompt: Ids, loading: asyncio.Task[Any], hold: _Hold, flies: bool
) -> list[Completion]:
    """The answers to a prompt, asked again and again as long as it loads. Those that began at the hold end it."""
    got: list[Completion] = []
    for _ in range(ASKED):
        if loading.done():
            break
        held = hold.reached.is_set()
        try:
            got += await lab.answer(lab.request(prompt))
        except EngineError as error:
            expect(not flies, f"a request that began during a load was refused, and requests may run then: {error}")
            await asyncio.sleep(0)
        if held:
            hold.go()
    return got


def _check_either(lab: RolloutLab, prompt: Ids, got: Completion, old: int, new: int) -> None:
    """It is of one of two versions, or each part of the one that its span names."""
    ids, have = np.asarray(got.token_ids, np.int32), np.asarray(got.logprobs, np.float64)

    def off(version: int, start: int, end: int) -> str:
        wanted = lab.policy.logprobs(version, np.concatenate([prompt, ids[:start]]), ids[start:end])
        return too_far(np.abs(have[start:end] - wanted), lab.tolerance)

    for version, start, end in got.spans:
        expect(version in (old, new), f"a span names version {version}; {old} and {new} were held")
        far = off(version, start, end)
        expect(
            not far,
            f"of a response that began while version {new} came, tokens {start} to {end} are said to be of version {version}, and"
            f" their log-probs are {far} from its: they come from a mixture, or from the other one",
        )
    far_old, far_new = (off(version, 0, len(ids)) for version in (old, new))
    expect(
        got.spans or not (far_old and far_new),
        f"the log-probs of a response that began while version {new} came are {far_old} from those of version {old}, and {far_new}"
        f" from those of {new}: it comes from a mixture of both",
    )


@check(
    "rollout", "full",
    means="what was generated before a swap is thrown away, or goes on as another response",
    look="interrupt(): end what runs, with the tokens it has and finish_reason aborted; `drawn` of the request that goes on",
)  # fmt: skip
@needs(lambda lab: "partial" in lab.engine.capabilities.swap, "it cannot be interrupted")
async def interrupted(lab: RolloutLab) -> None:
    """Responses that are interrupted come with the tokens they have, and go on where they were."""
    prompts, tokens = lab.policy.prompts(min(4, lab.rows), seed=29), min(96, lab.context - 32)
    requests = [lab.request(p, max_tokens=tokens) for p in prompts]
    whole_s = await lab.timed(requests)
    cut = empty = 0
    for turn in range(8):
        running = [asyncio.create_task(lab.answer(request, aborted=True)) for request in requests]
        await asyncio.sleep(whole_s * ((turn + 1) % 8) / 8)
        lab.doing = "waiting for interrupt(), and then for what it ended"
        await lab.engine.interrupt()
        rests = []
        for prompt, (got,) in zip(prompts, await asyncio.gather(*running), strict=True):
            have, aborted = np.asarray(got.token_ids, np.int32), got.finish_reason == "aborted"
            wanted = lab.policy.greedy(lab.version, prompt, tokens)
            lab.check_response(
                prompt, got, wanted[: len(have)] if aborted else wanted, when=" of an interrupted response"
            )
            if not aborted or len(have) == tokens:
                continue
            cut, empty = cut + (len(have) > 0), empty + (len(have) == 0)
            so_far = np.concatenate([prompt, have])
            rests.append((lab.request(so_far, max_tokens=tokens - len(have), drawn=len(have)), wanted[len(have) :]))
        for (rest, wanted), (more,) in zip(rests, await lab.answers([rest for rest, _ in rests]), strict=True):
            lab.check_response(rest.prompt_ids, more, wanted, when=" of a response that goes on")
        if cut >= 2:
            return
    expect(cut or empty, "in 8 interruptions every response ran to its end: interrupt() does not end what runs")
    expect(cut, "in 8 interruptions every interrupted response came back empty: the tokens it had are thrown away")


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
        try:
            check_held(update, lab.engine.held_weights())
        except WeightError as error:
            raise CheckFailed(f"{error}{_of_version(lab)}") from None
        finally:
            update.release()


def _of_version(lab: RolloutLab) -> str:
    for version in {max(lab.version - 1, 0), 0}:
        update = lab.make_update(version)
        with contextlib.suppress(Exception):
            check_held(update, lab.engine.held_weights())
            return f": they are those of version {version}"
    return ""


@check(
    "rollout", "full",
    means="prompts that just fit are refused or cut: the longest, hardest ones are missing from training",
    look="the sum of prompt and max_tokens may be the whole context, no less",
)  # fmt: skip
async def whole_context(lab: RolloutLab) -> None:
    """A prompt and a response that together fill the context are answered."""
    context = lab.context
    if context > FILLED:
        raise DoesNotApply(f"its context is {context} tokens, and the policy is too slow for more than {FILLED}")
    prompt = np.resize(lab.policy.prompts(1, seed=32)[0], context - 4).astype(np.int32)
    (got,) = await lab.answer(lab.request(prompt, max_tokens=4))
    lab.check_response(prompt, got, lab.policy.greedy(lab.version, prompt, 4), when=" at the end of the context")


async def _refused(lab: RolloutLab, update: Any) -> set[str] | None:
    """The names that were taken, or None when the load raised, whatever it was. The lab's version is what it was."""
    held = lab.version
    try:
        return set(await lab.load(update))
    except Exception:
        return None
    finally:
        lab.version = held


async def _sound(lab: RolloutLab, version: int, after: str) -> None:
    """A whole version loads, and the engine is on it."""
    await lab.update(version)
    await lab.check_greedy(lab.policy.prompts(3, seed=33), when=f" after {after} and then a whole one")
