"""Checks of stop texts, and of draws by top_p, top_k, min_p and a repetition penalty."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from ....interfaces import Completion
from ..check import CheckFailed, DoesNotApply, checks, expect, needs
from ..policy import Logprobs
from ..precision import FALSE_ALARM, chance, too_far
from .basic import telling_prompt
from .lab import Ids, RolloutLab, first_tokens

DRAWS, PROMPTS, WHOLE = 320, 8, 16
NEVER = "\x00 never drawn"
VALUES = {"top_k": 3, "top_p": 0.5, "min_p": 0.3, "repetition_penalty": 1000.0}
MASKED = {"top_k", "top_p", "min_p"}


async def stop_texts(lab: RolloutLab) -> None:
    """A response with stop texts reaches the token that completes one, also its first token, and
    ends there or soon after."""
    can = lab.engine.capabilities
    if not can.stop_texts:
        raise DoesNotApply("it declares no stop_texts: the worker cuts its responses")
    early, late, most = set[str](), dict[str, str](), WHOLE
    for prompt in lab.policy.prompts(PROMPTS, seed=12):
        limit, whole = most, lab.policy.greedy(lab.version, prompt, most)
        texts = [lab.policy.text(whole[:count]) for count in range(len(whole) + 1)]
        if None in texts:
            raise DoesNotApply("this policy has no text")
        before, after = (str(texts[min(count, len(whole))]) for count in (4, 5))
        if not before or len(after) == len(before) or not after.startswith(before):
            continue
        stop = after[len(before) - 1 : len(before) + 1]  # of two tokens
        kinds = {"": (0, stop), ", drawn as its first token": (0, str(texts[1]))}
        if "partial" in can.swap:
            kinds[", begun before it was interrupted"] = (4, stop)
        for kind, (had, stop) in kinds.items():
            if not stop or stop in str(texts[had]):
                continue
            counts = [str(text).count(stop) for text in texts]
            end = next(count for count, times in enumerate(counts) if times) - had
            again = next((count for count, times in enumerate(counts) if times > 1), len(whole)) - had
            so_far = np.concatenate([prompt, whole[:had]])
            asked = lab.request(so_far, max_tokens=limit - had, stop=(NEVER, stop), drawn=had)
            (got,) = await lab.answer(asked)
            tokens = len(got.token_ids)
            lab.check_response(so_far, got, whole[had:][:tokens], when=f" with stop={stop!r}")
            before_end = (
                f"a response ends after {tokens} tokens, before its stop text {stop!r}{kind}, which {end} complete"
            )
            expect(tokens >= end, before_end)
            if tokens < again:
                early.add(kind)
                reason = got.finish_reason
                expect(reason == "stop", f"a response that ends at {stop!r} says it ended for {reason!r}")
            elif end < again - 1 and kind not in early:  # the abort may have come after the last token: ask for more
                late[kind], most = stop, min(2 * limit, max(lab.context - 32, WHOLE))
    for kind in late.keys() - early:
        raise CheckFailed(f"each response goes on over its stop text{kind}, as {late[kind]!r}")
    if not early:
        raise DoesNotApply(f"no response to {PROMPTS} prompts has a text over two tokens")


async def restricted(lab: RolloutLab) -> str:
    """Draws keep to each declared restriction, and log-probs stay those of the whole vocabulary."""
    able = sorted(lab.engine.capabilities.restrictions)
    expect(set(able) <= VALUES.keys(), f"capabilities.restrictions is {able}; known are {sorted(VALUES)}")
    for name in able:
        await _check_restriction(lab, name, VALUES[name])
    return f"{DRAWS} tokens each by {', '.join(able) or 'none'}"


async def _check_restriction(lab: RolloutLab, name: str, value: float) -> None:
    prompt, logprobs = telling_prompt(lab)
    share = np.exp(logprobs)
    groups = await lab.draw(prompt, DRAWS, temperature=1.0, seed=2000, **{name: value})
    for got in itertools.chain(*groups):
        lab.check_logprobs(prompt, got, when=f" with {name}={value:g}")
    drawn = first_tokens(groups).ravel()
    said = f"of {len(drawn)} tokens drawn with {name}={value:g}"
    if name == "repetition_penalty":
        read = np.isin(np.arange(len(share)), prompt)
        part = float(read[drawn].mean())
        expect(
            part < share[read].sum() and chance(read, share, part, len(drawn)) < FALSE_ALARM,
            f"{said} {part:.1%} are tokens of the prompt, and without it {share[read].sum():.1%} would be",
        )
        (asked,) = lab.policy.prompts(1, seed=13)
        (got,) = await lab.answer(lab.request(asked, max_tokens=WHOLE, repetition_penalty=value))
        ids = np.asarray(got.token_ids).tolist()
        expect(len({*ids}) == len(ids), f"tokens with {name}={value:g} come twice: {ids}; drawn ones count, too")
        return
    allowed = share * _kept(share, name, value)
    most = share[np.flatnonzero(allowed)].min() - lab.tolerance  # a token as likely as the last one may replace it
    outside = sorted({token for token in drawn.tolist() if share[token] < most})
    expect(not outside, f"{said} some are not allowed: {outside}; allowed are {np.flatnonzero(allowed).tolist()}")
    mean = float(logprobs[drawn].mean())
    by_chance = chance(logprobs, allowed / allowed.sum(), mean, len(drawn))
    expect(by_chance > FALSE_ALARM, f"{said} the mean log-prob is {mean:.4f}: the draw is cut more than asked for")


def _kept(share: Logprobs, name: str, value: float) -> npt.NDArray[np.bool_]:
    if name == "min_p":
        return np.asarray(share >= value * share.max())
    order = np.argsort(-share, kind="stable")
    kept = np.empty(len(share), np.bool_)
    kept[order] = np.arange(len(share)) < value if name == "top_k" else share[order].cumsum() - share[order] < value
    return kept


@needs(lambda lab: lab.engine.capabilities.sampling_mask, "it declares no sampling_mask")
async def sampling_mask(lab: RolloutLab) -> str:
    """Kept ids are all possible tokens of each draw, and log-probs are the policy's over them."""
    (prompt,), able = lab.policy.prompts(1, seed=14), {*lab.engine.capabilities.restrictions} & MASKED
    for name in sorted(able):
        cut: dict[str, Any] = {"sampling_mask": True, name: VALUES[name]}
        asked = lab.request(prompt, min(4, lab.rows), temperature=1.0, seed=1, **cut)
        for got in await lab.answer(asked):
            _check_mask(lab, prompt, got, name)
    for temperature in (0.0, 1.0):
        (got,) = await lab.answer(lab.request(prompt, temperature=temperature, seed=1, sampling_mask=True))
        counts = np.asarray(got.columns["kept_ids_counts"])
        said = f"kept_ids_counts are {counts.tolist()} at temperature {temperature:g} without a cut"
        expect(not counts.any(), said)
        lab.check_logprobs(prompt, got, when=" without a cut")
    return f"draws by {', '.join(sorted(able)) or 'none'}"


