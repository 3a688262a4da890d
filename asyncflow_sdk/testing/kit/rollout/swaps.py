"""Checks of weights loaded while requests run: the version of each token, interruption, continuation."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....errors import EngineError
from ....interfaces import Completion, Request
from ....types import VersionSpan
from ....workflow.loops.engine_gateway import EngineGateway
from ..check import CheckFailed, checks, expect, needs
from .basic import check_apart
from .lab import Ids, RolloutLab, first_tokens

MIXTURE = "load_weights: requests that begin during a load are answered from a mixture of two versions"
HELD_S, ASKED = 0.3, 4
"""Seconds a load is held half-way, and the requests of each of several clients meanwhile."""
HOT, WARM, PAIRS = 1000.0, 2.0, 16
"""A temperature with all tokens about equally likely, one for engines that refuse it, and pairs of draws compared."""
ATTEMPTS, SHARE, WHOLE = 24, 0.25, 0.8
"""The fewest attempts to hit running responses. There are more until SHARE of the check's limit is over, and none after WHOLE of it."""


@needs(lambda lab: lab.engine.capabilities.token_versions, "it gives no versions of tokens")
async def versions(lab: RolloutLab) -> None:
    """Spans name the loaded version, before and after an update."""
    for _ in range(2):
        for prompt in lab.policy.prompts(2, seed=27):
            for got in await lab.answer(lab.request(prompt, 2 if lab.rows > 1 else 1, temperature=1.0, seed=1)):
                named = {span.version for span in got.spans}
                expect(named <= {lab.version}, f"spans name versions {sorted(named)}, and {lab.version} is held")
        await lab.update()


@needs(lambda lab: "in_flight" in lab.engine.capabilities.swap, "it takes no weights while requests run")
async def update_in_flight(lab: RolloutLab) -> str:
    """With weights loaded while requests run, each token's span and log-prob are of its own version."""
    prompts, mixed, moment = lab.policy.prompts(min(4, lab.rows), seed=28), 0, _Moment(lab)
    while mixed < 2 and moment.try_again():
        requests = [lab.request(p, temperature=1.0, max_tokens=moment.tokens, seed=1) for p in prompts]
        await moment.prepare(requests)
        old, new = lab.version, lab.version + 1
        running = asyncio.create_task(lab.answers(requests))
        await moment.wait()
        lab.doing = "waiting for an update, and for requests that ran meanwhile"
        await lab.update(new)
        before, seen = mixed, set[int]()
        for prompt, (got,) in zip(prompts, await running, strict=True):
            versions = {span.version for span in got.spans}
            mixed, seen = mixed + (len(versions) > 1), seen | versions
            _check_mixed(lab, prompt, got, old, new)
        moment.learn(hit=mixed > before, too_early=seen == {new}, too_late=seen == {old})
    said = f"in {moment.attempts} updates while requests ran, no response got tokens of both versions"
    expect(mixed, f"{said}: the engine waits for their end")
    return moment.told()


class _Moment:
    """When to act while responses are drawn: searches it by bisection.

    The machine may be many times faster or slower than when the responses were timed, or its
    processors may be busy for as long as a response takes. So each attempt says whether it was too
    early or too late; where that does not help, the next requests ask for more tokens and are timed
    anew. ``attempts``: so far. ``tokens``: the most of each of the next responses.
    """

    def __init__(self, lab: RolloutLab) -> None:
        self._lab, self._longest = lab, min(512, lab.context - 32)
        self.attempts, self._began = 0, time.monotonic()
        self.tokens = min(96, self._longest)
        self._early = self._late = self._whole_s = 0.0

    def try_again(self) -> bool:
        """Count one more attempt, or return False if there were enough."""
        spent = (time.monotonic() - self._began) / self._lab.limit_s
        if spent > (SHARE if self.attempts >= ATTEMPTS else WHOLE):
            return False
        self.attempts += 1
        return True

    async def prepare(self, requests: Sequence[Request]) -> None:
        """Time these requests, if those with as many tokens are not timed."""
        if not self._whole_s:
            self._early, self._late = 0.0, await self._lab.timed(requests)
            self._whole_s = self._late

    async def wait(self) -> None:
        """Sleep until the middle of the interval."""
        await asyncio.sleep((self._early + self._late) / 2)

    def learn(self, *, hit: bool, too_early: bool, too_late: bool) -> None:
        """Halve the interval after a miss. Below an eighth, or without a direction, double the
        tokens and time the requests anew."""
        middle = (self._early + self._late) / 2
        if too_early:
            self._early = middle
        elif too_late:
            self._late = middle
        if not hit and (too_early == too_late or self._late - self._early <= self._whole_s / 8):
            self.tokens, self._whole_s = min(2 * self.tokens, self._longest), 0.0

    def told(self) -> str:
        """Return a remark if the first attempt did not do."""
        return f"running responses were hit in attempt {self.attempts}" if self.attempts > 1 else ""


