"""Checks every run needs of a rollout engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import EngineError
from ....interfaces import RolloutEngine
from ..check import CheckFailed, DoesNotApply, checks, expect
from ..policy import Logprobs
from ..precision import FALSE_ALARM, chance, chance_of_no_more
from ..resources import check_given_back
from .lab import Ids, RolloutLab, first_tokens

DRAWS, TRIED, NAMED = 640, 16, 64
ENDED, TEXTS = 96, 48
"""The numbers of prompts searched for responses with an end token, and for ids changed by their text."""
TURN_S, SEEN_S = 0.002, 0.2


async def capabilities(lab: RolloutLab) -> None:
    """The declared capabilities are consistent, and the engine defines the methods they need."""
    engine, can = lab.engine, lab.engine.capabilities
    known, swap = {"drain", "partial", "in_flight"}, set(can.swap)
    rows, context = can.max_rows, can.context
    expect(swap and swap <= known, f"capabilities.swap is {swap}; it is one or more of {sorted(known)}")
    whole = isinstance(rows, int) and rows >= 1
    expect(whole, f"capabilities.max_rows is {rows!r}, not a whole number from 1")
    fits = context is None or context >= 2
    expect(fits, f"capabilities.context is {context!r}: a prompt and a response need 2 tokens")
    named = "in_flight" not in swap or can.token_versions
    expect(named, 'swap "in_flight" needs token_versions: else nobody knows which version drew which token')
    flags = {"logprobs": can.logprobs, "held_weights": can.held_weights, "interrupt": "partial" in swap}
    for method, flag in flags.items():
        has = getattr(type(engine), method) is not getattr(RolloutEngine, method)
        expect(has or not flag, f"its capabilities promise {method}(), which it does not define")


async def completions(lab: RolloutLab) -> None:
    """Each of n responses arrives once, whole, with a log-prob for each token and a finish reason."""
    for n in {1, min(4, lab.rows)}:
        for prompt in lab.policy.prompts(3, seed=1):
            await lab.answer(lab.request(prompt, n, temperature=1.0, seed=n))


async def greedy(lab: RolloutLab) -> None:
    """At temperature 0 the tokens, one prompt after another, are those of a reference with the same weights."""
    for prompt in lab.policy.prompts(4, seed=2):
        await lab.check_greedy([prompt])


async def company(lab: RolloutLab) -> None:
    """Concurrent prompts of different lengths are answered like each of them alone."""
    prompts = lab.policy.prompts(min(lab.rows, 8), longest=24, seed=3)
    try:
        await lab.check_greedy(prompts, when=" in company")
    except CheckFailed as failed:
        for prompt in prompts:  # raises where company is not what is wrong
            await lab.check_greedy([prompt])
        cause = "batching: the answer to a prompt depends on the prompts beside it"
        raise CheckFailed(f"{failed}; asked for one by one, all are answered right", cause) from None


async def logprobs(lab: RolloutLab) -> None:
    """Log-probs of drawn tokens are those of the policy at the temperature of the draw."""
    for temperature in (1.0, 0.7, 1.3):
        for seed, prompt in enumerate(lab.policy.prompts(2, seed=4)):
            for got in await lab.answer(lab.request(prompt, min(4, lab.rows), temperature=temperature, seed=seed)):
                lab.check_logprobs(prompt, got, temperature=temperature)


async def draws(lab: RolloutLab) -> str:
    """Tokens are drawn from the whole distribution of their log-probs, independently in each response."""
    prompt, _ = telling_prompt(lab)
    for temperature in (1.0, 1.3):
        groups = await lab.draw(prompt, DRAWS, temperature=temperature, seed=1000)
        _check_drawn(lab, prompt, temperature, first_tokens(groups))
    return f"{DRAWS} tokens at each of two temperatures"


def telling_prompt(lab: RolloutLab) -> tuple[Ids, Logprobs]:
    """Return a prompt with its own tokens about as likely as the others, to expose penalties, and the
    log-probs after it."""
    prompts = lab.policy.prompts(TRIED, longest=min(96, lab.context // 2), seed=5)
    scored = [(prompt, lab.next_logprobs(prompt)) for prompt in prompts]
    return min(scored, key=lambda each: abs(float(np.exp(each[1][np.unique(each[0])]).sum()) - 0.5))


def _check_drawn(lab: RolloutLab, prompt: Ids, temperature: float, drawn: Ids) -> None:
    wanted = lab.next_logprobs(prompt, temperature)
    share = np.exp(wanted)
    same = float((share**2).sum())
    half, most = len(drawn) // 2 * 2, drawn.shape[1] // 2 * 2
    # no response is in two pairs
    check_apart("responses of one place in groups of different seeds", drawn[:half:2] == drawn[1:half:2], same)
    check_apart("neighbours of one group", drawn[:, :most:2] == drawn[:, 1:most:2], same)
    said = f"of {drawn.size} tokens drawn at temperature {temperature:g}"
    likely, rank, beyond = chance_of_no_more(share, drawn)
    text = f"none was beyond the {rank} likeliest, and {beyond:.1%} should be: the draw is cut (top_k, top_p, min_p)"
    expect(likely > FALSE_ALARM, f"{said} {text}", "draws: cut by top_k, top_p or min_p")
    read = np.isin(np.arange(len(share)), prompt)
    found, right = read[drawn], float(share[read].sum())
    expect(
        _by_chance(read, share, found),
        f"{said} {found.mean():.1%} are tokens of the prompt, and {right:.1%} should be: what was read is made"
        f" {'less' if found.mean() < right else 'more'} likely (repetition, presence or frequency penalties)",
        "draws: a repetition, presence or frequency penalty is applied",
    )
    have, mean = float(wanted[drawn].mean()), float(share @ wanted)
    narrower, lower = ("narrower", "lower") if have > mean else ("wider", "higher")
    expect(
        _by_chance(wanted, share, wanted[drawn]),
        f"{said} the mean log-prob is {have:.4f}; the policy's is {mean:.4f}: they are drawn from a {narrower} distribution",
        f"draws: at a {lower} temperature than the request's",
    )


def check_apart(what: str, pairs: np.ndarray[Any, Any], same: float) -> None:
    """Test ``pairs``, True for two equal tokens; those of independent draws are equal at the rate ``same``."""
    alike = float(pairs.mean()) if pairs.size else 0.0
    expect(
        alike <= same or _by_chance([0, 1], [1 - same, same], pairs),
        f"{alike:.0%} of {what} begin with the same token, {same:.0%} would by chance:"
        " they are drawn with the same random numbers",
        "draws: several responses use the same random numbers",
    )


def _by_chance(values: Any, shares: Any, drawn: np.ndarray[Any, Any]) -> bool:
    return chance(values, shares, float(drawn.mean()), drawn.size) > FALSE_ALARM


async def stops(lab: RolloutLab) -> None:
    """A response ends with a stop token, included, or at max_tokens; and its finish reason is right."""
    for prompt in lab.policy.prompts(2, seed=6):
        whole = lab.policy.greedy(lab.version, prompt, 8)
        (short,) = await lab.answer(lab.request(prompt, max_tokens=1))
        lab.check_response(prompt, short, whole[:1], when=" with max_tokens=1")
        if len(whole) == 8 and whole[-1] not in (lab.policy.ends or ()):
            (full,) = await lab.answer(lab.request(prompt, max_tokens=8))
            reason = full.finish_reason
            expect(reason == "length", f"a response of max_tokens tokens says it ended for {reason!r}, not length")
        other = _unlike(lab, whole)
        for stop in (int(whole[len(whole) // 2]), int(whole[0])):
            wanted = whole[: whole.tolist().index(stop) + 1]
            for most in (8, len(wanted)):
                (ended,) = await lab.answer(lab.request(prompt, max_tokens=most, stop_ids=(other, stop)))
                ids = np.asarray(ended.token_ids).tolist()
                left_out = f"a response that ends at stop token {stop} leaves it out: {ids}, not {wanted.tolist()}"
                expect(ids != wanted[:-1].tolist(), left_out)
                lab.check_response(prompt, ended, wanted, when=f" with stop_ids=({other}, {stop})")


def _unlike(lab: RolloutLab, ids: Ids) -> int:
    return next(token for token in range(lab.policy.vocabulary) if token not in ids)


async def ends(lab: RolloutLab) -> None:
    """A response ends at any of the model's end tokens, includes it with its log-prob, and has the
    finish reason stop."""
    left, found = set(lab.policy.ends or ()), []
    if not left:
        raise DoesNotApply("this policy has no end token")
    for prompt in lab.policy.prompts(ENDED, seed=10):
        wanted = lab.policy.greedy(lab.version, prompt, 24)
        if len(wanted) > 1 and int(wanted[-1]) in left:
            left.remove(int(wanted[-1]))
            found.append((prompt, wanted))
        if not left:
            break
    if not found:
        raise DoesNotApply(f"no response to {ENDED} prompts comes to an end token within 24 tokens")
    for prompt, wanted in found:
        for most, stop_ids in ((len(wanted) + 8, ()), (len(wanted) + 8, (_unlike(lab, wanted),)), (len(wanted), ())):
            (got,) = await lab.answer(lab.request(prompt, max_tokens=most, stop_ids=stop_ids))
            lab.check_response(prompt, got, wanted, when=f", which come to end token {wanted[-1]},")


async def retokenised(lab: RolloutLab) -> None:
    """Prompts and responses keep their ids even if their text would be encoded to others."""
    changed = []
    for prompt in lab.policy.prompts(TEXTS, seed=11):
        wanted = lab.policy.greedy(lab.version, prompt, 8)
        again = [(ids, lab.policy.retokenised(ids)) for ids in (prompt, wanted)]
        if any(other is None for _, other in again):
            raise DoesNotApply("this policy has no text")
        if not any(np.array_equal(ids, other) for ids, other in again if other is not None):
            changed.append((prompt, wanted))
        if len(changed) == 3:
            break
    if not changed:
        raise DoesNotApply(f"the text of {TEXTS} prompts and their responses is encoded to the same ids again")
    for prompt, wanted in changed:
        (got,) = await lab.answer(lab.request(prompt))
        lab.check_response(prompt, got, wanted)


async def bad_requests(lab: RolloutLab) -> None:
    """Impossible requests are refused with EngineError, without an effect on concurrent ones."""
    context, good = lab.context, lab.policy.prompts(2, seed=7)
    bad = {
        "an empty prompt": lab.request(np.zeros(0, np.int32)),
        f"a prompt longer than the context of {context}": lab.request(np.resize(good[0], context + 1), max_tokens=1),
    }
    beside = asyncio.create_task(lab.check_greedy(good[: lab.rows - 1], when=" beside bad requests"))
    for what, request in bad.items():
        try:
            got = await lab.answer(request)
        except EngineError:
            continue
        except CheckFailed as failed:
            raise CheckFailed(f"{what}: {failed}") from failed
        raise CheckFailed(f"{what} was answered with {np.asarray(got[0].token_ids).tolist()[:8]}, not refused")
    await beside
    await lab.check_greedy(good, when=" after bad requests")


async def does_not_block(lab: RolloutLab) -> str:
    """While the engine generates, its event loop is free for others."""
    for _ in range(3):  # one that blocks does so each time, and a busy machine does not
        spent, turns = await _turns(lab)
        if spent < SEEN_S:
            return f"responses as long as can be took {spent:.2g} s, which is too short to tell"
        # a fiftieth of what an idle loop has: a share, so that a slow machine does not matter
        if turns >= min(spent / TURN_S / 50, 20.0):
            return f"the event loop came round {turns} times in {spent:.2g} s"
    raise CheckFailed(
        f"in {spent:.2f} s of generating, the event loop came round {turns} times: generate() blocks it"
    )


async def _turns(lab: RolloutLab) -> tuple[float, int]:
    """Return seconds of generating, long enough to measure if possible, and turns of the loop meanwhile.

    Time without a processor is left out: engines spinning in processes of their own delay the loop.
    """
    turns, most = 0, lab.context - 16

    async def _count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(TURN_S)
            turns += 1

    tokens = min(32, most)
    while True:
        counting = asyncio.create_task(_count())
        turns = 0
        requests = [lab.request(p, max_tokens=tokens) for p in lab.policy.prompts(min(lab.rows, 4), seed=8)]
        queued_s = _queued_s()
        spent = await lab.timed(requests) - (_queued_s() - queued_s)
        counting.cancel()
        if spent > SEEN_S or tokens >= most:
            return spent, turns
        tokens = min(2 * tokens, most)


def _queued_s() -> float:
    """Return seconds this thread was ready to run and did not; 0 if the system does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