def _check_mask(lab: RolloutLab, prompt: Ids, got: Completion, name: str) -> None:
    ids, value, allow = np.asarray(got.token_ids, np.int32), VALUES[name], lab.tolerance
    ends, apart = np.cumsum([0, *got.columns["kept_ids_counts"]]), []
    for at, token in enumerate(ids.tolist()):
        kept = np.asarray(got.columns["kept_ids"][ends[at] : ends[at + 1]])
        said = f"with {name}={value:g}, token {at} ({token}) has kept ids {kept.tolist()}"
        once = token in kept.tolist() and len({*kept.tolist()}) == len(kept)
        expect(once, f"{said}: not the drawn one, or one twice")
        logprobs = lab.next_logprobs(np.concatenate([prompt, ids[:at]]))
        share, has = np.exp(logprobs), np.isin(np.arange(len(logprobs)), kept)
        last = share[_kept(share, name, value)].min()  # tokens as likely as the last one may replace each other
        off = 0 if name == "top_k" else allow
        must = _kept(share, name, value + (off if name == "min_p" else -off)) & (share > last + allow)
        may = _kept(share, name, value + (-off if name == "min_p" else off)) | (share >= last - allow)
        expect(not (must & ~has).any(), f"{said}, and it could be {np.flatnonzero(must & ~has).tolist()}, too")
        expect(not (has & ~may).any(), f"{said}, and it could not be {np.flatnonzero(has & ~may).tolist()}")
        apart.append(abs(float(got.logprobs[at]) - float(logprobs[token] - np.logaddexp.reduce(logprobs[kept]))))
    far = too_far(np.array(apart), allow)
    expect(not far, f"log-probs with {name}={value:g} are {far} from those of the policy over the kept ids")


CHECKS = checks("rollout", {
    stop_texts: ("full", ("greedy", "logprobs", "stops"),
        "a response is cut before its end, or goes on after it: text that was not meant is scored and trained",
        "abort a response once request.watch().found(all its tokens so far); keep the token that completes the text"),
    restricted: ("full", ("logprobs", "draws"),
        "log-probs are of a restricted distribution, which training does not compute: every ratio is wrong",
        "capabilities.restrictions: leave out those whose draws have other log-probs in this engine"),
    sampling_mask: ("full", ("restricted",),
        "behaviour and training are over different tokens: every ratio is wrong, or the trainer refuses the rows",
        "kept_ids are all ids with a chance in a draw, and log-probs are normalised over them"),
})  # fmt: skip