def _check_mixed(lab: RolloutLab, prompt: Ids, got: Completion, old: int, new: int) -> None:
    for span in got.spans:
        version, start, end = span
        expect(version in (old, new), f"a span names version {version}; {old} and {new} were held")
        if far := lab.off(prompt, got, span):
            why, cause = (
                "the first, before or after it came",
                "versions: spans name another version than the one that drew the tokens",
            )
            if start:
                why = "drawn after it came: what was read before is not read anew by it (old keys and values)"
                cause = "load_weights: running requests keep keys and values of the old weights"
            said = (
                f"tokens {start} to {end} are said to be of version {version}, and their log-probs are {far} from its"
            )
            raise CheckFailed(f"{said}; they are {why}", lab.why(prompt, got, span).or_else(cause))


async def during_load(lab: RolloutLab) -> str:
    """Requests begun during a load are answered by the old version, the new one, or both as their
    spans say. Engines that load in flight refuse none of them; others may."""
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
    """Called half-way by an update: in another thread it waits for ``go``, or HELD_S."""

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
        """Let the load continue."""
        self._going.set()


async def _ask_during(
    lab: RolloutLab, prompt: Ids, loading: asyncio.Task[Any], hold: _Hold, flies: bool
) -> list[Completion]:
    """Ask a prompt again and again during a load; requests begun at the hold end it."""
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
    """Verify a response against one of two versions, or each part against its span."""
    for span in got.spans:
        version, start, end = span
        expect(version in (old, new), f"a span names version {version}; {old} and {new} were held")
        far = lab.off(prompt, got, span)
        expect(
            not far,
            f"of a response that began while version {new} came, tokens {start} to {end} are said to be of version"
            f" {version}, and their log-probs are {far} from its: they come from a mixture, or from the other one",
            MIXTURE,
        )
    far_old, far_new = (lab.off(prompt, got, VersionSpan(each, 0, len(got.token_ids))) for each in (old, new))
    expect(
        got.spans or not (far_old and far_new),
        f"the log-probs of a response that began while version {new} came are {far_old} from those of version"
        f" {old}, and {far_new} from those of {new}: it comes from a mixture of both",
        MIXTURE,
    )


_can_be_interrupted = needs(lambda lab: "partial" in lab.engine.capabilities.swap, "it cannot be interrupted")


@_can_be_interrupted
async def interrupted(lab: RolloutLab) -> str:
    """Interrupted responses return with their tokens, and continue from there."""
    prompts, cut, empty, moment = lab.policy.prompts(min(4, lab.rows), seed=29), 0, 0, _Moment(lab)
    while cut < 2 and moment.try_again():
        tokens = moment.tokens
        requests = [lab.request(p, max_tokens=tokens) for p in prompts]
        await moment.prepare(requests)
        running = [asyncio.create_task(lab.answer(request, aborted=True)) for request in requests]
        await moment.wait()
        lab.doing = "waiting for interrupt(), and then for what it ended"
        await lab.engine.interrupt()
        rests, lengths, before = [], [], cut
        for prompt, (got,) in zip(prompts, await asyncio.gather(*running), strict=True):
            have, aborted = np.asarray(got.token_ids, np.int32), got.finish_reason == "aborted"
            wanted, count = lab.policy.greedy(lab.version, prompt, tokens), len(have)
            begun = wanted[:count] if aborted else wanted
            lab.check_response(prompt, got, begun, when=" of an interrupted response")
            lengths.append(count)
            if not aborted or count == tokens:
                continue
            cut, empty = cut + (count > 0), empty + (count == 0)
            so_far, following = np.concatenate([prompt, have]), wanted[count:]
            if not np.array_equal(have, begun):  # a tie: it drew other, equally likely tokens
                following = lab.policy.greedy(lab.version, so_far, tokens - count)
            rests.append((lab.request(so_far, max_tokens=tokens - count, drawn=count), following))
        for (rest, wanted), (more,) in zip(rests, await lab.answers([rest for rest, _ in rests]), strict=True):
            lab.check_response(rest.prompt_ids, more, wanted, when=" of a response that goes on")
        moment.learn(hit=cut > before, too_early=not any(lengths), too_late=not rests)
    times = f"in {moment.attempts} interruptions"
    expect(cut or empty, f"{times} every response ran to its end: interrupt() does not end what runs")
    expect(cut, f"{times} every interrupted response came back empty: the tokens it had are thrown away")
    return moment.told()