async def update(lab: RolloutLab) -> None:
    """After load_weights() every answer, and every log-prob, is of the new weights."""
    prompts = lab.policy.prompts(3, seed=9)
    await lab.check_greedy(prompts)
    await lab.update()
    try:
        await lab.check_greedy(prompts, when=" after the update")
    except CheckFailed as failed:
        blamed = await lab.blame_cache(failed)
        if blamed is not failed:
            raise blamed from None
        cause, text = await _suspect_tensors(lab, prompts[0])
        raise CheckFailed(f"{failed}{text}", cause or failed.cause, "" if cause else failed.hint) from None


async def _suspect_tensors(lab: RolloutLab, prompt: np.ndarray[Any, Any]) -> tuple[str, str]:
    """Load variants of a version to find ignored and transposed tensors. Return the cause and its text."""
    version = lab.version
    base, other = lab.policy.tensors(version), lab.policy.tensors(version + 1)
    names = [name for name in base if base[name].size][:NAMED]
    request, wanted = lab.request(prompt, max_tokens=4), lab.policy.greedy(version, prompt, 4)
    right = lab.policy.logprobs(version, prompt, wanted)

    async def _answer_under(tensors: Mapping[str, Any]) -> tuple[list[int], np.ndarray[Any, Any]]:
        await lab.load(lab.make_update(version, {**base, **tensors}))
        (got,) = await lab.answer(request)
        return list(got.token_ids), np.asarray(got.logprobs, np.float64)

    with contextlib.suppress(Exception):
        ids, logprobs = await _answer_under({})
        ignored = []
        for name in names:
            now, scored = await _answer_under({name: other[name]})
            if now == ids and np.abs(scored - logprobs).max() <= lab.tolerance / 100:
                ignored.append(name)
        if len(ignored) == len(names):
            return "load_weights: no tensor is loaded", "; whichever tensor comes changed, its answers stay the same"
        if ignored:
            text = f"; these tensors change no answer when they come changed: {', '.join(ignored)}"
            return f"load_weights: {_shown(ignored)} not loaded", text
    turned = {n: np.ascontiguousarray(base[n].T).reshape(base[n].shape) for n in names if base[n].ndim == 2}
    with contextlib.suppress(Exception):
        for some in ([*turned], *([name] for name in turned)):
            now, scored = await _answer_under({name: turned[name] for name in some})
            if now == wanted.tolist() and np.abs(scored - right).max() <= lab.tolerance:
                text = f"; it answers rightly when {', '.join(some)} come transposed"
                return f"load_weights: {_shown(some)} transposed", text
    return "", ""


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(map(repr, names[:3]))}{more} {'are' if len(names) > 1 else 'is'}"