@_can_be_interrupted
async def continued(lab: RolloutLab) -> None:
    """Continued responses draw by other random numbers than at their begin, and than each other."""
    (prompt,) = lab.policy.prompts(1, seed=36)
    longer, hot = np.append(prompt, prompt[:1]), HOT
    asked: list[tuple[Ids, dict[str, int]]] = [(prompt, {}), (prompt, {"first": 1}), (longer, {"drawn": 1})]
    try:
        await lab.draw(prompt, 1, temperature=HOT, seed=0)
    except (CheckFailed, EngineError):
        hot = WARM
    shares = [np.exp(lab.next_logprobs(ids, hot)) for ids, _ in asked]
    drawn = [first_tokens(await lab.draw(ids, PAIRS, temperature=hot, seed=0, **more)) for ids, more in asked]
    for one, other, said in (
        (0, 1, "first=0 and first=1 (`first` is ignored)"),
        (0, 2, "drawn=0 and drawn=1 (`drawn` is ignored)"),
        (1, 2, "first=1 and drawn=1 (they are confused)"),
    ):
        alike = float(shares[one] @ shares[other])
        check_apart(f"responses of one seed with {said}", drawn[one] == drawn[other], alike)


@needs(lambda lab: lab.engine.gives or lab.engine.capabilities.sampling_mask, "it gives no further columns")
async def further_columns(lab: RolloutLab) -> str:
    """Further columns fit the tokens of each response: whole, cut at a stop text, and interrupted by
    a load and continued."""
    cut: dict[str, Any] = {"sampling_mask": lab.engine.capabilities.sampling_mask}
    cut |= {"temperature": 1.0, "seed": 1} | dict.fromkeys({"top_k"} & {*lab.engine.capabilities.restrictions}, 3)
    sampling = lab.request(lab.policy.prompts(1, seed=37)[0], **cut).sampling
    gateway = EngineGateway(lab.engine, lab.version, asyncio.Event(), sampling=sampling)
    moment, joined = _Moment(lab), 0

    async def _answer(request: Request) -> Completion:
        try:
            async with contextlib.aclosing(gateway.generate(request)) as responses:
                (got,) = [each async for part in responses for each in part.completion.each()]
        except EngineError as error:
            raise CheckFailed(str(error)) from error
        return gateway.columns.checked(got)

    for prompt in lab.policy.prompts(2, seed=37):
        whole = await _answer(lab.request(prompt, **cut))
        if text := lab.policy.text(np.asarray(whole.token_ids)[:4]):
            await _answer(lab.request(prompt, stop=text[-1], **cut))
    while "partial" in lab.engine.capabilities.swap and not joined and moment.try_again():
        asked = lab.policy.prompts(2, seed=38)
        requests = [lab.request(prompt, max_tokens=moment.tokens, **cut) for prompt in asked]
        await moment.prepare(requests)
        running = [asyncio.create_task(_answer(request)) for request in requests]
        await moment.wait()
        async with gateway.stopped(interrupt=True):
            await asyncio.sleep(0.01)  # the tasks of whole responses end
            joined = sum(not task.done() for task in running)
            gateway.take(await lab.update())
        await asyncio.gather(*running)
        moment.learn(hit=joined > 0, too_early=False, too_late=not joined)
    return f"{', '.join(sorted(gateway.columns.specs))}; {joined} responses were interrupted and continued"


CHECKS = checks("rollout", {
    versions: ("full", ("update",), "the staleness of tokens is computed from wrong versions",
        "the spans of a Completion: the version loaded at the draw of each token, not the newest published one"),
    update_in_flight: ("full", ("versions", "stale_cache"),
        "tokens carry a wrong version, or are drawn with a KV cache of the version before",
        "load_weights() while requests run: stop between two tokens, load, recompute the KV cache, continue; spans "
        "and log-probs follow"),
    during_load: ("full", ("versions", "stale_cache"),
        "requests during a load are answered from a mixture of two versions under the number of one",
        "load_weights(): new requests wait for the end of the load, or use only the old weights and cache nothing"),
    interrupted: ("full", ("company", "logprobs"),
        "tokens generated before a swap are lost, or continue as another response", "interrupt(): end running "
        "requests with their tokens and finish_reason aborted; `drawn` of the continued request"),
    continued: ("full", ("draws", "interrupted"),
        "interrupted responses go on with random numbers used before: the responses of a group become alike",
        "seeds in generate(): response i of a request has number `first` + i, and its tokens are counted from "
        "`drawn`"),
    further_columns: ("full", ("completions", "interrupted"),
        "a value of a further column is taken for that of another token, or the worker refuses every response",
        "RolloutEngine.gives, and Completion.columns: also of aborted responses, without tokens of the prompt"),
})  # fmt: skip