def closes(lab: RolloutLab) -> None:
    """close() releases the engine's resources: threads, processes, shared memory, descriptors."""

    def _start() -> None:
        lab.start()
        lab.call(lab.answers([lab.request(lab.policy.prompts(1)[0])]), "a request")

    lab.close()
    check_given_back(_start, lab.close, limit_s=lab.limit_s)


CHECKS = checks("rollout", {
    capabilities: ("basic", (),
        "the workflow relies on the capabilities: it would choose an impossible way to swap weights",
        "the engine's `capabilities`, and its methods interrupt, logprobs, held_weights"),
    completions: ("basic", (),
        "rows are lost or counted twice, or columns differ in length: the run waits for missing rows",
        "generate(): yield one Completion for each of the n responses"),
    greedy: ("basic", ("completions",), "the run trains on tokens of another distribution than the model's",
        "how the prompt reaches the engine (token ids, never re-tokenised), positions, the attention mask, the "
        "model's dtype"),
    company: ("basic", ("greedy",), "concurrent prompts change each other's answers: no result can be reproduced",
        "padding, attention masks and positions of batches with prompts of different lengths"),
    logprobs: ("basic", ("completions",),
        "the importance ratio of every token is wrong: training drifts or collapses without an error",
        "log-probs are natural logs over the whole vocabulary, with the request's temperature applied and no other "
        "processor"),
    draws: ("basic", ("completions",), "the tokens come from another distribution than their log-probs say, or a "
        "group's responses are all the same: a biased or empty gradient",
        "defaults of the engine (top_k, top_p, repetition penalties of generation_config.json), the seed"),
    stops: ("basic", ("greedy", "logprobs"),
        "responses run past their end, or lose their end token: the policy never learns to stop",
        "stop_ids and the model's end token: the end token is part of the response, its last one"),
    ends: ("basic", ("greedy", "logprobs"), "responses run past the model's end, or lose its end token: the policy "
        "never learns to stop, and they grow longer", "the end tokens: all of eos_token_id in generation_config.json,"
        " even if no other entry of that file applies; keep the token and its log-prob"),
    retokenised: ("basic", ("greedy", "logprobs"),
        "token ids change on a way through text: log-probs belong to tokens never drawn, without an error",
        "pass the prompt's ids to the engine, not its text, and take the drawn ids from it, not its text encoded "
        "anew"),
    bad_requests: ("basic", ("company", "logprobs"),
        "one bad prompt ends the run, or is answered with something else than was asked, or hangs",
        "raise EngineError before the request reaches the engine, and for errors the engine answers with"),
    does_not_block: ("basic", ("completions",), "while it generates, the worker renews no lease and fetches no "
        "weights: leases expire, and rows are generated twice",
        "blocking calls in generate(): move them to a thread (asyncio.to_thread) and release the interpreter's lock"),
    update: ("basic", ("company", "logprobs"),
        "the run goes on with old weights under new version numbers: every token's version is wrong",
        "load_weights(): each tensor is written where the engine computes from, also into fused, repacked and tied "
        "copies"),
    closes: ("basic", ("completions",), "processes of an ended run stay, with their memory and their GPUs",
        "close(): join threads, end processes, and raise EngineError in pending requests"),
}, alone=("closes",))  # fmt: skip
